"""The head of the model, from the last hidden states to logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.ops.attention import soft_cap
from nnx_pipeline.sharding import Layout, gather_weight, out_sharding


def logits_of(
    hidden: Float[Array, "batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    *,
    cap: float | None,
    layout: Layout,
) -> Float[Array, "batch seq vocab"]:
    """The logits hidden · kernel, computed in the dtype of `hidden` and cast to float32.

    - `hidden`: the output of the final norm.
    - `kernel`: sharded by ("embed", "vocab").
    - `cap`: the bound of the logits, see `ops.attention.soft_cap`; None for no bound.
    - `layout`: which mesh axes the logical axes of kernel and result are sharded over.

    The batch of the result is sharded by the logical axis `whole_batch`.
    """
    kernel = gather_weight(
        kernel.astype(hidden.dtype),
        layout.spec("embed", "vocab"),
        layout.spec(None, "vocab_of_logits"),
    )
    spec = layout.spec("whole_batch", None, "vocab_of_logits")
    logits = jnp.einsum("bsd,dv->bsv", hidden, kernel, out_sharding=out_sharding(spec))
    logits = logits.astype(jnp.float32)
    return logits if cap is None else soft_cap(logits, cap)


def head_of_table(
    table: Float[Array, "vocab embed"], config: ModelConfig
) -> Float[Array, "embed vocab"]:
    """The kernel of a head that is tied to the embedding table, in the dtype of the table.

    - `table`: sharded by ("vocab", "embed"); the kernel is sharded by ("embed", "vocab").
    - `config`: with `tied_head_dtype="bfloat16"` the kernel's values are rounded to bfloat16.

    The gradient of the table is that of the kernel, without rounding.
    """
    if config.tied_head_dtype is None:
        return table.T
    kept = jnp.finfo(config.tied_head_dtype)
    # Unlike two casts, which a compiler may leave out, this always rounds.
    rounded = jax.lax.reduce_precision(jax.lax.stop_gradient(table), kept.nexp, kept.nmant)
    # The difference is exact, so that the sum is the rounded value.
    return (table + (rounded - jax.lax.stop_gradient(table))).T
