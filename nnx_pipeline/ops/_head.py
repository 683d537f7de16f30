"""The head of the model, from the last hidden states to logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops._attention import soft_cap
from nnx_pipeline.sharding.layout import Layout, gather_weight, out_sharding, place


def logits_of(
    hidden: Float[Array, "batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    *,
    cap: float | None,
    layout: Layout,
) -> Float[Array, "batch seq vocab"]:
    """The logits hidden · kernel, computed in the dtype of `hidden` and cast to float32."""
    # They are sharded by `whole_batch` and `vocab_of_logits`, but for a vocabulary that does not
    # split over the latter: its logits are computed with columns of zeros, then gathered, and these
    # columns left out.
    columns, kernel = kernel.shape[1], used_kernel(kernel.astype(hidden.dtype), layout)
    spec = layout.spec("whole_batch", None, "vocab_of_logits")
    logits = jnp.einsum("bsd,dv->bsv", hidden, kernel, out_sharding=out_sharding(spec))
    if logits.shape[-1] > columns:
        logits = place(logits, layout.spec("whole_batch", None, None))[..., :columns]
    logits = logits.astype(jnp.float32)
    return logits if cap is None else soft_cap(logits, cap)


def used_kernel(kernel: Float[Array, "embed vocab"], layout: Layout) -> Float[Array, "embed any"]:
    """The kernel, perhaps with columns of zeros, as a product for logits reads it."""
    # All its rows are on each device, and columns are sharded by `vocab_of_logits`.
    devices = layout.size("vocab_of_logits")
    padded = with_columns(kernel, -(-kernel.shape[1] // devices) * devices, layout)
    stored = layout.spec("embed_of_vocab", "vocab" if padded is kernel else None)
    return gather_weight(padded, stored, layout.spec(None, "vocab_of_logits"))


def with_columns(
    kernel: Float[Array, "embed vocab"], columns: int, layout: Layout
) -> Float[Array, "embed columns"]:
    """The kernel with columns of zeros after its own, whole along them on each device."""
    more = columns - kernel.shape[1]
    if not more:
        return kernel
    return jnp.pad(place(kernel, layout.spec("embed_of_vocab", None)), ((0, 0), (0, more)))


def head_of_table(
    table: Float[Array, "vocab embed"], config: ModelConfig
) -> Float[Array, "embed vocab"]:
    """The kernel, in the table's dtype, of a head that is tied to the embedding table."""
    # With `tied_head_dtype="bfloat16"` its values are rounded, and its gradient is not.
    if config.tied_head_dtype is None:
        return table.T
    finfo = jnp.finfo(config.tied_head_dtype)
    # Unlike two casts, which a compiler may leave out, this always rounds.
    rounded = jax.lax.reduce_precision(jax.lax.stop_gradient(table), finfo.nexp, finfo.nmant)
    # The difference is exact, so that the sum is the rounded value.
    return (table + (rounded - jax.lax.stop_gradient(table))).T
