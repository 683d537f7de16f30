"""The dense layers before a pipeline, as parameters in MaxText's tree and as one stacked module."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from linen_compat.modules.decoder_layers import layer_class
from linen_compat.modules.parameters import in_place, is_boxed, unboxed
from linen_compat.modules.stacked import (
    Boxed,
    StackedLayers,
    axes_of_box,
    leaves_of,
    parameters_of,
    place_in_nnx,
)
from nnx_pipeline import InputError, Layout, ModelConfig
from nnx_pipeline.errors import counted
from nnx_pipeline.remat import Remat
from nnx_pipeline.sharding import place, portable_key

_NAME = "dense_layers"


@dataclass(frozen=True)
class EarlyTree:
    """The parameters of the dense first layers, below MaxText's `decoder`.

    They are in `dense_layers`, where the second axis of every array is that of the layers, or with
    `apart` each layer is in a tree of its own, `dense_layers_0 …`.

    - `model`: the config of the whole model.
    - `layout`: the mesh axes over which each logical axis is sharded.
    - `remat`: what a layer keeps for the backward pass.
    - `apart`: whether each layer has a tree of its own.
    """

    model: ModelConfig
    layout: Layout
    remat: Remat
    apart: bool

    def declared(self, module: nn.Module) -> list[Boxed]:
        """The parameters of all layers, or of each; `init` makes them now.

        - `module`: the decoder, in whose `setup` this is called.
        """
        numbers = range(self.model.num_dense_layers)
        names = [f"{_NAME}_{number}" for number in numbers] if self.apart else [_NAME]
        if not module.is_initializing():  # `stacked` checks them with a message of its own
            return [module.get_variable("params", name, {}) for name in names]
        make = self._make_layer if self.apart else self._make
        return [module.param(name, make, unbox=False) for name in names]

    def stacked(self, trees: list[Boxed]) -> StackedLayers:
        """The layers as one callable module with parameters `[layers, …]`.

        - `trees`: as from `declared`.

        Raises InputError, naming the leaf, when a tree is not what the layers need.
        """
        one = leaves_of(jax.eval_shape(self._make_layer, jax.random.key(0)))
        number, weights = self.model.num_dense_layers, []
        found = [{path: unboxed(leaf) for path, leaf in leaves_of(tree).items()} for tree in trees]
        for each in found:
            self._check(one, each)
        paths = sorted(one, key=place_in_nnx)
        for path in paths:
            leaves = [each[path] for each in found]
            value = jnp.stack(leaves) if self.apart else jnp.moveaxis(leaves[0], 1, 0)
            assert value.shape[0] == number, "the shapes have been checked"
            axes = (None, *axes_of_box(one[path]))
            weights.append(nnx.Param(in_place(value, self.layout.spec(*axes)), logical_axes=axes))
        return StackedLayers(self._layer, paths, weights)

    @property
    def _layer(self) -> nn.Module:
        """One layer, unbound."""
        dense = self.model.of_dense_layers
        return layer_class(dense)(dense, self.layout, self.remat, parent=None)

    def _make_layer(self, key: Array) -> Boxed:
        """The parameters of one layer, in boxes."""
        # No value of x matters, but its axes must divide over those of the mesh.
        shape = (self.layout.size("batch"), 1, self.model.embed_dim)
        x = place(jnp.zeros(shape, self.model.dtype), self.layout.spec("batch", None, None))
        return parameters_of(self._layer, key, x, {})

    def _make(self, key: Array) -> Boxed:
        """The parameters of all layers, stacked along the second axis, in boxes."""
        keys = jax.random.split(portable_key(key), self.model.num_dense_layers)

        def scanned(leaf: nn.LogicallyPartitioned) -> nn.LogicallyPartitioned:
            names = (*leaf.names[:1], _NAME, *leaf.names[1:])
            value = jnp.moveaxis(leaf.value, 0, 1)
            axes = axes_of_box(leaf)
            spec = self.layout.spec(*axes[:1], None, *axes[1:])
            return leaf.replace(value=place(value, spec), names=names)

        return jax.tree.map(scanned, jax.vmap(self._make_layer)(keys), is_leaf=is_boxed)

    def _check(self, one: Boxed, found: Boxed) -> None:
        """Raises InputError for a leaf that is missing, unknown or of another shape.

        - `one`: the leaves that a layer has.
        - `found`: the leaves of one tree.
        """
        for path, leaf in one.items():
            shape = unboxed(leaf).shape
            if not self.apart:
                shape = (*shape[:1], self.model.num_dense_layers, *shape[1:])
            if path not in found or found[path].shape != shape:
                has = "are missing" if path not in found else f"have shape {found[path].shape}"
                raise InputError(
                    f"the parameters {_NAME}/{path} {has} and must have shape {shape}; give those "
                    f"of {counted(self.model.num_dense_layers, 'dense layer')} of this model"
                )
        for path in found:
            if path not in one:
                raise InputError(
                    f"params have {_NAME}/{path}, which no dense layer reads; give those of this "
                    "model"
                )
