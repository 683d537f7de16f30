"""A model in memory: its arrays by path, read as a source of layers, or filled from one."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from linen_compat.formats import _streams as streams
from linen_compat.formats._names import EARLY, check_names
from linen_compat.formats._parallel import threads
from linen_compat.formats._streams import PARAMETERS, ArraySpec, SourceOfParts
from nnx_pipeline import Config, InputError, MeshConfig, Mixtral
from nnx_pipeline.config._stage_layers import AUTO, fits
from nnx_pipeline.lab.errors import counted, note
from nnx_pipeline.lab.mesh import AXES
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.sharding.layout import variable_shardings

Tree = TypeVar("Tree")
LAYERS = "pipeline.layers."


def as_in_one_layer(leaves: Mapping[str, "Held"]) -> dict[str, ArraySpec]:
    return {
        in_layer(path): ArraySpec(leaf.shape[stack_axes(path) :], np.dtype(leaf.dtype))
        for path, leaf in leaves.items()
    }


_OF_KIND = re.compile(rf"{re.escape(LAYERS)}(?:(\d+)\.)?")


def in_layer(path: str) -> str:
    """A path without what says in which stack of layers it is."""
    return _OF_KIND.sub("", path, count=1)


def kind_of(path: str) -> int:
    """The number of the stack, where there are several kinds of layers that take turns."""
    found = _OF_KIND.match(path)
    return int(found[1] or 0) if found else 0


def stack_axes(path: str) -> int:
    """How many axes of a parameter of a model are not those of one layer."""
    return 3 if path.startswith(LAYERS) else 1 if path.startswith(EARLY) else 0


def parameter_paths(model: Mixtral) -> dict[str, jax.Array]:
    """Every array of a model by its path, such as `pipeline.layers.attention.query`."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {dotted_path(path): leaf for path, leaf in leaves}


def dotted_path(path: tuple[object, ...]) -> str:
    """A key path of JAX as dotted attributes of the model, without a variable's own `value`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


@dataclass(frozen=True)
class Shards:
    """What this process holds of an array; over all processes each number once.

    - `shard`: the shape of what one device holds.
    - `pieces`: what this process writes, and where in the array that is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard: tuple[int, ...]
    pieces: tuple[tuple[tuple[slice, ...], np.ndarray], ...]

    @classmethod
    def of(cls, array: jax.Array, *, turn: int, copies: "Copies | None") -> "Shards":
        """Of the devices that hold copies of one shard another one writes at each `turn`."""
        places = array.sharding.devices_indices_map(array.shape).values()
        replicas = len(places) // len({str(place) for place in places})
        shards = array.addressable_shards
        own = [shard for shard in shards if shard.replica_id == turn % replicas]
        pieces = tuple(
            (shard.index, _as_numpy(shard.data, (turn, number), copies))
            for number, shard in enumerate(own)
        )
        shape = array.sharding.shard_shape(array.shape)
        return cls(array.shape, np.dtype(array.dtype), shape, pieces)


Held = jax.Array | np.ndarray | Shards
# Of a state on the host, by the numbers of an array and of a shard. They take the next state of the
# same training: to get gigabytes of memory anew takes longer than to copy them.
Copies = dict[tuple[int, int], np.ndarray]


def _as_numpy(array: jax.Array, key: tuple[int, int], copies: Copies | None) -> np.ndarray:
    return np.asarray(array) if copies is None else _copied(array, key, copies)


def _copied(array: jax.Array, key: tuple[int, int], copies: Copies) -> np.ndarray:
    whole = copies.setdefault(key, np.empty(array.shape, array.dtype))
    for shard in array.addressable_shards:  # as a whole JAX would keep another copy of it
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole


