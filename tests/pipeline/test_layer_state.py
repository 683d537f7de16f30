"""Layers with state, unchanged in a pipeline, equal to a loop over the microbatches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, equations, float_rows, mesh_of
from test_foreign_layers import BATCH, FORMS, LAYERS, LENGTH, WIDTH, Form, every_form, loss_of

from nnx_pipeline import CircularPipeline, InputError, LayerPlace, LayerState, PipelineConfig
from nnx_pipeline.pipeline import (
    Accumulation,
    CircularSchedule,
    Inputs,
    LoopOptions,
    ModelEnds,
    ModelFunctions,
    OneForwardOneBackward,
    Weights,
    WithState,
    run_one_f_one_b,
    run_pipeline,
)
from nnx_pipeline.pipeline.stage.layers import takes_place

pytestmark = pytest.mark.numbers

MICROBATCHES = 4
Make = Callable[[nnx.Rngs], nnx.Module]


def numbers(tree: Any) -> Any:
    """The arrays of a tree in numpy, keys as the numbers that they hold."""

    def one(leaf: jax.Array) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(one, tree)


def state_of(layers: nnx.Module) -> dict[Any, Any]:
    """All variables that are no parameters, by their paths."""
    others = nnx.to_flat_state(nnx.state(layers, nnx.Not(nnx.Param)))
    return {path: numbers(variable.get_value()) for path, variable in others}


class Around(NamedTuple):
    """What is around the layers of a model, and what is trained."""

    start: Callable[[Any], Any] = lambda x: x
    end: Callable[[Any], jax.Array] = loss_of
    trained: Any = nnx.Param


def in_pipeline(make: Make, form: Form, x: Any, around: Around = Around()) -> Any:
    """Losses, gradients and state of two calls in turn, and the layers as they were before."""

    def loss(pipeline: CircularPipeline, x: Any) -> jax.Array:
        if form.config.schedule != "1f1b":
            return around.end(pipeline(around.start(x))[0])
        ends = ModelEnds(lambda _, x: around.start(x), None, lambda _, y, __: around.end(y), None)
        return pipeline.loss(ends, (x, x), {})[0]

    @nnx.jit
    def step(pipeline: CircularPipeline, x: Any) -> Any:
        trained = nnx.DiffState(0, around.trained)
        return nnx.value_and_grad(loss, argnums=trained)(pipeline, x)

    with jax.set_mesh(mesh_of(form.mesh, form.config.sharding)):
        pipeline = CircularPipeline(form.config, make, num_layers=LAYERS, rngs=nnx.Rngs(0))
        before = nnx.clone(pipeline.layers)
        found = [step(pipeline, x) for _ in range(2)]
    results = [(float(value), numbers(gradients.layers)) for value, gradients in found]
    return results, state_of(pipeline.layers), before


@functools.cache
def plain_step(around: Around) -> Callable[..., Any]:
    """Loss and gradients by a loop that knows nothing of pipelines, compiled once for all forms."""

    def loss(each: list[nnx.Module], x: Any) -> jax.Array:
        total = jnp.zeros(())
        for microbatch in jnp.split(x, MICROBATCHES):
            y = around.start(microbatch)
            for number, layer in enumerate(each):
                y, _ = layer(
                    y, **({"place": LayerPlace(number, 0, 0)} if takes_place(layer) else {})
                )
            total += around.end(y)
        return total

    return nnx.jit(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, around.trained)))


def one_after_the_other(layers: nnx.Module, x: Any, around: Around = Around()) -> Any:
    """The same of `plain_step`, and the state that it leaves."""
    stack = jax.tree.leaves(layers)[0].shape[:3]

    def whole(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.wrap_key_data(np.asarray(jax.random.key_data(leaf)))
        else:
            leaf = jnp.asarray(np.asarray(leaf))
        return leaf.reshape(LAYERS, *leaf.shape[3:])

    flat = jax.tree.map(whole, layers)
    each = [jax.tree.map(lambda leaf, at=at: leaf[at], flat) for at in range(LAYERS)]

    def joined(each: Any) -> Any:
        return jax.tree.map(
            lambda *leaves: jnp.stack(leaves).reshape(*stack, *leaves[0].shape), *each
        )

    results = []
    for _ in range(2):
        value, gradients = plain_step(around)(each, x)
        results.append((float(value), numbers(joined([*gradients]))))
    return results, state_of(joined(each))


def check(make: Make, form: Form, around: Around = Around()) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    *got, before = in_pipeline(make, form, x, around)
    assert_close(tuple(got), one_after_the_other(before, x, around), 2e-5)


class Normalised(nnx.Module):
    """`nnx.BatchNorm`, which keeps running statistics, after a convolution."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convolution = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + 0.3 * self.norm(jnp.tanh(self.convolution(x))), None


