"""Folders of safetensors, one file or several with an index, read and written tensor by tensor."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linen_compat.formats import _intact as checksums
from linen_compat.formats._orbax.corruption import unreadable
from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats.huggingface._architectures import CONFIG_FILE
from linen_compat.formats.huggingface.config import read_json
from nnx_pipeline import InputError
from nnx_pipeline.lab._files import local
from nnx_pipeline.lab.errors import counted, optional, shown

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
LONGEST_NAME = 255  # bytes that a file system allows
SHARD_BYTES = 5 * 10**9  # the size of a file that transformers 4 writes; version 5 writes 50 GB

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),  # known to numpy, and so to safetensors, since JAX is imported
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def holds_tensors(folder: Path) -> bool:
    """Whether a folder has the safetensors file of a whole model, or the index of several."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX_FILE).is_file()


class TensorFolder:
    """The tensors of a folder, by name. `specs` has the shape and dtype of each.

    Raises InputError when the folder holds no model, and Mismatch, naming the file or the tensor,
    when files or tensors are missing, broken, of a dtype other than `DTYPES`, or not what this
    project wrote.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = local(folder)
        self.specs: dict[str, ArraySpec] = {}
        self._files: dict[str, Path] = {}
        self.sums = checksums.read_checksums(self.folder)
        self._checked: set[str] = set()
        if (self.folder / ONE_FILE).is_file():
            self._add(self.folder / ONE_FILE, None)
        elif (self.folder / INDEX_FILE).is_file():
            for file, names in _index(self.folder).items():
                self._add(file, names)
        else:
            kind = Mismatch if (self.folder / CONFIG_FILE).is_file() else InputError
            raise kind(
                f"{folder} holds neither {ONE_FILE} nor {INDEX_FILE}; "
                "give the folder of a model that was saved as safetensors"
            )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, which is checked as a whole first if the folder has checksums."""
        if self.sums is not None and name not in self._checked:
            checksum = checksums.of_part(*_byte_range(self._files[name], name))
            checksums.require(self.folder, self.sums, name, checksum)
            self._checked.add(name)
        # Opened anew, as the pages of a mapped file count as memory until it is closed.
        with _opened(self._files[name]) as file:
            array: np.ndarray = file.get_slice(name)[index] if index else file.get_tensor(name)
            return array

    def _add(self, path: Path, expected: list[str] | None) -> None:
        """Notes the tensors of a file, which must be those that the index gives it."""
        if not path.is_file():
            names = expected or [""]
            others = counted(len(names) - 1, "other tensor")
            raise Mismatch(f"{path} is missing; it holds {names[0]} and {others}")
        with _opened(path) as file:
            names = list(file.keys())
            for name in expected or ():
                if name not in names:
                    raise Mismatch(f"{name} is not in {path}, where {INDEX_FILE} places it")
            for name in names:
                if expected is not None and name not in expected:
                    raise Mismatch(f"{name} is in {path} and {INDEX_FILE} does not place it there")
                tensor = file.get_slice(name)
                code = tensor.get_dtype()
                if code not in DTYPES:
                    raise Mismatch(
                        f"{name} in {path} has dtype {code}; only {', '.join(DTYPES)} are read"
                    )
                self.specs[name] = ArraySpec(tuple(tensor.get_shape()), DTYPES[code])
                self._files[name] = path


def files_of(folder: str | Path) -> list[Path]:
    """The files of a folder that are read; whatever else is there may change meanwhile."""
    path = local(folder)
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
    """Tensors that are being written to an empty folder, in any order, one at a time.

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

    def write(self, name: str, array: np.ndarray) -> None:
        """Raises RuntimeError unless the tensor has the shape and dtype announced."""
        spec = self.tensors[name]
        if (array.shape, array.dtype) != (spec.shape, spec.dtype):
            raise RuntimeError(f"{name} is {array.shape} {array.dtype} instead of {spec}")
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        with open(self.folder / self._files[name], "r+b") as stream:
            stream.seek(self._offsets[name])
            stream.write(content)
        self._written[name] = checksums.of_bytes(content)

    def finish(self) -> dict[str, str]:
        """Writes the index if there are several files; returns the checksums by tensor."""
        missing = [name for name in self.tensors if name not in self._written]
        if missing:
            raise RuntimeError(f"{missing[0]} was never written")
        files = dict(sorted(self._files.items()))
        if len(set(files.values())) > 1:
            total = sum(spec.nbytes for spec in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        return self._written

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


def _byte_range(file: Path, name: str) -> tuple[Path, int, int]:
    """The file, the first byte and the end of a tensor."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        begin, end = json.loads(stream.read(length))[name]["data_offsets"]
    return file, 8 + length + begin, 8 + length + end


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; errors of the library become a Mismatch with its name."""
    safetensors = optional("safetensors", "huggingface", str(path))
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise Mismatch(f"{path} is damaged or is not a safetensors file: {error}") from error
    except PermissionError as error:
        raise unreadable(str(path), error) from error
