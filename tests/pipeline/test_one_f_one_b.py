"""1F1B against plain Python loops over microbatches and stages."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, assert_same_placement, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import InputError, MeshConfig, PipelineConfig, Sum
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.pipeline import (
    CircularPipeline,
    Inputs,
    LoopOptions,
    ModelEnds,
    ModelFunctions,
    OneForwardOneBackward,
    Weights,
    run_one_f_one_b,
)
from nnx_pipeline.sharding.layout import gather_weight, mesh_sizes, out_sharding

pytestmark = pytest.mark.numbers

WIDTH, VOCABULARY, BATCH = 4, 6, 8
BALANCE = 1e-2


class Case(NamedTuple):
    """Where it runs and how."""

    mesh: str
    microbatches: int
    layers: int = 1  # per stage
    shift: str = "ppermute"
    mode: str = "explicit"
    remat: str = "full"
    fill: float = math.nan
    repeats: int = 1

    @property
    def stages(self) -> int:
        return MeshConfig.parse(self.mesh).stage

    @property
    def schedule(self) -> OneForwardOneBackward:
        return OneForwardOneBackward(self.stages, self.microbatches, self.repeats)


TABLE = [
    Case("stage=4,fsdp=2", 4),
    Case("stage=4,fsdp=2", 8, layers=2),
    Case("stage=4,fsdp=2", 12, shift="slice", mode="auto"),
    Case("stage=2,fsdp=2,data=2", 6, shift="slice"),
    Case("stage=8", 8, layers=2),
    Case("fsdp=4", 3, layers=3),  # no stages: the gradient adds up over microbatches
    Case("", 4),
    Case("stage=4,fsdp=2", 4, repeats=3, layers=2, mode="auto"),
    Case("stage=2,fsdp=2,data=2", 6, repeats=2, shift="slice", remat="none"),
    Case("", 4, repeats=3),
]


def batch_axes() -> tuple[str, ...] | None:
    return tuple(axis for axis in ("data", "fsdp") if mesh_sizes().get(axis, 1) > 1) or None


def enter(table: jax.Array, tokens: jax.Array) -> jax.Array:
    spec = P(batch_axes(), None)
    return table.at[tokens].get(out_sharding=out_sharding(spec))


def apply_stage(params: Any, x: jax.Array, side: jax.Array) -> Any:
    fsdp = "fsdp" if mesh_sizes().get("fsdp", 1) > 1 else None
    kernel = gather_weight(params["kernel"], P(None, fsdp, None), P(None, None, None))
    for index in range(kernel.shape[0]):
        turned = jnp.tanh(x @ kernel[index] + params["bias"][index])
        x = x + turned * jnp.cos(side.astype(x.dtype))[:, None]
    return x, {"visits": Sum(jnp.ones(())), "square": Sum(jnp.sum(x**2))}


def leave(params: Any, x: jax.Array, inputs: Any) -> jax.Array:
    targets, weights = inputs
    normed = params["scale"] * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
    logits = normed @ params["head"]
    hit = jax.nn.one_hot(targets, VOCABULARY, dtype=logits.dtype)
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - jnp.sum(hit * logits, axis=-1)))


def arguments(case: Case) -> tuple[Weights, Inputs]:
    """Numpy arrays."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    def whole(most: int) -> np.ndarray:
        return generator.integers(most, size=(case.microbatches, BATCH), dtype=np.int32)

    lead = (case.repeats, case.stages, case.layers)
    weights = Weights(
        enter=normal(VOCABULARY, WIDTH),
        stages={"kernel": 0.5 * normal(*lead, WIDTH, WIDTH), "bias": 0.1 * normal(*lead, WIDTH)},
        leave={"scale": normal(WIDTH), "head": normal(WIDTH, VOCABULARY)},
    )
    share = generator.random((case.microbatches, BATCH)).astype(np.float32)
    targets = (whole(VOCABULARY), share)
    return weights, Inputs(enter=whole(VOCABULARY), side=whole(3), leave=targets)


def on_mesh(case: Case, mesh: Any) -> tuple[Weights, Inputs]:
    names = {name for name, size in mesh.shape.items() if size > 1}
    stage, fsdp = (name if name in names else None for name in ("stage", "fsdp"))
    rows = P(None, tuple(name for name in ("data", "fsdp") if name in names) or None)
    specs = (
        Weights(
            enter=P(),
            stages={"kernel": P(None, stage, None, fsdp, None), "bias": P(None, stage, None, None)},
            leave={"scale": P(), "head": P()},
        ),
        Inputs(enter=rows, side=rows, leave=(rows, rows)),
    )
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), arguments(case), specs
    )


