"""Arrays of a source straight into a model on a mesh, each part where it belongs."""

import contextlib
import dataclasses
import itertools
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from linen_compat.compare import LAYERS, nnx_path
from linen_compat.streams import PARAMETERS, Source, check_finite, check_sign
from nnx_pipeline import Config, InputError, MeshConfig, Mixtral
from nnx_pipeline.mesh import AXES
from nnx_pipeline.sharding import variable_shardings

Tree = TypeVar("Tree")
_STACK_AXES = 3  # repeats, stages, layers per stage


class SourceOfParts(Source, Protocol):
    """A source that reads no more of an array than is asked for."""

    def read(
        self,
        path: str,
        layer: int | None,
        part: str = PARAMETERS,
        index: tuple[slice, ...] = (),
    ) -> np.ndarray:
        """As of `Source`; index: a part of the array, the whole by default."""
        ...

    def close(self) -> None:
        """Lets go of what is held between reads."""
        ...


def load_from(source: SourceOfParts, config: Config, mesh: Mesh | None) -> Mixtral:
    """The model of a config with the parameters of a source; mesh as for `load`."""
    mesh = mesh or mesh_in_use()
    config = for_mesh(config, mesh)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        return fill(model, _placement(model, mesh), source)


def mesh_in_use() -> Mesh | None:
    """The mesh of `jax.set_mesh`."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def for_mesh(config: Config, mesh: Mesh | None) -> Config:
    """The config as this mesh can hold its weights.

    Without stages the parts of a pipeline are left out. With stages there are `num_repeats` of
    them, or the most below that for which there are layers: it is the mesh that decides how layers
    are stacked, and never what a checkpoint holds. Raises InputError when the mesh cannot hold the
    weights, whose sizes are those of a checkpoint.
    """
    sizes = MeshConfig(**{axis: mesh.shape.get(axis, 1) for axis in AXES} if mesh else {})
    pipeline = config.pipeline
    if sizes.stage == 1:
        pipeline = dataclasses.replace(pipeline, num_repeats=1)
    if sizes.stage == 1 and pipeline.schedule != "1f1b":
        pipeline = dataclasses.replace(pipeline, num_microbatches=None, fsdp_gather="use")
    per_stage = max(1, config.model.num_layers // sizes.stage)
    fitting = (n for n in range(pipeline.num_repeats, 0, -1) if per_stage % n == 0)
    pipeline = dataclasses.replace(pipeline, num_repeats=next(fitting))
    config = dataclasses.replace(config, pipeline=pipeline)
    for divisor, size, rule in config.weight_rules(sizes):
        if size % divisor:
            raise InputError(
                f"{rule}; choose another mesh, as the sizes of a checkpoint are what they are"
            )
    return config


def _placement(model: Mixtral, mesh: Mesh | None) -> Any:
    if mesh is not None:
        return variable_shardings(model, model.layout, mesh)
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, model)


def fill(tree: Tree, shardings: Any, source: SourceOfParts, part: str = PARAMETERS) -> Tree:
    """A tree of a model's shape with the arrays of a source instead of abstract ones."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = jax.tree.leaves(shardings)
    arrays = []
    for (path, leaf), place in zip(leaves, places, strict=True):
        arrays.append(_read_array(nnx_path(path), leaf, place, source, part))
    source.close()
    return jax.tree.unflatten(structure, arrays)


def _read_array(
    path: str, leaf: jax.ShapeDtypeStruct, place: Sharding, source: SourceOfParts, part: str
) -> jax.Array:
    """One parameter, `[repeats, stages, layers per stage, …]` where it belongs to the layers.

    Row-major order of the first three axes is the order of the layers, whatever their sizes.
    """
    read: dict[Any, np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        cuts = index or ()
        bounds = [cut.indices(size) for cut, size in zip(cuts, leaf.shape, strict=True)]
        key = tuple(bound[:2] for bound in bounds)
        if key not in read:  # devices that hold copies of one shard share it
            read[key] = _read_shard(path, leaf, [range(*bound) for bound in bounds], source, part)
        return read[key]

    return jax.make_array_from_callback(leaf.shape, place, shard, dtype=leaf.dtype)


def _read_shard(
    path: str, leaf: jax.ShapeDtypeStruct, ranges: list[range], source: SourceOfParts, part: str
) -> np.ndarray:
    stack = _STACK_AXES if path.startswith(LAYERS) else 0
    cut = tuple(slice(span.start, span.stop) for span in ranges[stack:])
    if not stack:
        return _read_checked(source, path, None, part, cut).astype(leaf.dtype, copy=False)
    result = np.empty([len(span) for span in ranges], leaf.dtype)
    flat = result.reshape(-1, *result.shape[stack:])
    places = itertools.product(*ranges[:stack])
    layers = {int(np.ravel_multi_index(at, leaf.shape[:stack])): i for i, at in enumerate(places)}
    inner = path.removeprefix(LAYERS)
    for layer in source.order(inner):
        if layer in layers:
            flat[layers[layer]] = _read_checked(source, inner, layer, part, cut)
    return result


def _read_checked(
    source: SourceOfParts, path: str, layer: int | None, part: str, cut: tuple[slice, ...]
) -> np.ndarray:
    array, name = source.read(path, layer, part, cut), source.name(path, layer, part)
    if part != PARAMETERS:  # training would go on, and what it gives be none
        check_finite(array, name, cure="its parameters alone with linen_compat.load")
    check_sign(array, name, part)
    return array
