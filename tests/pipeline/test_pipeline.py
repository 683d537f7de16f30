"""The pipeline loop against plain Python loops over microbatches, repeats and stages."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_placement, equations, float_rows, mesh_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import InputError, MeshConfig, Sum
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.pipeline import (
    Accumulation,
    CircularSchedule,
    LoopOptions,
    run_pipeline,
    run_sequential,
)
from nnx_pipeline.sharding.layout import gather_weight, mesh_sizes

pytestmark = pytest.mark.jax_alone

WIDTH = 4
BATCH = 8  # sequences of one microbatch


class Case(NamedTuple):
    """One row of the table: where it runs and how the layers are cut."""

    mesh: str
    microbatches: int
    repeats: int
    layers: int  # per stage
    shift: str
    mode: str
    remat: str = "full"
    delay: int = 1
    fill: float = math.nan

    @property
    def stages(self) -> int:
        return MeshConfig.parse(self.mesh).stage

    @property
    def schedule(self) -> CircularSchedule:
        return CircularSchedule(self.stages, self.microbatches, self.repeats, self.delay)


TABLE = [
    # microbatches = stages
    Case("stage=4,fsdp=2", 4, 1, 2, "pad", "explicit", remat="none"),
    Case("stage=4,fsdp=2", 4, 2, 1, "slice", "auto"),
    Case("stage=4,fsdp=2", 4, 3, 2, "ppermute", "auto", fill=0.0),
    Case("stage=2,fsdp=4", 2, 2, 2, "ppermute", "explicit"),
    # microbatches > stages
    Case("stage=4,fsdp=2", 8, 2, 1, "ppermute", "explicit", remat="none"),
    Case("stage=4,fsdp=2", 12, 2, 2, "slice", "explicit"),
    Case("data=2,stage=2,fsdp=2", 6, 2, 1, "pad", "explicit"),
    Case("stage=2", 10, 3, 1, "slice", "explicit", fill=0.0),
    Case("stage=8", 16, 1, 1, "slice", "auto"),
    # a transfer beside the work of a tick
    Case("stage=4,fsdp=2", 8, 2, 1, "ppermute", "explicit", delay=2),
    Case("stage=2,fsdp=2", 8, 2, 1, "slice", "auto", delay=2),
]


def layer(x: jax.Array, weights: dict[str, jax.Array], side: dict[str, jax.Array]) -> jax.Array:
    """A layer that reads its side inputs and whose result depends on the order of layers."""
    turned = jnp.tanh(x @ weights["kernel"] + weights["bias"])
    positions, segments = (side[name].astype(x.dtype) for name in ("positions", "segment_ids"))
    return x + turned * jnp.cos(positions)[:, None] + 0.1 * segments[:, None]


def apply_stage(
    params: dict[str, jax.Array], x: jax.Array, side: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Several layers; a microbatch is `[BATCH, WIDTH]`. The kernel's rows lie on fsdp."""
    fsdp = "fsdp" if "fsdp" in mesh_sizes() else None
    kernel = gather_weight(params["kernel"], P(None, fsdp, None), P(None, None, None))
    for index in range(kernel.shape[0]):
        weights = {"kernel": kernel[index], "bias": params["bias"][index]}
        x = layer(x, weights, side)
    return x, {"visits": Sum(jnp.ones(())), "sum": Sum(jnp.sum(x**2))}


def inputs_of(case: Case) -> tuple[Any, Any, Any]:
    """Parameters, microbatches and side inputs, as numpy arrays."""
    generator = np.random.default_rng(0)
    lead = (case.repeats, case.stages, case.layers)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    params = {"kernel": 0.5 * normal(*lead, WIDTH, WIDTH), "bias": 0.1 * normal(*lead, WIDTH)}
    ids = generator.integers(0, 3, size=(2, case.microbatches, BATCH), dtype=np.int32)
    side = {"positions": ids[0], "segment_ids": np.sort(ids[1], axis=-1)}
    return params, normal(case.microbatches, BATCH, WIDTH), side


def by_loops(apply: Any, params: Any, microbatches: Any, side: Any) -> tuple[Any, Any]:
    """The reference: three loops, nothing shared with the package."""
    repeats, stages = jax.tree.leaves(params)[0].shape[:2]
    outputs, totals = [], None
    for m in range(jax.tree.leaves(microbatches)[0].shape[0]):
        x = jax.tree.map(lambda leaf, m=m: leaf[m], microbatches)
        beside = jax.tree.map(lambda leaf, m=m: leaf[m], side)
        for r in range(repeats):
            for s in range(stages):
                weights = jax.tree.map(lambda leaf, r=r, s=s: leaf[r, s], params)
                x, metrics = apply(weights, x, beside)
                totals = metrics if totals is None else jax.tree.map(jnp.add, totals, metrics)
        outputs.append(x)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs), unwrapped(totals)


