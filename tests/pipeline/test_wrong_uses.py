"""Wrong uses of the pipeline: each ends in one clear error, in both sharding modes."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import float_rows, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import CircularPipeline, InputError, Mean, PipelineConfig, Shared, Sum, preset
from nnx_pipeline.pipeline import (
    CircularSchedule,
    Inputs,
    MicrobatchMean,
    ModelEnds,
    ModelFunctions,
    OneForwardOneBackward,
    WeightOptions,
    Weights,
    run_one_f_one_b,
    run_pipeline,
)

pytestmark = pytest.mark.jax_alone

STAGES, MICROBATCHES, BATCH, WIDTH = 2, 4, 8, 4
KERNELS = np.ones((1, STAGES, WIDTH, WIDTH), np.float32)
ROWS = np.ones((MICROBATCHES, 2, WIDTH), np.float32)
both_modes = pytest.mark.parametrize("mode", ["explicit", "auto"])


def stage(kernel: Any, x: Any, _: Any) -> Any:
    return x @ kernel, {}


def circular(function: Any = stage, *, params: Any = KERNELS, x: Any = ROWS, side: Any = None):
    """A call of `run_pipeline` with something wrong in it."""
    schedule = CircularSchedule(STAGES, MICROBATCHES)
    return lambda: run_pipeline(function, params, x, side, schedule=schedule)


def one_f_one_b(
    enter: Any = lambda _, x: x,
    function: Any = stage,
    leave: Any = lambda _, y, __: jnp.sum(y),
    *,
    params: Any = KERNELS,
    x: Any = ROWS,
):
    """A call of `run_one_f_one_b`, with gradients, with something wrong in it."""

    def run() -> Any:
        def loss(params: Any) -> Any:
            weights = Weights(jnp.zeros(()), params, jnp.zeros(()))
            schedule = OneForwardOneBackward(STAGES, MICROBATCHES)
            inputs = Inputs(x, None, ROWS)
            functions = ModelFunctions(enter, function, leave)
            return run_one_f_one_b(functions, weights, inputs, schedule=schedule)[0]

        return jax.grad(loss)(params)

    return run


class Layer(nnx.Module):
    """Returns what a function makes of its result."""

    def __init__(self, rngs: nnx.Rngs, returns: Callable[[Any], Any], axes: Any) -> None:
        self.mix, self.returns = nnx.Linear(WIDTH, WIDTH, rngs=rngs), returns
        if axes:
            self.mix.kernel.set_metadata(logical_axes=axes)

    def __call__(self, x: Any, **side: Any) -> Any:
        return self.returns(self.mix(x))


def module(
    returns: Callable[[Any], Any] = lambda x: (x, None),
    *,
    x: Any = np.ones((BATCH, WIDTH), np.float32),
    layers: int = 4,
    schedule: str = "circular",
    axes: Any = None,
    kinds: Callable[[Any], Any] = lambda make: make,
    **side: Any,
):
    """A call of the module with something wrong in it."""

    def run() -> Any:
        config = PipelineConfig(num_microbatches=MICROBATCHES, schedule=schedule)
        make = kinds(lambda rngs: Layer(rngs, returns, axes))
        pipeline = CircularPipeline(config, make, num_layers=layers, rngs=nnx.Rngs(0))
        if schedule == "circular":
            return pipeline(x, **side)
        ends = ModelEnds(lambda _, x: x, jnp.zeros(()), lambda _, y, __: jnp.sum(y), jnp.zeros(()))
        return pipeline.loss(ends, (x, x), side)

    return run


def model(
    ends: Any = None,
    inputs: Any = (ROWS[0].repeat(4, 0), ROWS[0].repeat(4, 0)),
    side: Any = None,
    schedule: str = "1f1b",
):
    """A loss of the module with something wrong in it."""

    def run() -> Any:
        config = PipelineConfig(num_microbatches=MICROBATCHES, schedule=schedule)
        pipeline = CircularPipeline(config, plain, num_layers=4, rngs=nnx.Rngs(0))
        return pipeline.loss(ends or ModelEnds(_same, None, _summed, None), inputs, side or {})

    return run


def weighed(weight: Any):
    """A loss of the module with a wrong weight for a metric."""

    def run() -> Any:
        config = PipelineConfig(num_microbatches=MICROBATCHES, schedule="1f1b")
        pipeline = CircularPipeline(
            config, lambda rngs: Layer(rngs, _with_a_sum, None), num_layers=4, rngs=nnx.Rngs(0)
        )
        x = np.ones((BATCH, WIDTH), np.float32)
        ends = ModelEnds(_same, None, _summed, None)
        return pipeline.loss(ends, (x, x), {}, metric_weights=weight)

    return run


FUNCTIONS = ModelFunctions(lambda _, x: x, stage, lambda _, y, __: jnp.sum(y))
WEIGHTS, INPUTS = Weights(None, KERNELS, None), Inputs(ROWS, None, ROWS)


def plain(rngs: nnx.Rngs) -> nnx.Module:
    return Layer(rngs, lambda x: (x, None), None)


def _same(_: Any, x: Any) -> Any:
    return x


def _summed(_: Any, y: Any, __: Any) -> Any:
    return jnp.sum(y)


class Bare(nnx.Module):
    """Holds an array in no variable, which Flax takes for a constant while JAX traces."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = jnp.ones(WIDTH)

    def __call__(self, x: Any) -> Any:
        return x * self.scale, None


