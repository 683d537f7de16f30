"""Gradients that raise an error when asked for, in place of silently being zero."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.sharding.layout import is_explicit, place

Cotangent = Array | SymbolicZero  # of an output, in a backward rule with `symbolic_zeros`


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def no_gradient_to(message: str, tree: PyTree) -> PyTree:
    """`tree` unchanged; raises InputError(message) for a derivative with respect to it."""
    del message
    return tree


def _to_forward(message: str, tree: PyTree) -> tuple[PyTree, None]:
    return refuse_perturbed(message, tree), None


def _to_backward(message: str, _: None, cotangents: PyTree) -> PyTree:
    del message
    return (jax.tree.map(_nothing, cotangents, is_leaf=is_symbolic_zero),)


no_gradient_to.defvjp(_to_forward, _to_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def no_gradient_of(message: str, value: PyTree, differentiated: PyTree) -> PyTree:
    """`value` unchanged; raises InputError(message) for a derivative of it.

    `differentiated` are floating arrays that have a derivative wherever `value` may have one; their
    contents are not used. JAX calls the backward rule, which raises the error, only if some
    argument is differentiated, and `value` may be cut off by `stop_gradient`.
    """
    del message, differentiated
    return value


def _of_forward(message: str, value: PyTree, differentiated: PyTree) -> tuple[PyTree, PyTree]:
    del message
    primals = values_of((value, differentiated))
    return primals[0], primals


def _of_backward(message: str, saved: PyTree, cotangents: PyTree) -> PyTree:
    if not all(map(is_symbolic_zero, jax.tree.leaves(cotangents, is_leaf=is_symbolic_zero))):
        raise InputError(message)
    return jax.tree.map(_nothing, saved)


no_gradient_of.defvjp(_of_forward, _of_backward, symbolic_zeros=True)


def refuse_perturbed(message: str, primals: PyTree) -> PyTree:
    """Unwraps `primals`; raises InputError if a derivative with respect to one is asked for."""
    if any(jax.tree.leaves(perturbed(primals))):
        raise InputError(message)
    return values_of(primals)


def values_of(primals: PyTree) -> PyTree:
    """Unwraps the arguments of a forward rule of `jax.custom_vjp` with `symbolic_zeros`."""
    return jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=_is_primal)


def perturbed(primals: PyTree) -> PyTree:
    """Whether the gradient of each of these primals is asked for."""
    return jax.tree.map(lambda leaf: bool(leaf.perturbed), primals, is_leaf=_is_primal)


def _is_primal(leaf: object) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


def or_zeros(cotangent: Cotangent) -> Array:
    """The cotangent, with an array of zeros in the place of a symbolic zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval  # that of an array
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return place(zeros, aval.sharding.spec) if is_explicit() else zeros


def scaled(gradient: Array, cotangent: Array, dtype: jax.typing.DTypeLike | None = None) -> Array:
    """A gradient for a cotangent of 1 times the cotangent of a scalar, rounded once.

    The float32 cotangent may be out of the range of the gradient's dtype.
    """
    wide = gradient.dtype if jnp.finfo(gradient.dtype).bits > 32 else jnp.float32
    product = gradient.astype(wide) * cotangent.astype(wide)
    return product.astype(gradient.dtype if dtype is None else dtype)


def is_symbolic_zero(leaf: object) -> bool:
    return isinstance(leaf, SymbolicZero)


def _nothing(leaf: Array) -> Array | np.ndarray:
    """The zero cotangent of an array, which for integers has dtype float0."""
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return np.zeros(leaf.shape, jax.dtypes.float0)