class ModelSource:
    """A model in memory as a `LayerSource`: for each part a tree in the model's structure.

    - `copies`: where its arrays are copied now, as those that a step of training will change.

    Of a model that is spread over several processes it is a `SpreadSource`.
    """

    def __init__(
        self,
        model: Mixtral,
        trees: Mapping[str, Mixtral],
        scalars: Mapping[str, np.ndarray],
        *,
        copies: Copies | None = None,
    ) -> None:
        check_names(model.config.model)
        self.num_layers = model.config.model.num_layers
        self.num_dense_layers = model.config.model.num_dense_layers
        self.parts, self.scalars = tuple(trees), scalars
        self._stack = model.pipeline.runner.stack
        leaves = {part: parameter_paths(tree) for part, tree in trees.items()}
        every = [leaf for paths in leaves.values() for leaf in paths.values()]
        self.is_spread = any(
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in every
        )
        for leaf in () if copies is None else every:
            leaf.copy_to_host_async()  # all begin before the first is waited for

        def held(turn: int, leaf: jax.Array) -> Held:
            if self.is_spread:
                return Shards.of(leaf, turn=turn, copies=copies)
            return leaf if copies is None else _copied(leaf, (turn, 0), copies)

        with ThreadPoolExecutor(threads()) as pool:  # training waits for the copies
            of_all = pool.map(held, itertools.count(), every)
            self._arrays: dict[str, dict[str, Held]] = {
                part: dict(zip(paths, of_all, strict=False)) for part, paths in leaves.items()
            }
        self._gathered: dict[tuple[str, str], np.ndarray] = {}  # one at most
        self.arrays = as_in_one_layer(self._arrays[PARAMETERS])
        self.attention_scale = streams.scale_in_arrays(
            self.arrays, model.config.model.attention_scale
        )
        self.rotary: streams.Rotary | None = streams.Rotary.of(model.config.model)

    def order(self, path: str) -> Sequence[int]:
        dense = self.num_dense_layers
        layers = range(dense if path.startswith(EARLY) else self.num_layers - dense)
        return sorted(layers, key=lambda layer: layer % self._stack.kinds)  # stack after stack

    def dtype(self, path: str, part: str = PARAMETERS) -> np.dtype:
        arrays = self._arrays[part]
        return np.dtype(arrays[path if path in arrays else self._in_stack(path, 0)].dtype)

    def hold(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        return streams.array_title(path, layer, part)

    def shard(self, path: str, part: str) -> tuple[int, ...]:
        full = path if path in self._arrays[part] else self._in_stack(path, 0)
        shape: tuple[int, ...] = self._shards(full, part).shard[stack_axes(full) :]
        return shape

    def pieces(
        self, path: str, layer: int | None, part: str
    ) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        full, at = self._place(path, layer)
        shards, stack = self._shards(full, part), stack_axes(full)
        place = np.unravel_index(at, shards.shape[:stack]) if stack else ()
        for index, piece in shards.pieces:
            begins = [cut.indices(size)[:2] for cut, size in zip(index, shards.shape, strict=True)]
            if all(a <= number < b for number, (a, b) in zip(place, begins, strict=False)):
                inside = tuple(
                    int(number) - a for number, (a, _) in zip(place, begins, strict=False)
                )
                yield tuple(slice(*cut) for cut in begins[stack:]), piece[inside]

    def _shards(self, full: str, part: str) -> Shards:
        array = self._arrays[part][full]
        if not isinstance(array, Shards):
            raise TypeError(f"{full} is in one process")
        return array

    def _place(self, path: str, layer: int | None) -> tuple[str, int]:
        """The full path of an array, and where in the stack of its layers one of them is."""
        if layer is None or path.startswith(EARLY):
            return path, layer or 0
        return self._in_stack(path, layer), int(self._stack.places[layer])

    def read(self, path: str, layer: int | None, part: str = PARAMETERS) -> np.ndarray:
        full, at = self._place(path, layer)
        # Layers of one array are read in turn, so the array stays here for the next of them.
        if (part, full) not in self._gathered:
            self._gathered.clear()  # before the next one takes memory
            self._gathered[part, full] = _on_host(self._arrays[part][full], full)
        array = self._gathered[part, full]
        if layer is None:
            return array
        of_layer: np.ndarray = array.reshape(-1, *array.shape[stack_axes(full) :])[at]
        return of_layer

    def _in_stack(self, path: str, layer: int) -> str:
        """The full path of what holds a layer of the pipeline."""
        kinds = self._stack.kinds
        kind = f"{layer % kinds}." if kinds > 1 else ""
        return f"{LAYERS}{kind}{path}"


def _on_host(array: Held, path: str) -> np.ndarray:
    """The whole array. Raises InputError when other processes hold parts of it."""
    if isinstance(array, Shards):
        raise InputError(
            f"{path} is sharded over several processes, but one process must write this format; "
            "save it in another one, and convert that"
        )
    return np.asarray(array)


def load_from(source: SourceOfParts, config: Config, mesh: Mesh | None) -> Mixtral:
    """The model of a config with the parameters of a source that was compared with it."""
    mesh = mesh or mesh_in_use()
    config = for_mesh(config, mesh)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        model: Mixtral = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        stack = model.pipeline.runner.stack
        if mesh is not None:
            return fill(model, variable_shardings(model, model.layout, mesh), source, stack)
        device = SingleDeviceSharding(jax.devices()[0])
        return fill(model, jax.tree.map(lambda _: device, model), source, stack)


def mesh_in_use() -> Mesh | None:
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def for_mesh(config: Config, mesh: Mesh | None) -> Config:
    """The config, with its pipeline adapted so that this mesh can hold the weights.

    `num_repeats` becomes the largest number up to it that divides the layers of a stage, unless
    `stage_layers` is set; a list that is for another mesh becomes `auto`. So the mesh decides how
    layers are stacked, and never a checkpoint.
    """
    sizes = MeshConfig(**{axis: mesh.shape.get(axis, 1) for axis in AXES} if mesh else {})
    pipeline = config.pipeline
    # Layers that do not divide into stages at all are refused below, by the rules of the weights.
    per_stage = max(1, config.model.num_pipeline_layers // sizes.stage)
    if pipeline.stage_layers is None:
        fitting = (n for n in range(pipeline.num_repeats, 0, -1) if per_stage % n == 0)
        pipeline = dataclasses.replace(pipeline, num_repeats=next(fitting))
    elif not fits(pipeline.stage_layers, sizes.stage, pipeline.num_repeats):
        pipeline = dataclasses.replace(pipeline, stage_layers=AUTO)
    config = dataclasses.replace(config, pipeline=pipeline)
    for divisor, size, rule in config.weight_rules(sizes):
        if size % divisor:
            raise InputError(
                f"{rule}; choose another mesh, because the checkpoint fixes the sizes of the model"
            )
    return config


def fill(
    tree: Tree, shardings: PyTree, source: SourceOfParts, stack: Stack, part: str = PARAMETERS
) -> Tree:
    """A copy of a tree of abstract arrays, with arrays of a part of a source in their places."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    reader = _Part(source, part, stack)
    arrays = [
        _read_array(dotted_path(path), leaf, target, reader)
        for (path, leaf), target in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]
    source.close()
    if reader.strange:
        first, others = reader.strange[0], len(reader.strange) - 1
        what = f"{first} holds" if not others else f"{first} and {counted(others, 'other')} hold"
        note(f"{what} NaN or infinity, as was stored; take an earlier checkpoint")
    filled: Tree = jax.tree.unflatten(structure, arrays)
    return filled


@dataclass(frozen=True)
class _Part:
    source: SourceOfParts
    name: str
    stack: Stack  # of the layers of the pipeline
    strange: list[str] = field(default_factory=list)  # arrays that are not finite

    def read(self, path: str, layer: int | None, cut: tuple[slice, ...]) -> np.ndarray:
        """A shard of one array, after the checks that its part needs."""
        array = self.source.read(path, layer, self.name, cut)
        name = self.source.name(path, layer, self.name)
        if self.name != PARAMETERS:  # training would go on with them, to no useful result
            streams.check_finite(
                array, name, cure="load the parameters of this one alone with linen_compat.load"
            )
        elif name not in self.strange and streams.not_finite(array):
            self.strange.append(name)
        streams.check_sign(array, name, self.name)
        return array


def _read_array(path: str, leaf: jax.ShapeDtypeStruct, target: Sharding, part: _Part) -> jax.Array:
    """One parameter as a JAX array; each device of this process reads its own shard."""
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        cuts = index or ()
        bounds = [cut.indices(size) for cut, size in zip(cuts, leaf.shape, strict=True)]
        key = tuple(bound[:2] for bound in bounds)
        if key not in read:  # devices that hold copies of one shard share it
            read[key] = _read_shard(path, leaf, [range(*bound) for bound in bounds], part)
        return read[key]

    return jax.make_array_from_callback(leaf.shape, target, shard, dtype=leaf.dtype)


def _read_shard(
    path: str, leaf: jax.ShapeDtypeStruct, ranges: list[range], part: _Part
) -> np.ndarray:
    """The part of a parameter within these ranges of indices, one range per axis."""
    stack = stack_axes(path)
    cut = tuple(slice(span.start, span.stop) for span in ranges[stack:])
    if not stack:
        return part.read(path, None, cut).astype(leaf.dtype, copy=False)
    result = np.empty([len(span) for span in ranges], leaf.dtype)
    flat = result.reshape(-1, *result.shape[stack:])
    # From each place in the flattened stack `[repeats, stages, layers per stage]` to that in this
    # shard.
    places = itertools.product(*ranges[:stack])
    here = {int(np.ravel_multi_index(at, leaf.shape[:stack])): i for i, at in enumerate(places)}
    inner = in_layer(path)
    in_pipeline = path.startswith(LAYERS)
    kinds = part.stack.kinds if in_pipeline else 1
    # In the order in which each stored array is read once.
    layers = [one for one in part.source.order(inner) if one % kinds == kind_of(path)]
    for layer in layers:
        place = int(part.stack.places[layer]) if in_pipeline else layer
        if place in here:
            flat[here.pop(place)] = part.read(inner, layer, cut)
    if here:  # padding computes what nobody reads, on the numbers of the last layer
        flat[[*here.values()]] = part.read(inner, max(layers), cut)
    return result
