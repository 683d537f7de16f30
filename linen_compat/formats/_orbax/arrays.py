"""Arrays on disk, read and written in parts: zarr in an OCDBT database, as Orbax stores them."""

import contextlib
import itertools
import json
import math
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorstore as ts

from linen_compat.formats._intact import Json
from linen_compat.formats._orbax import corruption
from linen_compat.formats._orbax.chunks import Box, Grid, Index, box_of, checksum, contains, within
from linen_compat.formats._orbax.corruption import CHUNKS, MARK, METADATA, STORE_ERRORS, unreadable
from linen_compat.formats._paths import in_folder, with_real_paths
from linen_compat.formats._streams import ArraySpec, Mismatch

_BLOCK_BYTES = 32 * 2**20  # compressed, written and kept in memory at a time


def array_specs(items: Path) -> dict[str, ArraySpec]:
    """Shape and dtype of every array of a checkpoint, by the path of its leaf; none is read."""
    metadata = corruption.read_metadata(items)
    context = ts.Context()  # one for all, so that the index of a database is read once
    # Begin to open all of them before waiting for the first.
    opened = {
        leaf: ts.open(
            {"driver": "auto", "kvstore": _kvstore(items, leaf)},
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

    The last array stays open, with its decoded chunks in memory. So a stack of layers in one chunk
    is read from disk once, for all its layers in turn.
    """

    def __init__(self, items: Path) -> None:
        self.items = items
        self._metadata = corruption.read_metadata(items)
        self._open: dict[str, ts.TensorStore] = {}  # one at most
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
            for box in _grid(store).touched(box_of(store.shape, ())):
                yield np.asarray(store[box].read().result())

    def close(self) -> None:
        self._open.clear()

    def _check_chunks(self, leaf: str, store: ts.TensorStore, box: Box, block: np.ndarray) -> None:
        """Raises Mismatch unless all chunks that a box overlaps have their checksums."""
        grid, sums = _grid(store), (self._metadata.chunks or {}).get(leaf, [])
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
        if leaf in self._open:
            return self._open[leaf]
        self.close()  # before the next one takes memory
        spec: Json = {"driver": "auto", "kvstore": _kvstore(self.items, leaf)}
        # Opened first without a cache, to learn the size and the driver.
        first = ts.open(spec, open=True, read=True).result()
        nbytes = math.prod(first.shape) * first.dtype.numpy_dtype.itemsize
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0 if whole else 2 * nbytes}})
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


class NewArrays:
    """Arrays that are being written to an empty folder; `finish` makes it an Orbax checkpoint.

    Each chunk ends in its crc32c, a codec of the format that every reader checks. The checksums in
    `_METADATA` show that each chunk is in its own place. All arrays of a checkpoint share a mark
    with `_METADATA`, which shows that the checksums are theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = secrets.token_hex(8)
        self._sums: dict[str, dict[int, str]] = {}
        self._stores: dict[str, ts.TensorStore] = {}
        # Writes are committed a block's worth at a time: a commit waits for the disk.
        self._bound: dict[str, ts.Transaction] = {}
        self._transaction = ts.Transaction()
        self._pending = 0
        self._context = ts.Context()  # one for all arrays, or each commits by itself

    def create(
        self, leaf: str, shape: tuple[int, ...], dtype: np.dtype, stacked_axes: Iterable[int] = ()
    ) -> None:
        """Makes room for an array; along `stacked_axes` chunks have length 1."""
        stacked = set(stacked_axes)
        block = _block([1 if a in stacked else size for a, size in enumerate(shape)], dtype)
        compressed = {"name": "zstd", "configuration": {"level": 1}}
        codecs = [{"name": "bytes"}, compressed, {"name": "crc32c"}]
        spec = {
            "driver": "zarr3",
            "kvstore": _kvstore(self.folder, leaf, new=True),
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": block}},
                "codecs": codecs,
                "attributes": {MARK: self._mark},
            },
            # Zeros are stored too, so that a missing chunk always means damage.
            "store_data_equal_to_fill_value": True,
        }
        with self._writing():
            store = ts.open(
                spec, create=True, context=self._context, transaction=self._transaction
            ).result()
        self._stores[leaf], self._bound[leaf] = store, self._transaction
        self._sums[leaf] = {}

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._stores

    def dtype(self, leaf: str) -> np.dtype:
        return self._stores[leaf].dtype.numpy_dtype

    def write(self, leaf: str, index: Index, array: np.ndarray) -> None:
        """Stores the part of a created array at `index`, empty for the whole, block by block."""
        store = self._in_transaction(leaf)
        part = store[index] if index else store
        chunk = [size or 1 for size in part.chunk_layout.write_chunk.shape or ()]
        grid = _grid(store)
        for block in _blocks(array.shape, chunk):
            piece = array[block]
            number = grid.number(box_of(grid.shape, (index, block)))
            self._sums[leaf][number] = checksum(piece)
            with self._writing():
                part[block].write(piece).result()
            self._pending += piece.nbytes
            if self._pending >= _BLOCK_BYTES:
                self._flush()  # ends the transaction that the array was bound to
                store = self._in_transaction(leaf)
                part = store[index] if index else store

    def finish(self, empty: Iterable[str] = (), custom: Json | None = None) -> None:
        """Writes the tree's metadata; `empty` has the paths of leaves that are None."""
        self._flush()
        tree = {}
        for leaf, store in self._stores.items():
            value = {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(store.shape),
            }
            tree.update(_entry(leaf, value))
        for leaf in empty:
            tree.update(_entry(leaf, {"value_type": "None", "skip_deserialize": True}))
        sums = {leaf: [by[n] for n in sorted(by)] for leaf, by in self._sums.items()}
        metadata = {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": {**(custom or {}), MARK: self._mark, CHUNKS: sums},
        }
        text = json.dumps(corruption.metadata_with_checksum(metadata))
        (self.folder / METADATA).write_text(text, encoding="utf-8")

    def _in_transaction(self, leaf: str) -> ts.TensorStore:
        if self._bound[leaf] is not self._transaction:
            self._stores[leaf] = self._stores[leaf].with_transaction(self._transaction)
            self._bound[leaf] = self._transaction
        return self._stores[leaf]

    def _flush(self) -> None:
        with self._writing():
            self._transaction.commit_async().result()
        self._transaction, self._pending = ts.Transaction(), 0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of TensorStore, for a full disk or other reasons, into an OSError."""
        try:
            yield
        except STORE_ERRORS as error:
            reason = " ".join(str(error).split("[source locations")[0].split())
            raise OSError(f"{self.folder} cannot be written: {with_real_paths(reason)}") from error


def _grid(store: ts.TensorStore) -> Grid:
    shape = tuple(store.shape)
    # An array without axes has one chunk. No edge may be 0, as sizes are divided by them.
    return Grid(shape, tuple(edge or 1 for edge in store.chunk_layout.read_chunk.shape or ()))


def _kvstore(items: Path, leaf: str, *, new: bool = False) -> Json:
    """The key-value store of one array: in an OCDBT database, or in files of its own."""
    name = leaf.replace("/", ".") + "/"
    if new or (items / corruption.MANIFEST).exists():
        store: Json = {"driver": "ocdbt", "base": in_folder(items), "path": name}
        if new:
            store["config"] = {"max_inline_value_bytes": 1024}
        return store
    return {**in_folder(items, name)}


def _entry(leaf: str, value: Json) -> Json:
    """The entry of one leaf in Orbax's `_METADATA`; keys of digits are places in a list."""
    keys = leaf.split("/")
    sequence, mapping = 1, 2
    kinds = [{"key": key, "key_type": sequence if key.isdecimal() else mapping} for key in keys]
    return {str(tuple(keys)): {"key_metadata": kinds, "value_metadata": value}}


def _block(shape: list[int], dtype: np.dtype) -> list[int]:
    """The shape, cut along its first axes until it takes `_BLOCK_BYTES` or less."""
    block = list(shape)
    for axis in range(len(block)):
        nbytes = math.prod(block) * dtype.itemsize
        if nbytes <= _BLOCK_BYTES:
            break
        block[axis] = max(1, block[axis] * _BLOCK_BYTES // nbytes)
    return block


def _blocks(shape: tuple[int, ...], block: Iterable[int]) -> Iterator[tuple[slice, ...]]:
    """Indices that cut an array into blocks of this shape or less."""
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, block, strict=True)
    ]
    yield from itertools.product(*cuts)
