"""How weights pass from one format to another: layer by layer, never a whole model in memory."""

import functools
import itertools
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from linen_compat.formats._names import EARLY, KV_DOWN, PATHS_OUTSIDE, QK_NORMS
from linen_compat.formats._parallel import Memory, in_order
from nnx_pipeline import InputError
from nnx_pipeline.config.model import ModelConfig

# The parts of a checkpoint: the parameters, then Adam's first and second moments.
PARAMETERS = "parameters"
MOMENTS = ("mu", "nu")
# What the format `nnx` alone has besides: the copy that is trained, and gradients that add up.
COPIES = ("master", "acc_grads")
# Steps as counted by training, by Adam, and by the schedule of the learning rate.
SCALARS = ("step", "count", "schedule_count")
# What else is counted and kept, of the format `nnx` alone: see `Guarded`, and `optax.MultiSteps`.
GUARD = ("skipped_in_a_row", "skipped", "spike_losses", "spike_norms", "spike_seen")
SEVERAL = ("mini_step", "gradient_step")
SCALED = ("attention.query", "attention.query_bias")  # by which scores are proportional
_SPARE_BYTES = 64 * 2**20  # that threads may take besides the largest array
_PLAIN = (np.float32, np.float16, ml_dtypes.bfloat16)


class Mismatch(InputError):
    """A checkpoint does not hold what was asked for; commands then exit with 1 and not 2."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape and stored dtype of an array; an array of the layers has the shape of one layer."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Rotary(NamedTuple):
    """In which order the query and key kernels are stored: of neighbours, or of halves of a head.

    No shape tells it. `scaling` is the model's `rope_scaling`, with which MaxText has one order.
    """

    interleaved: bool
    scaling: str | None

    @classmethod
    def of(cls, model: ModelConfig) -> "Rotary":
        return cls(model.rope_interleaved, model.rope_scaling)


class LayerSource(Protocol):
    """A checkpoint to read from, one array of one layer at a time.

    `num_layers` counts the dense layers before the pipeline too. `parts` is `(PARAMETERS,)`, then
    those of `MOMENTS` and `COPIES` that are there. `attention_scale` is the factor on attention
    scores for which the query kernels are stored; None with latent attention, where no format folds
    the factor into them. `rotary` is None where nobody said it. `arrays` has shape and dtype by NNX
    path, of one layer or of the whole model for paths of `names.OUTSIDE`. `scalars` are those of
    `SCALARS`, `GUARD` and `SEVERAL`.
    """

    num_layers: int
    num_dense_layers: int
    parts: tuple[str, ...]
    attention_scale: float | None
    rotary: Rotary | None

    @property
    def arrays(self) -> Mapping[str, ArraySpec]: ...

    @property
    def scalars(self) -> Mapping[str, np.ndarray]: ...

    def order(self, path: str) -> Sequence[int]:
        """The layers that have a parameter, in an order that reads each stored array once."""

    def dtype(self, path: str, part: str = PARAMETERS) -> np.dtype:
        """The dtype of the arrays from `read`; moments may have another than parameters."""

    def read(self, path: str, layer: int | None, part: str = PARAMETERS) -> np.ndarray:
        """One array; `layer` is its number among those that have it, None outside the layers."""

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        """What the checkpoint calls the stored array, which may hold several layers."""

    def hold(self, name: str) -> None:
        """Keeps what is read of a stored array for its other layers, until it is released."""

    def release(self, name: str) -> None: ...


class SourceOfParts(LayerSource, Protocol):
    """A source that reads parts of arrays: `index` has a slice per axis, or is empty."""

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: tuple[slice, ...] = ()
    ) -> np.ndarray: ...

    def close(self) -> None: ...


class SpreadSource(LayerSource, Protocol):
    """A source of which several processes hold parts, each number in one of them."""

    def shard(self, path: str, part: str) -> tuple[int, ...]:
        """The shape of what a device holds of one layer, or of an array outside the layers."""

    def pieces(
        self, path: str, layer: int | None, part: str
    ) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """What this process holds of one array, and where in the array that is."""


class LayerDestination(Protocol):
    """A checkpoint to write, in a new folder of its own (see `new_folder.new_folder`).

    Parts of a source that are not among its `parts` are left out. The written query kernels must
    suit its `attention_scale`; None with latent attention.
    """

    parts: tuple[str, ...]
    attention_scale: float | None

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        """Stores one array of one layer; each combination is stored once."""

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Writes what makes the folder a checkpoint; called after the last array."""


