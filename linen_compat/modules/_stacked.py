"""Layers in MaxText's tree, and stacked for the loops of `nnx_pipeline`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from linen_compat.formats._names import ALL_OF_LAYERS, EARLY
from linen_compat.modules.decoder_layers import layer_class
from linen_compat.modules.parameters import Names, axes_of, is_boxed, sharded_by, unboxed
from nnx_pipeline import InputError, Layout, ModelConfig
from nnx_pipeline.config._remat import Remat
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline.stage.layers import Side, takes_place
from nnx_pipeline.sharding.layout import place, portable_key

Boxed = dict[str, PyTree]  # parameters, in metadata boxes or not
MakeLayer = Callable[[Array], Boxed]
_DENSE = "dense_layers"


class LinenStack(nnx.Module):
    """A Linen layer with stacked parameters, as a callable pytree for the loop of `nnx_pipeline`.

    `weights` are `[repeats, stages, layers per stage, …]`, or before the pipeline `[layers, …]`,
    and `paths` say where each belongs in the tree of a layer, with `/` between names.
    """

    def __init__(
        self, module: nn.Module, paths: list[str], weights: list[nnx.Param[Array]]
    ) -> None:
        self.module, self.paths, self.weights = module, tuple(paths), nnx.List(weights)
        self.layout = getattr(module, "layout", None)

    @property
    def takes_place(self) -> bool:
        return takes_place(self.module)

    def __call__(self, x: Array, **side: PyTree) -> tuple[Array, PyTree]:
        values = [weight[...] for weight in self.weights]
        params = unflatten_dict(dict(zip(self.paths, values, strict=True)), sep="/")
        module = self.module
        if hasattr(module, "layout"):
            module = module.clone(layout=self.layout)
        return module.apply({"params": params}, x, **side)


@dataclass(frozen=True)
class StageTree:
    """The tree below MaxText's `pipeline_module/layers`, with `stack` layers.

    Layer j of each stage is below `layers_{j}`, or one layer in the tree itself. Each array has the
    leading axes `[repeats, stages]`, or `[stages]` with one repeat.
    """

    stack: tuple[int, int, int]
    layout: Layout

    def make(self, key: Array, make_layer: MakeLayer) -> Boxed:
        """New weights, each made on its own stage, in boxes that also name the stacking axes."""
        repeats, stages, per_stage = self.stack
        # Each key is on the stage of its layer, so that the weights are made there.
        keys = place(
            jax.random.split(portable_key(key), self.stack), self.layout.spec(None, "stage", None)
        )
        stage = "stage" if stages > 1 else None
        leading: Names = ("layers",) if repeats == 1 else ("circular_repeats", "layers")
        made = [
            jax.vmap(jax.vmap(make_layer, spmd_axis_name=stage))(keys[:, :, j])
            for j in range(per_stage)
        ]

        def named(leaf: PyTree) -> PyTree:
            # With one repeat, MaxText's arrays have no axis of repeats.
            value = unboxed(leaf)[0] if repeats == 1 else unboxed(leaf)
            inner = leaf.names if is_boxed(leaf) else (None,) * (value.ndim - len(leading))
            names = (*leading, *inner)
            value = place(value, self.layout.spec(*axes_of(names)))
            return leaf.replace(value=value, names=names) if is_boxed(leaf) else value

        layers: list[Boxed] = [jax.tree.map(named, layer, is_leaf=is_boxed) for layer in made]
        if per_stage == 1:
            return layers[0]
        return {f"layers_{j}": layer for j, layer in enumerate(layers)}

    def stacked(self, tree: Boxed, make_layer: MakeLayer, module: nn.Module) -> LinenStack:
        """The tree as one callable module with parameters `[repeats, stages, layers per stage, …]`.

        Where a stage has several layers, stacking copies them.
        """
        like = leaves_of(jax.eval_shape(make_layer, jax.random.key(0)))
        repeats, stages, per_stage = self.stack
        leading = (stages,) if repeats == 1 else (repeats, stages)
        prefixes = [""] if per_stage == 1 else [f"layers_{j}/" for j in range(per_stage)]
        shapes = {path: (*leading, *unboxed(leaf).shape) for path, leaf in like.items()}
        want = {prefix + path: shape for prefix in prefixes for path, shape in shapes.items()}
        params = unboxed_leaves(tree)
        cure = (
            f"give the parameters of {counted(stages, 'stage')} × {counted(repeats, 'repeat')} "
            f"with {counted(per_stage, 'layer')} per stage, as the mesh and the config ask for"
        )
        check_stacked_shapes(params, want, cure=cure)

        def stack(path: str) -> Array:
            # The loop wants an axis of repeats in any case.
            leaves = [params[prefix + path] for prefix in prefixes]
            leaves = [leaf[None] if repeats == 1 else leaf for leaf in leaves]
            return jnp.stack(leaves, axis=2)

        return stacked_layers(module, like, (None, "stage", None), stack, self.layout)


@dataclass(frozen=True)
class EarlyTree:
    """The parameters of the dense first layers, below MaxText's `decoder`.

    `dense_layers` stacks them along the second axis of every array. If they are `unscanned` each
    layer has its own tree, `dense_layers_0 …`.
    """

    model: ModelConfig
    layout: Layout
    remat: Remat
    unscanned: bool

    def declared(self, module: nn.Module) -> list[Boxed]:
        """The parameters of all layers, or of each, for a decoder's `setup`; `init` makes them."""
        numbers = range(self.model.num_dense_layers)
        names = [f"{_DENSE}_{number}" for number in numbers] if self.unscanned else [_DENSE]
        if not module.is_initializing():  # `stacked` checks them with a message of its own
            return [module.get_variable("params", name, {}) for name in names]
        make = self._make_layer if self.unscanned else self._make
        return [module.param(name, make, unbox=False) for name in names]

    def stacked(self, trees: list[Boxed]) -> LinenStack:
        """The layers as one callable module with parameters `[layers, …]`."""
        like = leaves_of(jax.eval_shape(self._make_layer, jax.random.key(0)))
        number, want = self.model.num_dense_layers, {}
        for path, leaf in like.items():
            first, *rest = unboxed(leaf).shape
            want[path] = (first, *rest) if self.unscanned else (first, number, *rest)
        layers = [unboxed_leaves(tree) for tree in trees]
        cure = f"give the parameters of {counted(number, 'dense layer')} of this model"
        for layer in layers:
            check_stacked_shapes(layer, want, cure=cure, below=f"{_DENSE}/")

        def stack(path: str) -> Array:
            leaves = [layer[path] for layer in layers]
            return jnp.stack(leaves) if self.unscanned else jnp.moveaxis(leaves[0], 1, 0)

        return stacked_layers(self._layer, like, (None,), stack, self.layout)

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
            names = (*leaf.names[:1], _DENSE, *leaf.names[1:])
            value = jnp.moveaxis(leaf.value, 0, 1)
            axes = axes_of_box(leaf)
            spec = self.layout.spec(*axes[:1], None, *axes[1:])
            return leaf.replace(value=place(value, spec), names=names)

        layers = jax.vmap(self._make_layer)(keys)
        made: Boxed = jax.tree.map(scanned, layers, is_leaf=is_boxed)
        return made


