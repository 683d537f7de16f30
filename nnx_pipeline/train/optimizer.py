"""The optimizer: AdamW with the same setup as in MaxText."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from nnx_pipeline.config.config import TrainConfig


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, followed by AdamW with weight decay on every parameter.

    The state is the same with and without clipping.
    """
    largest = config.clip_norm
    return optax.chain(
        optax.identity() if largest is None else clip_by_global_norm(largest),
        optax.adamw(
            config.learning_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        ),
    )


def global_norm(gradients: PyTree) -> Array:
    """The Euclidean norm of all arrays as one vector, summed in float32 whatever their dtypes."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in leaves), jnp.float32(0)))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scales gradients down so that their `global_norm` is at most `largest`; keeps their dtypes.

    For bfloat16 `optax.clip_by_global_norm` rounds the norm, to an error of several percent.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        norm = global_norm(updates)

        def clipped(leaf: Array) -> Array:
            scaled = (leaf.astype(jnp.float32) / norm * largest).astype(leaf.dtype)
            return jnp.where(norm < largest, leaf, scaled)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