Progress = Callable[[str, int], None]  # given the name and the size in bytes of an array


COPY_WORDS = {
    "master": "the master copy of the parameters (train.master_dtype)",
    "acc_grads": "accumulated gradients (train.accumulate_steps)",
}


def ours_alone(parts: Iterable[str], numbers: Mapping[str, np.ndarray]) -> str:
    """What a training state has for which MaxText has no place, in words; "" for nothing."""
    words = [COPY_WORDS[part] for part in COPIES if part in parts]
    skipped = int(numbers.get("skipped", 0))
    words += [f"the number of skipped steps ({skipped}), which Adam does not count"] * bool(skipped)
    return " and ".join(words)


def no_progress(name: str, nbytes: int) -> None: ...


def copy(
    source: LayerSource,
    destination: LayerDestination,
    *,
    allow_nan: bool = False,
    progress: Progress = no_progress,
    workers: int = 1,
) -> None:
    """Copies every array of `source` to `destination`, then commits the destination.

    With one worker, one array of one layer is in memory at a time. Several work on one each, in the
    memory of twice the largest stored array and 64 MiB; both sides are then used by all threads.
    Query kernels are multiplied where the attention scales differ. Raises Mismatch for a second
    moment below 0 and, unless `allow_nan`, for values that are not finite, and InputError when the
    optimizer's state would have to be scaled.
    """
    ratio = ratio_of(source.attention_scale, destination.attention_scale)
    parts = [part for part in source.parts if part in destination.parts]
    if ratio != 1.0 and len(parts) > 1:
        raise InputError(
            f"attention_scale changes from {source.attention_scale} to "
            f"{destination.attention_scale}, so the query kernels are scaled, and Adam's moments "
            "would no longer fit them; convert the parameters alone with --parameters-only, or "
            "save the model alone with linen_compat.save"
        )
    check_ratio(source.arrays, ratio)

    def copy_one(stored: "_Stored", one: "_Array") -> "_Array":
        array = stored.read(one)
        check_finite(array, one.name, allow_nan=allow_nan)
        check_sign(array, one.name, one.part)
        if one.path in SCALED and ratio != 1.0:
            array = times_ratio(array, ratio)
        destination.write(one.path, one.layer, array, one.part)
        del array  # before another one takes its memory
        stored.written(one)
        return one

    groups = [list(group) for _, group in itertools.groupby(_arrays(source, parts), _name)]
    largest = max((_nbytes(group) for group in groups), default=0)
    memory = Memory(2 * largest + _SPARE_BYTES)
    tasks = (
        functools.partial(copy_one, stored, one)
        for stored in (_Stored(source, group, memory) for group in groups)
        for one in stored.admitted()
    )
    for one in in_order(tasks, memory, workers):
        progress(one.name, one.nbytes)
    destination.commit(source.scalars)


@dataclass(frozen=True)
class _Array:
    """One array of one layer, which is in the stored array of this name."""

    part: str
    path: str
    layer: int | None
    name: str
    nbytes: int


def _arrays(source: LayerSource, parts: Iterable[str]) -> Iterator[_Array]:
    for part in parts:
        for path, layer in walk(source):
            nbytes = ArraySpec(source.arrays[path].shape, source.dtype(path, part)).nbytes
            yield _Array(part, path, layer, source.name(path, layer, part), nbytes)


def _name(one: _Array) -> str:
    return one.name


def _nbytes(arrays: Iterable[_Array]) -> int:
    return sum(one.nbytes for one in arrays)