def parameters_of(module: nn.Module, key: Array, x: Array, side: Side) -> Boxed:
    """The parameters that `init` makes for an unbound layer; InputError for other collections."""
    variables = module.init(key, x, **side)
    others = [name for name in variables if name != "params"]
    if others:
        raise InputError(
            f"{type(module).__name__} holds the collection {others[0]!r}; in a pipeline a layer "
            "may hold params only, as its state would be lost between microbatches; for random "
            "numbers call the pipeline with a key"
        )
    params: Boxed = variables["params"]
    return params


def leaves_of(tree: Boxed) -> Boxed:
    """The leaves of a tree by their paths, with `/` between names."""
    leaves: Boxed = flatten_dict(unfreeze(tree), sep="/")
    return leaves


def unboxed_leaves(tree: Boxed) -> dict[str, Array]:
    return {path: unboxed(leaf) for path, leaf in leaves_of(tree).items()}


def check_stacked_shapes(
    params: Mapping[str, Array], want: Mapping[str, tuple[int, ...]], *, cure: str, below: str = ""
) -> None:
    """Raises InputError for a parameter that is missing, unknown or of another shape.

    `cure` is the end of the message, and `below` stands before each path in it.
    """
    for path, shape in want.items():
        if path not in params:
            raise InputError(f"params have no {below}{path}, which must be {shape}; {cure}")
        if params[path].shape != shape:
            raise InputError(
                f"{below}{path} has shape {params[path].shape} and must be {shape}; {cure}"
            )
    for path in params:
        if path not in want:
            raise InputError(f"params have {below}{path}, which no layer reads; {cure}")


def stacked_layers(
    module: nn.Module, like: Boxed, leading: Names, stack: Callable[[str], Array], layout: Layout
) -> LinenStack:
    """Stacked parameters as one callable module, in the order of the NNX layer.

    `like` has those of one layer by their paths, `leading` are the logical axes before its own, and
    `stack` gives the stacked array of a path.
    """
    paths, weights = sorted(like, key=nnx_order), []
    for path in paths:
        axes = (*leading, *axes_of_box(like[path]))
        value = sharded_by(stack(path), layout.spec(*axes))
        weights.append(nnx.Param(value, logical_axes=axes))
    return LinenStack(module, paths, weights)


def axes_of_box(leaf: PyTree) -> Names:
    """The axes of a parameter, with the names of `Layout`, where it is in a box."""
    return axes_of(leaf.names) if is_boxed(leaf) else (None,) * leaf.ndim


def nnx_order(path: str) -> tuple[str, ...]:
    """A sort key: the weights of a decoder layer in the order of the NNX layer.

    In another order a loop carries the arrays, and fuses, differently, and sums round differently.
    """
    return tuple(_NNX_PATHS.get(path, path.replace("/", ".")).split("."))


_NNX_PATHS = {names.linen: names.nnx.removeprefix(EARLY) for names in ALL_OF_LAYERS}
