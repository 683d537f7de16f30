"""A copy of the parameters in float32, and gradients of several steps: by hand, on meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_close,
    fresh_model,
    mesh_of,
    new_model,
    optax_promotion,
    replace,
    small_config,
)

from nnx_pipeline import Config
from nnx_pipeline.experiments import floor
from nnx_pipeline.train import (
    TrainState,
    abstract_batch,
    abstract_state,
    jit_train_step,
    learnable_batches,
    loss_of,
    make_optimizer,
)
from nnx_pipeline.train.optimizer import clip_by_global_norm, from_master
from nnx_pipeline.train.step import bytes_of_parameter, optimized

TRAIN = {"learning_rate": 0.03, "adam_eps": 1e-3}
# 1F1B adds gradients up itself, and by default in the dtype of the parameters.
MASTER = small_config(
    model={"param_dtype": "bfloat16"},
    train={**TRAIN, "master_dtype": "float32", "grad_dtype": "float32"},
)
SEVERAL = small_config(train={**TRAIN, "accumulate_steps": 2})
MESHES = [
    ("stage=2,fsdp=2", {"schedule": "1f1b", "num_microbatches": 2}),
    ("stage=2,fsdp=2", {"num_repeats": 2, "num_microbatches": 4}),
    ("data=2,stage=2", {"num_microbatches": 2}),
]


def trained(config: Config, mesh: str, steps: int) -> TrainState:
    on = mesh_of(mesh)
    with jax.set_mesh(on), optax_promotion():
        model = fresh_model(config, on)
        optimizer = jax.jit(make_optimizer(config.train).init)(optimized(model))
        state = TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, on))
        state = jax.device_put(state, places)
        step, feed = jit_train_step(state, on), learnable_batches(config, on)
        for _ in range(steps):
            state, _ = step(state, next(feed))
    return state


@functools.cache
def by_hand(config: Config, steps: int) -> Any:
    """The float32 weights that plain optax leaves on one device.

    Gradients are those of the weights rounded to `param_dtype`, and the mean of each
    `accumulate_steps` of them.
    """
    train, several = config.train, config.train.accumulate_steps
    rate = (train.learning_rate, train.adam_b1, train.adam_b2, train.adam_eps)
    optimizer = optax.chain(
        clip_by_global_norm(train.clip_norm), optax.adamw(*rate, weight_decay=train.weight_decay)
    )
    model = new_model(config)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, model)

    def in_float32(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    @jax.jit
    def gradients_of(weights: Any, batch: Any) -> Any:
        rounded = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), weights, dtypes)
        return in_float32(jax.grad(lambda model: loss_of(model, batch)[0])(rounded))

    weights = in_float32(model)
    state, feed = optimizer.init(weights), learnable_batches(config, mesh_of(""))
    with optax_promotion():
        for _ in range(steps // several):
            found = [gradients_of(weights, next(feed)) for _ in range(several)]
            mean = jax.tree.map(lambda *leaves: sum(leaves) / several, *found)
            updates, state = optimizer.update(mean, state, weights)
            weights = optax.apply_updates(weights, updates)
    return weights


def part(state: TrainState, name: str) -> Any:
    return optax.tree.get(state.optimizer, name)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh", "pipeline", "zero1"),
    [*((*one, False) for one in MESHES), (*MESHES[-1], True)],
    ids=str,
)
def test_a_master_copy_is_what_optax_leaves(
    mesh: str, pipeline: dict[str, Any], zero1: bool
) -> None:
    """The parameters are the copy, rounded; moments are in its dtype.

    Weights and gradients are rounded to bfloat16, and a sum in another order may round the other
    way: numbers were off by up to 3.4 % of the way that a weight can go in these steps, and without
    weight decay by 7 to 30 % in each array. With experts it may also send a token to another one.
    """
    dense = replace(MASTER, "model", num_experts=1, num_experts_per_token=1)
    config = replace(dense, "pipeline", **pipeline)
    state = trained(replace(config, "train", shard_optimizer_over_data=zero1), mesh, 4)
    master, way = jax.tree.leaves(part(state, "master")), 4 * TRAIN["learning_rate"]
    for kept, want in zip(master, jax.tree.leaves(by_hand(dense, 4)), strict=True):
        np.testing.assert_allclose(np.ravel(kept), np.ravel(want), rtol=0, atol=0.05 * way)
    for rounded, kept in zip(jax.tree.leaves(state.model), master, strict=True):
        assert (rounded.dtype, kept.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(rounded, np.asarray(kept).astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(part(state, "nu"))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("several", [1, 3])
def test_of_the_same_gradients_the_copy_is_that_of_optax(several: int) -> None:
    """In bfloat16, with a mean in float32; to the bit where nothing is compiled in another way."""
    generator = np.random.default_rng(several)
    config = replace(MASTER, "train", clip_norm=None, accumulate_steps=several).train
    ours = make_optimizer(config)
    plain = optax.adamw(0.03, 0.9, 0.95, 1e-3, weight_decay=config.weight_decay)
    params = jnp.asarray(generator.normal(size=64), jnp.bfloat16)
    weights = params.astype(jnp.float32)
    state, bare, mean = ours.init(params), plain.init(weights), jnp.zeros(64)
    with optax_promotion():
        for step in range(6 * several):
            gradient = jnp.asarray(generator.normal(size=64), jnp.bfloat16)
            _, state = ours.update(gradient, state, params)
            params = from_master(params, state)
            mean = mean + (gradient.astype(jnp.float32) - mean) / (step % several + 1)
            if step % several == several - 1:
                updates, bare = plain.update(mean, bare, weights)
                weights, mean = optax.apply_updates(weights, updates), jnp.zeros(64)
            master, most = optax.tree.get(state, "master"), 0.0 if several == 1 else 1e-6
            np.testing.assert_allclose(master, weights, rtol=0, atol=most)
            np.testing.assert_array_equal(params, master.astype(jnp.bfloat16))


def test_changes_that_bfloat16_rounds_away_add_up_in_the_copy() -> None:
    """At a small rate the parameters alone stay where they are."""
    config = replace(MASTER, "train", learning_rate=1e-5, weight_decay=0.0)
    alone = replace(config, "train", master_dtype=None)
    begun = new_model(config).head[...]
    kept, lost = (trained(one, "", 30) for one in (config, alone))
    moved = np.abs(np.asarray(part(kept, "master").head[...]) - np.asarray(begun, np.float32))
    assert np.median(moved) > 5e-5
    assert np.mean(np.asarray(kept.model.head[...] != begun)) > 0.1
    assert np.mean(np.asarray(lost.model.head[...] != begun)) < 0.05


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("mesh", "pipeline"), MESHES, ids=str)
def test_several_steps_are_one_of_their_mean(mesh: str, pipeline: dict[str, Any]) -> None:
    config = replace(SEVERAL, "pipeline", **pipeline)
    state = trained(config, mesh, 4)
    assert_close(state.model, by_hand(SEVERAL, 4), 1e-4)
    odd = trained(config, mesh, 5)
    assert_close(odd.model, state.model, 0.0)  # one step changes no weight
    counts = [int(part(odd, name)) for name in ("mini_step", "gradient_step", "count")]
    assert (int(odd.step), *counts) == (5, 1, 2, 2)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
@pytest.mark.parametrize("which", ["master", "several", "both"])
def test_the_floor_counts_what_the_compiler_holds(which: str, schedule: str) -> None:
    """Exactly: the arguments of the step as compiled, of which a device writes the new state."""
    config = SEVERAL if which == "several" else MASTER
    if which == "both":
        config = replace(config, "train", accumulate_steps=3, max_skipped_steps=1)
    config = replace(config, "pipeline", num_microbatches=2, schedule=schedule)
    mesh = mesh_of("stage=2,fsdp=2")
    with jax.set_mesh(mesh), optax_promotion():
        state, batch = abstract_state(config, mesh), abstract_batch(config, mesh)
        compiled = jit_train_step(state, mesh).lower(state, batch).compile()
    found = {term.name: term.bytes for term in floor(config, "stage=2,fsdp=2").arguments}
    analysis = compiled.memory_analysis()
    step = 4  # bytes of the number of the step, which the floor leaves out
    assert analysis.argument_size_in_bytes == sum(found.values()) + step
    assert analysis.alias_size_in_bytes >= found["parameters"] + found["optimizer state"]
    numbers = found["parameters"] // jnp.dtype(config.model.param_dtype).itemsize
    copies = {"master": 3, "several": 3, "both": 4}[which]
    assert 0 <= found["optimizer state"] - copies * 4 * numbers <= 24  # and counts
    stored = found["parameters"] + found["optimizer state"]
    assert stored - numbers * bytes_of_parameter(config) == found["optimizer state"] - (
        copies * 4 * numbers
    )
