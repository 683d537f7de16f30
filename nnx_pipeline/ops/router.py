"""Which experts a token goes to, with which weights, and how evenly the experts are used."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.sharding import P, place


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
    """How a router used its experts; means over the tokens of a group of sequences."""

    chosen: Float[Array, "*layers groups experts"]  # choices of the expert per token
    probability: Float[Array, "*layers groups experts"]


def expert_usage(
    logits: Float[Array, "batch seq experts"],
    experts: Int[Array, "batch seq chosen"],
    groups: int,
) -> Usage:
    """What the load-balance loss is made of, in float32.

    A group is `batch / groups` consecutive sequences: a microbatch, so that the sequential model
    computes per microbatch what the pipelined one does. Where the sequences of a microbatch are in
    several places, the mean of their usages is its usage.
    """
    batch, _, num_experts = logits.shape
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=-2)

    def per_group(x: Array) -> Array:
        per_sequence = replicate(jnp.mean(x, axis=1))
        return jnp.mean(per_sequence.reshape(groups, batch // groups, num_experts), axis=1)

    return Usage(per_group(chosen), per_group(probability))


def load_balance_loss(usage: Usage) -> Float[Array, "*layers"]:
    """experts · Σ_e (choices of e per token) · (mean probability of e), averaged over groups.

    The auxiliary loss of Switch Transformer (Fedus et al., 2021, equation 4) for k choices: k when
    the experts are used evenly, more when not.
    """
    num_experts = usage.chosen.shape[-1]
    return num_experts * jnp.mean(jnp.sum(usage.chosen * usage.probability, axis=-1), axis=-1)


def total_load_balance(usage: Usage | None) -> Float[Array, ""]:
    """The load-balance loss of several layers, summed; 0 for layers without a router."""
    return jnp.zeros((), jnp.float32) if usage is None else jnp.sum(load_balance_loss(usage))


def replicate(x: Array) -> Array:
    """A small array, whole on every device of the mesh (of a stage, inside the pipeline)."""
    return place(x, P(*[None] * x.ndim))
