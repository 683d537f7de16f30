"""A model in memory, presented as a stream of layers."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from linen_compat.formats._comparison import LAYERS, parameter_paths, stack_axes
from linen_compat.formats._names import EARLY, check_names
from linen_compat.formats._streams import PARAMETERS, ArraySpec, array_title, scale_in_arrays
from nnx_pipeline import InputError, Mixtral


class ModelSource:
    """A model in memory as a `LayerSource`: for each part a tree in the model's structure.

    One array at a time is gathered to the host. Raises InputError for a model with parameters that
    no format has a name for.
    """

    def __init__(
        self, model: Mixtral, trees: Mapping[str, Mixtral], scalars: Mapping[str, np.ndarray]
    ) -> None:
        check_names(model.config.model)
        self.num_layers = model.config.model.num_layers
        self.num_dense_layers = model.config.model.num_dense_layers
        self.parts, self.scalars = tuple(trees), scalars
        self._arrays = {part: parameter_paths(tree) for part, tree in trees.items()}
        self._gathered: dict[tuple[str, str], np.ndarray] = {}  # one at most
        self.arrays = {}
        for path, array in self._arrays[PARAMETERS].items():
            shape = array.shape[stack_axes(path) :]
            self.arrays[path.removeprefix(LAYERS)] = ArraySpec(shape, np.dtype(array.dtype))
        self.attention_scale = scale_in_arrays(self.arrays, model.config.model.attention_scale)

    def order(self, path: str) -> Sequence[int]:
        dense = self.num_dense_layers
        return range(dense if path.startswith(EARLY) else self.num_layers - dense)

    def dtype(self, path: str, part: str = PARAMETERS) -> np.dtype:
        arrays = self._arrays[part]
        return np.dtype(arrays[path if path in arrays else LAYERS + path].dtype)

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        return array_title(path, layer, part)

    def read(self, path: str, layer: int | None, part: str = PARAMETERS) -> np.ndarray:
        full = path if layer is None or path.startswith(EARLY) else LAYERS + path
        # Layers of one array are read in turn, so the array stays here for the next of them.
        if (part, full) not in self._gathered:
            self._gathered.clear()  # before the next one takes memory
            self._gathered[part, full] = _on_host(self._arrays[part][full], full)
        array = self._gathered[part, full]
        # Row-major order of repeats, stages and layers per stage is the order of the layers.
        return (
            array if layer is None else array.reshape(-1, *array.shape[stack_axes(full) :])[layer]
        )


def _on_host(array: jax.Array, path: str) -> np.ndarray:
    """The whole array. Raises InputError when other processes hold parts of it."""
    if not array.is_fully_addressable:
        raise InputError(
            f"{path} is sharded over several processes, but one process must write a checkpoint; "
            "gather the model first, or save it from a run with one process"
        )
    return np.asarray(array)
