"""Safetensors files in object stores, of which single tensors and parts of them are read.

The library reads files of this machine alone.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._files.stores import StorePath
from nnx_pipeline.lab.errors import once

_MOST = 100_000_000  # bytes of a header, as in the library
_PREFIX = 8  # bytes that say how long the header is


class ByteRange(NamedTuple):
    """The bytes from `begin` to `end` of an object, without that at `end`."""

    begin: int
    end: int


@dataclass(frozen=True)
class StoredSlice:
    """A tensor that is read when it is indexed, by slices, one for each of the first axes."""

    path: StorePath
    code: str
    shape: tuple[int, ...]
    dtype: np.dtype
    bytes: ByteRange

    def get_dtype(self) -> str:
        return self.code

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Only the rows of the first axis that are asked for are read."""
        first, *rest = index or (slice(None),)
        rows = range(self.shape[0])[first] if self.shape else range(1)
        of_row = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin, end = self.bytes.begin + rows.start * of_row, self.bytes.begin + rows.stop * of_row
        content = self.path.read_part(begin, end) if end > begin else b""
        if len(content) != end - begin:
            raise Mismatch(f"{self.path} is cut: it ends before its tensors do")
        read = np.frombuffer(content, self.dtype).reshape(len(rows), *self.shape[1:])
        return read[(slice(None), *rest)] if self.shape else read.reshape(())


class StoredFile:
    """The tensors of a file, with what `safetensors.safe_open` has of it.

    - `path`: of the object. Its header is read at once.
    - `dtypes`: numpy's dtype for each code in a header.

    Raises Mismatch where the header is damaged, or gives a tensor other bytes than its shape takes.
    """

    def __init__(self, path: StorePath, dtypes: dict[str, np.dtype]) -> None:
        self.path = path
        stamp, length = path.stamp(), int.from_bytes(path.read_part(0, _PREFIX), "little")
        size = stamp.size if stamp else 0
        end = _PREFIX + length
        if not 0 < length <= min(_MOST, size - _PREFIX):
            raise self._damaged("its header is longer than the file")
        try:
            header = json.loads(path.read_part(_PREFIX, end), object_pairs_hook=once)
            header.pop("__metadata__", None)
            self._tensors = {
                name: StoredSlice(
                    path,
                    entry["dtype"],
                    tuple(entry["shape"]),
                    dtypes.get(entry["dtype"], np.dtype(np.uint8)),
                    ByteRange(*(end + offset for offset in entry["data_offsets"])),
                )
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged("its header cannot be read") from error
        self._check(size, dtypes)

    def _check(self, size: int, dtypes: dict[str, np.dtype]) -> None:
        """Raises Mismatch unless the tensors follow each other to the end of the file."""
        ordered = sorted(self._tensors.values(), key=lambda tensor: tensor.bytes)
        at = ordered[0].bytes.begin if ordered else size
        for tensor in ordered:
            begin, end = tensor.bytes
            nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            if begin != at or (tensor.code in dtypes and end - begin != nbytes):
                raise self._damaged("its header gives tensors other bytes than they take")
            at = end
        if at != size:
            raise self._damaged(f"it has {size:,} bytes and its tensors end at {at:,}")

    def _damaged(self, why: str) -> Mismatch:
        return Mismatch(f"{self.path} is damaged or is not a safetensors file: {why}")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> StoredSlice:
        return self._tensors[name]