class Called(LayerState):
    """What the calls of a layer left."""


class Table(nnx.Variable):
    """An array that a layer reads alone."""


class Attentive(nnx.Module):
    """`nnx.MultiHeadAttention` with dropout, and state and tables of types of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            num_heads=2,
            in_features=WIDTH,
            dropout_rate=0.3,
            deterministic=False,
            decode=False,
            use_bias=False,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.table = Table(jax.random.normal(rngs.params(), (WIDTH,)))
        self.mask = Table(jax.random.bernoulli(rngs.params(), 0.5, (WIDTH,)))
        self.calls = Called(jnp.zeros((), jnp.int32))
        self.largest = Called(jnp.zeros((WIDTH,)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        self.calls.set_value(self.calls.get_value() + 1)
        largest = jnp.maximum(self.largest.get_value(), jnp.max(x, (0, 1)))
        self.largest.set_value(jax.lax.stop_gradient(largest))
        scale = jnp.where(self.mask.get_value(), self.table.get_value(), 0.5)
        seen = self.largest.get_value() / self.calls.get_value().astype(x.dtype)
        return x + 0.3 * self.dropout(jnp.tanh(self.attention(x) * scale + seen)), None


@pytest.mark.slow
@every_form
def test_layers_with_state(form: Form) -> None:
    check(Attentive, form)


# In explicit mode JAX cannot type a convolution that is mapped over stages or sharded over a batch.
CONVOLUTIONS = {
    "no stages, 1F1B": FORMS["no stages, 1F1B"],
    "auto": FORMS["auto"],
    "auto, accumulate": Form(
        "stage=2,fsdp=2", {"sharding": "auto", "num_repeats": 2, "backward": "accumulate"}
    ),
    "auto, 1F1B": Form("stage=4", {"sharding": "auto", "schedule": "1f1b", "remat": "none"}),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("form", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_running_statistics(form: Form) -> None:
    check(Normalised, form)


def test_what_jax_cannot_type_is_refused_with_the_cure() -> None:
    with jax.set_mesh(mesh_of("stage=2")):
        config = PipelineConfig(num_microbatches=2)
        pipeline = CircularPipeline(config, Normalised, num_layers=2, rngs=nnx.Rngs(0))
        with pytest.raises(InputError, match=r"explicit.*sharding=auto"):
            pipeline(float_rows(BATCH, LENGTH, WIDTH))


class Recurrent(nnx.Module):
    """`nnx.RNN`, whose scan begins with zeros that Flax does not shard."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + self.rnn(x), None


