"""A model in memory as a stream of layers."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from linen_compat.compare import LAYERS, parameter_paths
from linen_compat.streams import PARAMETERS, ArraySpec, title
from nnx_pipeline import InputError, Mixtral

_STACK_AXES = 3  # repeats, stages, layers per stage


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