class Named(Layer):
    """Takes one side input."""

    def __call__(self, x: Any, scale: Any) -> Any:
        return x * scale, None


class Counts(Layer):
    """Counts its calls in an attribute of Python."""

    calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x, None


class Window(Layer):
    """Has a number of its own."""

    def __init__(self, rngs: nnx.Rngs, window: int) -> None:
        super().__init__(rngs, lambda x: (x, None), None)
        self.window = window


def alternating() -> Callable[[nnx.Rngs], nnx.Module]:
    """Makes layers by a counter of Python, which JAX calls once for all of them."""
    windows = itertools.cycle((2, 8))
    return lambda rngs: Window(rngs, next(windows))


def widening() -> Callable[[nnx.Rngs], nnx.Module]:
    """Makes wider and wider layers."""
    widths = itertools.count(1)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        layer = plain(rngs)
        layer.mix = nnx.Linear(WIDTH, next(widths), rngs=rngs)
        return layer

    return make


def replaced() -> Any:
    """A call of a pipeline whose layers are one layer of the user's."""
    config = PipelineConfig(num_microbatches=MICROBATCHES)
    pipeline = CircularPipeline(config, plain, num_layers=4, rngs=nnx.Rngs(0))
    pipeline.layers.mix.kernel = nnx.Param(jnp.ones((WIDTH, WIDTH)))
    return pipeline(np.ones((BATCH, WIDTH), np.float32))


def named(**side: Any):
    """A call of layers that take a side input `scale`."""
    return module(kinds=lambda _: lambda rngs: Named(rngs, lambda x: (x, None), None), **side)


def _with_a_sum(x: Any) -> Any:
    return x, Sum(jnp.sum(x))


def elsewhere(rows: Any = ROWS) -> Any:
    """Arrays on a device that is not of the mesh."""
    return jax.device_put(rows, jax.devices("cpu")[7])


def of_another_mode() -> Any:
    """Arrays whose type names axes of a mesh in explicit mode."""
    return jax.device_put(ROWS, NamedSharding(mesh_of("data=2,fsdp=2"), P("data")))


ALONE = "must return a pair, activations and metrics, such as (x, None)"
SAME = "both must be the same, as the next"
FLOATING = "activations must be floating-point"
LEAVE = "it must return the loss of a microbatch and nothing else, a float32 scalar"
FIRST = "first axis is the batch of 8, or Shared(…) if all sequences read the same"

