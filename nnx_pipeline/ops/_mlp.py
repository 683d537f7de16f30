"""The gated feed-forward block (Shazeer 2020) of a dense model."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.config._remat import HIDDEN, named
from nnx_pipeline.ops._low_precision import Product, full_product
from nnx_pipeline.sharding._cast import cast_at_use
from nnx_pipeline.sharding.layout import Layout, gather_weight

LIMIT, SLOPE = 7.0, 1.702  # of the clamped swish


def _clamped_swish(opened: Array, raised: Array) -> Array:
    opened, raised = jnp.minimum(opened, LIMIT), jnp.clip(raised, -LIMIT, LIMIT)
    return opened * jax.nn.sigmoid(SLOPE * opened) * (raised + 1)


# What makes hidden units of the products with gate and up.
ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda opened, raised: jax.nn.silu(opened) * raised,
    "gelu_tanh": lambda opened, raised: jax.nn.gelu(opened, approximate=True) * raised,
    "clamped_swish": _clamped_swish,
}


class GatedKernels(NamedTuple):
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]


def gated(
    opened: Float[Array, "*rows mlp"],
    raised: Float[Array, "*rows mlp"],
    activation: str = "silu",
) -> Float[Array, "*rows mlp"]:
    """activation(opened) · raised: hidden units; remat may keep both factors, by their names."""
    opened, raised = map(named, (opened, raised), HIDDEN)
    return ACTIVATIONS[activation](opened, raised)


def gated_mlp(
    x: Float[Array, "batch seq embed"],
    kernels: GatedKernels,
    *,
    product: Product = full_product,
    activation: str = "silu",
    layout: Layout,
) -> Float[Array, "batch seq embed"]:
    """(activation(x · gate) · (x · up)) · down, in the dtype of `x`.

    `x` and the result are sharded by ("batch", None, None). Kernels are gathered over the axes of
    `embed`.
    """

    def gathered(kernel: Array, *names: str) -> Array:
        used = (None if name == "embed" else name for name in names)
        return gather_weight(cast_at_use(kernel, x.dtype), layout.spec(*names), layout.spec(*used))

    gate, up = gathered(kernels.gate, "embed", "mlp"), gathered(kernels.up, "embed", "mlp")
    down = gathered(kernels.down, "mlp", "embed")
    wide = layout.spec("batch", None, "mlp")
    opened, raised = (product("bsd,df->bsf", x, kernel, wide) for kernel in (gate, up))
    hidden = gated(opened, raised, activation)
    return product("bsf,fd->bsd", hidden, down, layout.spec("batch", None, None))
