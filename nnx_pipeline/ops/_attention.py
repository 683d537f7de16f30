"""Grouped-query attention, computed in the dtype of its inputs."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.sharding.layout import out_sharding

# The score of a key that a query may not read: far below any real score, and finite in the dtype of
# the scores, for which float16 needs a value of its own.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
MASKED_HALF = -0.7 * float(jnp.finfo(jnp.float16).max)


class TokenSpan(NamedTuple):
    """`size` tokens of a sequence from place `start` on; without segments each row is one."""

    start: int | Int[Array, ""]
    size: int
    segments: Int[Array, "batch size"] | None


# Of a sequence up to WHOLE all queries are computed at once, of a longer one BLOCK at a time. On a
# TPU v5p (libtpu 0.0.42.1), whole and in blocks of 512: Mixtral 8x7B at a sequence of 4096 takes
# 4,832 and 4,616 ms of compute and a heap of 9.1 and 7.5 GB, Llama2-7B at 2048 5,739 and 5,410 ms
# and 23.1 and 21.9 GB; `mixtral-small` at 1024 without a pipeline 15.8 and 15.4 ms and 198 and
# 196 MB.
WHOLE, BLOCK = 1024, 512
MOST_BLOCKS = 1024  # each is traced and compiled on its own


def allowed(
    queries: TokenSpan, keys: TokenSpan, window: int | None = None
) -> Bool[Array, "#batch queries keys"]:
    """The attention mask: a query may read no key after itself and none of another segment."""
    # Which token is later is decided by the order in the array, not by positions. Padding (segment
    # 0) may read padding. Without segment ids the mask is a comparison of two iotas, which XLA
    # fuses: no mask array is built. With a window a query reads itself and the `window - 1` tokens
    # before it.
    shape = (1, queries.size, keys.size)
    query, key = (
        _places(span, jax.lax.broadcasted_iota(jnp.int32, shape, dimension))
        for dimension, span in enumerate((queries, keys), 1)
    )
    readable = query >= key
    if window is not None:
        readable &= query - key < window
    if queries.segments is None or keys.segments is None:
        return readable
    return readable & (queries.segments[:, :, None] == keys.segments[:, None, :])


def _places(span: TokenSpan, counted: Array) -> Array:
    return counted if isinstance(span.start, int) and span.start == 0 else counted + span.start


@dataclass(frozen=True)
class Options:
    """How attention is computed, for all kinds of attention."""

    scale: float = 1.0  # multiplies the scores
    window: int | None = None  # see `allowed`
    block: int | None = None  # tokens at a time; None for what the kind finds best
    soft_cap: float | None = None  # the bound of the scores
    # Scores `[heads]` of a key without a value that every query reads; for `dot_product` alone.
    sinks: Array | None = None
    interpret: bool = False  # a kernel for TPUs, for tests where there is none


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segment_ids: Int[Array, "batch seq"] | None = None,
    *,
    grouped: jax.sharding.PartitionSpec,
    options: Options = Options(),
) -> Float[Array, "batch seq heads value_dim"]:
    """softmax(scale · query · keyᵀ, masked) · value, for one block of queries after the other.

    The scores of one block exist at a time, for keys up to the block's last query. Query head n
    reads key-value head n // (heads / kv_heads). `grouped` is the sharding of the query as `[batch,
    seq, kv_heads, heads / kv_heads, head_dim]`. Without `options.block` the block is `BLOCK` in
    sequences longer than `WHOLE`, and all queries in others. Raises InputError for more than
    `MOST_BLOCKS` blocks.
    """
    length = query.shape[1]
    size = options.block or (length if length <= WHOLE else BLOCK)
    if length > size * MOST_BLOCKS:
        raise InputError(
            f"a sequence of {length} tokens has more than {MOST_BLOCKS} blocks of {size} queries; "
            "choose a larger model.attention_block, or model.attention=chunked"
        )
    how = _How(options.window, size, options.soft_cap)
    query = in_groups(query, key.shape[2], scale=options.scale, grouped=grouped)
    sinks = sinks_in_groups(options.sinks, key.shape[2], grouped)
    return out_of_groups(_attend(how, query, key, value, segment_ids, sinks), grouped)


def sinks_in_groups(
    sinks: Float[Array, "heads"] | None, kv_heads: int, grouped: jax.sharding.PartitionSpec
) -> Float[Array, "kv_heads queries_per_key"] | None:
    if sinks is None:
        return None
    spec = out_sharding(jax.sharding.PartitionSpec(grouped[2], None))
    shape = (kv_heads, sinks.shape[0] // kv_heads)
    return jax.lax.reshape(sinks.astype(jnp.float32), shape, out_sharding=spec)


def cached_attention(
    query: Float[Array, "batch 1 heads head_dim"],
    key: Float[Array, "batch slots kv_heads head_dim"],
    value: Float[Array, "batch slots kv_heads value_dim"],
    positions: Int[Array, "batch 1"],
    *,
    grouped: jax.sharding.PartitionSpec,
    options: Options = Options(),
) -> Float[Array, "batch 1 heads value_dim"]:
    """Attention of one new token of each sequence over the tokens before it and over itself."""
    # Slot p belongs to the token at position p. Slots after the new token's may hold anything
    # finite: they are not read.
    query = in_groups(query, key.shape[2], scale=options.scale, grouped=grouped)
    behind = positions[:, :, None] - jnp.arange(key.shape[1], dtype=jnp.int32)
    readable = behind >= 0
    if options.window is not None:
        readable &= behind < options.window
    how = _How(options.window, 1, options.soft_cap)
    sinks = sinks_in_groups(options.sinks, key.shape[2], grouped)
    weights, _, total = _exponentials(_scores(how, query, key, readable), sinks)
    mixed = jnp.einsum("bgqrk,bkgd->bqgrd", weights, value)
    return out_of_groups(mixed / jnp.moveaxis(total, 1, 2).astype(mixed.dtype), grouped)


def in_slots(
    stored: Float[Array, "batch slots kv_heads head_dim"],
    new: Float[Array, "batch 1 kv_heads head_dim"],
    positions: Int[Array, "batch 1"],
) -> Float[Array, "batch slots kv_heads head_dim"]:
    """Stored keys or values, with a new token of each sequence in its slot, if it has one."""
    # A choice for each slot keeps every array in its sharding. It reads and writes all slots, as
    # many bytes as attention reads; a scatter would write one, but has no sharding rule.
    slots = jnp.arange(stored.shape[1], dtype=jnp.int32)
    return jnp.where((positions == slots)[:, :, None, None], new, stored)


def in_groups(
    query: Float[Array, "batch seq heads head_dim"],
    kv_heads: int,
    *,
    scale: float,
    grouped: jax.sharding.PartitionSpec,
) -> Float[Array, "batch seq kv_heads queries_per_key head_dim"]:
    """The query heads, grouped by the key-value head that they read, times the scale."""
    batch, length, heads, head_dim = query.shape
    return jax.lax.reshape(
        query * scale if scale != 1.0 else query,
        (batch, length, kv_heads, heads // kv_heads, head_dim),
        out_sharding=out_sharding(grouped),
    )


def out_of_groups(
    mixed: Float[Array, "batch seq kv_heads queries_per_key head_dim"],
    grouped: jax.sharding.PartitionSpec,
) -> Float[Array, "batch seq heads head_dim"]:
    """The heads as one axis, which stays sharded as the key-value heads were."""
    batch, length, kv_heads, queries, head_dim = mixed.shape
    whole = jax.sharding.PartitionSpec(grouped[0], grouped[1], grouped[2], None)
    shape = (batch, length, kv_heads * queries, head_dim)
    return jax.lax.reshape(mixed, shape, out_sharding=out_sharding(whole))


# Residuals of the derivative: query, key, value, segment ids, the result and the normaliser.
AttentionResiduals = tuple[Array, Array, Array, Array | None, Array, Array]
_WithSinks = tuple[AttentionResiduals, Array | None]


class _How(NamedTuple):
    """`size` queries are computed at a time; `cap` bounds the scores."""

    window: int | None
    size: int
    cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: _How,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    sinks: Array | None,
) -> Array:
    """Attention whose derivative keeps no scores; query and result are in groups."""
    # The forward pass keeps its result and, per query, the logarithm of the softmax's denominator.
    # From these the backward pass computes each weight again by one exponential, and takes the sum
    # in the softmax's derivative from the result: Σ_k p · dp is the product of the result and its
    # cotangent (FlashAttention-2, Dao 2023, section 2.3).
    return _attend_forward(how, query, key, value, segment_ids, sinks)[0]


def _attend_forward(
    how: _How,
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None,
    sinks: Array | None,
) -> tuple[Array, _WithSinks]:
    size, length = how.size, query.shape[1]
    every = TokenSpan(0, length, segment_ids)
    readable = allowed(every, every, how.window)
    results, normalisers = [], []
    for start, stop in _blocks(length, size):
        scores = _scores(how, query[:, start:stop], key[:, :stop], readable[:, start:stop, :stop])
        weights, largest, total = _exponentials(scores, sinks)
        mixed = jnp.einsum("bgqrk,bkgd->bqgrd", weights, value[:, :stop])
        results.append(mixed / jnp.moveaxis(total, 1, 2).astype(mixed.dtype))
        normalisers.append(largest.astype(jnp.float32) + jnp.log(total))
    mixed, normaliser = jnp.concatenate(results, axis=1), jnp.concatenate(normalisers, axis=2)
    return mixed, ((query, key, value, segment_ids, mixed, normaliser), sinks)


def _exponentials(scores: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """exp(scores - largest), the largest score of each query, and the sum with that of its sink."""
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is None:
        weights = jnp.exp(scores - largest)
        return weights, largest, jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    sink = sinks[None, :, None, :, None].astype(scores.dtype)
    largest = jnp.maximum(largest, sink)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    return weights, largest, total + jnp.exp(sink - largest).astype(jnp.float32)


def _attend_backward(
    how: _How, residuals: _WithSinks, d_mixed: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    size = how.size
    (query, key, value, segment_ids, mixed, normaliser), sinks = residuals
    # The scores depend on nothing that comes late, so that a compiler may compute them long before
    # they are used, and hold them. The barrier makes them wait for the cotangent.
    query, d_mixed = jax.lax.optimization_barrier((query, d_mixed))
    length = query.shape[1]
    every = TokenSpan(0, length, segment_ids)
    readable = allowed(every, every, how.window)
    inner = jnp.sum(d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)
    # From [batch, query, kv_heads, queries per key] to the order of the scores.
    inner = jnp.moveaxis(inner, 1, 2)[..., None]
    d_queries: list[Array] = []
    totals: tuple[Array, ...] = ()  # the gradients of keys and values
    # The last block comes first: it reads all keys, and its gradients are what the others add to.
    for start, stop in reversed(_blocks(length, size)):
        rows, d_rows = query[:, start:stop], d_mixed[:, start:stop]
        if d_queries:  # one block waits for the other, so that the scores of one exist at a time
            rows, d_rows, totals, d_queries[-1] = jax.lax.optimization_barrier(
                (rows, d_rows, totals, d_queries[-1])
            )
        scores = _scores(how, rows, key[:, :stop], readable[:, start:stop, :stop])
        weights = jnp.exp(scores.astype(jnp.float32) - normaliser[:, :, start:stop])
        d_weights = jnp.einsum("bqgrd,bkgd->bgqrk", d_rows, value[:, :stop])
        d_scores = weights * (d_weights.astype(jnp.float32) - inner[:, :, start:stop])
        if how.cap is not None:
            d_scores *= soft_cap_slope(scores, how.cap)
        d_scores, weights = d_scores.astype(query.dtype), weights.astype(query.dtype)
        d_queries.append(jnp.einsum("bgqrk,bkgd->bqgrd", d_scores, key[:, :stop]))
        # Several blocks are added up in float32; of a single one the product does that.
        wide = None if size >= length else jnp.float32
        new = [
            jnp.einsum("bgqrk,bqgrd->bkgd", *pair, preferred_element_type=wide)
            for pair in ((d_scores, rows), (weights, d_rows))
        ]
        totals = tuple(map(_added, totals, new)) if totals else tuple(new)
    d_key, d_value = totals
    d_query = jnp.concatenate(d_queries[::-1], axis=1)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks[None, :, None, :, None] - normaliser)
        d_sinks = -jnp.sum(share * inner, axis=(0, 2, 4))
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None, d_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def soft_cap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap · tanh(x / cap), computed in float32 and in the dtype of `x` (Gemma 2, section 2)."""
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def soft_cap_slope(capped: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """The derivative of `soft_cap` from its result, 1 - (capped / cap)², in float32."""
    # Values beyond the cap, such as the score of a key that is masked, have the derivative 0.
    return jnp.maximum(1 - jnp.square(capped.astype(jnp.float32) / cap), 0)


def _blocks(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _added(total: Array, new: Array) -> Array:
    return total.at[:, : new.shape[1]].add(new)


def _scores(how: _How, query: Array, key: Array, readable: Array) -> Array:
    """The scores `[batch, kv_heads, query, queries per key, key]` in the dtype of the inputs."""
    # That is the order in which the product gives them. In another one XLA for NVIDIA GPUs
    # transposes arrays of this size: in the backward pass of `mixtral-small` on H100 it holds three
    # of them, and with query and queries per key exchanged it holds five (temp 257 and 291 MB).
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", query, key)
    if how.cap is not None:
        scores = soft_cap(scores, how.cap)
    masked = MASKED_HALF if scores.dtype == jnp.float16 else MASKED
    return jnp.where(readable[:, None, :, None], scores, masked)
