"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Scale = Float[Array, "embed"] | Float[Array, "heads embed"]


def multiply_scale(x: Float[Array, "*batch embed"], scale: Scale, offset: float) -> Array:
    """Multiplies the last axes by the scale, which XLA fuses into the operations around it."""
    return x * (scale + offset if offset else scale)


def rms_norm(
    x: Float[Array, "*batch embed"],
    scale: Scale,
    *,
    epsilon: float,
    scale_offset: float = 0.0,
) -> Float[Array, "*batch embed"]:
    """`x / sqrt(mean(x²) + epsilon)` in float32, cast to the dtype of `x`, then times the scale.

    The mean is over as many of the last axes of `x` as the scale has. A single one must be whole
    on every device. The result has the sharding of `x`.
    """
    wide, axes = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)
    return multiply_scale((wide * inverse).astype(x.dtype), scale.astype(x.dtype), scale_offset)
