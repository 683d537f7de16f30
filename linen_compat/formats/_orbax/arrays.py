"""Arrays on disk, read and written in parts: zarr in an OCDBT database, as Orbax stores them."""

import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorstore as ts

from linen_compat.formats._intact import Json
from linen_compat.formats._orbax import corruption
from linen_compat.formats._orbax.chunks import Box, Grid, Index, box_of, checksum, contains, within
from linen_compat.formats._orbax.corruption import (
    MARK,
    STORE_ERRORS,
    unreadable,
)
from linen_compat.formats._paths import database, in_folder, new_context
from linen_compat.formats._streams import ArraySpec, Mismatch


def array_specs(items: Path) -> dict[str, ArraySpec]:
    """Shape and dtype of every array of a checkpoint, by the path of its leaf; none is read."""
    metadata, in_database = corruption.read_metadata(items), _has_database(items)
    context = new_context()  # one for all, so that the index of a database is read once
    # Begin to open all of them before waiting for the first.
    opened = {
        leaf: ts.open(
            {"driver": "auto", "kvstore": kvstore_of(items, leaf, in_database)},
            open=True,
            read=True,
            context=context,
        )
        for leaf in metadata.leaves
    }
    specs = {}
    for leaf, future in opened.items():
        try:
            store = future.result()
        except STORE_ERRORS as error:
            raise unreadable(f"{leaf} in {items}", error) from error
        dtype = store.dtype.numpy_dtype
        if dtype.kind not in "biufcV":  # bfloat16 and its like are V
            raise Mismatch(f"{leaf} in {items} is of dtype {store.dtype.name}, which no model has")
        described = store.spec().to_json()["metadata"].get("attributes", {})
        corruption.check_mark(metadata, items, leaf, described.get(MARK))
        specs[leaf] = ArraySpec(tuple(store.shape), dtype)
    return specs


class MissingChunk(Mismatch):
    """An array lacks a chunk, which in some checkpoints means zeros and in others a loss."""


class StoredArrays:
    """The arrays of one checkpoint, by the path of their leaf.

    The last array stays open, with its decoded chunks in memory, and so does one that is held. So a
    stack of layers in one chunk is read from disk once, for all its layers. Several threads may
    read.
    """

    def __init__(self, items: Path) -> None:
        self.items = items
        self._metadata = corruption.read_metadata(items)
        self._open: dict[str, ts.TensorStore] = {}  # the last one, and those that are held
        self._held = set[str]()
        self._opening = threading.RLock()
        self._in_database, self._context = _has_database(items), new_context()
        self._checked = set[tuple[str, int]]()  # chunks of which parts were asked for

    def read(self, leaf: str, *indices: Index) -> np.ndarray:
        """A part of an array; indices apply one after the other, none is for all of it.

        Raises Mismatch, naming the leaf, when bytes cannot be read or decoded, or are not those
        that this project wrote there, and MissingChunk when a chunk is missing.
        """
        with self._named(leaf):
            store = part = self._store(leaf, whole=not any(indices))
            for index in indices:
                part = part[index] if index else part
            values = np.asarray(part.read().result())
        if self._metadata.chunks is not None:
            self._check_chunks(leaf, store, box_of(store.shape, indices), values)
        return values

    def in_order(self, leaf: str) -> Iterator[np.ndarray]:
        """The chunks of an array as they are stored, in row-major order."""
        with self._named(leaf):
            store = self._store(leaf, whole=True)
            for box in grid_of(store).touched(box_of(store.shape, ())):
                yield np.asarray(store[box].read().result())

    def hold(self, leaf: str) -> None:
        """Keeps an array open from when a part of it is first read until it is released."""
        self._held.add(leaf)

    def release(self, leaf: str) -> None:
        with self._opening:
            self._held.discard(leaf)
            self._open.pop(leaf, None)

    def close(self) -> None:
        with self._opening:
            for leaf in self._open.keys() - self._held:
                del self._open[leaf]

    def _check_chunks(self, leaf: str, store: ts.TensorStore, box: Box, block: np.ndarray) -> None:
        """Raises Mismatch unless all chunks that a box overlaps have their checksums."""
        grid, sums = grid_of(store), (self._metadata.chunks or {}).get(leaf, [])
        whole = block.reshape([part.stop - part.start for part in box])
        for chunk in grid.touched(box):
            number = grid.number(chunk)
            if contains(box, chunk):  # not read a second time
                values = whole[within(box, chunk)]
            elif (leaf, number) in self._checked:
                continue
            else:  # a checksum is of the whole chunk
                with self._named(leaf):
                    values = np.asarray(store[chunk].read().result())
                self._checked.add((leaf, number))
            if len(sums) != grid.size or sums[number] != checksum(values):
                raise Mismatch(
                    f"{leaf} in {self.items} does not match the checksum that its chunk {number} "
                    "was written with: the checkpoint is damaged; take another one"
                )

    @contextlib.contextmanager
    def _named(self, leaf: str) -> Iterator[None]:
        """Turns errors of TensorStore into a Mismatch with the name of the leaf."""
        try:
            yield
        except STORE_ERRORS as error:
            what = f"{leaf} in {self.items}"
            if "is missing" not in str(error):
                raise unreadable(what, error) from error
            if not self._metadata.zeros_left_out:
                raise MissingChunk(str(unreadable(what, error))) from error
            raise MissingChunk(
                f"{what} lacks a chunk: either its file is lost, or it was all zeros, which older "
                "versions of Orbax leave out; restore the file, or if zeros are known to be right, "
                "write the checkpoint again with a current version of Orbax; where the step, a "
                "count or a moment lacks it, the parameters can still be read alone "
                "(linen_compat.load, or linen-compat convert --parameters-only)"
            ) from error

    def _store(self, leaf: str, *, whole: bool) -> ts.TensorStore:
        """An open array; it is kept for the next read unless it is read as a whole."""
        with self._opening:
            if leaf in self._open:
                return self._open[leaf]
            self.close()  # before the next one takes memory
            kvstore = kvstore_of(self.items, leaf, self._in_database)
            spec: Json = {"driver": "auto", "kvstore": kvstore}
            # Opened first without a cache, to learn the size and the driver.
            first = ts.open(spec, open=True, read=True, context=new_context(self._context)).result()
            nbytes = math.prod(first.shape) * first.dtype.numpy_dtype.itemsize
            pool = {"total_bytes_limit": 0 if whole else 2 * nbytes}
            context = new_context(self._context, cache_pool=pool)
            spec = {
                **spec,
                "driver": first.spec().to_json()["driver"],
                "fill_missing_data_reads": False,  # a missing chunk is an error, and not zeros
                "recheck_cached_data": False,
            }
            store = ts.open(spec, open=True, read=True, context=context).result()
            if not whole:
                self._open[leaf] = store
            return store


def grid_of(store: ts.TensorStore) -> Grid:
    shape = tuple(store.shape)
    # An array without axes has one chunk. No edge may be 0, as sizes are divided by them.
    return Grid(shape, tuple(edge or 1 for edge in store.chunk_layout.read_chunk.shape or ()))


def _has_database(items: Path) -> bool:
    return (items / corruption.MANIFEST).exists()


def kvstore_of(items: Path, leaf: str, in_database: bool) -> Json:
    """The key-value store of one array: in an OCDBT database, or in files of its own."""
    name = leaf.replace("/", ".") + "/"
    if in_database:
        return database(items, name)
    return {**in_folder(items, name)}
