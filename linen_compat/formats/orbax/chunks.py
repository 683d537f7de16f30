"""Which chunks of an array a part of it touches, and a checksum of each that says where it belongs.

The crc32c that a chunk ends in is of its bytes alone: two chunks that changed places both have
theirs. So the checksums of an array's chunks are kept in the order of their places, apart from it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linen_compat import checksums

Index = tuple[int | slice, ...]
Box = tuple[slice, ...]  # a part of an array that has all of its axes


@dataclass(frozen=True)
class Grid:
    """An array of this shape, cut into chunks. Chunks are numbered in row-major order."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many chunks there are."""
        return math.prod(self._counts)

    def number(self, box: Box) -> int:
        """The number of the chunk that a box begins in."""
        places = (part.start // step for part, step in zip(box, self.chunk, strict=True))
        number = 0
        for place, count in zip(places, self._counts, strict=True):
            number = number * count + place
        return number

    def touched(self, box: Box) -> Iterator[Box]:
        """The chunks that a box has a part of, each cut off where the array ends."""
        cuts = []
        for part, step, size in zip(box, self.chunk, self.shape, strict=True):
            first = part.start // step * step
            cuts.append([slice(at, min(at + step, size)) for at in range(first, part.stop, step)])
        yield from itertools.product(*cuts)

    @property
    def _counts(self) -> list[int]:
        return [-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True)]


def box_of(shape: Sequence[int], indices: Sequence[Index]) -> Box:
    """The box that indices leave of an array, each applied to what the one before left."""
    box = [slice(0, size) for size in shape]
    left = list(range(len(box)))
    for index in indices:
        for axis, part in zip(tuple(left), index, strict=False):  # the other axes stay whole
            begin, size = box[axis].start, box[axis].stop - box[axis].start
            if isinstance(part, slice):
                start, stop, _ = part.indices(size)
                box[axis] = slice(begin + start, begin + max(start, stop))
            else:
                box[axis] = slice(begin + part, begin + part + 1)
                left.remove(axis)
    return tuple(box)


def contains(outer: Box, inner: Box) -> bool:
    """Whether a box has all of another one."""
    pairs = zip(outer, inner, strict=True)
    return all(a.start <= b.start and b.stop <= a.stop for a, b in pairs)


def within(outer: Box, inner: Box) -> Box:
    """A box that another one contains, counted from the beginning of that."""
    pairs = zip(outer, inner, strict=True)
    return tuple(slice(b.start - a.start, b.stop - a.start) for a, b in pairs)


def checksum(chunk: np.ndarray) -> str:
    """The checksum of the values of a chunk, in row-major order."""
    return checksums.of_bytes(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
