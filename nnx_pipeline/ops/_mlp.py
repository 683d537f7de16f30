"""The gated feed-forward block (SwiGLU, Shazeer 2020) of a dense model."""

import jax
from jaxtyping import Array, Float

from nnx_pipeline.config._remat import HIDDEN, named
from nnx_pipeline.ops._low_precision import Product, full_product
from nnx_pipeline.sharding.layout import Layout, gather_weight


def gated(opened: Float[Array, "*rows mlp"], raised: Float[Array, "*rows mlp"]) -> Array:
    """silu(opened) · raised: hidden units; remat may keep both factors, by their names."""
    opened, raised = map(named, (opened, raised), HIDDEN)
    return jax.nn.silu(opened) * raised


def gated_mlp(
    x: Float[Array, "batch seq embed"],
    gate: Float[Array, "embed mlp"],
    up: Float[Array, "embed mlp"],
    down: Float[Array, "mlp embed"],
    *,
    product: Product = full_product,
    layout: Layout,
) -> Float[Array, "batch seq embed"]:
    """(silu(x · gate) · (x · up)) · down, in the dtype of `x`.

    `x` and the result are sharded by ("batch", None, None). Kernels are gathered over the axes of
    `embed`.
    """

    def gathered(kernel: Array, *names: str) -> Array:
        used = (None if name == "embed" else name for name in names)
        return gather_weight(kernel.astype(x.dtype), layout.spec(*names), layout.spec(*used))

    gate, up = gathered(gate, "embed", "mlp"), gathered(up, "embed", "mlp")
    down = gathered(down, "mlp", "embed")
    wide = layout.spec("batch", None, "mlp")
    both = (product("bsd,df->bsf", x, kernel, wide) for kernel in (gate, up))
    return product("bsf,fd->bsd", gated(*both), down, layout.spec("batch", None, None))
