"""New arrays on disk, of one process or of several: zarr in an OCDBT database, as Orbax does it."""

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
from linen_compat.formats._orbax.arrays import grid_of, kvstore_of
from linen_compat.formats._orbax.chunks import Index, box_of, checksum
from linen_compat.formats._orbax.corruption import CHUNKS, MARK, METADATA, STORE_ERRORS, lost
from linen_compat.formats._orbax.parts import Part, PartsOfOthers, files_of, merge
from linen_compat.formats._paths import new_context, with_real_paths
from linen_compat.formats._store_folder import check_claim
from linen_compat.formats._transpose import contiguous
from nnx_pipeline.lab._ending import cleared_away, stay_if_ending
from nnx_pipeline.lab._files.stores import refused

_BLOCK_BYTES = 16 * 2**20  # of a chunk at most, and of what is committed together at least
_PATIENCE = 0.3  # seconds in which a commit ends that is under way when the command is ended


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
                **kvstore_of(self._database, leaf, in_database=True),
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
        grid = grid_of(store)
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
            if len(sums) != (size := grid_of(self._stores[leaf]).size):
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


def _entry(leaf: str, value: Json) -> Json:
    """The entry of one leaf in Orbax's `_METADATA`; keys of digits are places in a list."""
    keys = leaf.split("/")
    sequence, mapping = 1, 2
    kinds = [{"key": key, "key_type": sequence if key.isdecimal() else mapping} for key in keys]
    return {str(tuple(keys)): {"key_metadata": kinds, "value_metadata": value}}


def _block(shape: list[int], dtype: np.dtype, *, even: bool) -> list[int]:
    """The shape, cut along its first axes until it takes `_BLOCK_BYTES` or less; into equal pieces
    where that is asked for."""
    block, axes = list(shape), list(range(len(shape)))
    if even:  # an axis of a prime length would be cut to single rows, and so comes last
        whole = math.prod(shape) * dtype.itemsize
        axes.sort(key=lambda axis: 8 * _cut(shape[axis], whole, even) < _cut(shape[axis], whole))
    for axis in axes:
        nbytes = math.prod(block) * dtype.itemsize
        if nbytes <= _BLOCK_BYTES:
            break
        block[axis] = _cut(shape[axis], nbytes, even)
    return block


def _cut(size: int, nbytes: int, even: bool = False) -> int:
    """To how much an axis of an array with so many bytes is cut, so that these are few enough."""
    most = min(size, max(1, size * _BLOCK_BYTES // max(1, nbytes)))
    return next(n for n in range(most, 0, -1) if size % n == 0) if even and size else most


def _blocks(shape: tuple[int, ...], block: Iterable[int]) -> Iterator[tuple[slice, ...]]:
    """Indices that cut an array into blocks of this shape or less."""
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in zip(shape, block, strict=True)
    ]
    yield from itertools.product(*cuts)
