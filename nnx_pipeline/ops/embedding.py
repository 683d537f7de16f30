"""Token embedding: a gather, or a product with one-hot rows."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.sharding import Layout, P, mesh_sizes, out_sharding, spec_axes

ONE_HOT_LIMIT = 2 * 1024**3  # bytes; above it `auto` gathers (seeds S2.7)


def one_hot_bytes(num_tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of the one-hot array that `embed_one_hot` stands for, over all devices together."""
    return num_tokens * vocab_size * jnp.dtype(dtype).itemsize


def uses_one_hot(
    method: str, num_tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike
) -> bool:
    """Whether `num_tokens` ids (of all devices together) are looked up by a one-hot product.

    method: `gather`, `one_hot`, or `auto`, which takes the product unless its one-hot array would
    be above 2 GB.
    """
    if method != "auto":
        return method == "one_hot"
    return one_hot_bytes(num_tokens, vocab_size, dtype) <= ONE_HOT_LIMIT


def embed(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "*batch seq"],
    *,
    method: str,
    dtype: jax.typing.DTypeLike,
    out: P | None,
    layout: Layout,
) -> Float[Array, "*batch seq embed"]:
    """The rows of `tokens` in `dtype`, unscaled, by the method that `uses_one_hot` chooses.

    out: sharding of the result; the default leaves it whole on every device.
    """
    out = P(*[None] * (tokens.ndim + 1)) if out is None else out
    one_hot = uses_one_hot(method, tokens.size, table.shape[0], dtype)
    look_up = embed_one_hot if one_hot else embed_gather
    return look_up(table, tokens, dtype=dtype, out=out, layout=layout)


def embed_gather(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "*batch seq"],
    *,
    dtype: jax.typing.DTypeLike,
    out: P,
    layout: Layout,
) -> Float[Array, "*batch seq embed"]:
    """Reads the rows of `tokens`; ids outside the table read NaN rather than a wrong row.

    The table stays where it is ("vocab", "embed"). Each device looks up the tokens of all devices
    that share its part and gives zeros for rows that it does not hold; what goes back is summed
    over the vocabulary's axes and put together from the parts of the rows. So neither the table
    nor its gradient is ever gathered.

    out: sharding of the result, its last axis whole. The tokens have the same, without that axis.
    """
    rows = _look_up(table, tokens, dtype, out, layout)
    return out_of_range_as_nan(rows, tokens, table.shape[0])


def embed_one_hot(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "*batch seq"],
    *,
    dtype: jax.typing.DTypeLike,
    out: P,
    layout: Layout,
) -> Float[Array, "*batch seq embed"]:
    """The same rows by a matrix product, faster on a systolic array for a small vocabulary."""
    del layout
    rows = jax.nn.one_hot(tokens, table.shape[0], dtype=dtype)
    rows = jnp.einsum("...v,vd->...d", rows, table.astype(dtype), out_sharding=out_sharding(out))
    return out_of_range_as_nan(rows, tokens, table.shape[0])


def out_of_range_as_nan(rows: Array, tokens: Array, vocab_size: int) -> Array:
    """NaN in the rows of ids that are no row of the table, so that the loss shows them."""
    known = (tokens >= 0) & (tokens < vocab_size)
    return jnp.where(known[..., None], rows, jnp.asarray(jnp.nan, rows.dtype))


def _look_up(
    table: Array, tokens: Array, dtype: jax.typing.DTypeLike, out: P, layout: Layout
) -> Array:
    vocab, embed = layout.axes("vocab"), layout.axes("embed")
    spread = spec_axes(out)
    summed_apart = _only(vocab, spread)
    summed = tuple(axis for axis in vocab if axis not in spread)
    turned = _only(embed, spread)
    whole = tuple(axis for axis in embed if axis not in spread)

    def local(table: Array, tokens: Array) -> Array:
        own = tokens.reshape(-1)
        shared = (*summed_apart, *turned)
        asked = jax.lax.all_gather(own, shared, tiled=True) if shared else own
        place = asked - (table.shape[0] * jax.lax.axis_index(vocab) if vocab else 0)
        here = (place >= 0) & (place < table.shape[0])
        rows = table.at[jnp.where(here, place, 0)].get(mode="promise_in_bounds").astype(dtype)
        rows = jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype))
        if summed_apart:
            rows = jax.lax.psum_scatter(rows, summed_apart, scatter_dimension=0, tiled=True)
        if summed:
            rows = jax.lax.psum(rows, summed)
        if turned:
            rows = jax.lax.all_to_all(rows, turned, split_axis=0, concat_axis=1, tiled=True)
        if whole:
            rows = jax.lax.all_gather(rows, whole, axis=1, tiled=True)
        return rows.reshape(*tokens.shape, -1)

    if not mesh_sizes():
        return local(table, tokens)
    in_specs = (layout.spec("vocab", "embed"), P(*out[: tokens.ndim]))
    return jax.shard_map(local, in_specs=in_specs, out_specs=out)(table, tokens)


def _only(axes: Iterable[str], among: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in among)
