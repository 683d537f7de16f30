"""A scanned layer with JAX's own attention kernel for TPUs, and a product behind the kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, BATCH, TOKENS, HEADS, HEAD = 3, 8, 256, 2, 128
WIDTH = HEADS * HEAD


def attention(q: Array, k: Array, v: Array) -> Array:
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((TOKENS, TOKENS))] * HEADS
    )
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v)


def attending(x: Array, weights: dict[str, Array]) -> tuple[Array, None]:
    heads = (*x.shape[:2], HEADS, HEAD)
    q, k, v = ((x @ weights[name]).reshape(heads).swapaxes(1, 2) for name in "qkv")
    spread = P("data")
    local = jax.shard_map(attention, in_specs=spread, out_specs=spread, check_vma=False)
    seen = local(q, k, v).swapaxes(1, 2).reshape(x.shape)
    return x + jnp.tanh(seen @ weights["o"]), None  # behind the kernel


def step(weights: dict[str, Array], x: Array) -> Any:
    def loss(weights: dict[str, Array]) -> Array:
        return jnp.sum(jax.lax.scan(attending, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(weights)


def arguments() -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Weights, whole on each of 8 devices, and a batch that is spread over them."""
    shape = (LAYERS, WIDTH, WIDTH)
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name in "qkvo"}
    spread = NamedSharding(AbstractMesh((8,), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.bfloat16, sharding=spread)
    return weights, x
