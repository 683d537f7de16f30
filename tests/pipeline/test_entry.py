"""Arrays that lie elsewhere than the loops want them are moved, or refused in one sentence."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, assert_same_placement, float_rows, mesh_of, small_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import InputError, Sum, create_pipeline
from nnx_pipeline.pipeline import (
    Accumulation,
    CircularSchedule,
    Inputs,
    LoopOptions,
    ModelEnds,
    ModelFunctions,
    OneForwardOneBackward,
    Weights,
    run_one_f_one_b,
    run_pipeline,
)

pytestmark = pytest.mark.jax_alone

STAGES, MICROBATCHES, BATCH, WIDTH = 2, 4, 4, 4
MESHES = [
    ("stage=2,data=2", "explicit"),
    ("stage=2,data=2", "auto"),
    ("data=4", "explicit"),
    ("data=4", "auto"),
]
PLACES = ["numpy", "whole", "data", "data and stage", "one device"]

each_mesh = pytest.mark.parametrize(("mesh", "mode"), MESHES)


def put(tree: Any, where: str, grid: Any) -> Any:
    """The numpy arrays of a tree, somewhere on the mesh."""

    def one(leaf: np.ndarray) -> Any:
        if where == "numpy":
            return leaf
        if where == "one device":
            return jnp.asarray(leaf)
        axes = {"whole": (), "data": ("data",), "data and stage": ("data", "stage")}[where]
        parts = math.prod(grid.shape[axis] for axis in axes)
        fits = [axis for axis in range(min(leaf.ndim, 2)) if leaf.shape[axis] % parts == 0]
        spec = P(*[None] * fits[0], axes) if fits and axes else P()
        return jax.device_put(leaf, NamedSharding(grid, spec))

    return jax.tree.map(one, tree)


def apply_stage(kernel: jax.Array, x: jax.Array, side: jax.Array) -> Any:
    return x + jnp.tanh(x @ kernel) * side[:, None].astype(x.dtype), {"sum": Sum(jnp.sum(x))}


def arrays() -> tuple[Any, Any, Any]:
    kernel = np.asarray(float_rows(4 // STAGES, STAGES, WIDTH, WIDTH))
    side = np.arange(MICROBATCHES * BATCH, dtype=np.int32).reshape(MICROBATCHES, BATCH)
    return kernel, np.asarray(float_rows(MICROBATCHES, BATCH, WIDTH, seed=1)), side


def circular(kernel: Any, x: Any, side: Any, options: LoopOptions = LoopOptions()) -> jax.Array:
    schedule = CircularSchedule(STAGES, MICROBATCHES, 4 // STAGES)
    y, metrics = run_pipeline(apply_stage, kernel, x, side, schedule=schedule, options=options)
    return jnp.sum(jnp.sin(y)) + metrics["sum"]


def one_f_one_b(kernel: Any, x: Any, side: Any) -> jax.Array:
    """Ends with weights that are integers beside others."""
    ends = {"shift": np.ones(WIDTH, np.float32), "count": np.arange(WIDTH, dtype=np.int32)}
    return with_ends(kernel, {"enter": ends, "leave": ends}, x, side)


def with_ends(kernel: Any, ends: Any, x: Any, side: Any) -> jax.Array:
    return run_one_f_one_b(
        ModelFunctions(
            lambda weights, x: x * weights["count"].astype(x.dtype) + weights["shift"],
            apply_stage,
            lambda weights, y, targets: jnp.sum(
                jnp.sin(y * weights["count"].astype(y.dtype) * weights["shift"]) * targets
            ),
            {"sum": 1.0},
        ),
        Weights(enter=ends["enter"], stages=kernel, leave=ends["leave"]),
        Inputs(enter=x, side=side, leave=x),
        schedule=OneForwardOneBackward(STAGES, MICROBATCHES, 4 // STAGES),
    )[0]


RUNS = {
    "autodiff": circular,
    "accumulate": functools.partial(circular, options=LoopOptions(accumulate=Accumulation())),
    "1f1b": one_f_one_b,
}


@functools.cache
def on_one_device(run: str) -> Any:
    return jax.value_and_grad(RUNS[run])(*map(jnp.asarray, arrays()))


# Every place on the mesh that has most to move, and some on the others.
MESHES_AND_PLACES = [
    *((*MESHES[0], where) for where in PLACES),
    (*MESHES[1], "data and stage"),
    (*MESHES[2], "one device"),
    (*MESHES[3], "data"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "mode", "where"), MESHES_AND_PLACES)
@pytest.mark.parametrize("run", RUNS)
def test_arrays_from_anywhere(run: str, mesh: str, mode: str, where: str) -> None:
    """Value and gradient are those of one device, and the gradient lies where its array does."""
    grid = mesh_of(mesh, mode)
    with jax.set_mesh(grid):
        given = put(arrays(), where, grid)
        got = jax.jit(jax.value_and_grad(RUNS[run]))(*given)
        alone = jax.jit(RUNS[run])(*given)
    want = on_one_device(run)
    assert_close(got, want, 1e-4)
    assert_close(alone, want[0], 1e-4)
    if mode == "explicit" and where not in ("numpy", "one device"):
        assert_same_placement(got[1], given[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_without_jit(mode: str) -> None:
    """Numpy arrays under a mesh, nothing compiled around the loop."""
    with jax.set_mesh(mesh_of("stage=2,data=2", mode)):
        assert_close(circular(*arrays()), on_one_device("autodiff")[0], 1e-4)
        assert_close(one_f_one_b(*arrays()), on_one_device("1f1b")[0], 1e-4)


@pytest.mark.slow
@each_mesh
def test_integers_among_the_weights_of_1f1b(mesh: str, mode: str) -> None:
    """They have no gradient, in `enter` and in `leave`, and the others have theirs."""
    kernel, x, side = arrays()
    ends = {
        "enter": {"shift": np.full(WIDTH, 0.5, np.float32), "count": np.arange(WIDTH)},
        "leave": {"shift": np.full(WIDTH, 0.7, np.float32), "count": np.arange(WIDTH)[::-1]},
    }

    def shifts(ends: Any, kernel: Any, x: Any, side: Any) -> Any:
        def loss(shifts: Any) -> jax.Array:
            new = {name: {**ends[name], "shift": shifts[name]} for name in ends}
            return with_ends(kernel, new, x, side)

        return jax.grad(loss)({name: jnp.asarray(ends[name]["shift"]) for name in ends})

    def by_loops(ends: Any) -> jax.Array:
        total = jnp.zeros(())
        for m in range(MICROBATCHES):
            y = x[m] * ends["enter"]["count"].astype("float32") + ends["enter"]["shift"]
            for visit in np.ndindex(kernel.shape[:2]):
                y, metrics = apply_stage(kernel[visit], y, side[m])
                total += metrics["sum"].value
            y = y * ends["leave"]["count"].astype("float32") * ends["leave"]["shift"]
            total += jnp.sum(jnp.sin(y) * x[m])
        return total

    whole = jax.grad(by_loops, allow_int=True)(jax.tree.map(jnp.asarray, ends))
    want = {name: whole[name]["shift"] for name in ends}
    with jax.set_mesh(mesh_of(mesh, mode)):
        assert_close(jax.jit(shifts)(ends, kernel, x, side), want, 1e-4)
        asked = jax.grad(functools.partial(with_ends, kernel), allow_int=True)(
            jax.tree.map(jnp.asarray, ends), x, side
        )
    assert asked["enter"]["count"].dtype == jax.dtypes.float0
    assert_close({name: asked[name]["shift"] for name in ends}, want, 1e-4)


class Block(nnx.Module):
    """A layer whose kernel may be spread over fsdp and data."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(self.linear(x)) * scale[:, None], None


