"""What layers report: one value, and one gradient, on every mesh, schedule and option."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_close, float_rows, mesh_of, small_config

import linen_compat
from nnx_pipeline import (
    CircularPipeline,
    Config,
    InputError,
    Max,
    Mean,
    MeshConfig,
    PipelineConfig,
    Sum,
    run_pipeline,
)
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
)
from nnx_pipeline.sharding.layout import Layout, P, gather_weight, parameter

pytestmark = pytest.mark.jax_alone

LAYERS, BATCH, LENGTH, WIDTH = 8, 32, 3, 4
Case = dict[str, Any]
Metrics = Callable[[jax.Array, jax.Array], Any]


class Layer(nnx.Module):
    """A layer whose kernel lies apart on fsdp, and which reports what it is told to."""

    def __init__(self, rngs: nnx.Rngs, layout: Layout, metrics: Metrics) -> None:
        self.layout, self.metrics = layout, metrics
        normal = nnx.initializers.normal(0.5)
        self.kernel = parameter(rngs, layout, "float32", normal, (WIDTH, WIDTH), ("embed", None))

    def __call__(self, x: jax.Array, *, offset: jax.Array) -> tuple[jax.Array, Any]:
        stored = self.layout.spec("embed", None)
        kernel = gather_weight(self.kernel[...], stored, P(None, None))
        y = jnp.tanh(x @ kernel + offset[..., None])
        return x + y, self.metrics(x, y)


def curved(mean: jax.Array) -> jax.Array:
    """A function of a microbatch that is not linear."""
    return jnp.sum(mean**2)


# What a layer may report of its input and of what it adds, [batch, seq, width] both.
FORMULAS: dict[str, Metrics] = {
    "sum": lambda x, y: Sum(jnp.sum(x * y)),
    "sums": lambda x, y: Sum(jnp.sum(y**2, axis=0)),
    "sequences": lambda x, y: Sum(jnp.float32(x.shape[0])),
    "mean": lambda x, y: Mean(jnp.mean(x**2)),
    "means": lambda x, y: Mean(jnp.mean(y, axis=(0, 1))),
    "constant": lambda x, y: Mean(2.0),
    "max": lambda x, y: Max(jnp.max(x)),
    "maxima": lambda x, y: Max(jnp.max(-y - 3.0, axis=(0, 1))),  # all of them below zero
    "curved": lambda x, y: MicrobatchMean(jnp.mean(x * y, axis=1), curved),
    "nothing": lambda x, y: None,
}


def metrics_of(tree: Any) -> Metrics:
    """The names of formulas in a tree, as what a layer reports."""
    return lambda x, y: jax.tree.map(lambda name: FORMULAS[name](x, y), tree)


def drawn(generator: random.Random, depth: int = 2) -> Any:
    """A random tree of names."""
    if depth == 0 or generator.random() < 0.25:
        return generator.choice(list(FORMULAS))
    parts = [drawn(generator, depth - 1) for _ in range(generator.randint(1, 3))]
    return tuple(parts) if generator.random() < 0.5 else {f"m{i}": p for i, p in enumerate(parts)}


def weights_for(tree: Any, generator: random.Random) -> Any:
    """What each metric counts in the loss; what has no gradient counts nothing."""

    def one(name: str) -> float | None:
        if name == "nothing":
            return None
        return 0.0 if name.startswith("max") else generator.choice([0.0, 0.5, -0.25])

    return jax.tree.map(one, tree)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh": (
        "",
        "fsdp=2",
        "data=2,fsdp=2",
        "stage=2,fsdp=2",
        "stage=4,fsdp=2",
        "data=2,stage=2",
        "data=2,stage=2,fsdp=2",
    ),
    "sharding": ("explicit", "auto"),
    "schedule": ("circular", "1f1b"),
    "num_repeats": (1, 2),
    "num_microbatches": (4, 8),
    "forwarding_delay": (1, 2),
    "shift": ("ppermute", "slice", "pad"),
    "remat": ("full", "minimal", "none", "qkv_proj_offloaded"),
    "fsdp_gather": ("use", "step", "prefetch"),
    "backward": (None, "accumulate"),
    "own": (False, True),
}


def config_of(case: Case) -> Config:
    pipeline = {name: value for name, value in case.items() if name not in ("mesh", "own")}
    config = small_config(
        model={"num_layers": LAYERS}, pipeline=pipeline, train={"global_batch": BATCH}
    )
    config.check_mesh(MeshConfig.parse(case["mesh"]))
    return config


def any_case(generator: random.Random) -> Case:
    """One that the config takes."""
    while True:
        case = {name: generator.choice(values) for name, values in OPTIONS.items()}
        try:
            config_of(case)
        except InputError:
            continue
        return case


class Found(tuple):
    """Loss, metrics and gradients: of the kernels, and of what comes before and after them."""


def arguments() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What the batch is scaled by, what its result is, the batch and its offsets."""
    batch, offset = float_rows(BATCH, LENGTH, WIDTH, seed=1), float_rows(BATCH, LENGTH, seed=2)
    return 1.0 + 0.1 * float_rows(WIDTH, seed=3), float_rows(WIDTH, seed=4), batch, offset


