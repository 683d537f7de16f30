"""What the functions of a pipeline close over: kept once for all ticks, and with a gradient."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, equations, float_rows, mesh_of, small_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline import Sum, create_pipeline
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.pipeline import (
    Accumulation,
    CircularSchedule,
    Inputs,
    LoopOptions,
    ModelFunctions,
    OneForwardOneBackward,
    Weights,
    run_one_f_one_b,
    run_pipeline,
    run_sequential,
)

pytestmark = pytest.mark.jax_alone

WIDTH, BATCH, STAGES = 4, 4, 2
MICROBATCHES, REPEATS = 4, 2
TABLE = np.random.default_rng(5).normal(size=(3, WIDTH)).astype(np.float32)  # never differentiated


def closed_over() -> dict[str, jax.Array]:
    """What is differentiated: it is read by the stages, before the first and after the last one."""
    return {"scale": float_rows(WIDTH, seed=1), "mix": float_rows(WIDTH, WIDTH, seed=2)}


def stage_of(closed: dict[str, jax.Array]) -> Any:
    """A stage that closes over floats with and without gradient, integers and a random key."""
    steps, key = jnp.arange(WIDTH, dtype=jnp.int32), jax.random.key(3)

    def apply_stage(kernel: jax.Array, x: jax.Array, side: jax.Array) -> Any:
        noise = jax.random.normal(key, (WIDTH,), x.dtype)
        turned = jnp.tanh(x @ kernel @ closed["mix"]) * steps.astype(x.dtype)
        beside = side[:, None].astype(x.dtype) * closed["scale"] + TABLE[1] * noise
        return x + turned + beside, {"square": Sum(jnp.sum(x**2 * closed["scale"]))}

    return apply_stage


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Kernels `[repeats, stages, …]`, microbatches and side inputs."""
    side = jnp.arange(MICROBATCHES * BATCH, dtype=jnp.int32).reshape(MICROBATCHES, BATCH) % 3
    kernel = 0.5 * float_rows(REPEATS, STAGES, WIDTH, WIDTH, seed=3)
    return kernel, float_rows(MICROBATCHES, BATCH, WIDTH, seed=4), side


def circular(run: Any, closed: dict[str, jax.Array], kernel: Any, x: Any, side: Any) -> jax.Array:
    y, metrics = run(stage_of(closed), kernel, x, side)
    weight = jnp.linspace(-1.0, 1.0, y.size, dtype=y.dtype).reshape(y.shape)
    return jnp.sum(weight * y) + 1e-2 * metrics["square"]


