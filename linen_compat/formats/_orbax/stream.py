"""Orbax checkpoints, MaxText's and this project's own, as streams of layers."""

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from linen_compat.formats import _streams as streams
from linen_compat.formats._intact import Json
from linen_compat.formats._names import BIASES, PATHS_OUTSIDE, QK_NORMS, Names, of_model
from linen_compat.formats._orbax.arrays import MissingChunk, StoredArrays
from linen_compat.formats._orbax.chunks import Index
from linen_compat.formats._orbax.corruption import check_databases
from linen_compat.formats._orbax.inspect import Inspection
from linen_compat.formats._orbax.layouts import NNX, TreeLayout, scale_of_maxtext
from linen_compat.formats._orbax.leaves import SCALAR_PATHS
from linen_compat.formats._orbax.new_arrays import NewArrays
from linen_compat.formats._orbax.parts import Part
from linen_compat.formats._streams import (
    COPIES,
    MOMENTS,
    PARAMETERS,
    ArraySpec,
    SpreadSource,
    array_title,
)

_PREFIXES = {
    "maxtext": {
        PARAMETERS: "params/params/",
        **{moment: f"opt_state/0/{moment}/params/" for moment in MOMENTS},
    },
    "nnx": {
        PARAMETERS: "model/",
        **{part: f"optimizer/{part}/" for part in (*MOMENTS, *COPIES)},
    },
}


def names_by_path(arrays: Mapping[str, object]) -> dict[str, Names]:
    """The names of each parameter of a model with these NNX paths."""
    return {names.nnx: names for group in of_model(arrays) for names in group}


def scale_in_maxtext(arrays: Mapping[str, ArraySpec]) -> float | None:
    """The attention scale for which MaxText has the query kernels of a model; see `LayerSource`."""
    apart = (arrays.get(names.nnx) for names in (QK_NORMS[0], BIASES[0]))
    head_dim = next((one.shape[-1] for one in apart if one), None)
    return streams.scale_in_arrays(arrays, scale_of_maxtext(head_dim))


def read_scalars(contents: Inspection) -> dict[str, np.ndarray]:
    """The step and the counts of a checkpoint, by the names of `streams.SCALARS`."""
    files = StoredArrays(contents.items)
    return {name: files.read(leaf.stored) for name, leaf in contents.scalars.items()}


class OrbaxSource:
    """A checkpoint as a `LayerSource`, once `compare_leaves` has found it complete."""

    def __init__(
        self,
        contents: Inspection,
        arrays: Mapping[str, ArraySpec],
        *,
        rotary: streams.Rotary | None = None,
        parameters_only: bool = False,
    ) -> None:
        """`arrays` and `rotary` are the model's; dtypes are replaced by those that are stored."""
        self.layout, self.num_layers = contents.layout, contents.layout.num_layers
        self.num_dense_layers = contents.layout.num_dense_layers
        self.parts = (PARAMETERS,) if parameters_only else tuple(contents.parts)
        self._contents, self._names = contents, names_by_path(arrays)
        self._files = StoredArrays(contents.items)
        self.attention_scale = contents.attention_scale
        self.rotary = contents.rotary or rotary
        self.arrays = {
            path: ArraySpec(spec.shape, self.dtype(path)) for path, spec in arrays.items()
        }
        self._parameters_only = parameters_only

    @functools.cached_property
    def scalars(self) -> Mapping[str, np.ndarray]:
        """Read at the first access, because a model alone needs none."""
        if not self._parameters_only:
            return read_scalars(self._contents)
        step = self._contents.scalars.get("step")
        try:
            return {} if step is None else {"step": self._files.read(step.stored)}
        except MissingChunk:
            return {}

    def order(self, path: str) -> Sequence[int]:
        return self.layout.order(self._names[path])

    def dtype(self, path: str, part: str = PARAMETERS) -> np.dtype:
        names = self._names[path]
        slot = self.layout.slot(names, None if path in PATHS_OUTSIDE else 0)
        return self._contents.parts[part][slot.leaf].spec.dtype

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: Index = ()
    ) -> np.ndarray:
        slot = self.layout.slot(self._names[path], layer)
        return self._files.read(self._contents.parts[part][slot.leaf].stored, slot.index, index)

    def in_order(self, path: str, layer: int | None) -> Iterator[np.ndarray]:
        """The chunks of the whole stored array that holds a layer, in row-major order."""
        return self._files.in_order(self.name(path, layer))

    def check_files(self) -> None:
        """To be called after reading every array: those errors name what is lost."""
        check_databases(self._contents.items)

    def hold(self, name: str) -> None:
        self._files.hold(name)

    def release(self, name: str) -> None:
        self._files.release(name)

    def close(self) -> None:
        self._files.close()

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        return self._contents.parts[part][self.layout.slot(self._names[path], layer).leaf].stored