class _Stored:
    """The layers of one stored array while they are copied, and the memory that they take."""

    def __init__(self, source: LayerSource, arrays: Sequence[_Array], memory: Memory) -> None:
        self._source, self._arrays, self._memory = source, arrays, memory
        self._left, self._counting = len(arrays), threading.Lock()

    @property
    def _kept(self) -> int:
        """Bytes that are kept for other layers; a single one is read for itself."""
        return _nbytes(self._arrays) if len(self._arrays) > 1 else 0

    def admitted(self) -> Iterator[_Array]:
        """Each array when there is memory for it."""
        self._memory.take(2 * self._kept)  # the bytes as stored, and decoded
        self._source.hold(self._arrays[0].name)
        for one in self._arrays:
            self._memory.take(2 * one.nbytes)  # as read, and as written
            yield one

    def read(self, one: _Array) -> np.ndarray:
        array = self._source.read(one.path, one.layer, one.part)
        with self._counting:
            self._left -= 1
            is_first, is_last = self._left == len(self._arrays) - 1, self._left == 0
        if is_last:
            self._source.release(one.name)
        self._memory.give(self._kept * (is_first + is_last))
        return array

    def written(self, one: _Array) -> None:
        self._memory.give(2 * one.nbytes)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is one of floating-point numbers, narrow ones included."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def nbytes_of(source: LayerSource) -> int:
    """Bytes of the arrays of all parts of a source, without the scalars."""
    return sum(
        ArraySpec(source.arrays[path].shape, source.dtype(path, part)).nbytes
        for part in source.parts
        for path, _ in walk(source)
    )


def walk(source: LayerSource) -> Iterator[tuple[str, int | None]]:
    """The path and the layer of every array of one part, so that each stored array is read once."""
    for path in source.arrays:
        for layer in (None,) if path in PATHS_OUTSIDE else source.order(path):
            yield path, layer


def ratio_of(source: float | None, destination: float | None) -> float:
    """What the query kernels are multiplied by, so that scale · query · key stays the same."""
    return 1.0 if source is None or destination is None else source / destination


def scale_in_arrays(paths: Container[str], scale: float) -> float | None:
    """The attention scale that query kernels are for; None with latent attention."""
    return None if KV_DOWN.nnx in paths else scale


def check_ratio(paths: Container[str], ratio: float) -> None:
    """Raises InputError where query kernels cannot be scaled, because queries are normalised."""
    if ratio != 1.0 and QK_NORMS[0].nnx in paths:
        raise InputError(
            f"the two attention scales differ by a factor of {ratio}, which the query kernels of a "
            "model with qk_norm cannot hold, as its queries are normalised; set "
            "model.attention_scale to head_dim^-0.5"
        )


def array_title(path: str, layer: int | None, part: str = PARAMETERS) -> str:
    """The name of an array in messages, such as `mu of attention.query of layer 3`."""
    kind = "dense layer" if path.startswith(EARLY) else "layer"
    name = path if layer is None else f"{path.removeprefix(EARLY)} of {kind} {layer}"
    return name if part == PARAMETERS else f"{part} of {name}"


def check_finite(
    array: np.ndarray,
    name: str,
    *,
    allow_nan: bool = False,
    cure: str = "pass --allow-nan to keep them",
) -> None:
    """Raises Mismatch when a value is NaN or infinite."""
    if not allow_nan and (wrong := not_finite(array)):
        raise Mismatch(
            f"{name} holds NaN or infinity in {wrong} of {array.size} values; "
            f"take an earlier checkpoint, or {cure}"
        )


def not_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite, of any floating dtype, without a copy of the whole."""
    if array.dtype not in _PLAIN:
        return int(array.size - np.count_nonzero(np.isfinite(array)))
    # All bits of the exponent are ones then. numpy itself converts each number of 16 bits first.
    bits = np.dtype(f"u{array.itemsize}")
    ones = np.array(np.inf, array.dtype).view(bits)
    pieces = np.nditer(
        array.view(bits), ["external_loop", "buffered", "zerosize_ok"], order="K", buffersize=2**16
    )
    return sum(int(np.count_nonzero(piece & ones == ones)) for piece in pieces)


def check_sign(array: np.ndarray, name: str, part: str) -> None:
    """Raises Mismatch when a second moment, which is a mean of squares, is below 0."""
    if part == MOMENTS[1] and (wrong := int(np.count_nonzero(array < 0))):
        raise Mismatch(
            f"{name} is below 0 in {wrong} of {array.size} values, but a second moment is a mean "
            "of squares and cannot be negative; take an earlier checkpoint, or only the parameters "
            "of this one"
        )


def times_ratio(array: np.ndarray, ratio: float) -> np.ndarray:
    """The product of a query kernel and a number, in the dtype of the kernel."""
    # Back again, values are off by 1 unit in the last place at most; with float32 it would be 2.
    return (array.astype(np.float64) * ratio).astype(array.dtype)
