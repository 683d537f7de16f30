"""The layers of a pipeline: in MaxText's tree, and stacked for the loop of `nnx_pipeline`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from linen_compat.formats.names import ALL_OF_LAYERS, EARLY
from linen_compat.modules.parameters import Names, axes_of, in_place, is_boxed, unboxed
from nnx_pipeline import InputError, Layout
from nnx_pipeline.errors import counted
from nnx_pipeline.pipeline.stage.layers import takes_place
from nnx_pipeline.sharding import place, portable_key

Boxed = dict[str, Any]
MakeLayer = Callable[[Array], Boxed]


@dataclass(frozen=True)
class StageTree:
    """The tree below MaxText's `pipeline_module/layers`.

    The arrays of layer j of a stage are under `layers_{j}`, or directly in the tree where a stage
    has one layer. Before their own axes they have `[repeats, stages]`, or `[stages]` where there is
    one repeat.

    - `stack`: (repeats, stages, layers per stage).
    - `layout`: the mesh axes over which each logical axis is sharded.
    """

    stack: tuple[int, int, int]
    layout: Layout

    def make(self, key: Array, make_layer: MakeLayer) -> Boxed:
        """New weights in boxes that name the stacking axes too, each made on its own stage.

        - `key`: from which each layer gets a key of its own.
        - `make_layer`: makes the parameters of one layer from its key.
        """
        repeats, stages, per_stage = self.stack
        # Each key is on the stage of its layer, so that the weights are made there.
        keys = place(
            jax.random.split(portable_key(key), self.stack), self.layout.spec(None, "stage", None)
        )
        stage = "stage" if stages > 1 else None
        made = [
            jax.vmap(jax.vmap(make_layer, spmd_axis_name=stage))(keys[:, :, j])
            for j in range(per_stage)
        ]

        def named(leaf: Any) -> Any:
            # With one repeat, MaxText's arrays have no axis of repeats.
            value = unboxed(leaf)[0] if repeats == 1 else unboxed(leaf)
            own = leaf.names if is_boxed(leaf) else (None,) * (value.ndim - len(self.names))
            names = (*self.names, *own)
            value = place(value, self.layout.spec(*axes_of(names)))
            return leaf.replace(value=value, names=names) if is_boxed(leaf) else value

        return self.tree_of([jax.tree.map(named, layer, is_leaf=is_boxed) for layer in made])

    def stacked(self, tree: Boxed, make_layer: MakeLayer, module: nn.Module) -> "StackedLayers":
        """The tree as one callable module with parameters `[repeats, stages, layers per stage, …]`.

        Layers of a stage that are separate in the tree are stacked, which copies them.

        - `tree`: the parameters, boxed or not.
        - `make_layer`: as in `make`; only the shapes and boxes that it would give are used.
        - `module`: the Linen layer to call.

        Raises InputError, naming the leaf, when the tree is not what the layers need.
        """
        one = jax.eval_shape(make_layer, jax.random.key(0))
        self._check(tree, one)
        repeats, _, per_stage = self.stack

        def stack(*leaves: Array) -> Array:
            # The loop wants an axis of repeats in any case.
            leaves = tuple(leaf[None] if repeats == 1 else leaf for leaf in leaves)
            return jnp.stack(leaves, axis=2)

        apart = [tree] if per_stage == 1 else [tree[f"layers_{j}"] for j in range(per_stage)]
        flat = [{path: unboxed(leaf) for path, leaf in leaves_of(layer).items()} for layer in apart]
        boxes = leaves_of(one)
        paths = sorted(boxes, key=place_in_nnx)
        weights = []
        for path in paths:
            axes = (None, "stage", None, *axes_of_box(boxes[path]))
            stacked = in_place(stack(*(layer[path] for layer in flat)), self.layout.spec(*axes))
            weights.append(nnx.Param(stacked, logical_axes=axes))
        return StackedLayers(module, paths, weights)

    def tree_of(self, layers: list[Any]) -> Boxed:
        """The tree that holds these layers of a stage."""
        if len(layers) == 1:
            return layers[0]
        return {f"layers_{j}": layer for j, layer in enumerate(layers)}

    @property
    def names(self) -> Names:
        """MaxText's names of the stacking axes, which come before a layer's own."""
        return ("layers",) if self.stack[0] == 1 else ("circular_repeats", "layers")

    def _check(self, tree: Boxed, one: Boxed) -> None:
        """Raises InputError for a leaf that is missing, unknown or of another shape."""
        leading = self.stack[1:2] if self.stack[0] == 1 else self.stack[:2]
        want = _shapes(self.tree_of([one] * self.stack[2]))
        want = {path: (*leading, *shape) for path, shape in want.items()}
        have = _shapes(tree)
        for path, shape in want.items():
            if path not in have:
                raise InputError(f"params have no {path}, which must be {shape}; {self._cure}")
            if have[path] != shape:
                raise InputError(f"{path} has shape {have[path]} and must be {shape}; {self._cure}")
        for path in have:
            if path not in want:
                raise InputError(f"params have {path}, which no layer reads; {self._cure}")

    @property
    def _cure(self) -> str:
        repeats, stages, per_stage = self.stack
        return (
            f"give the parameters of {counted(stages, 'stage')} × {counted(repeats, 'repeat')} "
            f"with {counted(per_stage, 'layer')} per stage, as the mesh and the config ask for"
        )


class StackedLayers(nnx.Module):
    """A Linen layer with stacked parameters, as a callable pytree for the loop of `nnx_pipeline`.

    - `module`: the Linen layer.
    - `paths`: where each weight belongs in the tree of a layer, with `/` between names.
    - `weights`: one for each path, `[repeats, stages, layers per stage, …]`, or before the pipeline
      `[layers, …]`.
    """

    def __init__(self, module: nn.Module, paths: list[str], weights: list[nnx.Param]) -> None:
        self.module, self.paths, self.weights = module, tuple(paths), nnx.List(weights)
        self.layout = getattr(module, "layout", None)

    @property
    def takes_place(self) -> bool:
        """Whether the Linen layer asks for its place, see `takes_place`."""
        return takes_place(self.module)

    def __call__(self, x: Array, **side: Any) -> tuple[Array, PyTree]:
        values = [weight[...] for weight in self.weights]
        params = unflatten_dict(dict(zip(self.paths, values, strict=True)), sep="/")
        module = self.module
        if hasattr(module, "layout"):
            module = module.clone(layout=self.layout)
        return module.apply({"params": params}, x, **side)


def parameters_of(module: nn.Module, key: Array, x: Array, side: dict[str, Any]) -> Boxed:
    """The parameters that `module.init` makes for a layer.

    - `module`: the layer, unbound.
    - `key`: the random key of the parameters.
    - `x`, `side`: what the layer is called with.

    Raises InputError when it makes variables of other collections.
    """
    variables = module.init(key, x, **side)
    others = [name for name in variables if name != "params"]
    if others:
        raise InputError(
            f"{type(module).__name__} holds the collection {others[0]!r}; in a pipeline a layer "
            "may hold params only, as its state would be lost between microbatches; for random "
            "numbers call the pipeline with a key"
        )
    return variables["params"]


def leaves_of(tree: Boxed) -> dict[str, Any]:
    """The leaves of a tree by their paths, with `/` between names."""
    return flatten_dict(unfreeze(tree), sep="/")


def _shapes(tree: Boxed) -> dict[str, tuple[int, ...]]:
    return {path: unboxed(leaf).shape for path, leaf in leaves_of(tree).items()}


def axes_of_box(leaf: Any) -> Names:
    """The names in `Layout` of the axes of a parameter that may be in a box."""
    return axes_of(leaf.names) if is_boxed(leaf) else (None,) * leaf.ndim


def place_in_nnx(path: str) -> tuple[str, ...]:
    """A sort key that puts the weights of a decoder layer in the order of the NNX layer.

    Compilers fuse by the order of what a loop carries: in another order the same sums are rounded
    differently.
    """
    return tuple(_NNX_PATHS.get(path, path.replace("/", ".")).split("."))


_NNX_PATHS = {names.linen: names.nnx.removeprefix(EARLY) for names in ALL_OF_LAYERS}