# Name: what is called, and a part of the error.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    # what a stage or a layer returns
    "stage: x alone": (circular(lambda k, x, _: x @ k), ALONE),
    "stage: nothing": (circular(lambda k, x, _: None), f"returned NoneType; it {ALONE}"),
    "stage: three values": (circular(lambda k, x, _: (x, {}, {})), f"3 values; it {ALONE}"),
    "stage: metrics first": (circular(lambda k, x, _: ({}, x)), SAME),
    "stage: another shape": (circular(lambda k, x, _: (x[:, :2], {})), SAME),
    "stage: another dtype": (circular(lambda k, x, _: (x.astype("bfloat16"), {})), SAME),
    "stage: bare metric": (
        circular(lambda k, x, _: (x, jnp.sum(x))),
        "nothing says how to combine",
    ),
    "stage: metric of integers": (
        circular(lambda k, x, _: (x, Sum(jnp.int32(1)))),
        "must be one floating array",
    ),
    "1F1B: x alone": (one_f_one_b(function=lambda k, x, _: x @ k), ALONE),
    "1F1B: another shape": (one_f_one_b(function=lambda k, x, _: (x[:, :2], {})), SAME),
    "1F1B: a function for each stage": (
        one_f_one_b(function=[stage, stage]),
        "`apply_stage` is of type list; give a function, see ModelFunctions",
    ),
    "stage: two arguments": (
        circular(lambda k, x: (x @ k, {})),
        "the function of a stage is called with 3 arguments, and its arguments are (k, x)",
    ),
    "stage: no function": (circular(3), "3 arguments, and is of type int; give a function"),
    "schedule: of 1F1B": (
        lambda: run_pipeline(stage, KERNELS, ROWS, schedule=OneForwardOneBackward(2, 4)),
        "the schedule of run_pipeline is of type OneForwardOneBackward; give CircularSchedule",
    ),
    "schedule: a fraction": (
        lambda: CircularSchedule(2.0, 4),
        "stages=2.0 is not a whole number of 1 or more",
    ),
    "1F1B: the circular schedule": (
        lambda: run_one_f_one_b(FUNCTIONS, WEIGHTS, INPUTS, schedule=CircularSchedule(2, 4)),
        "run_one_f_one_b is of type CircularSchedule; give OneForwardOneBackward",
    ),
    "1F1B: a tuple of weights": (
        lambda: run_one_f_one_b(
            FUNCTIONS, tuple(WEIGHTS), INPUTS, schedule=OneForwardOneBackward(2, 4)
        ),
        "weights is of type tuple; give Weights",
    ),
    "layer: x alone": (module(lambda x: x), f"a layer, Layer, returned float32[2, 4]; it {ALONE}"),
    "kinds: none": (module(kinds=lambda _: []), "given as an empty list"),
    "kinds: no function": (module(kinds=lambda make: [make, 3]), "given as int among them"),
    "kinds: three over two layers": (
        module(kinds=lambda make: [make] * 3),
        "4 layers do not split into 2 stages × 1 repeat × 3 kinds in turn; choose a multiple of 6",
    ),
    "kinds: unlike metrics": (
        module(
            lambda x: (x, {"share": Sum(jnp.sum(x))}),
            kinds=lambda make: [make, lambda rngs: Layer(rngs, _with_a_sum, None)],
        ),
        "report the same metrics, or None",
    ),
    "kinds: an instance": (
        module(kinds=lambda _: plain(nnx.Rngs(0))),
        "given as Layer among them; give a function that makes a layer",
    ),
    "kinds: makes nothing": (module(kinds=lambda _: lambda rngs: None), "returned NoneType; it"),
    "kinds: makes a parameter": (
        module(kinds=lambda _: lambda rngs: nnx.Param(jnp.ones(3))),
        "returned Param; it must return an nnx.Module",
    ),
    "kinds: makes what has no call": (
        module(kinds=lambda _: lambda rngs: nnx.Dict(mix=nnx.Linear(4, 4, rngs=rngs))),
        "returned Dict; it must return an nnx.Module with a method __call__",
    ),
    "kinds: a bare array under jit": (
        lambda: jax.eval_shape(module(kinds=lambda _: Bare)),
        "a layer holds float32[4] in .scale, which is in no variable",
    ),
    "layers: none": (module(layers=0), "num_layers=0 is not a whole number from 1 to 10000"),
    "layers: a fraction": (module(layers=4.0), "num_layers=4.0 is not a whole number"),
    "config: of the whole model": (
        lambda: CircularPipeline(preset("tiny"), plain, num_layers=4, rngs=nnx.Rngs(0)),
        "the config of a pipeline is Config; give a PipelineConfig",
    ),
    "layers: more than one argument": (
        module(kinds=lambda _: functools.partial(Window, window=2, size=3)),
        "window: int) -> None: got an unexpected keyword argument 'size'; make them agree",
    ),
    "layers: no argument": (
        module(kinds=lambda _: lambda: Bare(nnx.Rngs(0))),
        "as by lambda rngs: Layer(8, rngs=rngs), and its arguments are (): too many positional",
    ),
    "layers: made by a counter": (
        module(kinds=lambda _: alternating()),
        "the function that makes a layer gave one with .window=2 and then one with 8",
    ),
    "layers: of other variables": (
        module(kinds=lambda _: widening()),
        "gave one with .mix.bias=float32[1] and then one with float32[2]",
    ),
    "layer: counts in an attribute": (
        module(kinds=lambda _: lambda rngs: Counts(rngs, lambda x: (x, None), None)),
        "a call of a layer set .calls to 1, and JAX traces one call for all layers",
    ),
    "layers: replaced": (replaced, "hold a Param of shape [4, 4] that the pipeline did not make"),
    "rngs: another stream": (
        lambda: CircularPipeline(
            PipelineConfig(), plain, num_layers=4, rngs=nnx.Rngs(dropout=jax.random.key(0))
        ),
        "made with rngs of type Rngs with the streams ['dropout']; give nnx.Rngs with a stream",
    ),
    "weights: an unknown axis": (
        lambda: WeightOptions(zero1=("dta",)),
        "zero1='dta' is not known; did you mean 'data'?",
    ),
    "weights: axes as a text": (lambda: WeightOptions(zero1="data"), "is no tuple of mesh axes"),
    "weights: an unknown dtype": (
        lambda: WeightOptions(grad_dtype="float3"),
        "grad_dtype='float3' is no floating dtype",
    ),
    "weights: integers": (lambda: WeightOptions(dtype="int8"), "dtype='int8' is no floating dtype"),
    "weights: a dtype alone": (
        lambda: CircularPipeline(
            PipelineConfig(), plain, num_layers=4, rngs=nnx.Rngs(0), weights="bfloat16"
        ),
        "weights of a pipeline is of type str; give WeightOptions",
    ),
    "metric: nothing": (
        module(lambda x: (x, {"load": Mean(None)})),
        "the metric ['load'] of a layer is NoneType; it must be one floating array",
    ),
    "rngs: a number": (
        lambda: CircularPipeline(PipelineConfig(), plain, num_layers=4, rngs=0),
        "made with rngs of type int; give nnx.Rngs",
    ),
    "layers that do not divide": (
        module(layers=5),
        "5 layers do not split into 2 stages × 1 repeat; choose a multiple of 2, such as 4 or 6, "
        "or set pipeline.stage_layers=auto, which leaves 1 place empty",
    ),
    "layer: x alone, one per stage": (module(lambda x: x, layers=2), ALONE),
    "layer: nothing": (module(lambda x: None), f"a layer, Layer, returned NoneType; it {ALONE}"),
    "layer: another shape": (module(lambda x: (x[:, :2], None)), f"{SAME} layer gets them"),
    "layer: another dtype": (module(lambda x: (x.astype("bfloat16"), None)), SAME),
    "layer: another tree": (module(lambda x: ({"x": x}, None)), SAME),
    "layer: x alone in 1F1B": (module(lambda x: x, schedule="1f1b"), ALONE),
    # activations
    "activations: integers": (circular(x=ROWS.astype(np.int32)), FLOATING),
    "activations: bool": (circular(x=ROWS > 0), FLOATING),
    "activations: words": (circular(x=np.full((4, 2), "a")), "activations hold <U1[4, 2]"),
    "activations: integers of a module": (
        module(x=np.ones((BATCH, WIDTH), np.int32)),
        "the activations of a pipeline hold int32[8, 4]; they must be floating-point arrays",
    ),
    "activations: nothing": (module(x={}), "the activations of a pipeline hold dict; they must be"),
    "activations: no array": (module(x=[ROWS, None]), "hold NoneType; they must be floating"),
    "activations: two batches": (
        module(x={"a": np.ones((8, WIDTH), np.float32), "b": np.ones((4, WIDTH), np.float32)}),
        "have the first axes [4, 8]; that of each must be the batch",
    ),
    "activations: a scalar": (module(x=np.float32(1)), "hold float32[]; they must be floating"),
    "activations: too few": (circular(x=ROWS[:3]), "must be the 4 microbatches of the schedule"),
    "activations: batch that does not split": (
        module(x=np.ones((6, WIDTH), np.float32)),
        "a batch of 6 does not split into 4 microbatches",
    ),
    "activations: on other devices": (
        lambda: circular(x=elsewhere())(),
        "it is on other devices, SingleDeviceSharding",
    ),
    "params: on other devices": (
        lambda: circular(params=jax.device_put(KERNELS, jax.devices("cpu")[7]))(),
        "a parameter of the pipeline, float32[1, 2, 4, 4], cannot be sharded",
    ),
    "activations of a module: on other devices": (
        lambda: module(x=jax.device_put(np.ones((8, 4), np.float32), jax.devices("cpu")[7]))(),
        "it is on other devices",
    ),
    # parameters
    "params: none": (circular(params={}), "the stages have no parameters"),
    "params: of another number of stages": (
        circular(params=np.ones((1, 3, 4, 4), np.float32)),
        "first axes must be (repeats, stages) = (1, 2)",
    ),
    "params: a number": (circular(params={"k": KERNELS, "c": 1.0}), "parameter ['c'] has shape ()"),
    "params: too few logical axes": (
        module(axes=("embed",)),
        "has the logical axes ('embed',), and its shape is [4, 4]; name each axis",
    ),
    "params: an unknown logical axis": (
        module(axes=("embed", "hidden")),
        "axis 'hidden' is neither a logical axis nor an axis of the mesh",
    ),
    # side inputs
    "side: a number": (module(scale=2.0), "['scale'] of a pipeline is float; it must be an array"),
    "side: a scalar": (module(scale=np.float32(2)), "['scale'] of a pipeline is float32"),
    "side: without a batch": (module(mask=np.ones((3, 3), np.float32)), "[3, 3]; it must be"),
    "side: half a batch": (
        module(mask=np.ones((4,), np.float32)),
        "array [4]; it must be an array",
    ),
    "side: twice the batch": (module(mask=np.ones((16,), np.float32)), FIRST),
    "side: words": (module(mask="causal"), "['mask'] of a pipeline is str"),
    "side: of 1F1B, half a batch": (module(mask=np.ones(4), schedule="1f1b"), FIRST),
    "side: of a function": (circular(side=np.ones(3)), "must be the 4 microbatches"),
    "side: unknown": (
        named(scale=np.ones((BATCH, 1), np.float32), shift=np.ones((BATCH, 1), np.float32)),
        "is called with x and ['scale', 'shift'], and its arguments are (x: Any, scale: Any)",
    ),
    "side: missing": (named(), "missing a required argument: 'scale'"),
    "side: Shared within": (
        named(scale={"table": Shared(np.ones((BATCH, WIDTH), np.float32))}),
        "the side input 'scale' has Shared(…) inside of it",
    ),
    "rows: a scalar": (
        module(lambda x: (x, MicrobatchMean(jnp.sum(x), lambda mean: mean))),
        "is a MicrobatchMean of float32[]; its rows must have the axis of the batch first",
    ),
    "activations: elsewhere, of a module": (
        lambda: module(x=elsewhere(ROWS.reshape(BATCH, WIDTH)))(),
        "an input of the pipeline, float32[8, 4], cannot be sharded",
    ),
    "activations: no sequences": (module(x=np.ones((0, WIDTH), np.float32)), "has no sequences"),
    # the loss of a module
    "loss: no ends": (model(ends=(_same, _summed)), "give ModelEnds with two functions"),
    "loss: one input": (model(inputs=ROWS), "the inputs of a model are ndarray; give a pair"),
    "loss: three inputs": (model(inputs=(ROWS, ROWS, ROWS)), "are 3 values; give a pair"),
    "loss: a scalar": (model(inputs=(np.float32(1), None)), "is float32; it must be an array"),
    "loss: numbers": (model(inputs=([1.0, 2.0], None)), "is float; it must be an array"),
    "loss: a list of side inputs": (model(side=[ROWS]), "are list; give a dict of arrays"),
    "loss: a batch that does not split": (
        model(inputs=(np.ones((6, 4), np.float32), None)),
        "a batch of 6 does not split into 4 microbatches",
    ),
    "loss: of the circular schedule": (
        model(schedule="circular"),
        "the loss is computed by 1F1B, and pipeline.schedule=circular; set it to 1f1b",
    ),
    "enter: another batch": (
        model(ends=ModelEnds(lambda _, x: x[:1], None, _summed, None)),
        "`enter` was given a microbatch [2] and returned an array [1, 4]",
    ),
    # the ends of 1F1B
    "leave: loss and more": (one_f_one_b(leave=lambda _, y, __: (jnp.sum(y), y)), LEAVE),
    "leave: nothing": (one_f_one_b(leave=lambda *_: None), f"returned None; {LEAVE}"),
    "leave: a loss per sequence": (one_f_one_b(leave=lambda _, y, __: jnp.sum(y, 1)), LEAVE),
    "leave: one axis": (one_f_one_b(leave=lambda _, y, __: jnp.sum(y)[None]), LEAVE),
    "leave: a bfloat16 loss": (
        one_f_one_b(leave=lambda _, y, __: jnp.sum(y.astype("bfloat16"))),
        f"returned bfloat16[]; {LEAVE}",
    ),
    "weights of metrics: a word": (
        weighed("0.01"),
        "metric_weights have '0.01' among them; give each metric a real number",
    ),
    "weights of metrics: a complex number": (weighed(1j), "metric_weights have 1j among them"),
    "leave: an integer": (one_f_one_b(leave=lambda *_: jnp.int32(1)), f"int32[]; {LEAVE}"),
    "leave: a Python number": (one_f_one_b(leave=lambda *_: 0.0), f"returned float; {LEAVE}"),
    "enter: integers": (
        one_f_one_b(enter=lambda _, x: x.astype("int32")),
        "`enter` returned int32",
    ),
    "enter: nothing": (one_f_one_b(enter=lambda *_: None), "`enter` returned NoneType"),
    "enter: a Python number": (one_f_one_b(enter=lambda *_: 1.0), "`enter` returned float;"),
}