def unwrapped(metrics: Any) -> Any:
    """The arrays of metrics that are all sums."""
    is_sum = lambda leaf: isinstance(leaf, Sum)  # noqa: E731
    return jax.tree.map(lambda metric: metric.value, metrics, is_leaf=is_sum)


def loss_from(outputs: jax.Array, metrics: dict[str, jax.Array]) -> jax.Array:
    """A scalar in which every output has its own weight, and the metrics count."""
    weight = jnp.linspace(-1.0, 1.0, outputs.size).reshape(outputs.shape)
    return jnp.sum(weight * outputs) + 1e-3 * metrics["sum"]


def with_gradients(run: Any) -> Any:
    """(params, microbatches, side) to the results of `run`, and the gradients of both inputs."""

    def evaluate(params: Any, microbatches: Any, side: Any) -> Any:
        def loss(params: Any, microbatches: Any) -> Any:
            outputs, metrics = run(params, microbatches, side)
            return loss_from(outputs, metrics), (outputs, metrics)

        gradients, results = jax.grad(loss, (0, 1), has_aux=True)(params, microbatches)
        return results, gradients

    return evaluate


def reference(case: Case) -> Any:
    """Results and gradients of the loops, on one device."""
    run = functools.partial(by_loops, jax.jit(apply_stage))
    return with_gradients(run)(*jax.tree.map(jnp.asarray, inputs_of(case)))


def arguments_on(mesh: Any, case: Case) -> tuple[Any, Any, Any]:
    """The inputs in their places on the mesh, as the loop asks for them."""
    specs = (
        {"kernel": P(None, "stage", None, "fsdp", None), "bias": P(None, "stage", None, None)},
        P("stage", "fsdp", None),
        {"positions": P(None, "fsdp"), "segment_ids": P(None, "fsdp")},
    )
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), inputs_of(case), specs
    )


both_backwards = pytest.mark.parametrize(
    "accumulate", [None, Accumulation()], ids=["autodiff", "accumulate"]
)


@pytest.mark.slow(but=6)
@both_backwards
@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_sequential_loops(case: Case, accumulate: Any) -> None:
    """Values, metrics, and the gradients of parameters and inputs, with NaN in the buffers."""
    mesh = mesh_of(case.mesh, case.mode)
    run = functools.partial(
        run_pipeline,
        apply_stage,
        schedule=case.schedule,
        options=LoopOptions(
            shift_by=case.shift,
            remat=POLICIES[case.remat],
            bubble_fill=case.fill,
            accumulate=accumulate,
        ),
    )
    with jax.set_mesh(mesh):
        arguments = arguments_on(mesh, case)
        (outputs, metrics), gradients = jax.jit(with_gradients(run))(*arguments)
    (want, want_metrics), want_gradients = reference(case)
    assert_close(outputs, want, 1e-5)
    assert_close(metrics, want_metrics, 1e-5)
    assert float(metrics["visits"]) == case.microbatches * case.repeats * case.stages
    assert_close(gradients, want_gradients, 1e-4)
    if case.mode == "explicit":
        assert_same_placement(outputs, arguments[1])
        assert_same_placement(gradients, arguments[:2])


def on_one_device(apply: Any, schedule: CircularSchedule, **options: Any) -> Any:
    """The pipeline without a mesh: stages are a plain leading axis."""
    return functools.partial(run_pipeline, apply, schedule=schedule, options=LoopOptions(**options))


