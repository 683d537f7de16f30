"""A soft cap on attention scores and on logits (Gemma 2, Gemma Team 2024, section 2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_cap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """cap · tanh(x / cap), computed in float32 and in the dtype of `x`.

    - `x`: scores or logits.
    - `cap`: the bound of the result, above 0.
    """
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def soft_cap_slope(capped: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """The derivative of `soft_cap` from its result, 1 - (capped / cap)², in float32.

    - `capped`: the result of `soft_cap`. Values beyond the cap, such as the score of a key that is
      masked, have the derivative 0.
    - `cap`: as of `soft_cap`.
    """
    return jnp.maximum(1 - jnp.square(capped.astype(jnp.float32) / cap), 0)