JAX_ADDS = "\n--------------------\n"  # that it has removed its own frames from the traceback


@both_modes
@pytest.mark.parametrize("name", WRONG)
def test_one_clear_error(name: str, mode: str) -> None:
    call, words = WRONG[name]
    mesh = mesh_of("stage=2", mode)
    with jax.set_mesh(mesh), pytest.raises(InputError, match=re.escape(words)) as found:
        call()
    assert "\n" not in str(found.value.args[0]).split(JAX_ADDS)[0]


@both_modes
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_forward_mode_through_a_derivative_by_hand_is_refused(schedule: str, mode: str) -> None:
    config = PipelineConfig(
        num_microbatches=2,
        schedule=schedule,
        backward="accumulate" if schedule == "circular" else None,
    )
    x = np.ones((4, WIDTH), np.float32)
    with jax.set_mesh(mesh_of("stage=2", mode)):
        pipeline = CircularPipeline(config, plain, num_layers=2, rngs=nnx.Rngs(0))

        def loss(pipeline: CircularPipeline) -> Any:
            if schedule == "circular":
                return jnp.sum(pipeline(x)[0])
            return pipeline.loss(ModelEnds(_same, None, _summed, None), (x, x), {})[0]

        with pytest.raises(InputError, match=r"forward mode .* set pipeline.schedule=circular"):
            jax.jvp(loss, (pipeline,), (pipeline,))


