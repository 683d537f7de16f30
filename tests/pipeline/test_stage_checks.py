"""What a pipeline would lose or get wrong is refused: state, shared variables, odd shapes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, mesh_of, small_config

from nnx_pipeline import InputError, create_pipeline, run_pipeline
from nnx_pipeline.pipeline import Accumulation, CircularSchedule, LoopOptions

pytestmark = pytest.mark.jax_alone

WIDTH, STAGES, REPEATS, MICROBATCHES = 4, 2, 2, 4


COMMON = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))


class Layer(nnx.Module):
    """A linear layer, and one thing that a pipeline cannot keep."""

    def __init__(self, rngs: nnx.Rngs, odd: str = "") -> None:
        self.odd = odd
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        if odd == "statistics":
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        if odd == "dropout":
            self.drop = nnx.Dropout(0.5, rngs=rngs)
        if odd == "twice":
            self.again = self.linear
        if odd == "common":
            self.common = COMMON
        if odd == "array":
            self.table = jnp.ones(WIDTH)
        if odd == "counts":
            self.visits = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array, **side: Any) -> tuple[jax.Array, Any]:
        y = self.linear(x)
        if self.odd == "statistics":
            y = self.norm(y)
        if self.odd == "dropout":
            y = self.drop(y)
        if self.odd == "twice":
            y = self.again(y)
        if self.odd == "counts":
            self.visits[...] += 1.0
        if self.odd == "sows":
            self.sow(nnx.Intermediate, "mean", jnp.mean(y))
        return x + y, None


def module_call(odd: str, mesh: str = "stage=2") -> None:
    config = small_config(pipeline={"num_microbatches": MICROBATCHES})
    grid = mesh_of(mesh)
    pipeline = create_pipeline(config, lambda rngs: Layer(rngs, odd), grid, rngs=nnx.Rngs(0))
    with jax.set_mesh(grid):
        jax.eval_shape(lambda p, x: p(x), pipeline, jnp.ones((8, 3, WIDTH)))


def function_call(apply_stage: Callable[..., Any], params: Any = None, x: Any = None) -> None:
    params = jnp.ones((REPEATS, STAGES, WIDTH, WIDTH)) if params is None else params
    x = jnp.ones((MICROBATCHES, 2, WIDTH)) if x is None else x
    schedule = CircularSchedule(STAGES, MICROBATCHES, REPEATS)
    jax.eval_shape(lambda p, x: run_pipeline(apply_stage, p, x, schedule=schedule), params, x)


def stacked(odd: str) -> Layer:
    keys = jax.random.split(jax.random.key(0), (REPEATS, STAGES))
    return jax.vmap(jax.vmap(lambda key: Layer(nnx.Rngs(key), odd)))(keys)


def test_a_plain_layer_is_taken() -> None:
    module_call("")
    function_call(lambda layer, x, side: layer(x), stacked(""))


@pytest.mark.parametrize("mesh", ["stage=2", ""], ids=["stages", "one device"])
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("twice", r"one variable in two places, \.again\.bias"),
        ("common", r"all layers hold one and the same variable, \.common\.bias.*Shared"),
        ("array", r"a layer holds float32\[4\] in \.table, which is in no variable"),
        ("counts", r"a stage changed \.visits"),
        ("sows", r"a stage changed \.mean"),
    ],
)
def test_a_module_refuses_what_it_would_lose(odd: str, words: str, mesh: str) -> None:
    with pytest.raises(InputError, match=words):
        module_call(odd, mesh)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("statistics", r"a stage changed \.norm\.mean"),
        ("dropout", r"a stage changed \.drop\.rngs\.count"),
        ("counts", r"a stage changed \.visits"),
        ("sows", r"a stage changed \.mean"),
    ],
)
def test_the_function_refuses_stages_that_change_what_they_are_given(odd: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        function_call(lambda layer, x, side: layer(x), stacked(odd))


@pytest.mark.parametrize(
    ("apply_stage", "words"),
    [
        (lambda w, x, side: x @ w, "returned .*; it must return a pair"),
        (lambda w, x, side: ((x @ w)[:1], {}), r"given activations float32\[2, 4\] and returned"),
        (lambda w, x, side: ((x @ w).astype("bfloat16"), {}), r"returned bfloat16\[2, 4\]"),
    ],
)
def test_what_a_stage_gives_must_fit(apply_stage: Callable[..., Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        function_call(apply_stage)


def test_arrays_must_fit() -> None:
    def apply_stage(w: Any, x: Any, side: Any) -> Any:
        return x, {}

    with pytest.raises(InputError, match="the stages have no parameters"):
        function_call(apply_stage, {})
    with pytest.raises(InputError, match=r"the activations hold int32\[4, 2\]"):
        function_call(apply_stage, x=jnp.ones((MICROBATCHES, 2), jnp.int32))


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_integer_parameters_have_no_gradient_and_do_no_harm(repeats: int) -> None:
    scale = jnp.arange(repeats * STAGES).reshape(repeats, STAGES)
    x = jnp.ones((MICROBATCHES, 2))

    def total(x: jax.Array) -> jax.Array:
        y, _ = run_pipeline(
            lambda n, x, side: (x * (1.0 + n.astype(x.dtype)), {}),
            scale,
            x,
            schedule=CircularSchedule(STAGES, MICROBATCHES, repeats),
            options=LoopOptions(accumulate=Accumulation()),
        )
        return jnp.sum(y)

    assert jnp.all(jax.grad(total)(x) == math.factorial(repeats * STAGES))


@pytest.mark.parametrize(
    ("mesh", "batch", "words"),
    [
        ("stage=2", 6, "a batch of 6 does not split into 4 microbatches"),
        (
            "stage=2,fsdp=4",
            8,
            "a microbatch of 2 does not split over 4 devices .* 16, such as 16, for the batch",
        ),
        ("stage=4", 8, None),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(mesh: str, batch: int, words: str | None) -> None:
    config = small_config(pipeline={"num_microbatches": 4})
    grid = mesh_of(mesh)
    pipeline = create_pipeline(config, Layer, grid, rngs=nnx.Rngs(0))
    with jax.set_mesh(grid):
        if words is None:
            jax.eval_shape(lambda p, x: p(x), pipeline, jnp.ones((batch, 3, WIDTH)))
            return
        with pytest.raises(InputError, match=words):
            jax.eval_shape(lambda p, x: p(x), pipeline, jnp.ones((batch, 3, WIDTH)))


@pytest.mark.parametrize(
    ("microbatches", "words"),
    [(6, "6 microbatches do not split over 4 stages"), (2, "2 microbatches do not split over 4")],
)
def test_microbatches_that_do_not_fit_the_stages(microbatches: int, words: str) -> None:
    """Weights need no microbatches, so that the call is what is refused."""
    config = small_config(pipeline={"num_microbatches": microbatches}, train={"global_batch": 12})
    pipeline = create_pipeline(config, Layer, mesh_of("stage=4"), rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of("stage=4")), pytest.raises(InputError, match=words):
        jax.eval_shape(lambda p, x: p(x), pipeline, jnp.ones((12, 3, WIDTH)))


def test_a_pipeline_stays_on_its_mesh() -> None:
    config = small_config(pipeline={"num_microbatches": 4})
    pipeline = create_pipeline(config, Layer, mesh_of("stage=2"), rngs=nnx.Rngs(0))
    with (
        jax.set_mesh(mesh_of("stage=4")),
        pytest.raises(InputError, match="made for 2 stages and the mesh has stage=4"),
    ):
        jax.eval_shape(lambda p, x: p(x), pipeline, jnp.ones((8, 3, WIDTH)))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_gather": "step"},
        {"fsdp_gather": "prefetch", "num_repeats": 2},
        {"backward": "accumulate"},
    ],
    ids=str,
)
def test_a_layer_may_have_no_bias(options: dict[str, Any]) -> None:
    """An attribute that is None has no place among the arrays, and does not shift the others."""

    class NoBias(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> tuple[jax.Array, Any]:
            return x + self.second(jnp.tanh(self.first(x))), None

    def gradients(mesh: str, options: dict[str, Any]) -> list[np.ndarray]:
        config = small_config(pipeline={"num_microbatches": 4, **options})
        grid = mesh_of(mesh)
        pipeline = create_pipeline(config, NoBias, grid, rngs=nnx.Rngs(0))
        with jax.set_mesh(grid):
            found = jax.jit(jax.grad(lambda p, x: jnp.sum(p(x)[0] ** 2)))(
                pipeline, jnp.ones((8, 3, WIDTH))
            )
        return [np.asarray(leaf).reshape(4, *leaf.shape[3:]) for leaf in jax.tree.leaves(found)]

    assert_close(gradients("stage=2,fsdp=2", options), gradients("", {}), 1e-5)
