"""Dense layers before layers with experts: before the pipeline, on all devices, as one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of, packed_batch, replace, small_config

from nnx_pipeline import Config, Mixtral
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.pipeline.stage._early import EarlyLayers
from nnx_pipeline.sharding.layout import Layout
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import Batch

pytestmark = pytest.mark.numbers

MODEL = {
    "num_layers": 6,
    "num_dense_layers": 2,
    "dense_mlp_dim": 24,
    "num_kv_heads": 4,
    "head_dim": 6,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "rope_head_dim": 2,
    "value_head_dim": 4,
    "num_shared_experts": 1,
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "router_bias": True,
}


def of_deepseek(**pipeline: Any) -> Config:
    config = small_config(model=MODEL, train={"load_balance_weight": 0.01, "global_batch": 16})
    return replace(config, "pipeline", num_microbatches=4, **pipeline)


def results(config: Config, mesh: str, *, key: int | None = None) -> dict[str, np.ndarray]:
    """The loss, its parts, and all gradients, with layers `[layers, …]`."""
    grid = mesh_of(mesh, sharding=config.pipeline.sharding)
    with jax.set_mesh(grid):
        model = jax.jit(lambda: Mixtral(config, rngs=nnx.Rngs(0)))()
        batch = Batch(**jax.tree.map(jnp.asarray, vars(packed_batch(config))))
        keys = None if key is None else jax.random.key(key)
        (loss, parts), gradients = jax.jit(loss_and_gradients)(model, batch, keys)
    found = {"loss": loss, "parts": jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(parts)])}
    for path, leaf in nnx.to_flat_state(nnx.state(gradients)):
        name, value = ".".join(map(str, path)), np.asarray(leaf[...])
        found[name] = value.reshape(-1, *value.shape[3:]) if "pipeline." in name else value
    return jax.tree.map(np.asarray, found)


@functools.cache
def on_one_device(key: int | None) -> dict[str, np.ndarray]:
    config = of_deepseek()
    config = replace(config, "model", dropout_rate=0.0 if key is None else 0.3)
    return results(config, "", key=key)


CASES = [
    ("stage=2,fsdp=2", {}),
    ("stage=4,fsdp=2", {"sharding": "auto"}),
    ("stage=2,fsdp=2", {"schedule": "1f1b", "num_repeats": 2}),
    ("data=2,stage=2,expert=2", {"fsdp_gather": "prefetch", "schedule": "1f1b"}),
    ("stage=2,tensor=2", {"schedule": "1f1b", "sharding": "auto"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "pipeline"), CASES, ids=str)
def test_equals_one_device(mesh: str, pipeline: dict[str, Any]) -> None:
    check(results(of_deepseek(**pipeline), mesh), on_one_device(None))


@pytest.mark.slow
def test_dropout_and_zero1_equal_one_device() -> None:
    config = of_deepseek(backward="accumulate")
    config = replace(config, "train", shard_optimizer_over_data=True)
    config = replace(config, "model", dropout_rate=0.3)
    check(results(config, "data=2,stage=2,fsdp=2", key=3), on_one_device(3))


@pytest.mark.parametrize(("mlp_dim", "split"), [(24, True), (25, False)])
def test_stages_share_them_in_1f1b(mlp_dim: int, split: bool) -> None:
    """Heads and hidden units, where they divide; they are stored whole on every stage."""
    config = replace(of_deepseek(schedule="1f1b"), "model", dense_mlp_dim=mlp_dim)
    with jax.set_mesh(mesh_of("stage=2,fsdp=2")):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        early = model.early
        assert early is not None
        shared = jax.eval_shape(early.shared_by_stages, model.dense_layers)
    for layer, has_stages in ((model.dense_layers, False), (shared, True)):
        up, out = layer.feed_forward.up.get_value(), layer.attention.out.get_value()
        assert ("stage" in str(up.sharding.spec)) == (has_stages and split)
        assert ("stage" in str(out.sharding.spec)) == has_stages


class Words(nnx.Module):
    """Adds the words of its keys, and has a weight because every layer has one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jnp.zeros(1), logical_axes=(None,))

    def __call__(self, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, None]:
        return x + keys.astype(x.dtype), None


def test_their_keys_are_no_keys_of_the_pipeline() -> None:
    """The layers are numbered after those of the pipeline, of which there are four here."""
    early = EarlyLayers(2, 4, Layout(), Layout(), POLICIES["none"])
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 3))
    x = jnp.zeros(keys.shape, jnp.float32)
    found = early(early.make(Words, nnx.Rngs(0)), x, {"keys": keys}, ("batch",))
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    words = [jax.random.key_data(fold(jax.random.wrap_key_data(keys), at)) for at in (4, 5)]
    np.testing.assert_array_equal(found, sum(each.astype(jnp.float32) for each in words))


def check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(np.abs(value).max(), 1e-6)
        np.testing.assert_allclose(found[name] / scale, value / scale, atol=2e-5, err_msg=name)
    assert np.abs(wanted["dense_layers.feed_forward.up"]).max() > 1e-4