def test_the_loops_in_the_package_are_these_loops() -> None:
    case = Case("stage=2", 4, 2, 1, "ppermute", "explicit")
    arguments = jax.tree.map(jnp.asarray, inputs_of(case))
    assert_close(
        run_sequential(apply_stage, *arguments), by_loops(apply_stage, *arguments), tolerance=0.0
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(
    stages=st.integers(1, 4),
    slots=st.integers(1, 3),
    repeats=st.integers(1, 3),
    delay=st.integers(1, 2),
    how=st.sampled_from(["ppermute", "slice", "pad"]),
    data=st.data(),
)
def test_every_microbatch_takes_its_way(
    stages: int, slots: int, repeats: int, delay: int, how: str, data: st.DataObject
) -> None:
    """Whole numbers that spell out which stages a microbatch met, in which order, exactly."""
    count = stages * max(slots, delay)
    schedule = CircularSchedule(stages, count, repeats, delay)
    assume(not (how == "pad" and schedule.is_ring))
    digits = st.integers(0, 4)
    params = np.array(
        data.draw(st.lists(digits, min_size=repeats * stages, max_size=repeats * stages)),
        np.float32,
    ).reshape(repeats, stages)
    side = np.array(data.draw(st.lists(digits, min_size=count, max_size=count)), np.int32)
    start = np.arange(count, dtype=np.float32)

    def append(digit: jax.Array, x: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 3 * x + digit + offset.astype(x.dtype), Sum(x)

    run = on_one_device(append, schedule, shift_by=how, bubble_fill=math.nan)
    outputs, seen = run(jnp.asarray(params), jnp.asarray(start), jnp.asarray(side))
    for m in range(count):
        x = int(start[m])
        for digit in params.reshape(-1):
            x = 3 * x + int(digit) + int(side[m])
        assert int(outputs[m]) == x
    assert np.isfinite(seen)


@both_backwards
def test_a_pytree_of_activations_and_of_metrics(accumulate: Any) -> None:
    """Activations of different ranks travel together; side inputs have gradients too."""
    schedule = CircularSchedule(2, 4, 2)
    params = (float_rows(2, 2, 3), {"scale": float_rows(2, 2, seed=1)})
    start = {"wide": float_rows(4, 5, 3, seed=2), "narrow": (float_rows(4, seed=3),)}

    def apply(params: Any, x: Any, side: Any) -> Any:
        shift, scale = params[0], params[1]["scale"]
        narrow = x["narrow"][0] + scale * side["factor"]
        wide = jnp.sin(x["wide"] * scale + shift + narrow + side["index"].astype(jnp.float32))
        return {"wide": wide, "narrow": (narrow,)}, (Sum(jnp.sum(wide)), {"last": Sum(narrow)})

    side = {"factor": float_rows(4, seed=4), "index": jnp.arange(4, dtype=jnp.int32)}
    pipelined = on_one_device(apply, schedule, bubble_fill=math.nan, accumulate=accumulate)

    def evaluate(run: Any) -> Any:
        def loss(params: Any, start: Any, factor: jax.Array) -> Any:
            results = run(params, start, {**side, "factor": factor})
            return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(results)), results

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, start, side["factor"])

    got, want = evaluate(pipelined), evaluate(functools.partial(by_loops, apply))
    assert_close(got[1], want[1], 1e-5)
    assert_close(got[0], want[0], 1e-4)


def test_weights_that_are_integers_have_no_gradient() -> None:
    """A stage may find its number, or a table, among its parameters."""
    schedule = CircularSchedule(2, 4, 2)
    params = {"number": jnp.arange(4, dtype=jnp.int32).reshape(2, 2), "scale": float_rows(2, 2)}

    def apply(params: Any, x: Any, side: None) -> Any:
        return jnp.sin(x * params["scale"] + params["number"].astype(x.dtype)), None

    def gradients(run: Any) -> Any:
        loss = lambda params, x: jnp.sum(run(params, x, None)[0] ** 2)  # noqa: E731
        of_params, of_x = jax.grad(loss, (0, 1), allow_int=True)(params, float_rows(4))
        return of_params["scale"], of_x

    run = on_one_device(apply, schedule, accumulate=Accumulation())
    assert_close(gradients(run), gradients(functools.partial(by_loops, apply)), 1e-4)


@both_backwards
@pytest.mark.parametrize("mesh", ["", "stage=4"])
def test_metrics_that_are_constant_or_none(mesh: str, accumulate: Any) -> None:
    """A stage may report a number that does not depend on its inputs, or nothing."""
    schedule = CircularSchedule(4, 4)

    def apply(params: jax.Array, x: jax.Array, side: None) -> Any:
        return x + params, {"constant": Sum(jnp.full((), 2.0)), "nothing": None}

    grid = mesh_of(mesh)
    with jax.set_mesh(grid):
        x = jax.device_put(jnp.zeros(4), NamedSharding(grid, P("stage")))
        params = jax.device_put(jnp.ones((1, 4)), NamedSharding(grid, P(None, "stage")))
        run = jax.jit(on_one_device(apply, schedule, accumulate=accumulate))
        outputs, metrics = run(params, x)
        gradient = jax.grad(lambda params, x: jnp.sum(run(params, x)[0]))(params, x)
    np.testing.assert_array_equal(gradient, np.full((1, 4), 4.0))
    np.testing.assert_array_equal(outputs, np.full(4, 4.0))
    assert float(metrics["constant"]) == 2.0 * 4 * 4