def total(outputs: Any, weights: Any, metrics: Any) -> jax.Array:
    """The loss: what counts nothing is not read."""

    def share(weight: float, metric: jax.Array) -> jax.Array:
        return weight * jnp.sum(metric) if weight else jnp.float32(0)

    return jax.tree.reduce(jnp.add, jax.tree.map(share, weights, metrics), outputs)


def in_pipeline(case: Case, metrics: Metrics, weights: Any) -> Any:
    """(loss, metrics) and the gradients, through a pipeline."""
    config, mesh = config_of(case), mesh_of(case["mesh"], case["sharding"])
    layout = Layout()

    def loss(trained: Any, x: jax.Array, offset: jax.Array) -> Any:
        pipeline, before, after = trained

        def leave(after: jax.Array, y: jax.Array, _: Any) -> jax.Array:
            return jnp.sum(after * y)

        if case["schedule"] == "1f1b":
            found, (_, reported) = pipeline.loss(
                ModelEnds(lambda before, x: before * x, before, leave, after),
                (x, ()),
                {"offset": offset},
                metric_weights=weights,
            )
            return found, reported
        y, reported = pipeline(before * x, offset=offset)
        return total(leave(after, y, None), weights, reported), reported

    with jax.set_mesh(mesh):
        pipeline = CircularPipeline(
            config.pipeline,
            lambda rngs: Layer(rngs, layout, metrics),
            num_layers=LAYERS,
            rngs=nnx.Rngs(0),
            weights=WeightOptions(zero1=("data",) if case["own"] else ()),
        )
        before, after, *batch = arguments()
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (found, reported), (of_layers, *ends) = run((pipeline, before, after), *batch)
    kernel = pipeline.layers.kernel.get_value()
    of_kernel = of_layers.layers.kernel.get_value()
    kernels, of_kernels = (np.asarray(x).reshape(LAYERS, WIDTH, WIDTH) for x in (kernel, of_kernel))
    return kernels, (found, reported), (of_kernels, *ends)


def by_loops(kernels: Any, tree: Any, weights: Any, microbatches: int) -> Any:
    """The same without the package: all layers, and every microbatch by itself."""

    def whole(name: str, values: list[Any]) -> Any:
        every = jnp.stack([value.value for value in values])  # [layers, microbatches, …]
        if name.startswith("max"):
            return jnp.max(every, axis=(0, 1))
        by = jnp.sum if name.startswith(("sum", "sequences")) else jnp.mean
        return by(every, axis=(0, 1))

    def formula(name: str, x: jax.Array, y: jax.Array) -> Any:
        if name == "curved":
            return Mean(curved(jnp.mean(x * y, axis=(0, 1))))
        if name == "constant":
            return Mean(jnp.float32(2.0))
        return FORMULAS[name](x, y)

    def loss(trained: Any, x: jax.Array, offset: jax.Array) -> Any:
        kernels, before, after = trained
        x, offset = (leaf.reshape(microbatches, -1, *leaf.shape[1:]) for leaf in (x, offset))
        x, found = before * x, []
        for layer in range(LAYERS):
            y = jnp.tanh(x @ kernels[layer] + offset[..., None])
            found.append(
                {name: jax.vmap(functools.partial(formula, name))(x, y) for name in FORMULAS}
            )
            x = x + y
        reported = jax.tree.map(
            lambda name: None if name == "nothing" else whole(name, [f[name] for f in found]), tree
        )
        return total(jnp.sum(after * x), weights, reported), reported

    before, after, *batch = arguments()
    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return run((jnp.asarray(kernels), before, after), *batch)


