"""The forward and the backward pass of a visit as two functions, with residuals as arrays."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.sharding.layout import is_explicit, place


@jax.tree_util.register_static
@dataclass(frozen=True)
class _ResupplyArg:
    """A placeholder for an argument that the backward pass gets again, so that it is not saved."""

    index: int


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Types:
    """Shapes, dtypes and shardings of the leaves of an argument that is not saved."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    tree: PyTree


def forward_keeping(function: Function, again: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
    """The result of `function(again, x)`, and the residuals of its derivative as arrays."""
    # Its own `jax.checkpoint` decides what they are. Arrays of `again` are not saved:
    # `backward_from`, which may run in another loop, is given them again.
    out, linear = jax.linearize(function, again, x)
    # A residual that is an array of `again` itself is found by its identity.
    places = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(again))}
    stored = jax.tree.map(
        lambda leaf: _ResupplyArg(places[id(leaf)]) if id(leaf) in places else leaf, linear
    )
    types, tree = jax.tree.flatten(jax.eval_shape(lambda x: x, x))
    return out, (stored, _Types(tuple(types), tree))


def backward_from(residuals: PyTree, again: PyTree, cotangents: PyTree) -> tuple[PyTree, PyTree]:
    """The cotangents of `again` and `x` of a call of `forward_keeping`; None for integers."""
    # A cotangent that is None is not asked for, and is left out: with zeros instead, an infinite
    # derivative would give 0 times infinity, which is NaN.
    leaves = jax.tree.leaves(again)

    def restore(leaf: Array | _ResupplyArg) -> Array:
        return leaves[leaf.index] if isinstance(leaf, _ResupplyArg) else leaf

    linear, _ = residuals
    linear = jax.tree.map(restore, linear, is_leaf=lambda leaf: isinstance(leaf, _ResupplyArg))
    primals, tree = jax.tree.flatten((again, argument_of(residuals)))
    floats = [index for index, leaf in enumerate(primals) if is_float(leaf)]
    needed = _with_nones(cotangents)

    # Linear in the floating arguments alone, and only the results whose gradient is asked for:
    # integers have tangents of dtype float0, which `linear_transpose` does not accept.
    def needed_tangents(*d_floats: Array) -> list[Array | None]:
        tangents = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in primals]
        for index, tangent in zip(floats, d_floats, strict=True):
            tangents[index] = tangent  # type: ignore[call-overload]
        d_outs = _with_nones(linear(*jax.tree.unflatten(tree, tangents)))
        return [leaf for leaf, d_out in zip(d_outs, needed, strict=True) if d_out is not None]

    back = jax.linear_transpose(needed_tangents, *(primals[index] for index in floats))
    results: list[Array | None] = [None] * len(primals)
    d_floats = back([d_out for d_out in needed if d_out is not None])
    for index, cotangent in zip(floats, d_floats, strict=True):
        results[index] = cotangent
    d_again, d_x = jax.tree.unflatten(tree, results)
    return d_again, d_x


def argument_of(residuals: PyTree) -> PyTree:
    """The types of the argument `x` of the call of `forward_keeping` that saved these residuals."""
    _, x = residuals
    return jax.tree.unflatten(x.tree, x.leaves)


def none_for_integers(cotangents: PyTree) -> PyTree:
    """The cotangents with None in the place of float0 arrays, which stand for integers."""
    return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, cotangents)


def _with_nones(tree: PyTree) -> list[Array | None]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def is_float(leaf: Array) -> bool:
    """Whether an array has a gradient: floating or complex."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def zero_gradients(tree: PyTree, like: PyTree, dtype: jax.typing.DTypeLike | None = None) -> PyTree:
    """Accumulators like `tree`, of `dtype` or of the dtypes of `like`; None for integers."""

    def zeros_of(leaf: Array, like: Array) -> Array | None:
        return jnp.zeros_like(leaf, dtype=dtype or like.dtype) if is_float(leaf) else None

    return jax.tree.map(zeros_of, tree, like)


def add(totals: PyTree, gradients: PyTree) -> PyTree:
    """Adds gradients in the dtype of the totals; where a total is None the gradient is dropped."""
    return jax.tree.map(
        lambda total, new: None if total is None else total + new.astype(total.dtype),
        totals,
        gradients,
        is_leaf=lambda leaf: leaf is None,
    )


def only(needed: PyTree, totals: PyTree) -> PyTree:
    """The totals of what has a gradient asked for, and None for everything else."""
    return jax.tree.map(lambda yes, total: total if yes else None, needed, totals)


def as_cotangents(gradients: PyTree, primals: PyTree) -> PyTree:
    """As `jax.custom_vjp` requires them: in the primal's dtype, float0 for integers."""
    return jax.tree.map(
        lambda primal, new: _none_of(primal) if new is None else new.astype(primal.dtype),
        primals,
        gradients,
    )


def no_gradient(primals: PyTree) -> PyTree:
    return jax.tree.map(_none_of, primals)


def _none_of(primal: Array) -> Array | np.ndarray:
    if not is_float(primal):
        return np.zeros(primal.shape, jax.dtypes.float0)
    # A jitted function may close over the primal, and `zeros_like` would forget its sharding.
    zeros = jnp.zeros(primal.shape, primal.dtype)
    return place(zeros, jax.typeof(primal).sharding.spec) if is_explicit() else zeros
