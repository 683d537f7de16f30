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


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Types:
    """Shapes, dtypes and shardings of the leaves of an argument that is not kept."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any


def forward_keeping(function: Callable[..., Any], again: PyTree, x: PyTree) -> tuple[Any, PyTree]:
    """`function(again, x)`, and what its derivative needs of it beside `again`.

    What is kept is what the function's own `jax.checkpoint` decides; without one it is everything.
    It is a pytree of arrays, to be stored and handed to `backward_from` in another loop.
    """
    out, linear = jax.linearize(function, again, x)
    places = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(again))}

    def store(leaf: Array) -> Array | _Again:
        return _Again(places[id(leaf)]) if id(leaf) in places else leaf

    types, tree = jax.tree.flatten(jax.eval_shape(lambda x: x, x))
    return out, (jax.tree.map(store, linear), _Types(tuple(types), tree))


def backward_from(kept: PyTree, again: PyTree, cotangents: PyTree) -> tuple[PyTree, PyTree]:
    """The cotangents of `again` and `x` of `forward_keeping`; None for integers.

    cotangents: of its result, None for a leaf that nobody asks about. That leaf has no part in the
    derivative then: zeros would go through it, and 0 times an infinite one is no number.
    """
    leaves = jax.tree.leaves(again)

    def restore(leaf: Array | _Again) -> Array:
        return leaves[leaf.index] if isinstance(leaf, _Again) else leaf

    linear, x = kept
    linear = jax.tree.map(restore, linear, is_leaf=lambda leaf: isinstance(leaf, _Again))
    primals, tree = jax.tree.flatten((again, jax.tree.unflatten(x.tree, x.leaves)))
    floats = [index for index, leaf in enumerate(primals) if is_float(leaf)]
    asked = _with_nones(cotangents)

    def tangents_asked(*of_floats: Array) -> list[Array]:
        tangents = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in primals]
        for index, tangent in zip(floats, of_floats, strict=True):
            tangents[index] = tangent  # type: ignore[call-overload]
        given = _with_nones(linear(*jax.tree.unflatten(tree, tangents)))
        return [leaf for leaf, of in zip(given, asked, strict=True) if of is not None]

    back = jax.linear_transpose(tangents_asked, *(primals[index] for index in floats))
    found: list[Array | None] = [None] * len(primals)
    of_floats = back([of for of in asked if of is not None])
    for index, cotangent in zip(floats, of_floats, strict=True):
        found[index] = cotangent
    return jax.tree.unflatten(tree, found)


def none_for_integers(cotangents: PyTree) -> PyTree:
    """What a derivative gives, with None where it gives an array of float0."""

    def one(leaf: Any) -> Array | None:
        return None if leaf.dtype == jax.dtypes.float0 else leaf

    return jax.tree.map(one, cotangents)


def _with_nones(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


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