SEEDS = (369, 1, 30, 186, 3, 10, 63, 52, 39, 18, 361)


def drawn_by(seed: int) -> tuple[Case, Any, Any]:
    """A case, the metrics of a layer and what they count in the loss."""
    generator = random.Random(seed)
    case, tree = any_case(generator), drawn(generator)
    return case, tree, weights_for(tree, generator)


def test_the_seeds_have_every_metric_in_the_loss_of_both_schedules() -> None:
    found = set()
    for case, tree, weights in map(drawn_by, SEEDS):
        counted = jax.tree.map(lambda name, weight: name if weight else None, tree, weights)
        found |= {(case["schedule"], name) for name in jax.tree.leaves(counted)}
    counting = {name for name in FORMULAS if not name.startswith("max")} - {"nothing"}
    assert found == set(itertools.product(OPTIONS["schedule"], counting))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_metrics_under_random_options(seed: int) -> None:
    """Values and gradients, against plain loops over layers and microbatches."""
    case, tree, weights = drawn_by(seed)
    kernels, found, gradients = in_pipeline(case, metrics_of(tree), weights)
    want, want_gradients = by_loops(kernels, tree, weights, case["num_microbatches"])
    words = f"{case} {tree} {weights}"
    try:
        assert_close(found, want, 1e-5)
        assert_close(gradients, want_gradients, 1e-4)
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from error


PLAIN: Case = {name: values[0] for name, values in OPTIONS.items()}
WAYS: dict[str, Case] = {
    "whole batch": {},
    "whole batch in copies": {"mesh": "data=2,fsdp=2", "own": True},
    "autodiff": {"mesh": "stage=2,fsdp=2", "remat": "none"},
    "accumulate": {"mesh": "data=2,stage=2", "backward": "accumulate", "num_repeats": 2},
    "step": {"mesh": "stage=2,fsdp=2", "fsdp_gather": "step"},
    "prefetch": {"mesh": "stage=2,fsdp=2", "fsdp_gather": "prefetch", "num_repeats": 2},
    "1f1b": {"mesh": "stage=2,fsdp=2", "schedule": "1f1b", "num_repeats": 2},
    "1f1b on one device": {"schedule": "1f1b", "remat": "none"},
}
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["autodiff", "accumulate", "prefetch", "1f1b"])
def test_what_the_loss_does_not_count_has_no_derivative(way: str) -> None:
    """A metric that overflows, whose derivative is infinite, leaves all gradients as they are."""

    def reported(x: jax.Array, y: jax.Array) -> Any:
        overflowing = jnp.exp(100.0 + 100.0 * jnp.abs(y))
        return {"counts": Sum(jnp.sum(y**2)), "overflows": Sum(jnp.sum(overflowing))}

    case = {**PLAIN, **WAYS[way]}
    _, found, gradients = in_pipeline(case, reported, {"counts": 0.5, "overflows": 0.0})
    assert float(found[1]["overflows"]) == np.inf

    def without(x: jax.Array, y: jax.Array) -> Any:
        return {"counts": Sum(jnp.sum(y**2))}

    _, _, want = in_pipeline(case, without, {"counts": 0.5})
    assert_close(gradients, want, 1e-6)


@each_way
def test_the_gradient_of_a_maximum_is_refused(way: str) -> None:
    case = {**PLAIN, **WAYS[way]}
    tree = {"most": "max", "mean": "mean"}
    words = "Max, which has no"
    with pytest.raises(InputError, match=words):
        in_pipeline(case, metrics_of(tree), {"most": 1.0, "mean": 0.0})