@both_modes
def test_forward_mode_with_respect_to_a_number_that_an_end_reads_is_refused(mode: str) -> None:
    x = np.ones((4, WIDTH), np.float32)
    with jax.set_mesh(mesh_of("stage=2", mode)):
        config = PipelineConfig(num_microbatches=2, schedule="1f1b")
        pipeline = CircularPipeline(config, plain, num_layers=2, rngs=nnx.Rngs(0))

        def loss(factor: float) -> Any:
            ends = ModelEnds(lambda _, x: x * factor, None, _summed, None)
            return pipeline.loss(ends, (x, x), {})[0]

        assert jax.grad(loss)(2.0).shape == ()
        with pytest.raises(InputError, match="forward mode"):
            jax.jvp(loss, (2.0,), (1.0,))


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_arrays_made_before_the_mesh_is_set_are_moved(schedule: str, mode: str) -> None:
    """Outside of `jax.jit`, where JAX in auto mode takes no constraint for such an array."""
    x, side = jnp.asarray(float_rows(BATCH, WIDTH)), jnp.linspace(1, 2, BATCH)[:, None]
    config = PipelineConfig(num_microbatches=MICROBATCHES, schedule=schedule)
    with jax.set_mesh(mesh_of("stage=2,fsdp=2", mode)):
        pipeline = CircularPipeline(
            config, lambda rngs: Named(rngs, None, None), num_layers=4, rngs=nnx.Rngs(0)
        )

        def loss(x: Any) -> Any:
            if schedule == "circular":
                return jnp.sum(pipeline(x, scale=side)[0] ** 2)
            ends = ModelEnds(_same, None, lambda _, y, __: jnp.sum(y**2), None)
            return pipeline.loss(ends, (x, x), {"scale": side})[0]

        value, gradient = jax.value_and_grad(loss)(x)
    np.testing.assert_allclose(value, jnp.sum((x * side**4) ** 2), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x * side**8, rtol=1e-5)


