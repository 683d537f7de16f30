"""Weights as the ticks see them: stored, or gathered once and held for many ticks.

A gathered weight is the same on every device along the axes that it was gathered over, and its
gradient is not: each device adds up that of its own sequences. Both are written as arrays with an
axis of copies, `[repeats, stages, copies, …]`, one copy per device along these mesh axes. So
nothing is sent while the gradient adds up, and one reduce-scatter brings it back to where it is
stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.sharding import P, mesh_sizes

GatherName = Literal["use", "step", "prefetch"]


@dataclass(frozen=True)
class Lending:
    """How the loop holds the weights of the stages.

    specs: where each array of the parameters is stored, `[repeats, stages, …]`, in tree order.
    copies: mesh axes along which every device has a copy of its own and works with it on its own
        sequences. gathered: those of them that weights are stored apart on; an axis of an array
        that is spread over one of them is gathered whole.
    dtype: of the copies, None for that of the parameters; a cast before the gather.
    ahead: repeat by repeat, the next one while the present one is in use, in the place of all at
        once.
    lent: the first axes of `copies` if the parameters come in copies along them (see `Owners`);
        `specs` then have that axis, and its gradients are left apart.
    """

    specs: tuple[P, ...] = ()
    copies: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    dtype: jax.typing.DTypeLike | None = None
    ahead: bool = False
    lent: tuple[str, ...] = ()

    def lend(self, params: PyTree) -> PyTree:
        """`[repeats, stages, …]` as stored to `[repeats, stages, copies, …]`.

        Without axes to copy along they stay as they are.
        """
        if self.copies == self.lent:
            return params

        def one(leaf: Array, spec: P) -> Array:
            if self.dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
                leaf = leaf.astype(self.dtype)
            for axis, names in self._gathered_axes(spec):
                leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
            return leaf if self.lent else jnp.expand_dims(leaf, 2)

        return self._on_each_device(one, params, params, self.specs, self._lent_specs)

    def give_back(self, gradients: PyTree, params: PyTree) -> PyTree:
        """Gradients of copies to gradients of what is stored: summed, each device its part.

        params: what was lent, for the places of its arrays; an integer has the gradient None.
        The sum is made in the dtype of the gradients, by a reduce-scatter over the axes that the
        weight was gathered over and an all-reduce over the other axes of the copies.
        """
        if self.copies == self.lent:
            return gradients

        def one(leaf: Array, spec: P) -> Array:
            leaf = leaf if self.lent else jnp.squeeze(leaf, 2)
            scattered = [*self.lent]
            for axis, names in self._gathered_axes(spec):
                for name in names:
                    leaf = _scatter(leaf, axis, name, summed=name in self.copies)
                    scattered.append(name)
            rest = tuple(name for name in self.copies if name not in scattered)
            return jax.lax.psum(leaf, rest) if rest else leaf

        return self._on_each_device(one, gradients, params, self._lent_specs, self.specs)

    def _gathered_axes(self, spec: P) -> list[tuple[int, tuple[str, ...]]]:
        found = []
        for axis, entry in enumerate(spec):
            names = (entry,) if isinstance(entry, str) else tuple(entry or ())
            if set(names) & set(self.gathered):
                found.append((axis, names))
        return found

    @property
    def _lent_specs(self) -> tuple[P, ...]:
        """Where the copies are."""
        specs = []
        for spec in self.specs:
            entries = list(spec)
            for axis, _ in self._gathered_axes(spec):
                entries[axis] = None
            specs.append(P(*entries[:2], self.copies, *entries[3 if self.lent else 2 :]))
        return tuple(specs)

    def _on_each_device(
        self,
        function: Callable[[Array, P], Array],
        tree: PyTree,
        params: PyTree,
        in_specs: tuple[P, ...],
        out_specs: tuple[P, ...],
    ) -> PyTree:
        """The function on every array and its stored spec; None, for no gradient, stays None."""
        treedef: Any = jax.tree.structure(params)
        leaves = treedef.flatten_up_to(tree)
        there = [index for index, leaf in enumerate(leaves) if leaf is not None]

        def local(*arrays: Array) -> tuple[Array, ...]:
            return tuple(map(function, arrays, [self.specs[index] for index in there]))

        mapped = jax.shard_map(
            local,
            in_specs=tuple(in_specs[index] for index in there),
            out_specs=tuple(out_specs[index] for index in there),
            check_vma=False,
        )
        for index, new in zip(there, mapped(*(leaves[index] for index in there)), strict=True):
            leaves[index] = new
        return jax.tree.unflatten(treedef, leaves)


def _scatter(x: Array, axis: int, name: str, *, summed: bool) -> Array:
    """This device's part of an array axis, summed over the mesh axis if it differs along it."""
    if summed:
        return jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    size = x.shape[axis] // mesh_sizes()[name]
    start = jax.lax.axis_index(name) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


AS_STORED = Lending()