def by_loops(weights: Weights, inputs: Inputs) -> Any:
    """The reference: loops over microbatches, repeats and stages."""
    loss, totals = jnp.zeros(()), {"visits": 0.0, "square": 0.0}
    for m in range(inputs.side.shape[0]):
        x = enter(weights.enter, inputs.enter[m])
        repeats, stages = weights.stages["bias"].shape[:2]
        for visit in itertools.product(range(repeats), range(stages)):
            of_stage = jax.tree.map(lambda leaf, at=visit: leaf[at], weights.stages)
            x, metrics = apply_stage(of_stage, x, inputs.side[m])
            totals = {name: totals[name] + metrics[name].value for name in totals}
        loss += leave(weights.leave, x, jax.tree.map(lambda leaf, m=m: leaf[m], inputs.leave))
    return loss + BALANCE * totals["square"], (loss, totals)


def pipelined(case: Case, **options: Any) -> Any:
    return functools.partial(
        run_one_f_one_b,
        ModelFunctions(enter, apply_stage, leave, {"visits": None, "square": BALANCE}),
        schedule=case.schedule,
        options=LoopOptions(
            shift_by=case.shift, remat=POLICIES[case.remat], bubble_fill=case.fill, **options
        ),
    )


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_sequential_loops(case: Case) -> None:
    """Loss, its parts and all gradients, with NaN in the buffers; and the loss alone."""
    want, want_gradients = jax.value_and_grad(by_loops, has_aux=True)(
        *jax.tree.map(jnp.asarray, arguments(case))
    )
    mesh = mesh_of(case.mesh, case.mode)
    run = pipelined(case)
    with jax.set_mesh(mesh):
        weights, inputs = on_mesh(case, mesh)
        got, gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(weights, inputs)
        alone = jax.jit(run)(weights, inputs)
    assert_close(got, want, 1e-5)
    assert_close(alone, want, 1e-5)
    assert_close(gradients, want_gradients, 1e-4)
    if case.mode == "explicit":
        assert_same_placement(gradients, weights)


class Half(nnx.Module):
    """Computes in float16, and gives what it is given: float16, or float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, rngs=rngs, dtype=jnp.float16)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(self.linear(x)).astype(x.dtype), None


def gradients_in_half(
    schedule: str, dtype: str, small: float, lift: float | None, scale: float = 1.0
) -> Any:
    """The gradients of a loss times a small number and a loss scale, divided by both in float64."""
    config = PipelineConfig(num_microbatches=4, schedule=schedule)
    with jax.set_mesh(mesh_of("stage=2")):
        pipeline = CircularPipeline(config, Half, num_layers=4, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (8, 8, 16)).astype(dtype)
        graph, params, rest = nnx.split(pipeline, nnx.Param, ...)

        def squares(_: Any, y: jax.Array, x: jax.Array) -> jax.Array:
            apart = y.astype(jnp.float32) - jnp.roll(x, 1, -1).astype(jnp.float32)
            return small * jnp.sum(apart**2)

        def loss(params: Any) -> jax.Array:
            pipeline = nnx.merge(graph, params, rest)
            if schedule == "circular":
                return scale * squares((), pipeline(x)[0], x)
            ends = ModelEnds(lambda _, x: x, (), squares, (), lift)
            return scale * pipeline.loss(ends, (x, x), {})[0]

        found = jax.jit(jax.grad(loss))(params)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / small / scale, found)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float16_has_its_gradients_by_a_lift(dtype: str) -> None:
    """As large or small as the loss is; the activations between layers may be in float32."""
    want = gradients_in_half("circular", dtype, 1.0, None)
    for small, lift, scale in (
        (1.0, 1.0, 1.0),
        (2.0**-26, 2.0**26, 1.0),
        (2.0**-26, 2.0**26, 2.0**26),
        (2.0**12, np.float32(2.0**-12), 2.0**-12),
    ):
        found = gradients_in_half("1f1b", dtype, small, lift, scale)
        for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            apart = np.linalg.norm(one - exact)
            assert apart < 3 * float(jnp.finfo("float16").eps) * np.linalg.norm(exact)
    with pytest.raises(InputError, match=r"compute in float16; .* set `lift` of ModelEnds"):
        gradients_in_half("1f1b", dtype, 1.0, None, 2.0**12)


@pytest.mark.parametrize("lift", [0.0, -1.0, math.nan, True, "2", np.ones(2)])
def test_a_lift_is_a_number_above_zero(lift: Any) -> None:
    with pytest.raises(InputError, match="lift="):
        gradients_in_half("1f1b", "float16", 1.0, lift)


def test_a_lift_changes_neither_the_loss_nor_its_gradients() -> None:
    """Those of metrics with a weight included."""
    case = Case("stage=4", 4, mode="auto")
    with jax.set_mesh(mesh_of(case.mesh, case.mode)):
        given = jax.tree.map(jnp.asarray, arguments(case))
        functions = ModelFunctions(enter, apply_stage, leave, {"visits": None, "square": BALANCE})
        loop = functools.partial(run_one_f_one_b, schedule=case.schedule)
        lifts = (None, 2.0**12, jnp.float32(2.0**-12))
        each = [dataclasses.replace(functions, lift=lift) for lift in lifts]
        runs = [jax.value_and_grad(functools.partial(loop, one), has_aux=True) for one in each]
        want, *found = (jax.jit(run)(*given) for run in runs)
        for one in found:
            assert_close(one, want, 1e-6)
