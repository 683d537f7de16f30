"""Linen modules of DeepSeek's layers compute what the NNX modules do, in every layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fresh_model, mesh_of, packed_batch, small_config
from linen_helpers import as_linen

import linen_compat
from nnx_pipeline import Config, InputError

pytestmark = pytest.mark.numbers

DEEPSEEK = {
    "num_layers": 6,
    "num_dense_layers": 2,
    "dense_mlp_dim": 24,
    "num_kv_heads": 4,
    "head_dim": 10,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "rope_head_dim": 4,
    "value_head_dim": 6,
    "num_shared_experts": 2,
    "router_score": "sigmoid",
    "router_scale": 1.5,
    "router_bias": True,
    "rope_interleaved": True,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_length": 8,
    "rope_low_frequency": 0.01,
    "rope_high_frequency": 1.0,
    "attention_scale": 0.4,
}


def deepseek(pipeline: dict[str, Any] | None = None, **model: Any) -> Config:
    return small_config(model={**DEEPSEEK, **model}, pipeline=pipeline)


def by_linen(model: linen_compat.Transformer, params: Any, config: Config) -> Any:
    """Loss, metrics and gradients."""
    batch = packed_batch(config)

    @jax.jit
    def evaluate(params: Any) -> Any:
        def loss(params: Any) -> Any:
            side = {"positions": batch.positions, "segment_ids": batch.segment_ids}
            whole = (batch.tokens, batch.targets, batch.weights / np.sum(batch.weights))
            return model.apply({"params": params}, *whole, **side, method="loss")

        return jax.value_and_grad(loss, has_aux=True)(params)

    return evaluate(params)


def by_nnx(model: Any, config: Config) -> Any:
    """The same."""
    batch = packed_batch(config)

    @jax.jit
    def evaluate(model: Any) -> Any:
        def loss(model: Any) -> Any:
            side = {"positions": batch.positions, "segment_ids": batch.segment_ids}
            whole = (batch.tokens, batch.targets, batch.weights / np.sum(batch.weights))
            return model.loss(*whole, **side)

        return jax.value_and_grad(loss, has_aux=True)(model)

    return evaluate(model)


CASES = {
    "scanned": ("scanned", "fsdp=2,tensor=2", {}),
    "unscanned": ("unscanned", "fsdp=2,expert=2", {}),
    "1f1b": ("pipelined", "stage=2,data=2", {"schedule": "1f1b", "num_repeats": 2}),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_nnx(case: str) -> None:
    layout, axes, pipeline = CASES[case]
    # A bias in the weights has a gradient, one that only chooses has none.
    config = deepseek(pipeline, router_bias_in_weights=case in ("unscanned", "1f1b"))
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        model = fresh_model(config, mesh)
        want, gradients = by_nnx(model, config)
        found, of_linen = by_linen(
            linen_compat.Transformer(config, layout), as_linen(model, layout), config
        )
    assert_close(found, want, 1e-6)
    assert_close(of_linen, as_linen(gradients, layout), 1e-5)


@pytest.mark.slow
def test_new_parameters_in_a_pipeline_fit_the_mesh() -> None:
    layout, config = "pipelined", deepseek({"num_repeats": 2})
    mesh = mesh_of("stage=2,fsdp=2")
    tokens = jnp.zeros((8, 8), jnp.int32)
    with jax.set_mesh(mesh):
        linen = linen_compat.Transformer(config, layout)
        params = jax.jit(linen.init)(jax.random.key(0), tokens)["params"]
        logits = jax.jit(lambda params: linen.apply({"params": params}, tokens))(params)
        model = fresh_model(config, mesh)
    assert np.all(np.isfinite(logits))
    boxes = jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "names"))
    wanted = jax.tree.leaves(as_linen(model, layout))
    for box, want in zip(boxes, wanted, strict=True):
        assert box.value.shape == want.shape
    kernel = params["decoder"]["dense_layers"]["self_attention"]["wkv_b"]["kernel"]
    assert kernel.names == ("kv_lora", "dense_layers", "kv_heads", "kv_head_dim")
    assert kernel.value.sharding.spec[:2] == ("fsdp", None)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            "scanned",
            {"num_layers": 5, "num_dense_layers": 1},
            r"has shape \(\d+, 2\D.* \(\d+, 1\D",
        ),
        ("unscanned", {"dense_mlp_dim": 12}, r"mlp/wi_0/kernel has shape \(16, 24\) and must"),
        (
            "unscanned",
            {"q_lora_rank": None},
            "params have no dense_layers/self_attention/query/kernel",
        ),
        ("unscanned", {"num_layers": 5}, "params hold 4 layers and .*=5 - num_dense_layers=2;"),
    ],
)
def test_dense_layers_of_another_model(layout: Any, changes: dict, message: str) -> None:
    config, tokens = deepseek(), jax.ShapeDtypeStruct((8, 8), jnp.int32)
    params = jax.eval_shape(
        linen_compat.Transformer(config, layout).init, jax.random.key(0), tokens
    )
    other = linen_compat.Transformer(deepseek(**changes), layout)
    with pytest.raises(InputError, match=message):
        jax.eval_shape(other.apply, params, tokens)
