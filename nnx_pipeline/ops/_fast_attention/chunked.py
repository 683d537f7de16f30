"""Attention by tiles of scores, in plain JAX: memory is linear in the sequence on every platform.

The softmax over the keys of a query is made up from tile to tile, by the largest score so far
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention"). All functions are of what one device holds: queries and results `[batch, seq,
kv_heads, queries per key, head_dim]`, keys and values `[batch, seq, kv_heads, head_dim]`, scores
`[batch, kv_heads, queries, queries per key, keys]`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops._attention import (
    MASKED,
    AttentionResiduals,
    TokenSpan,
    allowed,
    soft_cap,
    soft_cap_slope,
)

_Carry = tuple[Array, ...]


class Tiling(NamedTuple):
    """`block` queries and keys make a tile; `cap` bounds the scores."""

    window: int | None
    block: int
    cap: float | None = None


def tiles_needed(length: int, block: int, window: int | None) -> Int[np.ndarray, "tiles 2"]:
    """Query block and key block of each tile in which a query may read a key, row by row."""
    number = -(-length // block)
    reach = number if window is None else (window + block - 2) // block  # blocks before its own
    tiles = [(q, k) for q in range(number) for k in range(max(0, q - reach), q + 1)]
    return np.array(tiles, np.int32)


def attend_by_tiles(
    tiling: Tiling,
    query: Float[Array, "batch seq kv_heads queries_per_key head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq kv_heads queries_per_key value_dim"]:
    """softmax(query · keyᵀ, masked) · value of scaled queries, tile by tile."""
    # The products of a tile give the dtype of the inputs, as in `dot_product_attention`: with
    # scores in float32 a layer of Mixtral 8x7B takes 254 MB of temp instead of 187 on a TPU v5p.
    # All else has float32. Where no block divides the sequence, it is filled up at its end: no
    # query reads what comes after it, and those results are dropped.
    length = query.shape[1]
    tiling = tiling._replace(block=min(tiling.block, length))
    more = -length % tiling.block
    if more:
        query, key, value = (
            jnp.pad(x, [(0, more) if axis == 1 else (0, 0) for axis in range(x.ndim)])
            for x in (query, key, value)
        )
        if segment_ids is not None:
            segment_ids = jnp.pad(segment_ids, ((0, 0), (0, more)))
    return _attend(tiling, query, key, value, segment_ids)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    tiling: Tiling, query: Array, key: Array, value: Array, segment_ids: Array | None
) -> Array:
    """Attention whose derivative keeps its result and, per query, the log of the denominator."""
    return _attend_forward(tiling, query, key, value, segment_ids)[0]


def _attend_forward(
    tiling: Tiling, query: Array, key: Array, value: Array, segment_ids: Array | None
) -> tuple[Array, AttentionResiduals]:
    block = tiling.block
    batch, length, kv_heads, queries, _ = query.shape
    per_query = (batch, kv_heads, block, queries, 1)
    value_dim = value.shape[-1]

    def one_tile(carry: _Carry, tile: Array) -> tuple[_Carry, None]:
        mixed, normaliser, total, largest, share = carry
        rows, columns = _block(query, tile[0], block), _block(key, tile[1], block)
        scores = _scores(tiling, rows, columns, tile, segment_ids)
        # The keys of a query block begin anew: what the last one has added up counts nothing.
        largest = jnp.where(_is_first(tile, tiling), MASKED, largest)
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        # Of a query that may read no key of this tile, and none so far, the weights here are 1. The
        # first key that it may read, at the latest itself, multiplies what they added up to by 0.
        weights = jnp.exp(scores - new)
        rescale = jnp.where(_is_first(tile, tiling), 0.0, jnp.exp(largest - new))
        share = share * rescale + jnp.sum(weights, axis=-1, keepdims=True)
        added = _product("bgqrk,bkgd->bgqrd", weights, _block(value, tile[1], block))
        total = total * rescale + added
        # Written at every tile, and right after the last one of the query block.
        result = jnp.moveaxis(total / share, 2, 1).astype(mixed.dtype)
        mixed = _written(mixed, result, tile[0] * block, axis=1)
        normaliser = _written(normaliser, new + jnp.log(share), tile[0] * block, axis=2)
        return (mixed, normaliser, total, new, share), None

    carry: _Carry = (
        jnp.zeros((*query.shape[:-1], value_dim), query.dtype),
        jnp.zeros((batch, kv_heads, length, queries, 1), jnp.float32),
        jnp.zeros((*per_query[:-1], value_dim), jnp.float32),
        jnp.full(per_query, MASKED, jnp.float32),
        jnp.zeros(per_query, jnp.float32),
    )
    (mixed, normaliser, *_), _ = jax.lax.scan(one_tile, carry, computed_tiles(tiling, length))
    return mixed, (query, key, value, segment_ids, mixed, normaliser)


def _attend_backward(
    tiling: Tiling, residuals: AttentionResiduals, d_mixed: Array
) -> tuple[Array, Array, Array, None]:
    """FlashAttention-2 (Dao 2023), section 2.3, with a block of queries in the outer loop."""
    # Gradients of keys and values, which are added to in float32 for the whole sequence, are
    # smaller than those of queries.
    query, key, value, segment_ids, mixed, normaliser = residuals
    block = tiling.block
    inner = jnp.sum(d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)
    inner = jnp.moveaxis(inner, 1, 2)[..., None]  # in the order of the scores

    def one_tile(carry: _Carry, tile: Array) -> tuple[_Carry, None]:
        d_query, d_key, d_value, total = carry
        rows, d_rows = _block(query, tile[0], block), _block(d_mixed, tile[0], block)
        columns, values = _block(key, tile[1], block), _block(value, tile[1], block)
        scores = _scores(tiling, rows, columns, tile, segment_ids)
        weights = jnp.exp(scores - _block(normaliser, tile[0], block, axis=2))
        d_weights = jnp.einsum("bqgrd,bkgd->bgqrk", d_rows, values).astype(jnp.float32)
        d_scores = weights * (d_weights - _block(inner, tile[0], block, axis=2))
        if tiling.cap is not None:
            d_scores *= soft_cap_slope(scores, tiling.cap)
        total = jnp.where(_is_first(tile, tiling), 0.0, total)
        total = total + _product("bgqrk,bkgd->bqgrd", d_scores, columns)
        start = tile[1] * block
        more = _product("bgqrk,bqgrd->bkgd", d_scores, rows)
        d_key = _written(d_key, _block(d_key, tile[1], block) + more, start, axis=1)
        more = _product("bgqrk,bqgrd->bkgd", weights, d_rows)
        d_value = _written(d_value, _block(d_value, tile[1], block) + more, start, axis=1)
        d_query = _written(d_query, total.astype(d_query.dtype), tile[0] * block, axis=1)
        return (d_query, d_key, d_value, total), None

    batch, length, *rest = query.shape
    carry: _Carry = (
        jnp.zeros(query.shape, query.dtype),
        jnp.zeros(key.shape, jnp.float32),
        jnp.zeros(value.shape, jnp.float32),
        jnp.zeros((batch, block, *rest), jnp.float32),
    )
    (d_query, d_key, d_value, _), _ = jax.lax.scan(one_tile, carry, computed_tiles(tiling, length))
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def computed_tiles(tiling: Tiling, length: int) -> Int[Array, "tiles 2"]:
    """`tiles_needed` without a constant array."""
    # A loop over microbatches makes constants of its layers arguments, which differ from stage to
    # stage for all that JAX knows; the rule of a `custom_vmap` accepts none of these.
    number = -(-length // tiling.block)
    rows = jnp.arange(number, dtype=jnp.int32)
    ends = jnp.cumsum(rows - _first_column(rows, tiling) + 1, dtype=jnp.int32)
    position = jnp.arange(len(tiles_needed(length, tiling.block, tiling.window)), dtype=jnp.int32)
    row = jnp.searchsorted(ends, position, side="right").astype(jnp.int32)
    return jnp.stack([row, row + position + 1 - ends[row]], axis=1)


def _first_column(rows: Array, tiling: Tiling) -> Array:
    if tiling.window is None:
        return jnp.zeros_like(rows)
    return jnp.maximum(rows - (tiling.window + tiling.block - 2) // tiling.block, 0)


def _is_first(tile: Array, tiling: Tiling) -> Array:
    return tile[1] == _first_column(tile[0], tiling)


def _block(x: Array, number: Array, size: int, *, axis: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _written(x: Array, block: Array, start: Array, *, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, start, axis)


def _product(equation: str, left: Array, right: Array) -> Array:
    """An einsum in the dtype of its right operand, added up in float32."""
    return jnp.einsum(equation, left.astype(right.dtype), right, preferred_element_type=jnp.float32)


def _scores(
    tiling: Tiling, rows: Array, columns: Array, tile: Array, segment_ids: Array | None
) -> Array:
    """The masked scores of one tile, in float32, from a product in the dtype of the inputs."""
    size = tiling.block
    queries, keys = (
        TokenSpan(
            number * size, size, None if segment_ids is None else _block(segment_ids, number, size)
        )
        for number in tile
    )
    readable = allowed(queries, keys, tiling.window)
    scores = jnp.einsum("bqgrd,bkgd->bgqrk", rows, columns).astype(jnp.float32)
    if tiling.cap is not None:
        scores = soft_cap(scores, tiling.cap)
    return jnp.where(readable[:, None, :, None], scores, MASKED)
