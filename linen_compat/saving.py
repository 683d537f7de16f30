"""Models out into checkpoints, of MaxText or of this project."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from linen_compat.compare import LAYERS, parameter_paths
from linen_compat.layouts import NNX, PIPELINED, Layout
from linen_compat.orbax_streams import OrbaxDestination
from linen_compat.streams import PARAMETERS, ArraySpec, Source, copy, new_folder, title
from nnx_pipeline import InputError, Mixtral

_STACK_AXES = 3  # repeats, stages, layers per stage


def save(
    model: Mixtral,
    checkpoint: str | Path,
    format: str = "maxtext:scanned",
    *,
    stages: int | None = None,
    repeats: int | None = None,
    step: int = 0,
) -> None:
    """Writes the parameters of a model, and `step`, as an Orbax checkpoint in a new folder.

    format: `maxtext:unscanned`, `maxtext:scanned`, `maxtext:pipelined`, or `nnx`. The folder itself
    is what Orbax restores; for MaxText's own arrangement give `<run>/<step>/items`.
    stages, repeats: of the pipelined layout, by default those of the model.

    Values and dtypes are those of the model, gathered one array at a time. Only where a model has
    an `attention_scale` other than 1 do the query kernels of a MaxText format take it in.

    Raises InputError when the folder holds something, or the arrays are spread over several
    processes. Nothing is left behind when it fails.
    """
    scalars = {"step": np.asarray(step, np.int32)}
    source = ModelSource(model, {PARAMETERS: model}, scalars)
    write(source, checkpoint, layout_for(model, format, stages, repeats))


def layout_for(model: Mixtral, format: str, stages: int | None, repeats: int | None) -> Layout:
    """The layout of that format, with the model's own stages and repeats unless told others."""
    layers = model.config.model.num_layers
    if format in (PIPELINED, NNX):
        own = model.pipeline.num_stages, model.pipeline.config.num_repeats
        return Layout(format, layers, stages or own[0], repeats or own[1])
    return Layout(format, layers, stages or 1, repeats or 1)


def write(
    source: Source, checkpoint: str | Path, layout: Layout, *, allow_nan: bool = True
) -> None:
    """Copies a source to a new folder of this layout."""
    with new_folder(checkpoint) as folder:
        destination = OrbaxDestination(
            folder, layout, source.arrays, attention_scale=source.attention_scale
        )
        copy(source, destination, allow_nan=True)


class ModelSource:
    """Parameters in memory as a stream of layers; see `streams.Source`.

    trees: models of one shape by part. One array at a time is gathered to the host.
    """

    def __init__(
        self, model: Mixtral, trees: Mapping[str, Mixtral], scalars: Mapping[str, np.ndarray]
    ) -> None:
        self.num_layers = model.config.model.num_layers
        self.attention_scale = model.config.model.attention_scale
        self.parts, self.scalars = tuple(trees), scalars
        self._arrays = {part: parameter_paths(tree) for part, tree in trees.items()}
        self._gathered: tuple[tuple[str, str], np.ndarray] | None = None
        self.arrays = {}
        for path, array in self._arrays[PARAMETERS].items():
            shape = array.shape[_STACK_AXES:] if path.startswith(LAYERS) else array.shape
            self.arrays[path.removeprefix(LAYERS)] = ArraySpec(shape, np.dtype(array.dtype))

    def order(self, path: str) -> Sequence[int]:
        return range(self.num_layers)

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        return title(path, layer, part)

    def read(self, path: str, layer: int | None, part: str = PARAMETERS) -> np.ndarray:
        full = path if layer is None else LAYERS + path
        if self._gathered is None or self._gathered[0] != (part, full):
            self._gathered = None  # before the next one takes memory
            self._gathered = (part, full), _on_host(self._arrays[part][full], full)
        array = self._gathered[1]
        return array if layer is None else array.reshape(-1, *array.shape[_STACK_AXES:])[layer]


def _on_host(array: jax.Array, path: str) -> np.ndarray:
    if not array.is_fully_addressable:
        raise InputError(
            f"{path} is spread over several processes, and a checkpoint is written by one; "
            "gather the model first, or save it from a run with one process"
        )
    return np.asarray(array)
