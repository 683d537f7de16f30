"""A visit of all stages and its derivative, apart, so that a loop can store what lies between."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.stages import at_repeat, select_repeat


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Again:
    """Stands for an argument that the backward pass is given again and need not be kept."""

    index: int


def forward_keeping(function: Callable[..., Any], again: PyTree, x: PyTree) -> tuple[Any, PyTree]:
    """`function(again, x)`, and what its derivative needs of it beside `again`.

    What is kept is what the function's own `jax.checkpoint` decides; without one it is everything.
    It is a pytree of arrays, to be stored and handed to `backward_from` in another loop.
    """
    out, back = jax.vjp(function, again, x)
    places = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(again))}

    def store(leaf: Array) -> Array | _Again:
        return _Again(places[id(leaf)]) if id(leaf) in places else leaf

    return out, jax.tree.map(store, back)


def backward_from(kept: PyTree, again: PyTree, cotangents: PyTree) -> tuple[PyTree, PyTree]:
    """The cotangents of `again` and `x` of `forward_keeping`; None for integers."""
    leaves = jax.tree.leaves(again)

    def is_again(leaf: Any) -> bool:
        return isinstance(leaf, _Again)

    def restore(leaf: Array | _Again) -> Array:
        return leaves[leaf.index] if isinstance(leaf, _Again) else leaf

    back = jax.tree.map(restore, kept, is_leaf=is_again)
    return none_for_integers(back(cotangents))


def none_for_integers(cotangents: PyTree) -> PyTree:
    """What a derivative gives, with None where it gives an array of float0."""

    def one(leaf: Any) -> Array | None:
        return None if leaf.dtype == jax.dtypes.float0 else leaf

    return jax.tree.map(one, cotangents)


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def zero_gradients(tree: PyTree, like: PyTree, dtype: jax.typing.DTypeLike | None = None) -> PyTree:
    """Accumulators laid out as the arrays of `tree`; None for integers.

    They are in `dtype`, or without it in those of the arrays of `like`.
    """

    def one(leaf: Array, like: Array) -> Array | None:
        return jnp.zeros_like(leaf, dtype=dtype or like.dtype) if is_float(leaf) else None

    return jax.tree.map(one, tree, like)


def add_at_repeat(totals: PyTree, gradients: PyTree, repeat: Array) -> PyTree:
    """Adds each stage's `[stages, …]` to its own repeat of `[repeats, stages, …]`, in place."""
    leaves = jax.tree.leaves(totals)
    if not leaves or leaves[0].shape[0] == 1:
        return add(totals, jax.tree.map(lambda leaf: leaf[None], gradients))
    return at_repeat(totals, repeat, add(select_repeat(totals, repeat), gradients))


def add(totals: PyTree, gradients: PyTree) -> PyTree:
    """Σ in the dtype of the accumulators."""
    return jax.tree.map(
        lambda total, gradient: total + gradient.astype(total.dtype), totals, gradients
    )


def as_cotangents(gradients: PyTree, primals: PyTree) -> PyTree:
    """Accumulators as `jax.custom_vjp` wants them: the primal's dtype, float0 for integers."""

    def one(primal: Array, gradient: Array | None) -> Array | np.ndarray:
        if gradient is None:
            return np.zeros(primal.shape, jax.dtypes.float0)
        return gradient.astype(primal.dtype)

    return jax.tree.map(one, primals, gradients)
