"""How weights pass from one format to another: layer by layer, never a whole model in memory.

A `Source` reads and a `Destination` writes one array of one layer at a time, under the paths of
`nnx_pipeline.Mixtral` (`names.Names.nnx`). Every format is one of each; `copy` knows none of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from linen_compat.names import OUTSIDE
from nnx_pipeline import InputError

PARAMETERS = "parameters"
MOMENTS = ("mu", "nu")
SCALARS = ("step", "count", "schedule_count")  # of training, of Adam, of the learning rate
QUERY = "attention.query"


class Mismatch(InputError):
    """A checkpoint does not hold what was asked for; the message names the leaf.

    The command line exits with 1 rather than 2: the argument was fine, what it holds is not.
    """


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array: of one layer where it belongs to the layers."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(Protocol):
    """A checkpoint to read from.

    num_layers: how many layers. arrays: NNX path to what one layer holds under it, or the model,
    for paths of `names.OUTSIDE`. parts: `(PARAMETERS,)`, followed by `MOMENTS` where the state of
    the optimizer is there. scalars: those of `SCALARS` that are there, as arrays without axes.
    attention_scale: what multiplies the scores of attention (`model.attention_scale`).
    """

    num_layers: int
    parts: tuple[str, ...]
    attention_scale: float

    @property
    def arrays(self) -> Mapping[str, ArraySpec]: ...

    @property
    def scalars(self) -> Mapping[str, np.ndarray]: ...

    def order(self, path: str) -> Sequence[int]:
        """The layers in an order in which each stored array is read once."""
        ...

    def read(self, path: str, layer: int | None, part: str = PARAMETERS) -> np.ndarray:
        """One array of one layer; `layer` is None for paths outside the layers.

        Raises Mismatch, naming the stored array, when bytes are missing.
        """
        ...

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        """What the checkpoint calls the stored array, for messages."""
        ...


class Destination(Protocol):
    """A checkpoint to write, in a folder that is there for it alone (see `new_folder.new_folder`).

    parts: those that the format has a place for; the others are left behind.
    """

    parts: tuple[str, ...]
    attention_scale: float

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        """Stores one array of one layer."""
        ...

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Writes what makes the folder a checkpoint, after the last array."""
        ...


Progress = Callable[[str, int], None]


def no_progress(name: str, nbytes: int) -> None:
    """Says nothing of an array that has passed."""


def copy(
    source: Source,
    destination: Destination,
    *,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Every array of `source` to `destination`, then its commit.

    Holds one array of one layer, beside what the two hold. Crossing to a format with another
    attention scale multiplies the query kernels (`scaled`); nothing else changes. progress: called
    with the name and the bytes of each array that has passed. Raises Mismatch, naming the array,
    when it holds a value that is no finite number (allowed with `allow_nan`), and InputError when
    the optimizer's state would have to be scaled too.
    """
    ratio = source.attention_scale / destination.attention_scale
    parts = [part for part in source.parts if part in destination.parts]
    if ratio != 1.0 and len(parts) > 1:
        raise InputError(
            f"attention_scale={source.attention_scale} becomes {destination.attention_scale}, and "
            "Adam's moments of a scaled query kernel are not kept; convert the parameters alone "
            "with --parameters-only, or save the model alone with linen_compat.save"
        )
    for part in parts:
        for path, layer in walk(source):
            name = source.name(path, layer, part)
            array = source.read(path, layer, part)
            check_finite(array, name, allow_nan=allow_nan)
            check_sign(array, name, part)
            if path == QUERY and ratio != 1.0:
                array = scaled(array, ratio)
            destination.write(path, layer, array, part)
            progress(name, array.nbytes)
            del array  # before the next one takes memory
    destination.commit(source.scalars)


def walk(source: Source) -> Iterator[tuple[str, int | None]]:
    """Every array of one part: its path and its layer, each stored array once through."""
    outside = {names.nnx for names in OUTSIDE}
    for path in source.arrays:
        if path in outside:
            yield path, None
        else:
            for layer in source.order(path):
                yield path, layer


def title(path: str, layer: int | None, part: str = PARAMETERS) -> str:
    """How messages name an array."""
    place = path if layer is None else f"{path} of layer {layer}"
    return place if part == PARAMETERS else f"{part} of {place}"


def check_finite(
    array: np.ndarray,
    name: str,
    *,
    allow_nan: bool = False,
    cure: str = "pass --allow-nan to keep them",
) -> None:
    """Raises Mismatch when a value is NaN or infinite. cure: beside an earlier checkpoint."""
    if allow_nan or np.isfinite(array).all():
        return
    wrong = int(array.size - np.isfinite(array).sum())
    raise Mismatch(
        f"{name} holds NaN or infinity in {wrong} of {array.size} values; "
        f"take an earlier checkpoint, or {cure}"
    )


def check_sign(array: np.ndarray, name: str, part: str) -> None:
    """Raises Mismatch when a second moment, a mean of squares, is below 0."""
    if part == MOMENTS[1] and (wrong := int(np.count_nonzero(array < 0))):
        raise Mismatch(
            f"{name} is below 0 in {wrong} of {array.size} values, and a second moment is a mean "
            "of squares; take an earlier checkpoint, or the parameters of this one alone"
        )


def scaled(array: np.ndarray, ratio: float) -> np.ndarray:
    """The array times `ratio`, in its own dtype; by `ratio` and back is 1 unit in the last place.

    In float64: a quotient that is rounded to float32 first leaves 2 (head_dim 96).
    """
    return (array.astype(np.float64) * ratio).astype(array.dtype)
