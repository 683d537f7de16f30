"""The router: which experts each token goes to, with which weights, and how evenly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def route(
    logits: Float[Array, "*batch experts"], num_experts_per_token: int
) -> tuple[Float[Array, "*batch chosen"], Int[Array, "*batch chosen"]]:
    """The weights of the experts chosen for each token, and their numbers.

    - `logits`: the router's output for every expert.
    - `num_experts_per_token`: how many experts are chosen for each token.

    A token goes to the `num_experts_per_token` experts with its largest logits. The weights are the
    softmax of these logits, computed in float32 and cast back to the dtype of the logits.
    """
    top, experts = jax.lax.top_k(logits, num_experts_per_token)
    weights = jax.nn.softmax(top.astype(jnp.float32), axis=-1)
    return weights.astype(logits.dtype), experts


def combine_weights(
    weights: Float[Array, "*batch chosen"], experts: Int[Array, "*batch chosen"], num_experts: int
) -> Float[Array, "*batch experts"]:
    """The weight of every expert for every token, 0 where it was not chosen.

    - `weights`, `experts`: of the chosen experts, from `route`.
    - `num_experts`: how many experts there are, the last axis of the result.
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=weights.dtype)
    return jnp.sum(weights[..., None] * chosen, axis=-2)


class Usage(NamedTuple):
    """How a router used its experts, as means over the tokens of one or several sequences.

    - `chosen`: how often each expert was chosen per token; sums to the number of choices.
    - `probability`: the mean probability of each expert, from a softmax over all of them.
    """

    chosen: Float[Array, "*sequences experts"]
    probability: Float[Array, "*sequences experts"]


def expert_usage(
    logits: Float[Array, "batch seq experts"], experts: Int[Array, "batch seq chosen"]
) -> Usage:
    """The usage of the experts by each sequence, in float32; the load-balance loss is made of it.

    - `logits`: the router's output for every expert, in any floating dtype.
    - `experts`: the numbers of the chosen experts, from `route`.

    The mean over the sequences of a microbatch is the usage of that microbatch.
    """
    num_experts = logits.shape[-1]
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=-2)
    return Usage(jnp.mean(chosen, axis=1), jnp.mean(probability, axis=1))


def load_balance_loss(usage: Usage) -> Float[Array, "*microbatches"]:
    """experts · Σ_e (choices of e per token) · (mean probability of e).

    - `usage`: of one or several microbatches.

    This is the auxiliary loss of Switch Transformer (Fedus et al., 2021, equation 4), extended to k
    choices per token. It is k when the experts are used evenly, and usually more when they are not.
    """
    num_experts = usage.chosen.shape[-1]
    return num_experts * jnp.sum(usage.chosen * usage.probability, axis=-1)


def or_zero(balance: Float[Array, ""] | None) -> Float[Array, ""]:
    """The load-balance loss that a pipeline returns, or 0 if its layers have no router."""
    return jnp.zeros((), jnp.float32) if balance is None else balance
