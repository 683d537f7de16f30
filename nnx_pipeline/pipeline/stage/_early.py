"""Layers that run before a pipeline, on all of its devices, such as dense ones before experts."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.stage.layers import LayerSequence, NumberedLayer, Side, call_layer
from nnx_pipeline.pipeline.stage.variables import is_state, join_state
from nnx_pipeline.sharding.layout import (
    Layout,
    P,
    Variable,
    is_variable,
    mesh_sizes,
    out_sharding,
    place,
    place_by,
    portable_key,
    with_layout,
)


@dataclass(frozen=True)
class EarlyLayers:
    """Runs `number` layers before those of a pipeline, on all devices at once.

    They work on a batch that is spread over the stages where it lies, on one microbatch of each
    stage at a time, with weights that every stage has. What 1F1B puts into its loop is one
    microbatch; there the stages share heads and hidden units, see `shared_by_stages`.
    """

    number: int
    first: int  # the first layer's number for dropout keys, above those of the pipeline
    layout: Layout  # of activations and weights, without copies
    copied: Layout  # of the pipeline's activations, with its axis of copies if any
    remat: Remat

    def make(self, layer: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
        """One module with all layers, in which each variable is `[layers, …]`."""
        keys = jax.random.split(portable_key(rngs.params()), self.number)
        made = jax.vmap(lambda key: layer(nnx.Rngs(params=key)))(keys)

        def stacked(variable: Variable) -> Variable:
            axes = (None, *variable.get_metadata("logical_axes"))
            placed = variable.replace(place(variable.get_value(), self.layout.spec(*axes)))
            placed.set_metadata("logical_axes", axes)
            return placed

        module: nnx.Module = jax.tree.map(stacked, made, is_leaf=is_variable)
        return module

    def shared_by_stages(self, layers: PyTree) -> PyTree:
        """The layers with heads and hidden units split over `stage`, as far as they divide."""
        # With 1F1B the same microbatch goes through them on all stages at each tick, so that whole
        # layers would take as long on every stage as that many layers of the pipeline.
        layout = self.layout
        variables = jax.tree.leaves(layers, is_leaf=is_variable)
        for together in (("heads", "kv_heads"), ("mlp",)):
            axes = {name: (*getattr(layout, name), "stage") for name in together}
            new = dataclasses.replace(layout, **axes)
            sizes = [
                (size, new.size(name))
                for variable in variables
                for name, size in zip(
                    variable.get_metadata("logical_axes"), variable.shape, strict=True
                )
                if name in together
            ]
            if all(size % devices == 0 for size, devices in sizes):
                layout = new
        return place_by(with_layout(layers, layout), layout)

    def __call__(self, layers: PyTree, x: Array, side: Side, axes: tuple[str, ...]) -> Array:
        """All layers applied to a batch or a microbatch; first axes are as of `Batches.axes`."""
        # Caches `[layers, batch, …]` or `[layers, microbatches, batch, …]` hold what the call
        # before left.
        plain = tuple(axis for axis in axes if axis != "copy")
        caches = _caches(layers)

        def together(leaf: Array) -> Array:
            """Merges the axes of copies and of the batch; the result is sharded as both were."""
            if plain == axes:
                return leaf
            at = axes.index("copy")
            shape = (*leaf.shape[:at], leaf.shape[at] * leaf.shape[at + 1], *leaf.shape[at + 2 :])
            return _reshaped(leaf, shape, self._spec(self.layout, plain, len(shape)))

        run = self._on_stages if plain[0] == "microbatch" else self._on_batch
        before: list[Array] = [cache.get_value() for cache in caches]
        without = join_state(layers, [None for _ in before]) if caches else layers
        x_of_devices, side = jax.tree.map(together, (x, side))
        y, after = run(without, x_of_devices, side, before)
        for cache, value in zip(caches, after, strict=True):
            cache.set_value(value)
        return y if plain == axes else _reshaped(y, x.shape, self._spec(self.copied, axes, x.ndim))

    def _on_batch(
        self, layers: PyTree, x: Array, side: Side, caches: list[Array]
    ) -> tuple[Array, list[Array]]:
        """All layers applied to `[batch, …]`, with caches `[layers, batch, …]`."""
        stack = Stack(1, 1, (self.number,))
        sequence = LayerSequence(self.number, 1, self.remat, in_ticks=False, most_unrolled=1)

        def call(x: Array, numbered: NumberedLayer) -> tuple[Array, list[Array]]:
            y, result = call_layer(x, numbered, side, stack=stack)
            return y, result.state

        numbers = jnp.arange(self.first, self.first + self.number, dtype=jnp.int32)
        y, (written,) = sequence(call, (NumberedLayer(layers, numbers, caches),), x)
        return y, written

    def _on_stages(
        self, layers: PyTree, x: Array, side: Side, caches: list[Array]
    ) -> tuple[Array, list[Array]]:
        """All layers applied to `[microbatches, batch, …]`, of which each stage has its own."""
        # Caches are `[layers, microbatches, batch, …]` each, with a microbatch for each stage.
        stages = self.layout.size("microbatch")
        name = "stage" if stages > 1 else None
        if caches:
            apply = functools.partial(self._on_batch, layers)
            with_caches = jax.vmap(apply, in_axes=(0, 0, 1), out_axes=(0, 1), spmd_axis_name=name)
            return with_caches(x, side, caches)

        def each_stage(x: Array, side: Side) -> Array:
            return self._on_batch(layers, x, side, [])[0]

        mapped = jax.vmap(each_stage, spmd_axis_name=name)

        def of_stages(leaf: Array) -> Array:
            """`[microbatches, …]` as `[microbatches of a stage, stages, …]`."""
            shape = (stages, leaf.shape[0] // stages, *leaf.shape[1:])
            axes = ("microbatch", None, "batch")
            cut = _reshaped(leaf, shape, self._spec(self.layout, axes, len(shape)))
            return jnp.swapaxes(cut, 0, 1)

        rows = jax.tree.map(of_stages, (x, side))
        _, y = jax.lax.scan(lambda _, row: (None, mapped(*row)), None, rows)
        y = jnp.swapaxes(y, 0, 1)
        spec = self._spec(self.layout, ("microbatch", "batch"), x.ndim)
        return _reshaped(y, x.shape, spec), []

    @staticmethod
    def _spec(layout: Layout, axes: tuple[str | None, ...], number: int) -> P:
        return layout.spec(*axes, *[None] * (number - len(axes)))


def _caches(layers: PyTree) -> list[Variable]:
    leaves = jax.tree.leaves(layers, is_leaf=is_state)
    return [leaf for leaf in leaves if is_state(leaf)]


def _reshaped(x: Array, shape: tuple[int, ...], spec: P) -> Array:
    """A reshape after which each device has the numbers that it had before."""
    # In explicit mode no type gives the sharding of one that merges or splits sharded axes.
    y = jax.lax.reshape(x, shape, out_sharding=out_sharding(spec))
    return place(y, spec) if mesh_sizes() else y