class OrbaxDestination:
    """A new Orbax checkpoint, of MaxText or of this project, as a `LayerDestination`."""

    def __init__(
        self,
        source: streams.LayerSource,
        folder: Path,
        layout: TreeLayout,
        *,
        durable: bool = True,
        part: Part | None = None,
    ) -> None:
        """Has a place for all arrays of a source. The folder is empty.

        `durable`, `part`: see `NewArrays`.
        """
        self.layout, self._arrays = layout, source.arrays
        self._family = "nnx" if layout.format == NNX else "maxtext"
        self.parts = tuple(_PREFIXES[self._family])
        self.attention_scale, self._rotary = source.attention_scale, source.rotary
        if self._family == "maxtext":
            self.attention_scale = scale_in_maxtext(self._arrays)
        self._names = names_by_path(self._arrays)
        self._files, self._is_part = NewArrays(folder, durable=durable, part=part), part is not None
        self._written = set[tuple[str, str, int | None]]()
        self._creating = threading.Lock()

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        slot = self.layout.slot(self._names[path], layer)
        leaf = _PREFIXES[self._family][part] + slot.leaf
        with self._creating:
            if leaf not in self._files:  # the first layer decides shape and dtype for all
                self._create(leaf, (path, layer), ArraySpec(array.shape, array.dtype))
        if array.dtype != self._files.dtype(leaf):
            raise streams.Mismatch(
                f"{array_title(path, layer, part)} is {array.dtype} and another layer of it is "
                f"{self._files.dtype(leaf)}, but {leaf} can only have one dtype; "
                "use linen_compat.load, which casts to model.param_dtype, and linen_compat.save"
            )
        self._files.write(leaf, slot.index, array)
        self._written.add((part, path, layer))

    def _create(
        self,
        leaf: str,
        place: tuple[str, int | None],
        spec: ArraySpec,
        shard: tuple[int, ...] | None = None,
    ) -> None:
        """Makes room for what stores an array of a layer; see `NewArrays.create`."""
        path, layer = place
        shape, axes, names = spec.shape, range(0), self._names[path]
        if layer is not None:
            shape, axes = self.layout.stacked(names, shape), self.layout.stacked_axes(names)
        self._files.create(leaf, shape, spec.dtype, axes, shard)

    def write_own(self, source: SpreadSource) -> None:
        """Stores what this process holds of a source, and says so; one of them then commits."""
        ratio = streams.ratio_of(source.attention_scale, self.attention_scale)
        for part in (part for part in source.parts if part in self.parts):
            for path, layer in streams.walk(source):
                slot = self.layout.slot(self._names[path], layer)
                leaf = _PREFIXES[self._family][part] + slot.leaf
                if leaf not in self._files:
                    spec = ArraySpec(source.arrays[path].shape, source.dtype(path, part))
                    self._create(leaf, (path, layer), spec, source.shard(path, part))
                for within, piece in source.pieces(path, layer, part):
                    streams.check_sign(piece, source.name(path, layer, part), part)
                    scaled = path in streams.SCALED and ratio != 1.0
                    values = streams.times_ratio(piece, ratio) if scaled else piece
                    self._files.write(leaf, slot.index, values, within)
        self._write_scalars(source.scalars)
        self._files.complete()

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Raises RuntimeError when a layer of an array was never written."""
        if not self._is_part:
            self._check_complete()
            self._write_scalars(scalars)
        # MaxText's optimizer is a list of three, and the second of them, weight decay, is empty.
        empty = ("opt_state/1",) if self._family == "maxtext" and "count" in scalars else ()
        custom: Json = {}
        if self._family == "nnx":
            if self.attention_scale is not None:
                custom["attention_scale"] = self.attention_scale
            if self._rotary is not None:
                custom["rotary"] = self._rotary._asdict()
        self._files.finish(empty, custom)

    def _write_scalars(self, scalars: Mapping[str, np.ndarray]) -> None:
        paths = SCALAR_PATHS[self._family]
        if "count" in scalars and self._family == "maxtext":  # it keeps two equal counts
            scalars = {"schedule_count": scalars["count"], **scalars}
        for name in paths:
            if name in scalars:
                value = np.asarray(scalars[name])
                self._files.create(paths[name], value.shape, value.dtype)
                self._files.write(paths[name], (), value)

    def _check_complete(self) -> None:
        for part in {part for part, _, _ in self._written}:
            for path in self._arrays:
                inside = path not in PATHS_OUTSIDE
                for layer in self.layout.order(self._names[path]) if inside else (None,):
                    if (part, path, layer) not in self._written:
                        raise RuntimeError(f"{array_title(path, layer, part)} was never written")
