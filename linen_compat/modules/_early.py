"""The dense layers before a pipeline, as parameters in MaxText's tree and as one stacked module."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules._stacked import (
    Boxed,
    StackedLayers,
    axes_of_box,
    check_shapes,
    leaves_of,
    parameters_of,
    stacked_layers,
    unboxed_leaves,
)
from linen_compat.modules.decoder_layers import layer_class
from linen_compat.modules.parameters import is_boxed, unboxed
from nnx_pipeline import Layout, ModelConfig
from nnx_pipeline.config._remat import Remat
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.sharding.layout import place, portable_key

_NAME = "dense_layers"


@dataclass(frozen=True)
class EarlyTree:
    """The parameters of the dense first layers, below MaxText's `decoder`.

    The tree `dense_layers` stacks the layers along the second axis of every array. With `apart`
    each layer has its own tree, `dense_layers_0 …`.
    """

    model: ModelConfig
    layout: Layout
    remat: Remat
    apart: bool

    def declared(self, module: nn.Module) -> list[Boxed]:
        """The parameters of all layers, or of each, for a decoder's `setup`; `init` makes them."""
        numbers = range(self.model.num_dense_layers)
        names = [f"{_NAME}_{number}" for number in numbers] if self.apart else [_NAME]
        if not module.is_initializing():  # `stacked` checks them with a message of its own
            return [module.get_variable("params", name, {}) for name in names]
        make = self._make_layer if self.apart else self._make
        return [module.param(name, make, unbox=False) for name in names]

    def stacked(self, trees: list[Boxed]) -> StackedLayers:
        """The layers as one callable module with parameters `[layers, …]`.

        Raises InputError, naming the leaf, when a tree is not what the layers need.
        """
        one = leaves_of(jax.eval_shape(self._make_layer, jax.random.key(0)))
        number, want = self.model.num_dense_layers, {}
        for path, leaf in one.items():
            first, *rest = unboxed(leaf).shape
            want[path] = (first, *rest) if self.apart else (first, number, *rest)
        found = [unboxed_leaves(tree) for tree in trees]
        cure = f"give the parameters of {counted(number, 'dense layer')} of this model"
        for layer in found:
            check_shapes(layer, want, cure=cure, below=f"{_NAME}/")

        def stack(path: str) -> Array:
            leaves = [layer[path] for layer in found]
            return jnp.stack(leaves) if self.apart else jnp.moveaxis(leaves[0], 1, 0)

        return stacked_layers(self._layer, one, (None,), stack, self.layout)

    @property
    def _layer(self) -> nn.Module:
        dense = self.model.of_dense_layers
        return layer_class(dense)(dense, self.layout, self.remat, parent=None)

    def _make_layer(self, key: Array) -> Boxed:
        # No value of x matters, but the batch must divide over the mesh.
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

        layers = jax.vmap(self._make_layer)(keys)
        made: Boxed = jax.tree.map(scanned, layers, is_leaf=is_boxed)
        return made
