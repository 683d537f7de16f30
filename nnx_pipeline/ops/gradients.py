"""Gradients that are refused: where one would silently be zero, asking for it is an error."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.sharding import is_explicit, place


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def no_gradient_to(message: str, tree: PyTree) -> PyTree:
    """The tree as it is; a derivative with respect to any array of it is an InputError.

    message: what the error says. tree: any arrays.
    """
    del message
    return tree


def _to_forward(message: str, tree: PyTree) -> tuple[PyTree, None]:
    return refuse_perturbed(message, tree), None


def _to_backward(message: str, _: None, cotangents: PyTree) -> PyTree:
    del message
    return (jax.tree.map(_nothing, cotangents, is_leaf=is_symbolic_zero),)


no_gradient_to.defvjp(_to_forward, _to_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def no_gradient_of(message: str, value: PyTree, beside: PyTree) -> PyTree:
    """The value as it is; a derivative of any array of it is an InputError.

    message: what the error says. value: any arrays. beside: floating arrays whose derivative is
    asked for wherever that of the value might be; they are not read.
    """
    del message, beside
    return value


def _of_forward(message: str, value: PyTree, beside: PyTree) -> tuple[PyTree, tuple[Any, Any]]:
    del message
    primals = values_of((value, beside))
    return primals[0], primals


def _of_backward(message: str, saved: tuple[Any, Any], cotangents: PyTree) -> tuple[Any, Any]:
    if not all(map(is_symbolic_zero, jax.tree.leaves(cotangents, is_leaf=is_symbolic_zero))):
        raise InputError(message)
    return jax.tree.map(_nothing, saved)


no_gradient_of.defvjp(_of_forward, _of_backward, symbolic_zeros=True)


def refuse_perturbed(message: str, primals: PyTree) -> PyTree:
    """The values of what a `jax.custom_vjp` with `symbolic_zeros` gets in its forward rule.

    Raises InputError with that message if a derivative with respect to one of them is asked for.
    """
    if any(leaf.perturbed for leaf in jax.tree.leaves(primals, is_leaf=is_primal)):
        raise InputError(message)
    return values_of(primals)


def values_of(primals: PyTree) -> PyTree:
    """The arrays of what such a forward rule gets."""
    return jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=is_primal)


def or_zeros(cotangent: Any) -> Array:
    """The cotangent as an array, where such a backward rule may be given none."""
    if not is_symbolic_zero(cotangent):
        return cotangent
    zeros = jnp.zeros(cotangent.aval.shape, cotangent.aval.dtype)
    return place(zeros, cotangent.aval.sharding.spec) if is_explicit() else zeros


def is_primal(leaf: Any) -> bool:
    """Whether a tree traversal is at an argument of such a forward rule."""
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


def is_symbolic_zero(leaf: Any) -> bool:
    """Whether a cotangent in such a backward rule is one that nobody asked for."""
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


def _nothing(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return np.zeros(leaf.shape, jax.dtypes.float0)