def test_a_mesh_of_explicit_axes_is_no_place_in_auto_mode() -> None:
    x = of_another_mode()
    refused = pytest.raises(InputError, match="it is from a mesh of another kind")
    with jax.set_mesh(mesh_of("stage=2,fsdp=2", "auto")), refused:
        circular(x=x)()
    with jax.set_mesh(mesh_of("stage=2,fsdp=2")):
        assert circular(x=x)()[0].shape == ROWS.shape


@both_modes
def test_nothing_is_an_array_too(mode: str) -> None:
    """Arrays without entries pass, as they do outside a pipeline."""
    x, side = float_rows(BATCH, 0), np.ones((BATCH, 0), np.float32)
    config = PipelineConfig(num_microbatches=MICROBATCHES)

    class Nothing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.empty = nnx.Param(jnp.zeros((0, 3)))

        def __call__(self, x: Any, side: Any) -> Any:
            return x + side + jnp.sum(self.empty[...]), None

    for mesh in ("", "stage=2", "stage=2,data=2"):
        with jax.set_mesh(mesh_of(mesh, mode)):
            pipeline = CircularPipeline(config, Nothing, num_layers=4, rngs=nnx.Rngs(0))
            y, _ = jax.jit(lambda pipeline, x, side: pipeline(x, side=side))(pipeline, x, side)
            assert y.shape == (BATCH, 0)
