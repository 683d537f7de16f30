"""How weights pass from one format to another: layer by layer, never a whole model in memory."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from linen_compat.formats._names import EARLY, KV_DOWN, PATHS_OUTSIDE, QK_NORMS
from nnx_pipeline import InputError

# The parts of a checkpoint: the parameters, then Adam's first and second moments.
PARAMETERS = "parameters"
MOMENTS = ("mu", "nu")
# Steps as counted by training, by Adam, and by the schedule of the learning rate.
SCALARS = ("step", "count", "schedule_count")
QUERY = "attention.query"
_PLAIN = (np.float32, np.float16, jnp.bfloat16)


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


class LayerSource(Protocol):
    """A checkpoint to read from, one array of one layer at a time.

    `num_layers` counts the dense layers before the pipeline too. `parts` is `(PARAMETERS,)`, then
    `MOMENTS` where the optimizer's state is there. `attention_scale` is the factor on attention
    scores for which the query kernels are stored; None with latent attention, where no format folds
    the factor into them. `arrays` has shape and dtype by NNX path, of one layer or of the whole
    model for paths of `names.OUTSIDE`. `scalars` are those of `SCALARS` that are there.
    """

    num_layers: int
    num_dense_layers: int
    parts: tuple[str, ...]
    attention_scale: float | None

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
        """What the checkpoint calls the stored array, for messages."""


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


def no_progress(name: str, nbytes: int) -> None: ...


def copy(
    source: LayerSource,
    destination: LayerDestination,
    *,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Copies every array of `source` to `destination`, then commits the destination.

    One array of one layer is in memory at a time. Query kernels are multiplied where the attention
    scales differ. Raises Mismatch for a second moment below 0 and, unless `allow_nan`, for values
    that are not finite, and InputError when the optimizer's state would have to be scaled.
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
    for part in parts:
        for path, layer in walk(source):
            name = source.name(path, layer, part)
            array = source.read(path, layer, part)
            check_finite(array, name, allow_nan=allow_nan)
            check_sign(array, name, part)
            if path == QUERY and ratio != 1.0:
                array = times_ratio(array, ratio)
            destination.write(path, layer, array, part)
            progress(name, array.nbytes)
            del array  # before the next one takes memory
    destination.commit(source.scalars)


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
