"""Creates the stacked layers of a pipeline, and assembles their side inputs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, divides
from nnx_pipeline.lab.mesh import entry_axes
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.stage import _checks as checks
from nnx_pipeline.pipeline.stage.layers import Side
from nnx_pipeline.pipeline.stage.variables import is_per_microbatch
from nnx_pipeline.sharding.layout import (
    AxisName,
    Layout,
    Variable,
    is_variable,
    mesh_sizes,
    place,
    portable_key,
)

MakeLayer = Callable[[nnx.Rngs], nnx.Module]

# The metadata by which Flax shards a variable, which has no axes for repeats, stages and layers.
_FLAX_SHARDING = ("out_sharding", "sharding", "sharding_names", "sharding_rules", "mesh")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """A side input that all sequences read alike, such as a table of positions; it is not cut.

    - `value`: any pytree of arrays, which every stage holds whole. It has a gradient.
    """

    value: PyTree


def _is_shared(value: object) -> bool:
    return isinstance(value, Shared)


def split_shared(side: Side) -> tuple[Side, Side]:
    """The side inputs that are cut as the batch is, and the values of those that are `Shared`."""
    shared = {name: each.value for name, each in side.items() if _is_shared(each)}
    return {name: each for name, each in side.items() if name not in shared}, shared


def as_kinds(layers: MakeLayer | Sequence[MakeLayer]) -> list[MakeLayer]:
    kinds = [*layers] if isinstance(layers, Sequence) else [layers]
    wrong = [kind for kind in kinds if not callable(kind) or isinstance(kind, nnx.Module)]
    if wrong or not kinds:
        text = f"{type(wrong[0]).__name__} among them" if wrong else "an empty list"
        raise InputError(
            f"the layers of a pipeline are given as {text}; give a function that makes a layer "
            "from nnx.Rngs, such as its class, or a list with one for each kind of layer"
        )
    return kinds


def make_layers(
    kinds: Sequence[MakeLayer], stack: Stack, *, microbatches: int, rngs: nnx.Rngs, layout: Layout
) -> PyTree:
    """One module that holds all layers, or a list of such modules if there are several kinds.

    Each variable is `[repeats, stages, layers, …]`, a cache `[repeats, stages, layers,
    microbatches, …]`. The `params` stream of `rngs` gives each layer a key of its own, whatever the
    mesh is.

    Raises InputError when a layer holds one variable in two places, the variable of another layer,
    or an array in no variable, when the layers of a kind differ, and for `rngs` without a stream
    `params`.
    """
    if not isinstance(rngs, nnx.Rngs) or not hasattr(rngs, "params"):
        streams = f" with the streams {[*rngs]}" if isinstance(rngs, nnx.Rngs) else ""
        raise InputError(
            f"the layers of a pipeline are made with rngs of type {type(rngs).__name__}{streams}; "
            "give nnx.Rngs with a stream called params or default, such as nnx.Rngs(0)"
        )
    keys = jax.random.split(portable_key(rngs.params()), stack.layers)
    made = [
        _made(make_layer, keys[np.minimum(stack.numbers(kind), stack.layers - 1)], layout)
        for kind, make_layer in enumerate(kinds)
    ]
    made = jax.tree.map(
        lambda leaf: _repeated(leaf, microbatches) if is_per_microbatch(leaf) else leaf,
        made,
        is_leaf=is_per_microbatch,
    )
    return made[0] if stack.kinds == 1 else nnx.List(made)


def _repeated(variable: Variable, microbatches: int) -> Variable:
    """A variable `[repeats, stages, layers, …]` with an axis of microbatches after the layers."""
    axes = variable.get_metadata("logical_axes")
    value = jnp.repeat(variable.get_value()[:, :, :, None], microbatches, axis=3)
    longer = variable.replace(value)
    longer.set_metadata("logical_axes", (*axes[:3], None, *axes[3:]))
    return longer


def _made(make_layer: MakeLayer, keys: Array, layout: Layout) -> nnx.Module:
    """All layers of one kind, with a key for each: `[repeats, stages, layers]`."""
    # With the keys sharded over the stages, each stage computes the values of its own layers.
    keys = place(keys, layout.spec(None, "stage", None))

    def make(key: Array) -> nnx.Module:
        # The other stream is for what is not a parameter, such as the masks of dropout.
        rngs = nnx.Rngs(jax.random.fold_in(key, 0), params=key)
        rule = "a layer is made by one argument, as by lambda rngs: Layer(8, rngs=rngs)"
        with checks.call_explained(make_layer, (rngs,), {}, rule):
            layer = make_layer(rngs)
        if not isinstance(layer, nnx.Module) or not callable(layer):
            raise InputError(
                f"the function that makes a layer returned {type(layer).__name__}; it must return "
                "an nnx.Module with a method __call__(x, …)"
            )
        checks.check_layer_variables(layer)
        return layer

    def check_two(key: Array) -> None:
        layer, other = make(key), make(key)
        checks.check_no_sharing(layer, other)
        _check_axes(layer, layout)
        checks.check_same(layer, other)

    jax.eval_shape(check_two, portable_key(jax.random.key(0)))

    stage = "stage" if keys.shape[1] > 1 else None
    # From outside to inside: over repeats, over stages and over the layers of a stage.
    made: nnx.Module = jax.vmap(jax.vmap(jax.vmap(make), spmd_axis_name=stage))(keys)
    made = jax.tree.map(lambda leaf: _stacked(leaf, layout), made, is_leaf=is_variable)
    return made


def with_keys(side: dict[str, Array | None], keys: Array | None) -> dict[str, Array | None]:
    """The side inputs of a layer, with the keys for dropout, `[batch, words]`."""
    if not isinstance(side, dict):
        raise InputError(
            f"the side inputs of a pipeline are {type(side).__name__}; give a dict of arrays by "
            "the names of the arguments of a layer, or {}"
        )
    for name in ("key", "keys"):
        if name in side:
            raise InputError(
                f"a side input is called {name!r}, a name that a pipeline reserves for the key of "
                "dropout; give it another name, or for dropout give the pipeline a key"
            )
    for name, value in side.items():
        leaves = jax.tree.leaves(value, is_leaf=_is_shared)
        if any(map(_is_shared, leaves)) and not _is_shared(value):
            raise InputError(
                f"the side input {name!r} has Shared(…) inside of it, and other arrays are cut as "
                "the batch is; wrap the whole of it, or make two side inputs of it"
            )
    if "place" in side:
        raise InputError(
            "a side input is called 'place', a name that a pipeline reserves for the number of a "
            "layer, see LayerPlace; give it another name"
        )
    return side if keys is None else {**side, "keys": keys}


def _stacked(variable: Variable, layout: Layout) -> Variable:
    if not isinstance(variable.get_value(), jax.Array):
        raise InputError(
            f"a layer holds a variable of type {type(variable).__name__} with "
            f"{type(variable.get_value()).__name__} in it; in a pipeline each holds one array"
        )
    axes = _layer_axes(variable, variable.get_value().ndim - 3)
    placed = _placed(variable, (None, "stage", None, *axes), layout)
    if any(axes) and variable.get_metadata().get("logical_axes") is None:
        placed.set_metadata("gather_at_use", True)
    return placed


def _layer_axes(variable: Variable, number: int) -> tuple[AxisName, ...]:
    """The mesh axes of a variable with `number` axes in one layer; None for one that is whole."""
    axes: tuple[AxisName, ...] | None = variable.get_metadata().get("logical_axes")
    if axes is None:
        # What Flax's metadata (`nnx.with_partitioning`) says, in which Flax's own rules have
        # replaced names by mesh axes.
        said = tuple(nnx.get_partition_spec(variable).get_value() or ())
        return (*said, *[None] * (number - len(said)))
    if len(axes) != number:
        shape = jnp.shape(variable.get_value())
        raise InputError(
            f"a variable of a layer has the logical axes {axes}, and its shape is "
            f"{list(shape[len(shape) - number :])}; name each axis, or None for one that is not "
            "sharded"
        )
    return axes


def _check_axes(layer: nnx.Module, layout: Layout) -> None:
    variables = jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_variable)
    for path, variable in variables:
        shape = getattr(variable.get_value(), "shape", ())  # `_stacked` refuses what is no array
        axes = _layer_axes(variable, len(shape))
        what = f"the variable {jax.tree_util.keystr(path)} of a layer, {[*shape]}, has the axes"
        used = [layout.axes("stage")]
        for size, entry in zip(shape, layout.spec(*axes), strict=False):
            used.append(entry_axes(entry))
            shards = math.prod(mesh_sizes()[name] for name in used[-1])
            rule = f"{what} {axes}, and {size} entries do not split over {shards} devices"
            divides(shards, size, rule=rule, cure="or None for an axis that is not sharded")
        every = [name for names in used for name in names]
        twice = [name for name in every if every.count(name) > 1]
        if twice:
            hint = " (a pipeline shards its layers over stage, and holds no pipeline in a layer)"
            raise InputError(
                f"{what} {axes}, which shard it twice over the mesh axis {twice[0]!r}"
                f"{hint if twice[0] == 'stage' else ''}; name each mesh axis once"
            )


def _placed(variable: Variable, axes: tuple[AxisName, ...], layout: Layout) -> Variable:
    value = place(variable.get_value(), layout.spec(*axes))
    placed = type(variable)(value, logical_axes=axes)
    for name, entry in variable.get_metadata().items():
        if name not in placed.get_metadata() and name not in _FLAX_SHARDING:
            placed.set_metadata(name, entry)
    return placed
