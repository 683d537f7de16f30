"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ApplyScale = Callable[[Array, Array], Array]


def multiply_scale(x: Float[Array, "*batch embed"], scale: Float[Array, "embed"]) -> Array:
    """Scales the last axis by a product, which XLA fuses into what stands around it."""
    return x * scale


def rms_norm(
    x: Float[Array, "*batch embed"],
    scale: Float[Array, "embed"],
    *,
    epsilon: float,
    scale_offset: float = 0.0,
    apply_scale: ApplyScale = multiply_scale,
) -> Float[Array, "*batch embed"]:
    """`x / sqrt(mean(x²) + epsilon)` in float32, cast to the dtype of `x`, then times the scale.

    scale_offset: added to the scale; 1.0 for models whose scale is stored around 0.
    The sharding of `x` is kept; its last axis must be whole.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    scale = scale.astype(x.dtype)
    if scale_offset:
        scale = scale + scale_offset
    return apply_scale((wide * inverse).astype(x.dtype), scale)