@pytest.mark.parametrize("way", ["whole batch", "autodiff", "accumulate", "1f1b"])
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda y: jnp.sum(y), r"the metric \['m'\] of a layer is float32\[\].*wrap it, as Sum"),
        (lambda y: Sum(jnp.sum(y > 0)), r"the metric \['m'\] of a layer is int32\[\]"),
        (lambda y: Mean({"a": jnp.sum(y)}), r"the metric \['m'\] of a layer is dict"),
        (lambda y: Sum(Mean(jnp.sum(y))), r"the metric \['m'\] of a layer is Mean"),
    ],
)
def test_a_metric_that_does_not_say_what_it_is(metric: Any, words: str, way: str) -> None:
    with pytest.raises(InputError, match=words):
        in_pipeline({**PLAIN, **WAYS[way]}, lambda x, y: {"m": metric(y)}, {"m": 0.0})


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_the_functions_refuse_a_bare_metric(schedule: str) -> None:
    def stage(w: jax.Array, x: jax.Array, side: None) -> Any:
        return x * w, jnp.sum(x)

    def run() -> Any:
        w, x = jnp.ones((1, 2)), jnp.ones((4, 3))
        if schedule == "circular":
            return run_pipeline(stage, w, x, schedule=CircularSchedule(2, 4))
        return run_one_f_one_b(
            ModelFunctions(lambda w, x: w * x, stage, lambda w, x, _: jnp.sum(x)),
            Weights(jnp.ones(()), w, jnp.ones(())),
            Inputs(x, None, None),
            schedule=OneForwardOneBackward(2, 4),
        )

    with pytest.raises(InputError, match=r"the metric of a layer is .* wrap it, as Sum"):
        run()