def test_a_scan_that_jax_cannot_type_is_refused_with_the_cure() -> None:
    with jax.set_mesh(mesh_of("fsdp=2")):
        pipeline = CircularPipeline(PipelineConfig(), Recurrent, num_layers=2, rngs=nnx.Rngs(0))
        with pytest.raises(InputError, match=r"\[8@fsdp,4\].*sharding=auto"):
            jax.eval_shape(pipeline, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32"))


class Writes(nnx.Module):
    """Sets a variable, to an array of one shape or another."""

    def __init__(self, kind: type[nnx.Variable], shape: tuple[int, ...]) -> None:
        self.scale = nnx.Param(jnp.ones(()))
        self.kept, self.shape = kind(jnp.zeros(())), shape

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        self.kept.set_value(jnp.ones(self.shape))
        return x * self.scale[...], None


@pytest.mark.parametrize(
    ("mesh", "options", "layer", "words"),
    [
        ("stage=2", {}, Writes(Table, ()), r"changed \.kept.*variable of state \(nnx.BatchStat"),
        ("stage=2", {}, Writes(Called, (3,)), r"read the state .*float32\[\].* wrote .*\[3\]"),
        (
            "stage=2,data=2",
            {"schedule": "circular", "backward": "accumulate"},
            Writes(Called, ()),
            r"along data, .*because of pipeline.backward=accumulate; set .*backward=autodiff",
        ),
        (
            "stage=2,data=2",
            {"schedule": "1f1b"},
            Writes(Called, ()),
            r"because of pipeline.schedule=1f1b; set pipeline.schedule=circular, or take a mesh in",
        ),
        (
            "stage=2,fsdp=2",
            {"fsdp_gather": "step", "backward": "accumulate"},
            Writes(Called, ()),
            r"along fsdp, .*because of pipeline.fsdp_gather=step; set pipeline.fsdp_gather=use, or",
        ),
    ],
)
def test_what_is_refused(mesh: str, options: Any, layer: nnx.Module, words: str) -> None:
    config = PipelineConfig(num_microbatches=4, **options)
    with jax.set_mesh(mesh_of(mesh)):
        pipeline = CircularPipeline(
            config, lambda _: nnx.clone(layer), num_layers=4, rngs=nnx.Rngs(0)
        )
        with pytest.raises(InputError, match=words):
            pipeline(float_rows(BATCH, LENGTH, WIDTH))


def test_state_needs_a_number_of_microbatches_that_no_mesh_changes() -> None:
    """Else a mesh without stages would see the whole batch as one microbatch."""
    x = float_rows(BATCH, LENGTH, WIDTH)
    for mesh in ("", "stage=2"):
        with jax.set_mesh(mesh_of(mesh)):
            pipeline = CircularPipeline(
                PipelineConfig(), lambda _: Writes(Called, ()), num_layers=2, rngs=nnx.Rngs(0)
            )
            if not mesh:
                pipeline(x)
                continue
            with pytest.raises(InputError, match=r"set pipeline.num_microbatches=2, on every mesh"):
                pipeline(x)


@pytest.mark.slow
def test_what_is_not_trained_has_no_accumulator() -> None:
    """Frozen weights cost no gradient in a loop that adds up gradients itself."""

    class Frozen(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.small = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
            self.large = Table(jax.random.normal(rngs.params(), (WIDTH, 7, WIDTH)))

        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(jnp.einsum("blw,wov->blv", x, self.large[...])) * self.small, None

    config = PipelineConfig(num_microbatches=4, num_repeats=2, backward="accumulate")
    with jax.set_mesh(mesh_of("stage=2")):
        pipeline = CircularPipeline(config, Frozen, num_layers=8, rngs=nnx.Rngs(0))

        def gradients(pipeline: CircularPipeline, x: Any) -> Any:
            return nnx.grad(lambda pipeline: loss_of(pipeline(x)[0]))(pipeline)

        x = float_rows(BATCH, LENGTH, WIDTH)
        jaxpr = jax.make_jaxpr(gradients)(pipeline, x)
        assert jax.tree.leaves(gradients(pipeline, x))[0].shape == (2, 2, 2, WIDTH)
    carried = {
        (str(variable.aval.dtype), variable.aval.shape[-3:])
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        for variable in equation.outvars
    }
    assert ("float32", (WIDTH, 7, WIDTH)) not in carried
    assert ("float32", (2, WIDTH)) in carried, "the accumulator of what is trained"


class Moves(nnx.Module):
    """Reads how far x is from the x of the microbatch before: without derivative where it is 0."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.zeros(WIDTH))  # so that every layer gets the same x
        self.before = LayerState(jnp.zeros((2, LENGTH, WIDTH)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        apart = jnp.sqrt(jnp.sum((x - self.before[...]) ** 2, -1, keepdims=True))
        self.before.set_value(jax.lax.stop_gradient(x))
        return x + self.weight * apart, None


@pytest.mark.parametrize(
    ("stages", "options"), [(2, {}), (4, {}), (4, {"backward": "accumulate"})], ids=str
)
def test_a_bubble_does_not_read_what_its_last_visit_left(stages: int, options: Any) -> None:
    x = float_rows(2 * stages, LENGTH, WIDTH)
    config = PipelineConfig(num_microbatches=stages, **options)
    with jax.set_mesh(mesh_of(f"stage={stages}")):
        pipeline = CircularPipeline(config, Moves, num_layers=stages, rngs=nnx.Rngs(0))
        gradients = nnx.grad(lambda pipeline: loss_of(pipeline(x)[0]))(pipeline)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


class Adds(nnx.Module):
    """Adds the mean that its last call left, which it keeps with its gradient."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.full((), 0.5))
        self.mean = LayerState(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        y = x * self.weight + self.mean[...]
        self.mean.set_value(jnp.mean(y))
        return y, None


def test_state_has_no_gradient_without_stages_either() -> None:
    """Two calls in one loss: the second reads what the first one left."""
    x = float_rows(BATCH, LENGTH, WIDTH)

    def loss(pipeline: CircularPipeline) -> jax.Array:
        pipeline(2 * x)
        return loss_of(pipeline(x)[0])

    found = []
    for backward in ("autodiff", "accumulate"):
        with jax.set_mesh(mesh_of("")):
            config = PipelineConfig(num_microbatches=1, backward=backward)
            pipeline = CircularPipeline(config, Adds, num_layers=2, rngs=nnx.Rngs(0))
            found.append(nnx.grad(loss)(pipeline).layers.weight[...])
    assert_close(found[0], found[1], 1e-6)


def test_a_gradient_of_what_is_read_alone_is_refused() -> None:
    class Frozen(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = Table(jnp.ones(WIDTH))

        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            return x * self.table[...], None

    with jax.set_mesh(mesh_of("stage=2")):
        pipeline = CircularPipeline(PipelineConfig(), Frozen, num_layers=2, rngs=nnx.Rngs(0))
        trained = nnx.DiffState(0, Table)
        with pytest.raises(InputError, match="variable of type Table, which a pipeline only reads"):
            nnx.grad(lambda p: loss_of(p(np.ones((4, 3, WIDTH)))[0]), argnums=trained)(pipeline)


def test_a_variable_without_an_array_is_refused() -> None:
    def make(_: nnx.Rngs) -> nnx.Module:
        return Writes(lambda _: Called(None), ())

    with jax.set_mesh(mesh_of("stage=2")), pytest.raises(InputError, match="Called with NoneType"):
        CircularPipeline(PipelineConfig(), make, num_layers=2, rngs=nnx.Rngs(0))


@jax.tree_util.register_pytree_node_class
class Pair:
    """A pytree without a comparison of its own."""

    def __init__(self, one: Any, other: Any) -> None:
        self.one, self.other = one, other

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.one, self.other), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Any]) -> "Pair":
        return cls(*leaves)


def test_a_pytree_class_as_activations_and_as_state() -> None:
    def apply_stage(w: jax.Array, x: Pair, side: None, state: Pair) -> Any:
        return Pair(x.one * w, x.other), None, Pair(state.one + 1, state.other)

    params = WithState(jnp.full((2, 2), 2.0), Pair(jnp.zeros((2, 2)), jnp.ones((2, 2))))
    x = Pair(jnp.ones((4, 3)), jnp.zeros((4, 1)))
    with jax.set_mesh(mesh_of("stage=2")):
        run = jax.jit(functools.partial(run_pipeline, apply_stage, schedule=SCHEDULES["circular"]))
        y, _, left = run(params, x)
    np.testing.assert_array_equal(y.one, np.full((4, 3), 16.0))
    np.testing.assert_array_equal(left.one, np.full((2, 2), 4.0))


class Averaged(nnx.Module):
    """`nnx.BatchNorm` whose running statistics are averaged over the microbatches."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        for variable in (self.norm.mean, self.norm.var):
            variable.set_metadata(over_microbatches="mean")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(self.norm(x)), None


@pytest.mark.parametrize("form", [FORMS["repeats"], FORMS["no stages, 1F1B"]], ids=str)
def test_running_statistics_that_are_averaged(form: Form) -> None:
    """As by layers that forget, after each microbatch, what it left; momentum is that of a step."""
    x = float_rows(BATCH, LENGTH, WIDTH)
    *(_, got), _ = in_pipeline(Averaged, form, x)
    means = np.zeros((LAYERS, WIDTH)), np.ones((LAYERS, WIDTH))
    for _ in range(2):
        left = []
        for y in np.split(x, MICROBATCHES):
            layers = [Averaged(nnx.Rngs(0)) for _ in range(LAYERS)]
            for number, layer in enumerate(layers):
                layer.norm.mean[...], layer.norm.var[...] = (one[number] for one in means)
                y, _ = layer(y)
            left.append([(one.norm.mean[...], one.norm.var[...]) for one in layers])
        means = tuple(np.mean(np.asarray(left), 0).swapaxes(0, 1))
    found = [got["norm", name].reshape(LAYERS, WIDTH) for name in ("mean", "var")]
    assert_close(found, [*means], 1e-5)


def test_what_has_no_mean_is_refused() -> None:
    def make(how: str) -> Any:
        layer = Writes(lambda _: Called(jnp.zeros((), jnp.int32), over_microbatches=how), ())
        return lambda _: nnx.clone(layer)

    x = float_rows(BATCH, LENGTH, WIDTH)
    for how, words in (("mean", "holds int32, which has no mean"), ("sum", "'sum' is not known")):
        with jax.set_mesh(mesh_of("stage=2")), pytest.raises(InputError, match=words):
            CircularPipeline(PipelineConfig(), make(how), num_layers=2, rngs=nnx.Rngs(0))(x)


class Decoding(nnx.Module):
    """`nnx.MultiHeadAttention` with a cache of keys and values, for one token at a time."""

    def __init__(self, rngs: nnx.Rngs, batch: int) -> None:
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=True, use_bias=False, rngs=rngs
        )
        self.attention.init_cache((batch, LENGTH, WIDTH))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + self.attention(x), None


# In explicit mode a cache has to be sharded as the batch is, which Flax's is not.
CACHES = {
    "no stages": ("", {}, 1),
    "no stages, one by one": ("fsdp=2", {"sharding": "auto"}, 4),
    "repeats": ("stage=2", {"num_repeats": 2}, 4),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("mesh", "options", "microbatches"), CACHES.values(), ids=CACHES)
def test_each_microbatch_has_its_own_cache(mesh: str, options: Any, microbatches: int) -> None:
    """Tokens are decoded one by one, as by layers that have caches for the whole batch."""
    config = PipelineConfig(num_microbatches=microbatches, **options)
    tokens = float_rows(3, BATCH, 1, WIDTH)
    each = BATCH // microbatches
    with jax.set_mesh(mesh_of(mesh, config.sharding)):
        pipeline = CircularPipeline(
            config, lambda rngs: Decoding(rngs, each), num_layers=4, rngs=nnx.Rngs(0)
        )
        flat = jax.tree.map(
            lambda leaf: np.asarray(leaf).reshape(4, *leaf.shape[3:]),
            nnx.state(pipeline.layers, nnx.Param),
        )
        decode = nnx.jit(lambda pipeline, x: pipeline(x)[0])
        got = [np.asarray(decode(pipeline, x)) for x in tokens]
    layers = [Decoding(nnx.Rngs(0), BATCH) for _ in range(4)]
    for number, layer in enumerate(layers):
        nnx.update(layer, jax.tree.map(lambda leaf, number=number: leaf[number], flat))
    for x, found in zip(tokens, got, strict=True):
        for layer in layers:
            x, _ = layer(x)
        assert_close(found, np.asarray(x), 1e-5)
    assert (pipeline.layers.attention.cache_index[...] == 3).all()
    shape = pipeline.layers.attention.cached_key.shape
    assert shape[3:5] == (microbatches, each)


# ---- functions with a state --------------------------------------------------------------------

SCHEDULES = {
    "circular": CircularSchedule(2, 4, 2),
    "delayed": CircularSchedule(2, 4, 2, delay=2),
    "1F1B": OneForwardOneBackward(2, 4, 2),
}


def sums(weight: jax.Array, x: jax.Array, side: None, state: Any) -> Any:
    """A stage that adds up what it was given, and reads the sum and the number of its visits."""
    del side
    total, visits = state
    state = total + jnp.sum(x, 0), visits + 1
    return jnp.tanh(x * weight + 0.1 * total / (1 + visits).astype(x.dtype)), None, state


@pytest.mark.parametrize("accumulate", [None, Accumulation()], ids=["autodiff", "accumulate"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_function_with_a_state(name: str, accumulate: Any) -> None:
    schedule = SCHEDULES[name]
    weights = jnp.asarray(float_rows(2, 2, WIDTH))
    state = jnp.zeros((2, 2, WIDTH)), jnp.zeros((2, 2), jnp.int32)
    x = jnp.asarray(float_rows(4, 3, WIDTH))
    options = LoopOptions(accumulate=accumulate)

    def loss(weights: jax.Array) -> tuple[jax.Array, Any]:
        params = WithState(weights, state)
        if isinstance(schedule, CircularSchedule):
            y, _, left = run_pipeline(sums, params, x, schedule=schedule, options=options)
            return loss_of(y), left
        (value, _), left = run_one_f_one_b(
            ModelFunctions(lambda _, x: x, sums, lambda _, y, __: loss_of(y)),
            Weights(None, params, None),
            Inputs(x, None, x),
            schedule=schedule,
            options=options,
        )
        return value, left

    def plain(weights: jax.Array) -> tuple[jax.Array, Any]:
        left = {at: (state[0][at], state[1][at]) for at in np.ndindex(2, 2)}
        value = jnp.zeros(())
        for y in x:
            for at in np.ndindex(2, 2):
                y, _, found = sums(weights[at], y, None, left[at])
                left[at] = jax.lax.stop_gradient(found)
            value += loss_of(y)
        return value, tuple(
            jnp.stack([left[at][k] for at in np.ndindex(2, 2)]).reshape(state[k].shape)
            for k in range(2)
        )

    with jax.set_mesh(mesh_of("stage=2")):
        got = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    assert_close(got, jax.value_and_grad(plain, has_aux=True)(weights), 1e-5)


@pytest.mark.parametrize(
    ("apply_stage", "state", "words"),
    [
        (lambda w, x, side, state: (x, None), jnp.zeros((2, 2)), "returned 2 values; .* the state"),
        (
            lambda w, x, side, state: (x, None, 1.0 * state[None]),
            jnp.zeros((2, 2)),
            "must be the sam",
        ),
        (sums, jnp.zeros((3, 2)), r"the state has shape \(3, 2\); its first axes must be"),
    ],
)
def test_what_is_no_state(apply_stage: Any, state: Any, words: str) -> None:
    params = WithState(jnp.ones((2, 2, WIDTH)), state)
    with jax.set_mesh(mesh_of("stage=2")), pytest.raises(InputError, match=words):
        run_pipeline(apply_stage, params, jnp.ones((4, 3, WIDTH)), schedule=SCHEDULES["circular"])
