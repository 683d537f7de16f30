"""Rotary position embedding (Su et al., 2021) in the half-split layout of Mixtral and Llama."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "#batch seq"],
    *,
    theta: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair (x[i], x[i + head_dim/2]) by position / theta^(2i / head_dim) radians.

    - `x`: query or key heads; `head_dim` is even.
    - `positions`: the place of each token in its document; one row may serve the whole batch.
    - `theta`: base of the frequencies, `ModelConfig.rope_theta`.

    Sine and cosine are computed in float32 and cast to the dtype of `x`.
    """
    half = x.shape[-1] // 2
    timescale = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) / timescale
    sine, cosine = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
