"""Which chunks of an array overlap a part of it, and checksums that tie each chunk to its place.

The crc32c at the end of a chunk stays valid when two chunks change places. So checksums are also
kept apart from the array, in the order of its chunks.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linen_compat.formats import _intact as checksums

Index = tuple[int | slice, ...]
Box = tuple[slice, ...]  # a part of an array, with a slice for each of its axes


@dataclass(frozen=True)
class Grid:
    """An array that is cut into chunks, which are numbered in row-major order."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of chunks."""
        return math.prod(self._counts)

    def number(self, box: Box) -> int:
        """The number of the chunk in which a box begins."""
        places = (part.start // step for part, step in zip(box, self.chunk, strict=True))
        number = 0  # as np.ravel_multi_index does
        for position, count in zip(places, self._counts, strict=True):
            number = number * count + position
        return number

    def touched(self, box: Box) -> Iterator[Box]:
        """The chunks that a box overlaps, each cut off where the array ends."""
        cuts = []
        for part, step, size in zip(box, self.chunk, self.shape, strict=True):
            first = part.start // step * step
            cuts.append([slice(at, min(at + step, size)) for at in range(first, part.stop, step)])
        yield from itertools.product(*cuts)

    @property
    def _counts(self) -> list[int]:
        return [-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True)]


def box_of(shape: Sequence[int], indices: Sequence[Index]) -> Box:
    """The box of an array that indices of step 1 select, each of what the one before left."""
    box = [slice(0, size) for size in shape]
    left = list(range(len(box)))
    for index in indices:
        for axis, part in zip(tuple(left), index, strict=False):  # the other axes stay whole
            begin, size = box[axis].start, box[axis].stop - box[axis].start
            if isinstance(part, slice):
                start, stop, _ = part.indices(size)
                box[axis] = slice(begin + start, begin + max(start, stop))
            else:  # later indices do not see this axis, and the box keeps it with length 1
                box[axis] = slice(begin + part, begin + part + 1)
                left.remove(axis)
    return tuple(box)


def contains(outer: Box, inner: Box) -> bool:
    pairs = zip(outer, inner, strict=True)
    return all(a.start <= b.start and b.stop <= a.stop for a, b in pairs)


def within(outer: Box, inner: Box) -> Box:
    """The box `inner` in coordinates in which the first element of `outer` has index 0."""
    pairs = zip(outer, inner, strict=True)
    return tuple(slice(b.start - a.start, b.stop - a.start) for a, b in pairs)


def checksum(chunk: np.ndarray) -> str:
    """The checksum of the values of a chunk in row-major order."""
    return checksums.of_bytes(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
