"""Token embedding: a gather, or a product with one-hot rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.sharding import out_sharding

ONE_HOT_LIMIT = 2 * 1024**3  # bytes; above it `auto` gathers (seeds S2.7)


def one_hot_bytes(num_tokens: int, vocab_size: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of the one-hot array that `embed_one_hot` stands for, over all devices together."""
    return num_tokens * vocab_size * jnp.dtype(dtype).itemsize


def embed_gather(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "*batch seq"],
    *,
    dtype: jax.typing.DTypeLike,
    out: jax.sharding.PartitionSpec,
) -> Float[Array, "*batch seq embed"]:
    """Reads the rows of `tokens`; ids outside the table read NaN rather than a wrong row."""
    rows = table.at[tokens].get(mode="fill", fill_value=jnp.nan, out_sharding=out_sharding(out))
    return rows.astype(dtype)


def embed_one_hot(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "*batch seq"],
    *,
    dtype: jax.typing.DTypeLike,
    out: jax.sharding.PartitionSpec,
) -> Float[Array, "*batch seq embed"]:
    """The same rows by a matrix product, faster on a systolic array for a small vocabulary."""
    rows = jax.nn.one_hot(tokens, table.shape[0], dtype=dtype)
    return jnp.einsum("...v,vd->...d", rows, table.astype(dtype), out_sharding=out_sharding(out))