@functools.cache
def by_sequence() -> Any:
    """Gradients of what is closed over, of weights and inputs."""
    closed, (kernel, x, side) = closed_over(), arrays()
    return jax.grad(functools.partial(circular, run_sequential), (0, 1, 2))(closed, kernel, x, side)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "mode", "accumulate", "remat"),
    [
        ("", "explicit", None, "none"),
        ("", "explicit", Accumulation(), "full"),
        ("stage=2,fsdp=2", "explicit", None, "full"),
        ("stage=2,fsdp=2", "explicit", Accumulation(), "none"),
        ("data=2,stage=2,fsdp=2", "auto", Accumulation(), "full"),
    ],
    ids=str,
)
def test_gradients_in_the_circular_loop(mesh: str, mode: str, accumulate: Any, remat: str) -> None:
    """Of what is closed over, of weights and inputs; a bubble adds nothing (NaN in the buffers)."""
    want, closed, (kernel, x, side) = by_sequence(), closed_over(), arrays()
    run = functools.partial(
        run_pipeline,
        schedule=CircularSchedule(STAGES, MICROBATCHES, REPEATS),
        options=LoopOptions(accumulate=accumulate, remat=POLICIES[remat], bubble_fill=math.nan),
    )
    grid = mesh_of(mesh, mode)
    stage, rows = ("stage", "fsdp") if mesh else (None, None)
    with jax.set_mesh(grid):
        kernel = jax.device_put(kernel, NamedSharding(grid, P(None, stage)))
        x = jax.device_put(x, NamedSharding(grid, P(stage, rows)))
        side = jax.device_put(side, NamedSharding(grid, P(None, rows)))
        gradients = jax.jit(jax.grad(functools.partial(circular, run), (0, 1, 2)))
        assert_close(gradients(closed, kernel, x, side), want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,stage=2", {"backward": "accumulate"}),
        ("stage=2,fsdp=2", {"fsdp_gather": "step"}),
        ("data=2,stage=2,fsdp=2", {"fsdp_gather": "prefetch", "num_repeats": 2}),
        ("data=2,stage=2,fsdp=2", {"fsdp_gather": "step", "sharding": "auto"}),
    ],
    ids=str,
)
def test_gradients_where_weights_are_in_copies(mesh: str, options: dict[str, Any]) -> None:
    """A module whose layers read arrays from outside; copies over `data` and `fsdp` add up."""

    def gradient(mesh: str, options: dict[str, Any]) -> Any:
        config = small_config(pipeline={"num_microbatches": 4, **options})
        grid = mesh_of(mesh, options.get("sharding", "explicit"))
        outside: dict[str, Any] = {}

        class Reads(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.kernel = nnx.Param(0.5 * jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

            def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
                turned = jnp.tanh(x @ self.kernel[...] @ outside["mix"])
                return x + turned * outside["scale"], None

        pipeline = create_pipeline(config, Reads, grid, rngs=nnx.Rngs(0))

        def loss(closed: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            outside.update(closed)
            y, _ = pipeline(x)
            return jnp.sum(jnp.sin(y))

        with jax.set_mesh(grid):
            return jax.jit(jax.grad(loss))(closed_over(), float_rows(16, 3, WIDTH, seed=6))

    assert_close(gradient(mesh, options), gradient("", {}), 1e-4)


def one_f_one_b(run: Any, closed: dict[str, jax.Array], kernel: Any, x: Any, side: Any) -> Any:
    """A loss whose three functions close over the same arrays."""

    def enter(shift: jax.Array, rows: jax.Array) -> jax.Array:
        return rows * closed["scale"] + shift

    def leave(out: jax.Array, y: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(y @ closed["mix"] @ out) * rows + TABLE[0])

    ends = jnp.ones(WIDTH), 0.1 * float_rows(WIDTH, WIDTH, seed=7)
    weights = Weights(enter=ends[0], stages=kernel, leave=ends[1])
    inputs = Inputs(enter=jax.lax.stop_gradient(x), side=side, leave=jnp.cos(x))
    functions = ModelFunctions(enter, stage_of(closed), leave, {"square": 1e-2})
    return run(functions, weights, inputs)


def by_loops(functions: ModelFunctions, weights: Weights, inputs: Inputs) -> Any:
    x = jax.vmap(functions.enter, (None, 0))(weights.enter, inputs.enter)
    y, metrics = run_sequential(functions.apply_stage, weights.stages, x, inputs.side)
    return jnp.sum(jax.vmap(functions.leave, (None, 0, 0))(weights.leave, y, inputs.leave)) + (
        1e-2 * metrics["square"]
    )


@functools.cache
def by_loops_alone(repeats: int) -> Any:
    """Gradients of what is closed over and of the weights."""
    closed, (kernel, x, side) = closed_over(), arrays()
    loss = functools.partial(one_f_one_b, by_loops)
    return jax.grad(loss, (0, 1))(closed, kernel[:repeats], x, side)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("mesh", "mode", "remat", "repeats"),
    [
        ("", "explicit", "none", 2),
        ("stage=2,fsdp=2", "explicit", "full", 2),
        ("stage=2,fsdp=2", "explicit", "none", 1),
        ("data=2,stage=2", "auto", "full", 1),
    ],
)
def test_gradients_in_1f1b(mesh: str, mode: str, remat: str, repeats: int) -> None:
    """What enters, the stages and what leaves read the same arrays; their gradients add up."""
    want, closed, (kernel, x, side) = by_loops_alone(repeats), closed_over(), arrays()
    kernel = kernel[:repeats]

    def run(*given: Any) -> jax.Array:
        return run_one_f_one_b(
            *given,
            schedule=OneForwardOneBackward(STAGES, MICROBATCHES, repeats),
            options=LoopOptions(remat=POLICIES[remat], bubble_fill=math.nan),
        )[0]

    grid = mesh_of(mesh, mode)
    with jax.set_mesh(grid):
        stage = "stage" if mesh else None
        kernel = jax.device_put(kernel, NamedSharding(grid, P(None, stage)))
        gradients = jax.jit(jax.grad(functools.partial(one_f_one_b, run), (0, 1)))
        assert_close(gradients(closed, kernel, x, side), want, 1e-4)


def bytes_between_ticks(program: Any, microbatches: int) -> int:
    """Bytes that the loops over ticks stack or carry, but for what is one row per tick."""
    scans = [e for e in equations(program) if e.primitive.name == "scan"]
    longest = max(scan.params["length"] for scan in scans)
    return sum(
        math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
        for scan in scans
        if scan.params["length"] == longest and not scan.params["reverse"]
        for variable in scan.outvars
    )


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("differentiated", [True, False])
@pytest.mark.parametrize("schedule", ["accumulate", "1f1b"])
def test_what_is_closed_over_is_kept_once(schedule: str, differentiated: bool, remat: str) -> None:
    """A table of 600 numbers: nothing grows with it but its own gradient, which exists once.

    In 1F1B that is one for each stage, so that nothing is sent while it adds up.
    """

    def kept(rows: int) -> int:
        table = float_rows(rows, WIDTH)
        kernel, x, side = arrays()
        kernel = kernel[:1]

        def loss(table: jax.Array, kernel: jax.Array) -> jax.Array:
            def apply(kernel: jax.Array, x: jax.Array, side: jax.Array) -> Any:
                return x + jnp.tanh(x @ kernel) * jnp.sum(table * table, axis=0), None

            if schedule == "accumulate":
                circular = CircularSchedule(STAGES, MICROBATCHES)
                options = LoopOptions(accumulate=Accumulation(), remat=POLICIES[remat])
                return jnp.sum(
                    run_pipeline(apply, kernel, x, side, schedule=circular, options=options)[0]
                )
            return run_one_f_one_b(
                ModelFunctions(
                    lambda shift, x: x + shift, apply, lambda scale, y, _: jnp.sum(scale * y)
                ),
                Weights(jnp.ones(()), kernel, jnp.ones(())),
                Inputs(x, side, side),
                schedule=OneForwardOneBackward(STAGES, MICROBATCHES),
                options=LoopOptions(remat=POLICIES[remat]),
            )[0]

        if differentiated:
            program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(table, kernel)
        else:
            program = jax.make_jaxpr(jax.grad(functools.partial(loss, table)))(kernel)
        return bytes_between_ticks(program, MICROBATCHES)

    grown = kept(150) - kept(1)
    of_gradient = 149 * WIDTH * 4 * (STAGES if schedule == "1f1b" and differentiated else 0)
    assert grown == of_gradient
