"""The dtype of gradients: where they add up, travel and reach the optimizer."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    carries,
    equations,
    fresh_model,
    fresh_state,
    mesh_of,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import Config, Mixtral
from nnx_pipeline.train import abstract_state, loss_of, step
from nnx_pipeline.train.optimizer import clip_by_global_norm, global_norm
from nnx_pipeline.train.step import in_dtype, loss_and_gradients, train_step

LOOPS = {
    "accumulate": {"backward": "accumulate", "num_microbatches": 2},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 4},
    "step": {"fsdp_gather": "step", "num_microbatches": 2, "num_repeats": 2},
    "autodiff": {"num_microbatches": 2},
}


def config_of(loop: str, grad_dtype: str | None) -> Config:
    return small_config(pipeline=LOOPS[loop], train={"grad_dtype": grad_dtype})


def gradients(config: Config, mesh: jax.sharding.Mesh) -> Any:
    batch = jax.tree.map(jnp.asarray, packed_batch(config))
    model = fresh_model(config, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(lambda model: loss_of(model, batch)[0]))(model)


def jaxpr_of(config: Config, mesh: jax.sharding.Mesh) -> Any:
    batch = jax.tree.map(jnp.asarray, packed_batch(config))
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        return jax.make_jaxpr(jax.grad(lambda model: loss_of(model, batch)[0]))(model)


def dtypes_of_weight_buffers(jaxpr: Any, config: Config) -> set[str]:
    """Dtypes of what a loop carries in the shape of the experts' weights of all layers."""
    model = config.model
    of_all = model.num_layers * model.num_experts * model.embed_dim * model.mlp_dim
    return {
        str(variable.aval.dtype)
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        for variable in carries(equation)
        if math.prod(variable.aval.shape) in (of_all, 2 * of_all)  # once per copy
    }


