"""Folders of safetensors, one file or several with an index, read and written tensor by tensor."""

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from linen_compat.formats import _intact as checksums
from linen_compat.formats._orbax.corruption import unreadable
from linen_compat.formats._store_folder import require_done
from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats._transpose import contiguous
from linen_compat.formats.huggingface import _quantized as quantized
from linen_compat.formats.huggingface._architecture import CONFIG_FILE
from linen_compat.formats.huggingface._ranges import ByteRange, StoredFile, StoredSlice
from linen_compat.formats.huggingface._tensors import Index
from linen_compat.formats.huggingface.config import read_json
from nnx_pipeline import InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath
from nnx_pipeline.lab.errors import counted, optional, shown

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
LONGEST_NAME = 255  # bytes that a file system allows
SHARD_BYTES = 5 * 10**9  # the size of a file that transformers 4 writes; version 5 writes 50 GB

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def holds_tensors(folder: Path) -> bool:
    """Whether a folder has the safetensors file of a whole model, or the index of several."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX_FILE).is_file()


class TensorFolder:
    """The tensors of a folder, by name. `specs` has the shape and dtype of each.

    With `only` they are those of that file alone, of which there are no checksums.

    Raises InputError when the folder holds no model, and Mismatch, naming the file or the tensor,
    when files or tensors are missing, broken, of a dtype other than `DTYPES`, or not what this
    project wrote.
    """

    def __init__(self, folder: str | Path, only: str | None = None) -> None:
        self.folder = place(folder)
        require_done(self.folder)
        self.specs: dict[str, ArraySpec] = {}
        self._places: dict[str, _Place] = {}
        self.sums = None if only else checksums.read_checksums(self.folder)
        self._checked: set[str] = set()
        self._scales: dict[str, str] = {}  # the names of those of quantized tensors
        self._block = (1, 1)
        self._mxfp4: dict[str, ArraySpec] = {}
        if only or (self.folder / ONE_FILE).is_file():
            self._add(self.folder / (only or ONE_FILE), None)
        elif (self.folder / INDEX_FILE).is_file():
            for file, names in _index(self.folder).items():
                self._add(file, names)
        else:
            kind = Mismatch if (self.folder / CONFIG_FILE).is_file() else InputError
            raise kind(
                f"{folder} holds neither {ONE_FILE} nor {INDEX_FILE}; "
                "give the folder of a model that was saved as safetensors"
            )
        self._pair_scales()

    def read(self, name: str, index: Index) -> np.ndarray:
        """A part of a tensor, which is checked as a whole if the folder has checksums."""
        if name in self._scales:
            stored, scales = self._stored(name, ()), self.read(self._scales[name], ())
            return quantized.dequantized(stored, scales, self._block, index)
        if name in self._mxfp4:
            experts, inputs, outputs = index or (slice(None),) * 3
            blocks = self._stored(name + quantized.MX_BLOCKS, (experts, outputs))
            found = self._stored(name + quantized.MX_SCALES, (experts, outputs))
            return quantized.from_mxfp4(blocks, found)[:, inputs]
        return self._stored(name, index)

    def _stored(self, name: str, index: Index) -> np.ndarray:
        """A part of a tensor as it is stored, in an array of its own."""
        stored = self._places[name]
        if self.sums is None or name in self._checked:
            return stored.read(index)
        array = stored.read(index)
        if array.nbytes == stored.spec.nbytes:  # all of it, and so not read a second time
            found = checksums.of_bytes(array.reshape(-1).view(np.uint8).data)
        else:
            found = checksums.of_part(stored.file, *stored.bytes)
        checksums.require(self.folder, self.sums, name, found)
        self._checked.add(name)
        return array

    def _pair_scales(self) -> None:
        """Takes the scales of quantized tensors from `specs`, which then has what is read."""
        self._mxfp4 = quantized.of_mxfp4(self.specs)
        for name, spec in self._mxfp4.items():
            del self.specs[name + quantized.MX_BLOCKS], self.specs[name + quantized.MX_SCALES]
            self.specs[name] = spec
        narrow = [name for name, spec in self.specs.items() if spec.dtype == quantized.STORED]
        if not narrow:
            return
        self._block = quantized.block_of(read_json(self.folder / CONFIG_FILE))
        self._scales = {name: quantized.scales_of(name, self.specs, self._block) for name in narrow}
        for name, scales in self._scales.items():
            self.specs[name] = ArraySpec(self.specs[name].shape, quantized.READ)
            del self.specs[scales]

    def _add(self, path: Path, expected: list[str] | None) -> None:
        """Notes the tensors of a file, which must be those that the index gives it."""
        if not path.is_file():
            names = expected or [""]
            others = counted(len(names) - 1, "other tensor")
            raise Mismatch(f"{path} is missing; it holds {names[0]} and {others}")
        with _opened(path) as file:
            names = list(file.keys())
            begins = _begins(path, file, names)
            for name in expected or ():
                if name not in names:
                    raise Mismatch(f"{name} is not in {path}, where {INDEX_FILE} places it")
            for name in names:
                if expected is not None and name not in expected:
                    raise Mismatch(f"{name} is in {path} and {INDEX_FILE} does not place it there")
                tensor = file.get_slice(name)
                code = tensor.get_dtype()
                if code not in (*DTYPES, *quantized.CODES):
                    raise Mismatch(
                        f"{name} in {path} has dtype {code}; only {', '.join(DTYPES)} are read"
                    )
                self.specs[name] = ArraySpec(
                    tuple(tensor.get_shape()), DTYPES.get(code) or quantized.CODES[code]
                )
                self._places[name] = _Place(path, begins[name], self.specs[name])


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored: a file, its first byte there, and its stored shape and dtype."""

    file: Path
    begin: int
    spec: ArraySpec

    @property
    def bytes(self) -> ByteRange:
        return ByteRange(self.begin, self.begin + self.spec.nbytes)

    def read(self, index: Index) -> np.ndarray:
        """A part of the tensor, and of the file no more than the rows that have it."""
        shape, dtype = self.spec.shape, self.spec.dtype
        if isinstance(self.file, StorePath):
            return StoredSlice(self.file, "", shape, dtype, self.bytes)[index]
        rows, *others = index or (slice(None),)
        first, last, step = rows.indices(shape[0] if shape else 1)
        if step != 1 or any(
            len(range(n)[cut]) < n for n, cut in zip(shape[1:], others, strict=False)
        ):
            # Closed at once, as the pages of a mapped file count as memory until then.
            mapped = np.memmap(self.file, np.dtype(f"u{dtype.itemsize}"), "r", self.begin, shape)
            return np.array(mapped[index]).view(dtype)
        array = np.empty((max(0, last - first), *shape[1:]) if shape else (), dtype)
        content = array.reshape(-1).view(np.uint8).data
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(self.begin + first * (self.spec.nbytes // max(1, shape[0]) if shape else 0))
            done = 0
            while done < len(content):
                got = stream.readinto(content[done:])
                if not got:
                    raise Mismatch(f"{self.file} is damaged: it ends in the middle of a tensor")
                done += got
        return array


def files_of(folder: str | Path) -> list[Path]:
    """The files of a folder that are read; whatever else is there may change meanwhile."""
    path = place(folder)
    files = [path / name for name in (CONFIG_FILE, checksums.FILE, ONE_FILE)]
    if not files[-1].is_file():
        files.append(path / INDEX_FILE)
        with contextlib.suppress(Mismatch):  # reading says what is wrong with it
            files.extend(_index(path))
    return files


def _index(folder: Path) -> dict[Path, list[str]]:
    """The tensors that each file holds according to the index of a folder."""
    path = folder / INDEX_FILE
    try:
        places = read_json(path).get("weight_map")
    except InputError as error:
        raise Mismatch(str(error)) from error
    if not isinstance(places, dict) or not places:
        raise Mismatch(f"{path} has no weight_map, which says where each tensor is")
    files: dict[Path, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not _is_name(file):
            raise Mismatch(
                f"{path} places {name} in {shown(file)}, which is not the name of a file in that "
                "folder"
            )
        files.setdefault(folder / file, []).append(name)
    return files


def _is_name(file: str) -> bool:
    size = len(file.encode(errors="surrogatepass"))
    return Path(file).name == file and 0 < size <= LONGEST_NAME


class NewTensorFolder:
    """Tensors that are being written to an empty folder, in any order, by several threads.

    The library writes a file only from memory as a whole, so the files are laid out here. A tensor
    of more than `shard_bytes` gets a file of its own. Each file has its full length from the start.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, ArraySpec], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.tensors = folder, tensors
        self._files: dict[str, str] = {}
        self._offsets: dict[str, int] = {}  # in the file of each tensor
        shards = list(_shards(tensors, shard_bytes))
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._begin(ONE_FILE if len(shards) == 1 else name, shard)
        self._written: dict[str, str] = {}  # with their checksums
        self._parts: dict[str, int] = {}  # how many numbers are written of those written in parts
        self._counting = threading.Lock()

    def write(self, name: str, array: np.ndarray, part: tuple[slice, ...] = ()) -> None:
        """Writes a tensor, or the `part` of it along its last axes.

        Raises RuntimeError unless the tensor, or its part, has the shape and dtype announced.
        """
        spec = self.tensors[name]
        index = (slice(None),) * (len(spec.shape) - len(part)) + part
        shape = tuple(len(range(n)[cut]) for n, cut in zip(spec.shape, index, strict=True))
        if (array.shape, array.dtype) != (shape, spec.dtype):
            raise RuntimeError(f"{name} is {array.shape} {array.dtype} instead of {spec}")
        file, offset = self.folder / self._files[name], self._offsets[name]
        if part:
            bits = np.dtype(f"u{spec.dtype.itemsize}")
            whole = np.memmap(file, bits, "r+", offset, spec.shape)
            whole[index] = contiguous(array).view(bits)
            with self._counting:
                self._parts[name] = self._parts.get(name, 0) + array.size
            return
        content = contiguous(array).reshape(-1).view(np.uint8).data
        with open(file, "r+b") as stream:
            stream.seek(offset)
            stream.write(content)
        self._written[name] = checksums.of_bytes(content)

    def finish(self) -> dict[str, str]:
        """Writes the index if there are several files; returns the checksums by tensor."""
        for name, size in self._parts.items():
            if size == math.prod(self.tensors[name].shape):
                begin, size = self._offsets[name], self.tensors[name].nbytes
                part = (self.folder / self._files[name], begin, begin + size)
                self._written[name] = checksums.of_part(*part)
        missing = [name for name in self.tensors if name not in self._written]
        if missing:
            raise RuntimeError(f"{missing[0]} was never written")
        files = dict(sorted(self._files.items()))
        if len(set(files.values())) > 1:
            total = sum(spec.nbytes for spec in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        # In the order of the tensors, whichever thread was first.
        return {name: self._written[name] for name in self.tensors}

    def _begin(self, file: str, shard: Mapping[str, ArraySpec]) -> None:
        header, offsets = _header(shard)
        with open(self.folder / file, "wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(spec.nbytes for spec in shard.values()))
        for name, offset in offsets.items():
            self._files[name], self._offsets[name] = file, len(header) + offset


def _shards(tensors: Mapping[str, ArraySpec], limit: int) -> Iterator[dict[str, ArraySpec]]:
    """The tensors of each file: all in their order, cut where a file would exceed `limit` bytes."""
    shard: dict[str, ArraySpec] = {}
    size = 0
    for name, spec in tensors.items():
        if shard and size + spec.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = spec
        size += spec.nbytes
    yield shard


def _header(shard: Mapping[str, ArraySpec]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and the offset of each tensor after it, as the library writes it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # which transformers 4 requires
    offsets, end = {}, 0
    # Wider dtypes come first, so that every tensor is aligned.
    for name, spec in sorted(shard.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        offsets[name], end = end, end + spec.nbytes
        code, shape = _CODES[spec.dtype], list(spec.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors after it begin aligned
    return len(text).to_bytes(8, "little") + text, offsets


def _begins(path: Path, file: Any, names: list[str]) -> dict[str, int]:
    """The first byte of each tensor of an open file."""
    if isinstance(file, StoredFile):
        return {name: file.get_slice(name).bytes.begin for name in names}
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: 8 + length + header[name]["data_offsets"][0] for name in names}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; errors of the library become a Mismatch with its name."""
    if isinstance(path, StorePath):
        yield StoredFile(path, {**DTYPES, **quantized.CODES})
        return
    safetensors = optional("safetensors", "huggingface", str(path))
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise Mismatch(f"{path} is damaged or is not a safetensors file: {error}") from error
    except PermissionError as error:
        raise unreadable(str(path), error) from error
