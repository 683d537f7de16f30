"""Grouped-query attention, computed in the dtype of its inputs."""

from collections.abc import Callable

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
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, key)
    masked = MASKED_HALF if scores.dtype == jnp.float16 else MASKED
    scores = jnp.where(mask(length, segment_ids)[:, None, None], scores, masked)
    mixed = jnp.einsum("bgrqk,bkgd->bqgrd", jax.nn.softmax(scores, axis=-1), value)
    # Heads merge into one axis, which stays sharded as the key-value heads were.
    whole = jax.sharding.PartitionSpec(grouped[0], grouped[1], grouped[2], None)
    return jax.lax.reshape(
        mixed, (batch, length, heads, head_dim), out_sharding=out_sharding(whole)
    )
