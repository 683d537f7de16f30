"""The option `fsdp_gather`: weights as they are stored, or gathered once and used in many ticks.

Gathered weights and their gradients have an axis of copies, `[repeats, stages, copies, …]`, one
copy per device along the mesh axes, which adds up the gradients of its own sequences. After each
visit, or with `prefetch` after a whole repeat, a reduce-scatter brings the gradient back to where
the weight is stored. Over the other mesh axes of copies, such as `data`, it is summed once, after
all visits.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.mesh import entry_axes
from nnx_pipeline.pipeline.stage._vjp import is_float, zero_gradients
from nnx_pipeline.sharding.layout import P, mesh_sizes, place


@dataclass(frozen=True)
class FsdpGather:
    """Which weights the loop gathers before the ticks that use them; without `copies` it is none.

    - `specs`: the partition spec of each stored parameter `[repeats, stages, …]`, in tree order.
    - `copies`: mesh axes along which each device has a copy of the weights and applies it to its
      own sequences.
    - `over`: the subset of `copies` over which weights are sharded. An array axis that is sharded
      over any of them is gathered whole.
    - `dtype`: the dtype of the copies, to which weights are cast before they are gathered; None for
      that of the parameters.
    - `prefetch`: whether to gather repeat by repeat, each while the one before it is in use,
      instead of all repeats at once.
    """

    specs: tuple[P, ...] = ()
    copies: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    dtype: jax.typing.DTypeLike | None = None
    prefetch: bool = False

    def of_repeats(self, repeats: int) -> "FsdpGather":
        """With one repeat there is none to prefetch."""
        return dataclasses.replace(self, prefetch=self.prefetch and repeats > 1)

    def gather(self, params: PyTree) -> PyTree:
        """Stored weights `[repeats, stages, …]` to `[repeats, stages, copies, …]`."""
        if not self.copies:
            return params

        def gathered(leaf: Array, spec: P) -> Array:
            if self.dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
                leaf = leaf.astype(self.dtype)
            for axis, names in self._gathered_axes(spec):
                leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
            return jnp.expand_dims(leaf, 2)

        return self._on_each_device(gathered, params, params, self.specs, self._copy_specs)

    def zeros(self, params: PyTree, dtype: jax.typing.DTypeLike | None) -> PyTree:
        """Accumulators for what `of_visit` returns; None for an array of integers."""
        if not self.copies:
            return zero_gradients(params, params, dtype)
        leaves, tree = jax.tree.flatten(params)

        def zeros_of(leaf: Array, stored: P, spec: P) -> Array | None:
            if not is_float(leaf):
                return None
            copies = math.prod(mesh_sizes()[name] for name in self._summed_later(stored))
            shape = (*leaf.shape[:2], copies, *leaf.shape[2:])
            return place(jnp.zeros(shape, dtype or leaf.dtype), spec)

        return jax.tree.unflatten(tree, map(zeros_of, leaves, self.specs, self._total_specs))

    def of_visit(self, gradients: PyTree, params: PyTree) -> PyTree:
        """The gradients of one visit, `[stages, copies, …]`, as the accumulators are sharded."""
        # Each is summed over the mesh axes that the weight was gathered over, by a reduce-scatter
        # in its own dtype, so that no device holds full gradients of more than one visit.
        if not self.copies:
            return gradients

        def scattered(leaf: Array, spec: P) -> Array:
            leaf = jnp.squeeze(leaf, 1)
            for axis, names in self._gathered_axes(spec):
                leaf = self._scattered(leaf, axis - 1, names)
            return jnp.expand_dims(leaf, 1)

        of_copies, of_totals = (
            tuple(P(*spec[1:]) for spec in specs) for specs in (self._copy_specs, self._total_specs)
        )
        return self._on_each_device(scattered, gradients, params, of_copies, of_totals)

    def scatter_gradients(self, gradients: PyTree, params: PyTree) -> PyTree:
        """Sums accumulated gradients in their dtype, sharded as the weights are stored."""
        # By an all-reduce over the axes of `copies`, and if repeats were prefetched, by a
        # reduce-scatter over the mesh axes of the gather.
        if not self.copies:
            return gradients

        def scattered(leaf: Array, spec: P) -> Array:
            leaf = jnp.squeeze(leaf, 2)
            for axis, names in self._gathered_axes(spec) if self.prefetch else ():
                leaf = self._scattered(leaf, axis, names)
            rest = self._summed_later(spec)
            return jax.lax.psum(leaf, rest) if rest else leaf

        now = self._copy_specs if self.prefetch else self._total_specs
        return self._on_each_device(scattered, gradients, params, now, self.specs)

    def _scattered(self, leaf: Array, axis: int, names: tuple[str, ...]) -> Array:
        for name in names:
            # A mesh axis that was gathered but has no copies has the same gradient on each of its
            # devices, of which each takes its shard.
            leaf = _scatter(leaf, axis, name, summed=name in self.copies)
        return leaf

    def _summed_later(self, spec: P) -> tuple[str, ...]:
        """The axes of `copies` over which no reduce-scatter sums the gradient of a weight."""
        scattered = {name for _, names in self._gathered_axes(spec) for name in names}
        return tuple(name for name in self.copies if name not in scattered)

    @property
    def _total_specs(self) -> tuple[P, ...]:
        return tuple(P(*spec[:2], self._summed_later(spec), *spec[2:]) for spec in self.specs)

    def _gathered_axes(self, spec: P) -> list[tuple[int, tuple[str, ...]]]:
        each = enumerate(map(entry_axes, spec))
        return [(axis, names) for axis, names in each if set(names) & set(self.over)]

    @property
    def _copy_specs(self) -> tuple[P, ...]:
        specs = []
        for spec in self.specs:
            entries = list(spec)
            for axis, _ in self._gathered_axes(spec):
                entries[axis] = None
            specs.append(P(*entries[:2], self.copies, *entries[2:]))
        return tuple(specs)

    def _on_each_device(
        self,
        function: Callable[[Array, P], Array],
        tree: PyTree,
        params: PyTree,
        in_specs: tuple[P, ...],
        out_specs: tuple[P, ...],
    ) -> PyTree:
        """Calls `function(array, stored spec)` everywhere; None in the tree stays None."""
        treedef: PyTreeDef = jax.tree.structure(params)
        leaves = treedef.flatten_up_to(tree)
        there = [index for index, leaf in enumerate(leaves) if leaf is not None]
        if not there:
            return tree

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
    """This device's shard of an array axis; `summed` if x differs between the devices."""
    if summed:
        shard: Array = jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
        return shard
    size = x.shape[axis] // mesh_sizes()[name]
    start = jax.lax.axis_index(name) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def gathered_axes(config: PipelineConfig) -> tuple[str, ...]:
    return ("fsdp",) if config.gathers_before_use else ()
