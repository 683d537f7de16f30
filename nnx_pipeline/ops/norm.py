"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# (normalised x, scale, what is added to the scale) to x times the scale
ApplyScale = Callable[[Array, Array, float], Array]


def multiply_scale(
    x: Float[Array, "*batch embed"], scale: Float[Array, "embed"], offset: float
) -> Array:
    """Scales the last axis by a product, which XLA fuses into what stands around it.

    offset: added to the scale, unless it is 0.
    """
    return x * (scale + offset if offset else scale)


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
    return apply_scale((wide * inverse).astype(x.dtype), scale.astype(x.dtype), scale_offset)
