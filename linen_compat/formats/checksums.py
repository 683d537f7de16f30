"""Checksums of what this project writes, where the format has no place for them.

Arrays of Orbax checkpoints carry a crc32c in each chunk, by a codec of the format; `_METADATA` has
one among its custom metadata. A folder of safetensors gets a file of its own beside the others.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linen_compat.streams import Mismatch

FILE = "nnx-pipeline-checksums.json"
_BLOCK_BYTES = 2**20


def of_values(values: Mapping[str, Any]) -> str:
    """The CRC-32 of plain values, in whatever order and spacing JSON has them."""
    return of_bytes(json.dumps(values, sort_keys=True).encode())


def of_bytes(content: Any) -> str:
    """The CRC-32 of bytes, as text."""
    return f"{zlib.crc32(content):08x}"


def of_part(file: Path, begin: int, end: int) -> str:
    """The CRC-32 of a part of a file, read block by block."""
    found = 0
    with open(file, "rb") as stream:
        stream.seek(begin)
        for at in range(begin, end, _BLOCK_BYTES):
            found = zlib.crc32(stream.read(min(_BLOCK_BYTES, end - at)), found)
    return f"{found:08x}"


def write(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the file. sums: by the names of tensors and files."""
    text = json.dumps({"crc32": {**sums}, "crc32_of_these": of_values(sums)}, indent=1)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read(folder: Path) -> dict[str, str] | None:
    """What the file of a folder says; None without one. Raises Mismatch when it is damaged."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        sums = values["crc32"]
        whole = isinstance(sums, dict) and values["crc32_of_these"] == of_values(sums)
    except FileNotFoundError:
        if not (folder / FILE).is_symlink():
            return None
        whole = False  # a link to nothing is no folder without checksums
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Mismatch(f"{folder / FILE} is damaged; {CURE}")
    return sums


CURE = (
    f"restore the folder, or if another program has written to it since, remove its {FILE}, which "
    "is then out of date"
)


def require(folder: Path, sums: Mapping[str, str], name: str, found: str) -> None:
    """Raises Mismatch unless a tensor or a file has the checksum that it was written with."""
    if sums.get(name) != found:
        raise Mismatch(f"{name} in {folder} is not what was written, by its checksum; {CURE}")