@pytest.mark.slow
@both_backwards
@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_stage_without_a_derivative_at_zero(remat: str, accumulate: Any) -> None:
    """x / |x| is not a number at zero, nor is its gradient: bubbles must not let it out."""
    schedule = CircularSchedule(3, 6, 2)
    params, start = float_rows(2, 3, 4, 4), float_rows(6, 4, seed=1)

    def apply(params: jax.Array, x: jax.Array, side: None) -> Any:
        y = (x / jnp.sqrt(jnp.sum(x**2))) @ params
        return y, {"sum": Sum(jnp.sum(y))}

    run = on_one_device(
        apply, schedule, remat=POLICIES[remat], bubble_fill=math.nan, accumulate=accumulate
    )
    (outputs, metrics), gradients = jax.jit(with_gradients(run))(params, start, None)
    (want, want_metrics), want_gradients = with_gradients(functools.partial(by_loops, apply))(
        params, start, None
    )
    assert_close((outputs, metrics), (want, want_metrics), 1e-5)
    assert_close(gradients, want_gradients, 1e-4)


@both_backwards
def test_remat_keeps_one_activation_per_tick(accumulate: Any) -> None:
    """With remat the scan hands each tick's input to the backward pass and no inner array."""
    schedule = CircularSchedule(2, 4)
    params, start = float_rows(1, 2, 7, 11), float_rows(4, 7, seed=1)

    def apply(params: jax.Array, x: jax.Array, side: None) -> Any:
        hidden = jnp.tanh(x @ params)
        return jnp.sin(hidden) @ params.T, None

    def kept(remat: str) -> set[tuple[int, ...]]:
        run = on_one_device(apply, schedule, remat=POLICIES[remat], accumulate=accumulate)
        loss = jax.grad(lambda p, x: jnp.sum(run(p, x)[0]), (0, 1))
        jaxpr = jax.make_jaxpr(loss)(params, start)
        scans = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
        return {v.aval.shape for e in scans for v in e.outvars if v.aval.shape[:1] == (5,)}

    wide = (schedule.ticks, schedule.stages, 11)
    assert wide in kept("none")
    assert wide not in kept("full")
    assert (schedule.ticks, schedule.stages, 7) in kept("full")


@pytest.mark.parametrize(
    ("params", "microbatches", "side", "message"),
    [
        ((2, 3), (6, 1), (6,), r"\(repeats, stages\) = \(1, 3\)"),
        ((1, 2), (6, 1), (6,), r"has shape \(1, 2\)"),
        ((1, 3), (3, 1), (6,), "6 microbatches of the schedule"),
        ((1, 3), (6, 1), (5,), "6 microbatches of the schedule"),
    ],
)
def test_shapes_that_do_not_fit_the_schedule(
    params: tuple[int, ...], microbatches: tuple[int, ...], side: tuple[int, ...], message: str
) -> None:
    run = on_one_device(lambda params, x, side: (x, None), CircularSchedule(3, 6))
    with pytest.raises(InputError, match=message):
        run(jnp.zeros(params), jnp.zeros(microbatches), jnp.zeros(side, jnp.int32))


def test_padding_a_ring() -> None:
    """The zeros of `pad` would come where the first stage expects the last one's work."""
    run = on_one_device(
        lambda params, x, side: (x, None), CircularSchedule(2, 2, 2), shift_by="pad"
    )
    with pytest.raises(InputError, match="choose more microbatches or 'slice'"):
        run(jnp.zeros((2, 2)), jnp.zeros((2, 1)))


def test_a_mesh_with_other_stages_than_the_schedule() -> None:
    run = on_one_device(lambda params, x, side: (x, None), CircularSchedule(2, 4))
    with jax.set_mesh(mesh_of("stage=4")), pytest.raises(InputError, match="make them equal"):
        run(jnp.zeros((1, 2)), jnp.zeros((4, 1)))


def test_an_unknown_way_to_send() -> None:
    with pytest.raises(InputError, match="shift_by='roll' is not known"):
        LoopOptions(shift_by="roll")
