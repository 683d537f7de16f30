"""Dropout: the mask belongs to step, layer and sequence, whatever runs where and when."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    assert_close,
    float_rows,
    fresh_model,
    fresh_state,
    mesh_of,
    new_model,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import InputError, Mixtral, create_pipeline
from nnx_pipeline.pipeline import ModelEnds
from nnx_pipeline.sharding.dropout import dropout, fold_in, sequence_keys
from nnx_pipeline.sharding.layout import Layout, P
from nnx_pipeline.train import jit_train_step, loss_of
from nnx_pipeline.train.step import batch_sharding

pytestmark = pytest.mark.numbers

CONFIG = small_config(
    model={"dropout_rate": 0.3}, train={"global_batch": 16}, pipeline={"num_microbatches": 4}
)
KEY = jax.random.key(3)
# Meshes without stages, and a policy and a mesh that test_option_pairs.py does not have.
CASES = [
    ("fsdp=4", {}),
    ("stage=2,fsdp=2,expert=2", {"schedule": "1f1b", "remat": "minimal"}),
    ("data=2,fsdp=2", {"schedule": "1f1b", "fsdp_gather": "step", "sharding": "auto"}),
]


def evaluate(model: Any, batch: Any, key: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda *args: loss_of(*args)[0]))(model, batch, key)


@functools.cache
def sequential() -> tuple[Any, Any]:
    """Loss and gradients on one device, with dropout and without."""
    source, batch = new_model(CONFIG), jax.tree.map(jnp.asarray, packed_batch(CONFIG))
    return evaluate(source, batch, KEY), evaluate(source, batch, None)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "pipeline"), CASES, ids=str)
def test_equals_one_device(mesh: str, pipeline: dict[str, Any]) -> None:
    """Loss and gradients with dropout, against the sequential model with the same key."""
    config = replace(CONFIG, "pipeline", **pipeline)
    want, without = sequential()
    assert abs(float(want[0]) - float(without[0])) > 1e-3
    grid = mesh_of(mesh, config.pipeline.sharding)
    model = fresh_model(config, grid)
    with jax.set_mesh(grid):
        got = evaluate(model, packed_batch(config), KEY)
    assert_close(got[0], want[0], 1e-5)
    assert_close(got[1], want[1], 1e-4)


def test_the_share_and_the_scale() -> None:
    x, keys = jnp.ones((8, 64, 32)), sequence_keys(jax.random.key(0), 8)
    y = np.asarray(dropout(x, keys, rate=0.25, spec=P()))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert np.mean(y == 0) == pytest.approx(0.25, abs=0.02)


def test_masks_differ_by_sequence_layer_place_and_step() -> None:
    keys = sequence_keys(jax.random.key(0), 4)
    others = [
        fold_in(keys, jnp.int32(0)),
        fold_in(keys, jnp.int32(1)),
        fold_in(fold_in(keys, jnp.int32(1)), jnp.int32(0)),
        sequence_keys(jax.random.key(1), 4),
    ]
    rows = np.concatenate([np.asarray(keys), *map(np.asarray, others)])
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_step_draws_from_seed_and_step() -> None:
    """Two steps without learning see other masks; the same step and seed the same one."""
    config = replace(CONFIG, "train", learning_rate=0.0, weight_decay=0.0)
    mesh = mesh_of("stage=2,fsdp=2")
    with jax.set_mesh(mesh), optax_promotion():

        def losses(seed: int) -> list[float]:
            state = fresh_state(replace(config, "train", dropout_seed=seed), mesh)
            step = jit_train_step(state, mesh)
            batch = jax.device_put(packed_batch(config), batch_sharding(mesh, Layout()))
            found = []
            for _ in range(2):
                state, metrics = step(state, batch)
                found.append(float(metrics.loss))
            return found

        first, again, other = losses(0), losses(0), losses(1)
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]


def test_numbers_tell_the_calls_in_a_layer_apart() -> None:
    x, keys = jnp.ones((8, 64)), sequence_keys(jax.random.key(0), 8)
    masks = [np.asarray(dropout(x, keys, rate=0.5, number=number)) for number in (0, 1, 0)]
    assert np.array_equal(masks[0], masks[2])
    assert np.mean(masks[0] != masks[1]) == pytest.approx(0.5, abs=0.1)
    assert dropout(x, None, rate=0.5) is x


@pytest.mark.parametrize(
    ("keys", "rate", "message"),
    [
        (sequence_keys(KEY, 8), 1.0, "rate=1.0 of dropout must be at least 0 and below 1"),
        (KEY, 0.5, r"keys of dropout are key<fry>\[\] for 8 sequences; .* `keys` of a layer"),
        (sequence_keys(KEY, 4), 0.5, r"uint32\[4, 2\] for 8 sequences"),
        (3, 0.5, "keys of dropout are int for 8"),
    ],
)
def test_what_is_no_dropout_is_refused(keys: Any, rate: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        dropout(jnp.ones((8, 4)), keys, rate=rate)


class Drop(nnx.Module):
    """A layer of one's own with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x: jax.Array, *, keys: jax.Array | None = None) -> tuple[jax.Array, None]:
        return x + dropout(jnp.tanh(x @ self.kernel[...]), keys, rate=0.5), None


