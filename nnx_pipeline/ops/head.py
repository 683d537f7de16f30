"""The head of the model, from the last hidden states to logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.sharding import Layout, gather_weight, out_sharding


def logits_of(
    hidden: Float[Array, "batch seq embed"], kernel: Float[Array, "embed vocab"], *, layout: Layout
) -> Float[Array, "batch seq vocab"]:
    """The logits hidden · kernel, computed in the dtype of `hidden` and cast to float32.

    - `hidden`: the output of the final norm.
    - `kernel`: sharded by ("embed", "vocab").
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
    return logits.astype(jnp.float32)