class Bare(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("scale", nn.initializers.ones, (WIDTH,)), {"sum": jnp.sum(x)}


@pytest.mark.parametrize("mesh", ["", "stage=2"])
def test_a_linen_pipeline_refuses_a_bare_metric(mesh: str) -> None:
    pipeline = linen_compat.Pipeline(PipelineConfig(num_microbatches=2), Bare(), 4)
    words = r"the metric \['sum'\] of a layer is float32\[\].*wrap it, as Sum"
    with jax.set_mesh(mesh_of(mesh)), pytest.raises(InputError, match=words):
        pipeline.init(jax.random.key(0), float_rows(4, 6, WIDTH))


@pytest.mark.parametrize("way", ["whole batch", "autodiff", "1f1b"])
def test_half_precision_adds_up_in_float32(way: str) -> None:
    """The sums are more than the largest float16, though no summand is."""

    def reported(x: jax.Array, y: jax.Array) -> Any:
        return Sum(jnp.float16(x.shape[0] * 1000)), Mean(jnp.float16(40_000))

    _, (_, found), _ = in_pipeline({**PLAIN, **WAYS[way]}, reported, (0.0, 0.0))
    assert [leaf.dtype for leaf in found] == [jnp.float32, jnp.float32]
    assert [float(leaf) for leaf in found] == [LAYERS * BATCH * 1000, 40_000]


def test_weights_of_metrics_have_their_tree() -> None:
    case = {**PLAIN, **WAYS["1f1b"]}
    tree = metrics_of({"sum": "sum", "mean": "mean"})
    _, found, gradients = in_pipeline(case, tree, {"sum": 0.5, "mean": 0.5})
    _, one, of_one = in_pipeline(case, tree, 0.5)
    assert_close((one, of_one), (found, gradients), 0.0)
    with pytest.raises(InputError, match="does not have the tree structure of the metrics"):
        in_pipeline(case, tree, {"sum": 0.5})


def test_a_weight_may_be_traced_and_has_no_gradient() -> None:
    """It may change from step to step; what the loss is by it would be silently 0."""
    schedule = OneForwardOneBackward(2, 4)
    x, w = float_rows(4, 3), float_rows(1, 2, seed=1)

    def loss(w: jax.Array, weight: Any) -> jax.Array:
        return run_one_f_one_b(
            ModelFunctions(
                lambda w, x: w * x,
                lambda w, x, side: (jnp.sin(x * w), Mean(jnp.mean(x**2))),
                lambda w, x, _: jnp.sum(w * x),
                weight,
            ),
            Weights(jnp.ones(()), w, jnp.ones(())),
            Inputs(x, None, None),
            schedule=schedule,
        )[0]

    traced = jax.jit(jax.value_and_grad(loss))(w, jnp.float32(0.5))
    assert_close(traced, jax.value_and_grad(loss)(w, 0.5), 1e-6)
    with pytest.raises(InputError, match="gradient with respect to metric_weights"):
        jax.jit(jax.grad(loss, 1))(w, jnp.float32(0.5))


# ---- names of side inputs ----------------------------------------------------------------------


class Named(nnx.Module):
    """A layer that reads side inputs of any name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, x: jax.Array, **side: jax.Array) -> tuple[jax.Array, None]:
        return x * self.scale[...] + sum(side.values()), None


@pytest.mark.parametrize("mesh", ["", "stage=2"])
@pytest.mark.parametrize("name", ["keys", "key", "place"])
def test_a_side_input_has_no_name_that_a_pipeline_reserves(name: str, mesh: str) -> None:
    x = float_rows(4, WIDTH)
    words = f"a side input is called '{name}'|key is float32.4, 4., and must be one key"
    with jax.set_mesh(mesh_of(mesh)):
        config = PipelineConfig(num_microbatches=2)
        pipeline = CircularPipeline(config, Named, num_layers=2, rngs=nnx.Rngs(0))
        with pytest.raises(InputError, match=words):
            pipeline(x, **{name: x})
        with pytest.raises(InputError, match=f"a side input is called '{name}'"):
            pipeline.runner.run(pipeline.placed_layers, pipeline.batches.arrange(x), {name: x})
        with pytest.raises(InputError, match=f"a side input is called '{name}'"):
            pipeline.loss(ModelEnds(None, None, None, None), (x, x), {name: x})
        linen = linen_compat.Pipeline(config, Bare(), 2)
        with pytest.raises(InputError, match=words):
            linen.init(jax.random.key(0), x, **{name: x})


# ---- repeats on a mesh without stages -----------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "own"), [("", ()), ("data=2,fsdp=2", ()), ("data=2,fsdp=2", ("data",))]
)
def test_all_repeats_run_where_there_are_no_stages(mesh: str, own: tuple[str, ...]) -> None:
    """One stage has the layers of all repeats; values, metrics and gradients are those of one."""

    def run(repeats: int) -> Any:
        def loss(pipeline: Any, x: jax.Array, offset: jax.Array) -> Any:
            y, found = pipeline(x, offset=offset)
            return jnp.sum(jnp.sin(y)), found

        pipeline = CircularPipeline(
            PipelineConfig(num_repeats=repeats),
            lambda rngs: Layer(rngs, Layout(), metrics_of({"sum": "sum", "mean": "mean"})),
            num_layers=LAYERS,
            rngs=nnx.Rngs(0),
            weights=WeightOptions(zero1=own),
        )
        (value, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            pipeline, *arguments()[2:]
        )
        kernel = gradients.layers.kernel.get_value()
        return value, found, kernel.reshape(LAYERS, *kernel.shape[3:])

    with jax.set_mesh(mesh_of(mesh)):
        assert_close(run(2), run(1), 1e-6)


def test_all_repeats_of_a_linen_pipeline_run_where_there_are_no_stages() -> None:
    class AddOne(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + self.param("one", nn.initializers.ones, (WIDTH,)), None

    pipeline = linen_compat.CircularPipeline(PipelineConfig(num_repeats=2), AddOne(), 4)
    y, variables = pipeline.init_with_output(jax.random.key(0), jnp.zeros((2, WIDTH)))
    np.testing.assert_array_equal(y[0], np.full((2, WIDTH), 4.0))
    again, _ = pipeline.apply(variables, jnp.zeros((2, WIDTH)))
    np.testing.assert_array_equal(again, y[0])
