"""Orbax checkpoints, MaxText's and this project's own, as streams of layers."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linen_compat.checkpoint import SCALAR_PATHS, Inspection
from linen_compat.chunks import Index
from linen_compat.damage import check_databases
from linen_compat.layouts import NNX, SCAN_AXIS, SCANNED, UNSCANNED, Layout
from linen_compat.names import OUTSIDE, Names, of_layer
from linen_compat.stored import MissingChunk, NewArrays, StoredArrays
from linen_compat.streams import MOMENTS, PARAMETERS, SCALARS, ArraySpec, Mismatch, title

_NAMES = {names.nnx: names for names in (*OUTSIDE, *of_layer(2))}
_NAMES_OF_ONE_EXPERT = {**_NAMES, **{names.nnx: names for names in of_layer(1)}}
_PREFIXES = {
    "maxtext": {
        PARAMETERS: "params/params/",
        **{moment: f"opt_state/0/{moment}/params/" for moment in MOMENTS},
    },
    "nnx": {PARAMETERS: "model/", **{moment: f"optimizer/{moment}/" for moment in MOMENTS}},
}
_ROUTER = "feed_forward.router"


def names_of(arrays: Mapping[str, Any]) -> dict[str, Names]:
    """The names of each NNX path, of a model that has these."""
    return _NAMES if _ROUTER in arrays else _NAMES_OF_ONE_EXPERT


def read_scalars(found: Inspection) -> dict[str, np.ndarray]:
    """The step and the counts of a checkpoint, by the names of `streams.SCALARS`."""
    files = StoredArrays(found.items)
    return {name: files.read(leaf.stored) for name, leaf in found.scalars.items()}


class OrbaxSource:
    """A checkpoint that `compare` has found complete, to be read. See `streams.Source`."""

    def __init__(
        self,
        found: Inspection,
        arrays: Mapping[str, ArraySpec],
        *,
        parameters_only: bool = False,
    ) -> None:
        """arrays: as of `compare.model_arrays`; the dtypes are those stored, whatever it says.

        parameters_only: whether to leave the state of the optimizer out, but not the step, unless
        its chunk is missing and nobody can tell what it was.
        """
        self.layout, self.num_layers = found.layout, found.layout.num_layers
        self.parts = (PARAMETERS,) if parameters_only else found.parts
        self._found, self._names = found, names_of(arrays)
        self._files = StoredArrays(found.items)
        self.attention_scale = found.attention_scale
        self.arrays = {path: self._as_stored(path, spec) for path, spec in arrays.items()}
        self._parameters_only = parameters_only

    @functools.cached_property
    def scalars(self) -> Mapping[str, np.ndarray]:
        """As of `streams.Source`; not read before somebody asks, as a model alone needs none."""
        if not self._parameters_only:
            return read_scalars(self._found)
        step = self._found.scalars.get("step")
        try:
            return {} if step is None else {"step": self._files.read(step.stored)}
        except MissingChunk:
            return {}

    def order(self, path: str) -> Sequence[int]:
        return self.layout.order()

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: Index = ()
    ) -> np.ndarray:
        """index: a part of the array, the whole by default."""
        slot = self._slot(path, layer)
        return self._files.read(self.name(path, layer, part), slot.index, index)

    def in_order(self, path: str, layer: int | None) -> Iterator[np.ndarray]:
        """The chunks of the stored array of a parameter, as they lie beside each other.

        It may hold other layers too, and all of them are given then.
        """
        return self._files.in_order(self.name(path, layer))

    def check_files(self) -> None:
        """Looks for files that were cut off, besides those that reading every array finds.

        To be called after that, which names what is lost.
        """
        check_databases(self._found.items)

    def close(self) -> None:
        """Lets go of the array that was read last."""
        self._files.close()

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        return self._found.part(part)[self._slot(path, layer).leaf].stored

    def _slot(self, path: str, layer: int | None) -> Any:
        names = self._names[path]
        return self.layout.outside(names) if layer is None else self.layout.slot(names, layer)

    def _as_stored(self, path: str, spec: ArraySpec) -> ArraySpec:
        outside = self._names[path] in OUTSIDE
        leaf = self._found.parameters[self._slot(path, None if outside else 0).leaf]
        return ArraySpec(spec.shape, np.dtype(jnp.dtype(leaf.dtype)))


class OrbaxDestination:
    """A new checkpoint in a layout of MaxText or of this project. See `streams.Destination`."""

    parts: tuple[str, ...] = (PARAMETERS, *MOMENTS)

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        arrays: Mapping[str, Any],
        *,
        attention_scale: float = 1.0,
    ) -> None:
        """arrays: what a layer has, by NNX path; only the names count.

        attention_scale: of the model, which this project's own format keeps beside the arrays. A
        MaxText model always has 1.
        """
        self.layout = layout
        self._family = "nnx" if layout.format == NNX else "maxtext"
        self.attention_scale = attention_scale if self._family == "nnx" else 1.0
        self._names = names_of(arrays)
        self._files = NewArrays(folder)
        self._written = set[tuple[str, str, int | None]]()
        self._arrays = tuple(arrays)

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        names = self._names[path]
        slot = self.layout.outside(names) if layer is None else self.layout.slot(names, layer)
        leaf = _PREFIXES[self._family][part] + slot.leaf
        if leaf not in self._files:
            shape = array.shape if layer is None else self.layout.stacked(array.shape)
            self._files.create(leaf, shape, array.dtype, self._stacked_axes(slot.index))
        if array.dtype != self._files.dtype(leaf):
            raise Mismatch(
                f"{title(path, layer, part)} is {array.dtype} and another layer of it "
                f"{self._files.dtype(leaf)}; {leaf} has one dtype"
            )
        self._files.write(leaf, slot.index, array)
        self._written.add((part, path, layer))

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Raises RuntimeError when a layer of an array was never written."""
        self._check_complete()
        paths = SCALAR_PATHS[self._family]
        if "count" in scalars and self._family == "maxtext":  # which keeps two, and they are equal
            scalars = {"schedule_count": scalars["count"], **scalars}
        for name in SCALARS:
            if name in scalars:
                value = np.asarray(scalars[name])
                self._files.create(paths[name], (), value.dtype)
                self._files.write(paths[name], (), value)
        # MaxText's optimizer is a list of three, and the second of them, weight decay, is empty.
        empty = ("opt_state/1",) if self._family == "maxtext" and "count" in scalars else ()
        custom = {"attention_scale": self.attention_scale} if self._family == "nnx" else None
        self._files.finish(empty, custom)

    def _check_complete(self) -> None:
        outside = {names.nnx for names in OUTSIDE}
        for part in {part for part, _, _ in self._written}:
            for path in self._arrays:
                layers = [None] if path in outside else range(self.layout.num_layers)
                absent = [layer for layer in layers if (part, path, layer) not in self._written]
                if absent:
                    raise RuntimeError(f"{title(path, absent[0], part)} was never written")

    def _stacked_axes(self, index: Index) -> range:
        if self.layout.format == UNSCANNED:
            return range(0)
        if self.layout.format == SCANNED and index:
            return range(SCAN_AXIS, SCAN_AXIS + 1)
        return range(len(index))
