"""Gradients of the layers of a stage, added to their accumulators layer by layer.

The transpose of a scan over layers stacks the gradients of all of them, and only then can they be
added to what earlier visits gave: for a moment a device holds the gradients of a whole visit beside
the accumulators. So the accumulators go through the scan as values that no layer reads. `_attach`
gives a layer its weights, and its derivative adds their gradient to the accumulators in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.stage._repeats import ByRepeat

_Sums = list[list[Array | None]]  # of each repeat those of the leaves of a stack, `[layers, …]`


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class WithSums:
    """Weights of a visit, and the accumulators of their gradients.

    A stage function returns the accumulators as they are, last. If their cotangent is what earlier
    visits added up, their cotangent before the function is that and the gradient of this visit.
    The weights then have no gradient of their own.

    - `weights`: any pytree of `[stages, …]`, within the stage function of `[…]`.
    - `sums`: a pytree like it for each repeat, None for what has no gradient.
    - `repeat`: the repeat that each stage is at, int32 `[stages]`.
    """

    weights: PyTree
    sums: ByRepeat
    repeat: Array

    def of_kinds(self) -> list[_Sums]:
        """The accumulators for the stack of each kind of layer, of which each is a pair."""
        return [
            [_leaves_like(layer, tree[kind][0]) for tree in self.sums.trees]
            for kind, (layer, _) in enumerate(self.weights)
        ]

    def replaced(self, of_kinds: Sequence[_Sums]) -> ByRepeat:
        """The inverse of `of_kinds`."""

        def tree(repeat: int) -> PyTree:
            pairs = zip(self.weights, of_kinds, strict=True)
            return type(self.weights)(
                (jax.tree.unflatten(jax.tree.structure(layer), sums[repeat]), None)
                for (layer, _), sums in pairs
            )

        return ByRepeat(tuple(map(tree, range(len(self.sums.trees)))))


def _leaves_like(layer: PyTree, sums: PyTree) -> list[Array | None]:
    """The accumulators of the leaves of a layer, in their order."""
    tree: PyTreeDef = jax.tree.structure(layer)
    leaves: list[Array | None] = tree.flatten_up_to(sums)
    return leaves


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class ReadWithSums:
    """Parameters as a loop reads them, without a gradient, and the accumulators of their gradients.

    - `split`: as from `split_to_read`.
    - `sums`: as from `split_repeats`.
    """

    split: PyTree
    sums: ByRepeat

    @classmethod
    def of(cls, split: PyTree, sums: ByRepeat) -> ReadWithSums:
        return cls(jax.lax.stop_gradient(split), sums)


def with_sums(split: PyTree, sums: PyTree) -> PyTree:
    """Parameters as a loop reads them with other accumulators, if they have any."""
    return dataclasses.replace(split, sums=sums) if isinstance(split, ReadWithSums) else split


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layer", "at"], meta_fields=["kind"]
)
@dataclass(frozen=True)
class _Placed:
    """A layer, or a stack of them, with its place in the stack of its kind."""

    layer: Any  # a `NumberedLayer`
    at: Array
    kind: int


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Carried:
    """What a scan over layers passes on."""

    x: PyTree
    sums: list[_Sums]


def placed(layers: Sequence[PyTree]) -> tuple[_Placed, ...]:
    """The stack of each kind, with the places of its layers."""
    number = jax.tree.leaves(layers[0])[0].shape[0]
    places = jnp.arange(number, dtype=jnp.int32)
    return tuple(_Placed(layer, places, kind) for kind, layer in enumerate(layers))


def adding(apply: Callable[..., Any], repeat: Array) -> Callable[..., Any]:
    """A function of one layer, for `Carried` and `placed`, that adds the layer's gradient."""

    def apply_adding(carried: Carried, layer: _Placed) -> tuple[Carried, PyTree]:
        leaves, tree = jax.tree.flatten(layer.layer.layer)
        sums = [*carried.sums]
        leaves, sums[layer.kind] = _attach(leaves, sums[layer.kind], layer.at, repeat)
        x, result = apply(carried.x, layer.layer._replace(layer=jax.tree.unflatten(tree, leaves)))
        return Carried(x, sums), result

    return apply_adding


@jax.custom_vjp
def _attach(weights: list[Array], sums: _Sums, at: Array, repeat: Array) -> PyTree:
    """The weights of one layer, and all accumulators as they are."""
    return weights, sums


def _forward(weights: list[Array], sums: _Sums, at: Array, repeat: Array) -> PyTree:
    return (weights, sums), (at, repeat)


def _backward(place: tuple[Array, Array], cotangents: PyTree) -> tuple[None, _Sums, None, None]:
    (at, repeat), (d_weights, d_sums) = place, cotangents

    def added(total: Array | None, new: Array, number: int) -> Array | None:
        if total is None:
            return None
        new = new.astype(total.dtype)
        if len(d_sums) > 1:
            new = jnp.where(repeat == number, new, jnp.zeros_like(new))
        now = jax.lax.dynamic_index_in_dim(total, at, keepdims=False)
        after: Array = jax.lax.dynamic_update_index_in_dim(total, now + new, at, axis=0)
        return after

    new_sums = [
        [added(total, new, number) for total, new in zip(totals, d_weights, strict=True)]
        for number, totals in enumerate(d_sums)
    ]
    return None, new_sums, None, None


_attach.defvjp(_forward, _backward)
