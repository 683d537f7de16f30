"""Checksums of what this project writes, kept where the format itself has no place for them.

In Orbax checkpoints each chunk of an array ends in a crc32c, written by a codec of the format, and
`_METADATA` has a checksum among its custom metadata. A folder of safetensors gets one extra file
beside the others.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._files import read_regular

FILE = "nnx-pipeline-checksums.json"
_BLOCK_BYTES = 2**20
Json = dict[str, Any]  # an object of JSON, or of YAML


def of_values(values: Mapping[str, object]) -> str:
    """The CRC-32 of plain JSON values, as eight hexadecimal digits.

    It depends neither on the order of keys nor on the spacing of the file that they come from.
    """
    return of_bytes(json.dumps(values, sort_keys=True).encode())


def of_bytes(content: bytes | memoryview) -> str:
    """The CRC-32 of bytes, as eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"


def of_part(file: Path, begin: int, end: int) -> str:
    """The CRC-32 of a part of a file, read block by block.

    - `file`: the file to read.
    - `begin`, `end`: byte offsets of the part; the byte at `end` is not included.
    """
    found = 0
    with open(file, "rb") as stream:
        stream.seek(begin)
        for at in range(begin, end, _BLOCK_BYTES):
            found = zlib.crc32(stream.read(min(_BLOCK_BYTES, end - at)), found)
    return f"{found:08x}"


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the file of checksums into a folder.

    - `sums`: the checksum of each tensor and file, by its name.
    """
    text = json.dumps({"crc32": {**sums}, "crc32_of_these": of_values(sums)}, indent=1)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str] | None:
    """The checksums that a folder's own file holds, by name; None without such a file.

    Raises Mismatch when that file is damaged.
    """
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


def require(folder: Path, sums: Mapping[str, str], name: str, found: str) -> None:
    """Raises Mismatch unless a tensor or a file still has the checksum that it was written with.

    - `folder`: what the message names as the place.
    - `sums`: the checksums as written, from `read_checksums`.
    - `name`: the name of the tensor or file.
    - `found`: the checksum of what the folder holds now.
    """
    if sums.get(name) != found:
        raise Mismatch(
            f"{name} in {folder} does not match the checksum that it was written with; {CURE}"
        )
