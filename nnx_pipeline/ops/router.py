"""Which experts a token goes to, with which weights, and how evenly the experts are used."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route(
    logits: Float[Array, "*batch experts"], num_experts_per_token: int
) -> tuple[Float[Array, "*batch chosen"], Int[Array, "*batch chosen"]]:
    """Per token the softmax of its k largest logits (in float32, cast back), and whose they are."""
    top, experts = jax.lax.top_k(logits, num_experts_per_token)
    weights = jax.nn.softmax(top.astype(jnp.float32), axis=-1)
    return weights.astype(logits.dtype), experts


def combine_weights(
    weights: Float[Array, "*batch chosen"], experts: Int[Array, "*batch chosen"], num_experts: int
) -> Float[Array, "*batch experts"]:
    """The weight of every expert for every token, 0 where it was not chosen."""
    chosen = jax.nn.one_hot(experts, num_experts, dtype=weights.dtype)
    return jnp.sum(weights[..., None] * chosen, axis=-2)


class Usage(NamedTuple):
    """How a router used its experts; means over the tokens of each sequence, or of several."""

    chosen: Float[Array, "*sequences experts"]  # choices of the expert per token
    probability: Float[Array, "*sequences experts"]


def expert_usage(
    logits: Float[Array, "batch seq experts"], experts: Int[Array, "batch seq chosen"]
) -> Usage:
    """What the load-balance loss is made of, in float32, sequence by sequence.

    The mean over the sequences of a microbatch is the usage of that microbatch.
    """
    num_experts = logits.shape[-1]
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=-2)
    return Usage(jnp.mean(chosen, axis=1), jnp.mean(probability, axis=1))


def load_balance_loss(usage: Usage) -> Float[Array, "*microbatches"]:
    """experts · Σ_e (choices of e per token) · (mean probability of e), of a microbatch's usage.

    The auxiliary loss of Switch Transformer (Fedus et al., 2021, equation 4) for k choices: k when
    the experts are used evenly, more when not.
    """
    num_experts = usage.chosen.shape[-1]
    return num_experts * jnp.sum(usage.chosen * usage.probability, axis=-1)


def or_zero(balance: Float[Array, ""] | None) -> Float[Array, ""]:
    """The load-balance loss that a pipeline gives, 0 for layers without a router."""
    return jnp.zeros((), jnp.float32) if balance is None else balance