def scattered(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    for equation in equations(jaxpr):
        if equation.primitive.name == "reduce_scatter":
            yield equation.outvars[0].aval.shape, str(equation.outvars[0].aval.dtype)


@pytest.mark.parametrize("loop", ["accumulate", "1f1b", "step"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_loop_adds_up_in_the_dtype(loop: str, dtype: str | None) -> None:
    config = config_of(loop, dtype)
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    assert dtypes_of_weight_buffers(jaxpr, config) == {dtype or "float32"}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_held_gathered_give_their_gradients_back_in_the_dtype(dtype: str | None) -> None:
    """The layers' reduce-scatters; those of embedding and head stay in their own dtypes."""
    config = config_of("step", dtype)
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    layers = {dtype for shape, dtype in scattered(jaxpr) if len(shape) > 3}
    assert layers == {dtype or "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accumulate", "autodiff"])
def test_values_in_bfloat16(loop: str) -> None:
    """Within a few roundings of bfloat16 (2⁻⁸ each) of the gradients in float32."""
    mesh = mesh_of("stage=2,fsdp=2")
    exact = gradients(config_of(loop, "float32"), mesh)
    rough = gradients(config_of(loop, "bfloat16"), mesh)
    assert_close(rough, exact, 2**-6)
    pairs = zip(jax.tree.leaves(rough), jax.tree.leaves(exact), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    assert same == (loop == "autodiff"), "JAX adds up in the dtype of the parameters"


@pytest.mark.parametrize("loop", LOOPS)
def test_the_optimizer_gets_the_dtype(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every mode; the state keeps the dtypes it had, and the metrics theirs."""
    config = config_of(loop, "bfloat16")
    mesh, got = mesh_of("stage=2,fsdp=2"), []
    make = step.make_optimizer

    def make_optimizer(settings: Any) -> Any:
        real = make(settings)

        def update(updates: Any, *rest: Any) -> Any:
            got.extend(str(leaf.dtype) for leaf in jax.tree.leaves(updates))
            return real.update(updates, *rest)

        return real._replace(update=update)

    monkeypatch.setattr(step, "make_optimizer", make_optimizer)
    with jax.set_mesh(mesh), optax_promotion():
        state = abstract_state(config, mesh)
        batch = jax.tree.map(jnp.asarray, packed_batch(config))
        new, metrics = jax.eval_shape(train_step, state, batch)
    assert set(got) == {"bfloat16"}
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    assert all(metric.dtype == jnp.float32 for metric in metrics)


@pytest.mark.parametrize("largest", [0.1, 1e4], ids=["clipped", "left alone"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_are_clipped_by_a_norm_in_float32(dtype: str, largest: float) -> None:
    """Against float64; a sum of this many squares in bfloat16 comes to rest far below."""
    generator = np.random.default_rng(0)
    tree = {name: jnp.asarray(generator.normal(size=300_000), dtype) for name in "ab"}
    exact = {name: np.asarray(leaf, np.float64) for name, leaf in tree.items()}
    norm = math.sqrt(sum(np.sum(leaf**2) for leaf in exact.values()))
    assert float(global_norm(tree)) == pytest.approx(norm, rel=1e-5)
    clip = clip_by_global_norm(largest)
    clipped, _ = jax.jit(clip.update)(tree, clip.init(tree))
    share = min(1.0, largest / norm)
    for name, leaf in clipped.items():
        assert leaf.dtype == dtype
        want = np.asarray(jnp.asarray(share * exact[name], dtype), np.float64)
        rounding = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(leaf, np.float64), want, rtol=rounding, atol=1e-6)


def test_clipping_in_float32_is_that_of_optax() -> None:
    tree = {"a": jnp.linspace(-3.0, 4.0, 1000), "b": jnp.ones((7, 5))}
    ours, theirs = clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)
    assert ours.init(tree) == theirs.init(tree)
    assert_close(ours.update(tree, None)[0], theirs.update(tree, None)[0], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grad_dtype", ["bfloat16", None])
def test_a_step_clips_and_reports_by_that_norm(
    grad_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AdamW gets is of length `clip_norm`, and the metric says how long the gradients were."""
    config = small_config(
        model={"vocab_size": 512, "embed_dim": 64},
        train={"grad_dtype": grad_dtype, "clip_norm": 1e-3},
    )
    made, got = optax.adamw, []

    def adamw(*args: Any, **kwargs: Any) -> Any:
        real = made(*args, **kwargs)

        def update(updates: Any, *rest: Any) -> Any:
            got.append(updates)
            return real.update(updates, *rest)

        return real._replace(update=update)

    monkeypatch.setattr(optax, "adamw", adamw)
    mesh = mesh_of("")
    with jax.set_mesh(mesh), optax_promotion():
        state = fresh_state(config, mesh)
        batch = jax.tree.map(jnp.asarray, packed_batch(config))

        def step(state: Any, batch: Any) -> Any:
            _, metrics = train_step(state, batch)
            return metrics.gradient_norm, got[-1], loss_and_gradients(state.model, batch)[1]

        reported, clipped, gradients = jax.jit(step)(state, batch)
    assert float(reported) == pytest.approx(length(gradients), rel=1e-5)
    # Each entry is rounded once to the dtype.
    assert length(clipped) == pytest.approx(1e-3, rel=1e-5 if grad_dtype is None else 1e-3)


def length(tree: Any) -> float:
    """In float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def test_no_cast_where_the_dtype_is_there_already() -> None:
    tree = {"a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)}
    assert in_dtype(tree, None) is tree
    assert in_dtype(tree, "float32")["a"] is tree["a"]
    jaxpr = jax.make_jaxpr(lambda tree: in_dtype(tree, "float32"))(tree)
    assert [equation.primitive.name for equation in equations(jaxpr)] == ["convert_element_type"]


@pytest.mark.slow
def test_training_in_bfloat16_follows_float32() -> None:
    """The loss after three steps, near that of float32 gradients."""
    mesh, found = mesh_of("stage=2,fsdp=2"), {}
    for dtype in ("float32", "bfloat16"):
        config = replace(config_of("step", dtype), "train", learning_rate=1e-2)
        with jax.set_mesh(mesh), optax_promotion():
            state = fresh_state(config, mesh)
            batch = jax.tree.map(jnp.asarray, packed_batch(config))
            run = jax.jit(train_step)
            for _ in range(3):
                state, metrics = run(state, batch)
        found[dtype] = float(metrics.loss)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=2e-2)
    assert found["bfloat16"] != found["float32"]
