"""Stacked layers in their order, for a batch that goes through all of them as a whole."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.stack import Stack


def in_order(tree: PyTree, stack: Stack) -> PyTree:
    """`[repeats, 1, layers per stage, …]` as `[layers, …]`: one stage has all of them.

    - `stack`: which layer is where. Padding is left out, but for that of the last layers of some
      kinds where the last layer is of another.
    """

    def one(leaf: Array) -> Array:
        return leaf[0, 0] if leaf.shape[0] == 1 else leaf.reshape(-1, *leaf.shape[3:])

    tree = jax.tree.map(one, tree)
    if not stack.padding:
        return tree
    count = -(-stack.layers // stack.kinds)
    return jax.tree.map(lambda leaf: leaf[:count], tree)


def in_place(stacked: Array, new: Array) -> Array:
    """A stack in which the first layers have new values; the rest is padding.

    - `stacked`: `[repeats, 1, layers per stage, …]`.
    - `new`: `[layers, …]`, as `in_order` gives them.
    """
    rest = stacked.reshape(-1, *stacked.shape[3:])[new.shape[0] :]
    everything = jnp.concatenate([new, rest]) if rest.shape[0] else new
    return everything.reshape(stacked.shape)