@pytest.mark.slow
def test_a_layer_of_ones_own_gets_keys() -> None:
    config = small_config(pipeline={"num_microbatches": 4})
    x, key = float_rows(8, 6, 4), jax.random.key(1)
    alone = create_pipeline(config, Drop, rngs=nnx.Rngs(0))
    want, _ = alone(x, key=key)
    mesh = mesh_of("stage=4")
    pipeline = create_pipeline(config, Drop, mesh, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        got, _ = jax.jit(lambda pipeline, x: pipeline(x, key=key))(pipeline, x)
        plain, _ = jax.jit(lambda pipeline, x: pipeline(x))(pipeline, x)
    assert_close(got, want, 1e-5)
    assert np.max(np.abs(np.asarray(got) - np.asarray(plain))) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["explicit", "auto"])
def test_the_loss_of_a_pipeline_takes_a_key(sharding: str) -> None:
    """By 1F1B on a mesh, against a call of the pipeline on one device."""
    x, key = float_rows(8, 6, 4), jax.random.key(1)

    def loss_on(mesh: str, schedule: str, key: Any) -> Any:
        config = small_config(pipeline={"num_microbatches": 4, "schedule": schedule})
        with jax.set_mesh(mesh_of(mesh, sharding)):
            pipeline = create_pipeline(config, Drop, rngs=nnx.Rngs(0))

            def loss(pipeline: Any) -> Any:
                if schedule == "circular":
                    return jnp.sum(pipeline(x, key=key)[0] ** 2)
                ends = ModelEnds(lambda _, x: x, None, lambda _, y, __: jnp.sum(y**2), None)
                return pipeline.loss(ends, (x, x), {}, key=key)[0]

            return jax.jit(jax.value_and_grad(loss))(pipeline)

    want, got = loss_on("", "circular", key), loss_on("stage=2,fsdp=2", "1f1b", key)
    assert_close(got, want, 1e-4)
    without = loss_on("stage=2,fsdp=2", "1f1b", None)
    assert abs(float(got[0]) - float(without[0])) > 1e-2


class Thin(nnx.Module):
    """A layer that drops half of its input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array, *, keys: jax.Array) -> tuple[jax.Array, None]:
        return dropout(x * self.scale[...], keys, rate=0.5), None


def test_every_layer_has_a_mask_of_its_own() -> None:
    """With the same mask in all four layers, half of the values would be left."""
    layers = create_pipeline(small_config(model={"num_layers": 4}), Thin, rngs=nnx.Rngs(0))
    y, _ = layers(jnp.ones((8, 64, 32)), key=jax.random.key(1))
    assert np.mean(np.asarray(y) != 0) == pytest.approx(1 / 2**4, abs=0.01)


def test_a_layer_without_its_keys_says_where_they_come_from() -> None:
    layers = create_pipeline(small_config(model={"num_layers": 4}), Thin, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"is called with a key: key=jax.random.key\(0\)"):
        layers(jnp.ones((8, 6, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["explicit", "auto"])
def test_a_key_of_another_generator_gives_the_same_everywhere(sharding: str) -> None:
    """The bits of `rbg` depend on vmap and on how an array is spread; its keys are good enough."""
    config = small_config(
        model={"dropout_rate": 0.5}, pipeline={"num_microbatches": 4, "sharding": sharding}
    )
    found = []
    for mesh_text in ("", "stage=2,fsdp=2"):
        mesh = mesh_of(mesh_text, sharding)
        with jax.set_mesh(mesh):
            model = Mixtral(config, rngs=nnx.Rngs(jax.random.key(0, impl="rbg")))
            batch = jax.device_put(packed_batch(config), batch_sharding(mesh, model.layout))
            key = jax.random.key(3, impl="rbg")
            found.append(float(jax.jit(loss_of)(model, batch, key)[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
