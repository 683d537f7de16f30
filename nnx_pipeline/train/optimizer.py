"""AdamW as MaxText sets it up."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from nnx_pipeline.config import TrainConfig


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clips by the global norm, then AdamW with decay on every parameter."""
    return optax.chain(
        clip_by_global_norm(config.clip_norm),
        optax.adamw(
            config.learning_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        ),
    )


def global_norm(gradients: PyTree) -> Array:
    """The length of all arrays as one vector, summed in float32 whatever their dtypes are."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in leaves), jnp.float32(0)))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scales gradients so that `global_norm` of them is `largest` at most; keeps their dtypes.

    `optax.clip_by_global_norm` is the same in float32. In bfloat16 it adds the squares up, and
    rounds the norm, in bfloat16, which is percents off for a model.
    """

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        norm = global_norm(updates)

        def clipped(leaf: Array) -> Array:
            scaled = (leaf.astype(jnp.float32) / norm * largest).astype(leaf.dtype)
            return jnp.where(norm < largest, leaf, scaled)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
