"""Checksums of what this project writes, and files that must not change while they are read."""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._files import place, read_regular
from nnx_pipeline.lab._files.stores import StorePath

FILE = "nnx-pipeline-checksums.json"
_BLOCK_BYTES, _PART_BYTES = 2**20, 2**25  # of a file, and of an object, which is a request
Json = dict[str, Any]  # an object of JSON, or of YAML


def of_values(values: Mapping[str, object]) -> str:
    """The CRC-32 of plain JSON values as eight hexadecimal digits, whatever the order of keys."""
    return of_bytes(json.dumps(values, sort_keys=True).encode())


def of_bytes(content: bytes | memoryview) -> str:
    return f"{zlib.crc32(content):08x}"


def of_part(file: Path, begin: int, end: int) -> str:
    """The CRC-32 of the bytes `begin` to `end` of a file, without that at `end`, block by block."""
    checksum = 0
    block = _PART_BYTES if isinstance(file, StorePath) else _BLOCK_BYTES
    for at in range(begin, end, block):
        checksum = zlib.crc32(read_part(file, at, min(at + block, end)), checksum)
    return f"{checksum:08x}"


def read_part(file: Path, begin: int, end: int) -> bytes:
    """The bytes `begin` to `end` of a file, without that at `end`."""
    if isinstance(file, StorePath):
        return file.read_part(begin, end)
    with open(file, "rb") as stream:
        stream.seek(begin)
        return stream.read(end - begin)


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the file of checksums into a folder; `sums` has one by tensor or file name."""
    text = json.dumps({"crc32": {**sums}, "crc32_of_these": of_values(sums)}, indent=1)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str] | None:
    """What `write_checksums` wrote; None without the file, and Mismatch where it is damaged."""
    try:
        values = json.loads(read_regular(folder / FILE))
        sums: dict[str, str] = values["crc32"]
        whole = isinstance(sums, dict) and values["crc32_of_these"] == of_values(sums)
    except FileNotFoundError:
        if not (folder / FILE).is_symlink():
            return None
        whole = False  # a link to nothing: the checksums existed and are lost
    except PermissionError:  # says nothing about damage
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Mismatch(f"{folder / FILE} is damaged; {CURE}")
    return sums


CURE = (
    f"restore the folder from a copy, or if another program has changed it on purpose, remove its "
    f"{FILE}, which is then out of date"
)


def require(folder: Path, sums: Mapping[str, str], name: str, checksum: str) -> None:
    """Raises Mismatch unless `name` has the `checksum` that it was written with."""
    if sums.get(name) != checksum:
        raise Mismatch(
            f"{name} in {folder} does not match the checksum that it was written with; {CURE}"
        )


class Unchanged:
    """A context in which a checkpoint is read.

    Raises Mismatch at the end, in the place of errors from reading, for a file whose size, time of
    change or inode is another than when this object was made. Later files may come.
    """

    def __init__(self, folder: str | Path, files: Iterable[Path] | None = None) -> None:
        self._folder, self._files = place(folder), files if files is None else [*files]
        self._stamps = self._now()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Mismatch | OSError):
            return
        now = self._now()
        for path, stamp in self._stamps.items():
            if now.get(path) != stamp:
                raise Mismatch(
                    f"{path} changed while it was read; read it again when nothing writes to it, "
                    "or read a copy"
                ) from error

    def _now(self) -> Mapping[Path, object]:
        if isinstance(self._folder, StorePath) and self._files is None:
            found = self._folder.below()
            return {path: found[path] for path in found}
        paths = self._folder.glob("**/*") if self._files is None else self._files
        stamps = {path: _stamp(path) for path in paths if path.is_file()}
        return {path: stamp for path, stamp in stamps.items() if stamp}


def _stamp(path: Path) -> tuple[object, ...] | None:
    """Size, time of change and inode of a file, or what a store says; None without a file."""
    if isinstance(path, StorePath):
        return path.stamp()
    with contextlib.suppress(OSError):
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino
    return None
