"""Token embedding, by a gather or by a matrix product with one-hot rows."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.lab.mesh import spec_axes
from nnx_pipeline.sharding.layout import Layout, P, mesh_sizes, out_sharding, place, reordered

ONE_HOT_LIMIT = 2 * 1024**3  # bytes; above it `auto` gathers (seeds S2.7)


def one_hot_bytes(num_tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike) -> int:
    return num_tokens * vocab_size * jnp.dtype(dtype).itemsize


def uses_one_hot(
    method: str, num_tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike
) -> bool:
    """Whether tokens, of all devices, are looked up by a one-hot product."""
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
    """The embedding of each token in `dtype`, unscaled.

    The table is sharded by ("vocab", "embed_of_vocab"), the result by `out`, or whole, as the
    tokens are.
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
    """Looks the tokens up by a gather from the sharded table, which is itself never gathered."""
    # Each device looks up the tokens of all devices along the mesh axes that shard the table, with
    # zeros for rows that it does not hold. The results are summed over the axes of the vocabulary,
    # and the parts of each row are put together. The last axis of `out` must be whole.
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
    """As `embed_gather`, by a product of one-hot rows: faster for a small vocabulary."""
    # Mesh axes that shard the table's width and not the tokens share the work of the product.
    wide = tuple(axis for axis in layout.axes("embed_of_vocab") if axis not in spec_axes(out))
    spec = P(*out[: tokens.ndim], wide) if wide else out
    rows = jax.nn.one_hot(tokens, table.shape[0], dtype=dtype)
    rows = jnp.einsum("...v,vd->...d", rows, table.astype(dtype), out_sharding=out_sharding(spec))
    rows = place(place(rows, spec), out) if wide else rows
    return out_of_range_as_nan(rows, tokens, table.shape[0])


def out_of_range_as_nan(rows: Array, tokens: Array, vocab_size: int) -> Array:
    """Replaces the rows of ids outside the vocabulary by NaN, so that the loss shows them."""
    known = (tokens >= 0) & (tokens < vocab_size)
    return jnp.where(known[..., None], rows, jnp.asarray(jnp.nan, rows.dtype))


def _look_up(
    table: Array, tokens: Array, dtype: jax.typing.DTypeLike, out: P, layout: Layout
) -> Array:
    vocab, embed = layout.axes("vocab"), layout.axes("embed_of_vocab")
    spread = spec_axes(out)
    # A mesh axis that shards the table may also shard the tokens. Along such an axis tokens are
    # gathered before the look-up, and afterwards each device takes back the rows of its own tokens.
    scattered = _only(vocab, spread)
    summed = tuple(axis for axis in vocab if axis not in spread)
    turned = _only(embed, spread)
    whole = tuple(axis for axis in embed if axis not in spread)

    def local(table: Array, tokens: Array) -> Array:
        flat = tokens.reshape(-1)
        shared = (*scattered, *turned)
        ids = jax.lax.all_gather(flat, shared, tiled=True) if shared else flat
        # The row of each id within this device's part of the vocabulary, which may not hold it.
        row = ids - (table.shape[0] * jax.lax.axis_index(vocab) if vocab else 0)
        here = (row >= 0) & (row < table.shape[0])
        rows = table.at[jnp.where(here, row, 0)].get(mode="promise_in_bounds").astype(dtype)
        rows = jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype))
        # Exactly one device along the axes of the vocabulary holds a row, so a sum selects it.
        if scattered:
            rows = jax.lax.psum_scatter(rows, scattered, scatter_dimension=0, tiled=True)
        if summed:
            rows = jax.lax.psum(rows, summed)
        # So far each device has only its columns of the rows.
        if turned:
            rows = jax.lax.all_to_all(rows, turned, split_axis=0, concat_axis=1, tiled=True)
        return rows.reshape(*tokens.shape, -1)

    if not mesh_sizes():
        return local(table, tokens)
    in_specs = (layout.spec("vocab", "embed_of_vocab"), P(*out[: tokens.ndim]))
    parts = P(*out[: tokens.ndim], whole) if whole else out
    mapped = jax.shard_map(local, in_specs=in_specs, out_specs=parts, axis_names=set(mesh_sizes()))
    rows = mapped(table, tokens)
    if not whole:
        return rows
    # The parts that devices along `whole` hold are put together last, one after the other.
    return reordered(place(rows, out), tokens.ndim, (*whole, *turned), embed)


def _only(axes: Iterable[str], among: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in among)