def layer_values(pipeline: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(pipeline)]


def value_and_gradients(schedule: str, gather: str, mesh: str, mode: str, where: str) -> Any:
    """The loss and the gradients of a pipeline of blocks, and of its batch, that lie somewhere."""

    def loss(pipeline: Any, x: Any, scale: Any) -> jax.Array:
        if schedule == "circular":
            return jnp.sum(jnp.sin(pipeline(x, scale=scale)[0]))
        ends = ModelEnds(
            enter=lambda weights, x: x,
            enter_weights=None,
            leave=lambda weights, y, _: jnp.sum(jnp.sin(y)),
            leave_weights=None,
        )
        return pipeline.loss(ends, (x, scale), {"scale": scale})[0]

    options = {"sharding": mode, "schedule": schedule, "fsdp_gather": gather}
    config = small_config(pipeline={"num_microbatches": 4, **options})
    grid = mesh_of(mesh, mode)
    x, scale = np.asarray(float_rows(16, WIDTH)), np.arange(16, dtype=np.float32)
    pipeline = create_pipeline(config, Block, grid, rngs=nnx.Rngs(0))
    with jax.set_mesh(grid):
        if where:
            placed = put(layer_values(pipeline), where, grid)
            pipeline = jax.tree.unflatten(jax.tree.structure(pipeline), placed)
            x, scale = put((x, scale), where, grid)
        value, gradients = jax.jit(jax.value_and_grad(loss))(pipeline, x, scale)
    return value, [leaf.reshape(4, *leaf.shape[3:]) for leaf in layer_values(gradients)]


@functools.cache
def without_a_mesh() -> Any:
    return value_and_gradients("circular", "use", "", "auto", "")


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("schedule", "gather", "mesh", "mode", "where"),
    [
        *(("circular", "use", *MESHES[0], where) for where in PLACES),
        *(("circular", "use", *place, "numpy") for place in MESHES[1:]),
        *(("circular", "step", *MESHES[0], where) for where in ("numpy", "data and stage")),
        *(("1f1b", "use", *MESHES[0], where) for where in ("numpy", "data and stage")),
        ("1f1b", "use", *MESHES[3], "numpy"),
    ],
)
def test_a_module_and_its_batch_from_anywhere(
    schedule: str, gather: str, mesh: str, mode: str, where: str
) -> None:
    """A batch and weights that are not where the layers want them, with and without stages."""
    got = value_and_gradients(schedule, gather, mesh, mode, where)
    assert_close(got, without_a_mesh(), 1e-4)


def test_what_cannot_be_moved_is_refused() -> None:
    """An array of other devices; words in the place of numbers."""
    kernel, x, side = arrays()
    elsewhere = jax.device_put(x, jax.devices()[7])
    with jax.set_mesh(mesh_of("stage=2,data=2")):
        with pytest.raises(InputError, match=r"a microbatch of the pipeline, float32\[4, 4, 4\]"):
            circular(kernel, elsewhere, side)
        with pytest.raises(InputError, match=r"an input of the pipeline, .* other devices"):
            one_f_one_b(kernel, elsewhere, side)
        with pytest.raises(InputError, match="give an array of numbers"):
            circular(kernel, x, np.full((MICROBATCHES, BATCH), "word"))
