"""The gated feed-forward layer (SwiGLU, Shazeer 2020) of a dense model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.remat import HIDDEN, named
from nnx_pipeline.sharding import P, out_sharding


def gated_mlp(
    x: Float[Array, "*batch embed"],
    gate: Float[Array, "embed mlp"],
    up: Float[Array, "embed mlp"],
    down: Float[Array, "mlp embed"],
    *,
    out: P,
) -> Float[Array, "*batch embed"]:
    """(silu(x · gate) · (x · up)) · down; kernels in the dtype of `x`, gathered over fsdp."""
    opened, raised = map(named, (x @ gate, x @ up), HIDDEN)
    hidden = jax.nn.silu(opened) * raised
    return jnp.einsum("...f,fd->...d", hidden, down, out_sharding=out_sharding(out))
