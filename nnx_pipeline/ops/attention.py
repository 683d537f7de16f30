"""Grouped-query attention, computed in the dtype of its inputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnx_pipeline.sharding import out_sharding

# The score of a key that a query may not read: far below any real score, and finite in the dtype of
# the scores, for which float16 needs a value of its own.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
MASKED_HALF = -0.7 * float(jnp.finfo(jnp.float16).max)

# From (length, segment ids [batch, seq] or None) to the keys each query may read, see `allowed`
Mask = Callable[[int, Array | None], Array]


def allowed(
    length: int, segment_ids: Int[Array, "batch seq"] | None
) -> Bool[Array, "#batch seq seq"]:
    """The attention mask: a query may read no key after itself and none of another segment.

    - `length`: tokens of a sequence.
    - `segment_ids`: which segment each token belongs to; None for one segment per row.

    Which token is later is decided by the order in the array, not by positions. Padding (segment 0)
    may read padding. Without segment ids the mask is a comparison of two iotas, which XLA fuses: no
    mask array is built.
    """
    query = jax.lax.broadcasted_iota(jnp.int32, (1, length, length), 1)
    key = jax.lax.broadcasted_iota(jnp.int32, (1, length, length), 2)
    causal = query >= key
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segment_ids: Int[Array, "batch seq"] | None = None,
    *,
    scale: float = 1.0,
    grouped: jax.sharding.PartitionSpec,
    mask: Mask = allowed,
) -> Float[Array, "batch seq heads head_dim"]:
    """softmax(scale · query · keyᵀ, masked) · value, with the scores as one array.

    - `query`, `key`, `value`: the projected heads; query head n reads key-value head
      n // (heads / kv_heads).
    - `segment_ids`: see `allowed`.
    - `scale`: multiplies the scores.
    - `grouped`: sharding of the query as `[batch, seq, kv_heads, heads / kv_heads, head_dim]`.
    - `mask`: which keys each query may read; functions other than `allowed` are used by
      experiments.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    shape = (batch, length, kv_heads, heads // kv_heads, head_dim)
    query = jax.lax.reshape(
        query * scale if scale != 1.0 else query, shape, out_sharding=out_sharding(grouped)
    )
    mixed = _attend(mask, query, key, value, segment_ids)
    # Heads merge into one axis, which stays sharded as the key-value heads were.
    whole = jax.sharding.PartitionSpec(grouped[0], grouped[1], grouped[2], None)
    return jax.lax.reshape(
        mixed, (batch, length, heads, head_dim), out_sharding=out_sharding(whole)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(mask: Mask, query: Array, key: Array, value: Array, segment_ids: Array | None) -> Array:
    """Attention whose derivative keeps no scores.

    The query is `[batch, seq, kv_heads, queries per key, head_dim]`, as the result is. The forward
    pass keeps its result and, per query, the logarithm of the softmax's denominator. From these the
    backward pass computes each weight again by one exponential, without the maximum and the sum
    over keys, and takes the sum in the softmax's derivative from the result: Σ_k p · dp is the
    product of the result and its cotangent (FlashAttention-2, Dao 2023, section 2.3).
    """
    return _attend_forward(mask, query, key, value, segment_ids)[0]


def _attend_forward(
    mask: Mask, query: Array, key: Array, value: Array, segment_ids: Array | None
) -> tuple[Array, Any]:
    scores = _scores(mask, query, key, segment_ids)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    mixed = jnp.einsum("bgqrk,bkgd->bqgrd", weights, value)
    mixed = mixed / jnp.moveaxis(total, 1, 2).astype(mixed.dtype)
    normaliser = largest.astype(jnp.float32) + jnp.log(total)
    return mixed, (query, key, value, segment_ids, mixed, normaliser)


def _attend_backward(mask: Mask, kept: Any, d_mixed: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, segment_ids, mixed, normaliser = kept
    # The scores depend on nothing that comes late, so that a compiler may compute them long before
    # they are used, and hold them. The barrier makes them wait for the cotangent.
    query, d_mixed = jax.lax.optimization_barrier((query, d_mixed))
    scores = _scores(mask, query, key, segment_ids).astype(jnp.float32)
    weights = jnp.exp(scores - normaliser)
    d_weights = jnp.einsum("bqgrd,bkgd->bgqrk", d_mixed, value).astype(jnp.float32)
    inner = jnp.sum(d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)
    # From [batch, query, kv_heads, queries per key] to the order of the scores.
    d_scores = weights * (d_weights - jnp.moveaxis(inner, 1, 2)[..., None])
    d_scores = d_scores.astype(query.dtype)
    weights = weights.astype(query.dtype)
    d_value = jnp.einsum("bgqrk,bqgrd->bkgd", weights, d_mixed)
    d_query = jnp.einsum("bgqrk,bkgd->bqgrd", d_scores, key)
    d_key = jnp.einsum("bgqrk,bqgrd->bkgd", d_scores, query)
    return d_query, d_key, d_value, None


_attend.defvjp(_attend_forward, _attend_backward)


def _scores(mask: Mask, query: Array, key: Array, segment_ids: Array | None) -> Array:
    """The scores `[batch, kv_heads, query, queries per key, key]` in the dtype of the inputs.

    That is the order in which the product gives them. In another one XLA for NVIDIA GPUs transposes
    arrays of this size: in the backward pass of `mixtral-small` on H100 it holds three of them, and
    with query and queries per key exchanged it holds five (temp 257 and 291 MB).
    """
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", query, key)
    masked = MASKED_HALF if scores.dtype == jnp.float16 else MASKED
    return jnp.where(mask(query.shape[1], segment_ids)[:, None, :, None], scores, masked)
