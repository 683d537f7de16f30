"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def multiply_scale(
    x: Float[Array, "*batch embed"], scale: Float[Array, "embed"], offset: float
) -> Array:
    """Multiplies the last axis by the scale, which XLA fuses into the operations around it."""
    return x * (scale + offset if offset else scale)


def rms_norm(
    x: Float[Array, "*batch embed"],
    scale: Float[Array, "embed"],
    *,
    epsilon: float,
    scale_offset: float = 0.0,
) -> Float[Array, "*batch embed"]:
    """`x / sqrt(mean(x²) + epsilon)` in float32, cast to the dtype of `x`, then times the scale.

    The last axis of `x` must be whole on every device; the result has the same sharding.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return multiply_scale((wide * inverse).astype(x.dtype), scale.astype(x.dtype), scale_offset)
