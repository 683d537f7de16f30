"""Arrays on disk, read and written in parts: zarr in an OCDBT database, as Orbax stores them."""

import contextlib
import functools
import itertools
import json
import math
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorstore as ts

from linen_compat.formats._intact import Json
from linen_compat.formats._orbax import corruption
from linen_compat.formats._orbax.chunks import Box, Grid, Index, box_of, checksum, contains, within
from linen_compat.formats._orbax.corruption import (
    CHUNKS,
    MARK,
    METADATA,
    STORE_ERRORS,
    lost,
    unreadable,
)
from linen_compat.formats._orbax.parts import Part, PartsOfOthers, files_of, merge
from linen_compat.formats._paths import database, in_folder, new_context, with_real_paths
from linen_compat.formats._store_folder import check_claim
from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats._transpose import contiguous
from nnx_pipeline.lab._ending import cleared_away, stay_if_ending
from nnx_pipeline.lab._files.stores import refused

_BLOCK_BYTES = 16 * 2**20  # of a chunk at most, and of what is committed together at least
_PATIENCE = 0.3  # seconds in which a commit ends that is under way when the command is ended


def array_specs(items: Path) -> dict[str, ArraySpec]:
    """Shape and dtype of every array of a checkpoint, by the path of its leaf; none is read."""
    metadata, in_database = corruption.read_metadata(items), _has_database(items)
    context = new_context()  # one for all, so that the index of a database is read once
    # Begin to open all of them before waiting for the first.
    opened = {
        leaf: ts.open(
            {"driver": "auto", "kvstore": _kvstore(items, leaf, in_database)},
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
            for box in _grid(store).touched(box_of(store.shape, ())):
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
        with self._opening:
            if leaf in self._open:
                return self._open[leaf]
            self.close()  # before the next one takes memory
            kvstore = _kvstore(self.items, leaf, self._in_database)
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


@dataclass
class _Batch:
    """Writes that are committed together, because each commit writes the index anew."""

    transaction: ts.Transaction = field(default_factory=ts.Transaction)
    writes: list[ts.WriteFutures] = field(default_factory=list)
    nbytes: int = 0


class NewArrays:
    """Arrays that are being written to an empty folder; `finish` makes it an Orbax checkpoint.

    Each chunk ends in its crc32c, a codec of the format that every reader checks. The checksums in
    `_METADATA` show that each chunk is in its own place. All arrays of a checkpoint share a mark
    with `_METADATA`, which shows that the checksums are theirs.

    Several threads may write. What is written must not change until `finish`. `durable` waits for
    the disk at each commit, else the system writes to it in its own time. With a `part` several
    processes write to one folder, each to a database of its own, and every array is created in all
    of them; the first one makes one database of all.
    """

    def __init__(self, folder: Path, *, durable: bool = True, part: Part | None = None) -> None:
        self.folder, self._part = folder, part
        self._database = folder / part.name if part else folder
        self._mark = part.mark if part else secrets.token_hex(8)
        self._sums: dict[str, dict[int, str]] = {}
        self._stores: dict[str, ts.TensorStore] = {}
        self._described = ts.Transaction()  # the metadata of all arrays, committed last
        self._batch, self._batching = _Batch(), threading.Lock()
        # One for all arrays, or each commits by itself.
        self._context = new_context(file_io_sync=durable)

    def create(
        self,
        leaf: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        stacked_axes: Iterable[int] = (),
        shard: tuple[int, ...] | None = None,
    ) -> None:
        """Makes room for an array; along `stacked_axes` chunks have length 1.

        - `shard`: what one device holds of a layer, in which chunks then divide evenly.
        """
        stacked = set(stacked_axes)
        edges = [1 if a in stacked else size for a, size in enumerate(shape)]
        if shard is not None:
            inner = iter(shard)
            edges = [1 if a in stacked else next(inner) for a in range(len(shape))]
        block = _block(edges, dtype, even=shard is not None)
        spec = {
            "driver": "zarr3",
            "kvstore": {
                **_kvstore(self._database, leaf, in_database=True),
                "config": {"max_inline_value_bytes": 1024},
            },
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": block}},
                # Not compressed: of random bits 8 to 22 % are saved, at three times the work.
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                "attributes": {MARK: self._mark},
            },
            # Zeros are stored too, so that a missing chunk always means damage.
            "store_data_equal_to_fill_value": True,
        }
        with self._writing():
            described = ts.open(
                spec, create=True, context=self._context, transaction=self._described
            )
            described.result()
            self._stores[leaf] = ts.open(
                spec, open=True, assume_metadata=True, context=self._context
            ).result()
        self._sums[leaf] = {}

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._stores

    def dtype(self, leaf: str) -> np.dtype:
        return self._stores[leaf].dtype.numpy_dtype

    def write(self, leaf: str, index: Index, array: np.ndarray, within: Index = ()) -> None:
        """Stores the part of a created array at `index`, empty for the whole, block by block.

        - `within`: where in that part the array is, if it is a shard.
        """
        store = self._stores[leaf]
        part = store[index] if index else store
        if within:
            part = part[within][ts.d[:].translate_to[0]]
        chunk = [size or 1 for size in part.chunk_layout.write_chunk.shape or ()]
        grid = _grid(store)
        is_large = array.nbytes >= _BLOCK_BYTES
        # A part of a larger array would keep all of that in memory until the batch is full.
        is_kept = is_large or getattr(array.base, "nbytes", 0) <= array.nbytes
        for block in _blocks(array.shape, chunk):
            piece = contiguous(array[block])
            number = grid.number(box_of(grid.shape, (index, within, block)))
            self._sums[leaf][number] = checksum(piece)
            self._add(part[block], piece if is_kept else piece.copy())
        if is_large:  # for the same reason
            self._flush()

    def complete(self) -> None:
        """Commits all that was written, and tells the first of several processes."""
        self._flush()
        with self._writing():
            self._described.commit_async().result()
        if self._part is not None and self._part.number:
            self._part.tell(self.folder, self._sums)

    def finish(self, empty: Iterable[str] = (), custom: Json | None = None) -> None:
        """Writes the tree's metadata; `empty` has the paths of leaves that are None.

        Of several processes the first one does, when all have called `complete`.
        """
        if self._part is None:
            self.complete()
        elif self._part.number:
            return
        else:
            files = self._add_others(PartsOfOthers.when_done(self.folder, self._part))
            custom = {**(custom or {}), corruption.PROCESSES: files}
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

    def _add_others(self, others: PartsOfOthers) -> list[int]:
        """Returns how many files each process has written.

        Raises RuntimeError where no process has written a chunk.
        """
        for leaf, sums in self._sums.items():
            sums |= others.sums_of(leaf)
            if len(sums) != (size := _grid(self._stores[leaf]).size):
                raise RuntimeError(f"of {leaf} {len(sums)} of {size} chunks were written")
        with self._writing():
            merge(self.folder, others.names)
        others.remove()
        return [files_of(self._database), *others.num_files]

    def _add(self, place: ts.TensorStore, piece: np.ndarray) -> None:
        """Adds a write to the batch of all threads; the one that fills it commits it."""
        stay_if_ending()  # TensorStore would make the folder again
        with self._batching, self._writing():
            batch = self._batch
            bound = place.with_transaction(batch.transaction)
            batch.writes.append(bound.write(piece, can_reference_source_data_indefinitely=True))
            batch.nbytes += piece.nbytes
            is_full = batch.nbytes >= _BLOCK_BYTES
            if is_full:
                self._batch = _Batch()
        if is_full:
            self._commit(batch)

    def _flush(self) -> None:
        with self._batching:
            batch, self._batch = self._batch, _Batch()
        self._commit(batch)

    def _commit(self, batch: _Batch) -> None:
        check_claim(self.folder)
        with self._writing():
            for write in batch.writes:
                write.copy.result()
            stay_if_ending()
            # What is under way would make a folder again that has been removed meanwhile.
            with cleared_away(functools.partial(_wait_for, batch.transaction.future)):
                batch.transaction.commit_async().result()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of TensorStore, for a full disk or other reasons, into an OSError."""
        try:
            yield
        except STORE_ERRORS as error:
            check_claim(self.folder)  # another process may have taken away what is missing
            if lost(error) or "PERMISSION_DENIED" in str(error):
                raise refused(str(self.folder), str(error).split("[")[0]) from error
            reason = " ".join(str(error).split("[source locations")[0].split())
            raise OSError(f"{self.folder} cannot be written: {with_real_paths(reason)}") from error


def _wait_for(commit: ts.Future[None]) -> None:
    with contextlib.suppress(Exception):
        commit.result(timeout=_PATIENCE)


def _grid(store: ts.TensorStore) -> Grid:
    shape = tuple(store.shape)
    # An array without axes has one chunk. No edge may be 0, as sizes are divided by them.
    return Grid(shape, tuple(edge or 1 for edge in store.chunk_layout.read_chunk.shape or ()))


def _has_database(items: Path) -> bool:
    return (items / corruption.MANIFEST).exists()


def _kvstore(items: Path, leaf: str, in_database: bool) -> Json:
    """The key-value store of one array: in an OCDBT database, or in files of its own."""
    name = leaf.replace("/", ".") + "/"
    if in_database:
        return database(items, name)
    return {**in_folder(items, name)}


def _entry(leaf: str, value: Json) -> Json:
    """The entry of one leaf in Orbax's `_METADATA`; keys of digits are places in a list."""
    keys = leaf.split("/")
    sequence, mapping = 1, 2
    kinds = [{"key": key, "key_type": sequence if key.isdecimal() else mapping} for key in keys]
    return {str(tuple(keys)): {"key_metadata": kinds, "value_metadata": value}}


def _block(shape: list[int], dtype: np.dtype, *, even: bool) -> list[int]:
    """The shape, cut along its first axes until it takes `_BLOCK_BYTES` or less; into equal pieces
    where that is asked for."""
    block = list(shape)
    for axis, size in enumerate(shape):
        nbytes = math.prod(block) * dtype.itemsize
        if nbytes <= _BLOCK_BYTES:
            break
        most = max(1, size * _BLOCK_BYTES // nbytes)
        block[axis] = next(n for n in range(most, 0, -1) if size % n == 0) if even else most
    return block


def _blocks(shape: tuple[int, ...], block: Iterable[int]) -> Iterator[tuple[slice, ...]]:
    """Indices that cut an array into blocks of this shape or less."""
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, block, strict=True)
    ]
    yield from itertools.product(*cuts)
