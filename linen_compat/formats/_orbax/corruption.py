"""Whether the files of an Orbax checkpoint are intact, beyond what reading its arrays shows."""

import ast
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorstore as ts

from linen_compat.formats import _intact as checksums
from linen_compat.formats._paths import database, in_folder, new_context, with_real_paths
from linen_compat.formats._streams import Mismatch, Rotary
from nnx_pipeline.lab._files import read_regular
from nnx_pipeline.lab._files.stores import StorePath, refused
from nnx_pipeline.lab.errors import counted, once, unparsed

METADATA, MANIFEST, SHARDING = "_METADATA", "manifest.ocdbt", "_sharding"
_OF_ARRAYS, _OF_PROCESSES = "array_metadatas", "ocdbt."
_REMAINS = (MANIFEST, SHARDING, _OF_ARRAYS, f"{_OF_PROCESSES}process_0")
# Custom metadata of what this project writes: the checksum of the metadata, the checksums of each
# array's chunks, and the mark that all arrays of this very checkpoint have.
_CHECKSUM, CHUNKS, MARK = "crc32_of_metadata", "crc32_of_chunks", "nnx_pipeline_checkpoint"
PROCESSES = "files_of_processes"  # of each of several that wrote, in a database of its own
_NO_ARRAY = ("None", "Dict", "List", "Tuple", "NamedTuple")  # empty nodes of a tree
# What TensorStore raises for stores that are damaged, missing or not to be read.
_LOST = ("CURL error", "UNAVAILABLE", "DEADLINE_EXCEEDED", "retry attempts failed")
STORE_ERRORS = (ValueError, OSError, NotImplementedError, RuntimeError, IndexError, KeyError)


@dataclass(frozen=True)
class Metadata:
    """The contents of a checkpoint's `_METADATA`."""

    leaves: tuple[str, ...]
    ocdbt: bool
    zeros_left_out: bool
    attention_scale: float | None
    rotary: Rotary | None
    chunks: Mapping[str, Sequence[str]] | None
    mark: str | None
    files: Sequence[int]  # of each of the processes that wrote, if there were several


def read_metadata(items: Path) -> Metadata:
    """Raises Mismatch when the file is damaged or missing."""
    file = items / METADATA
    values = _read_json(file)
    custom = values.get("custom_metadata") or {}
    tree = values.get("tree_metadata")
    if not isinstance(custom, dict) or not isinstance(tree, dict):
        raise _broken(file, "it has no tree of arrays")
    # With any of the three this project wrote it, so that a checksum must be there as well.
    if {_CHECKSUM, CHUNKS, MARK} & set(custom) and custom.get(_CHECKSUM) != _checksum(values):
        raise _broken(file, "it does not match its own checksum")
    scale = custom.get("attention_scale")
    if scale is not None and not (type(scale) in (int, float) and 0 < scale < math.inf):
        raise _broken(file, f"attention_scale={scale!r} is not a number above 0")
    rotary = custom.get("rotary")
    if rotary is not None and not _is_rotary(rotary):
        raise _broken(file, f"rotary={rotary!r} does not say an order and a scaling")
    leaves = []
    for key, entry in tree.items():
        kind = entry.get("value_metadata") if isinstance(entry, dict) else None
        if not isinstance(kind, dict):
            raise _broken(file, f"it does not say what {key[:100]} is")
        if not (kind.get("skip_deserialize") or kind.get("value_type") in _NO_ARRAY):
            leaves.append(_path(key, file))
    return Metadata(
        leaves=tuple(leaves),
        ocdbt=bool(values.get("use_ocdbt")),
        zeros_left_out=values.get("store_array_data_equal_to_fill_value") is not True,
        attention_scale=None if scale is None else float(scale),
        rotary=None if rotary is None else Rotary(**rotary),
        chunks=custom.get(CHUNKS),
        mark=custom.get(MARK),
        files=tuple(custom.get(PROCESSES, ())) if MARK in custom else (),
    )


def _check_parts(items: Path, files: Sequence[int]) -> None:
    """Raises Mismatch where the database of one of the processes that wrote is not all there."""
    for number, count in enumerate(files):
        name = f"{_OF_PROCESSES}process_{number}"
        data, lacking = items / name / "d", name
        if (items / name / MANIFEST).is_file():
            left = sum(1 for _ in data.iterdir()) if data.is_dir() else 0
            if left >= count:
                continue
            lacking = f"{counted(count - left, 'file')} of {name}/d"
        raise Mismatch(
            f"{items} lacks {lacking}, which process {number} of {len(files)} wrote: the "
            f"checkpoint is damaged; restore {name}, or take another step"
        )


def _is_rotary(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {*Rotary._fields}
        and type(value["interleaved"]) is bool
        and isinstance(value["scaling"], str | None)
    )


def check_mark(metadata: Metadata, items: Path, leaf: str, mark: str | None) -> None:
    """Raises Mismatch unless an array with this mark and the metadata belong to one checkpoint."""
    if mark != metadata.mark:
        raise Mismatch(
            f"{items / METADATA} belongs to another checkpoint than {leaf}, or has lost its "
            "checksums: the checkpoint is damaged; restore that file, or take another checkpoint"
        )


def metadata_with_checksum(values: checksums.Json) -> checksums.Json:
    custom = {**(values.get("custom_metadata") or {}), _CHECKSUM: _checksum(values)}
    return {**values, "custom_metadata": custom}


def _checksum(values: checksums.Json) -> str:
    custom = {k: v for k, v in (values.get("custom_metadata") or {}).items() if k != _CHECKSUM}
    return checksums.of_values({**values, "custom_metadata": custom})


def was_orbax(folder: Path) -> bool:
    """Whether a folder has some files of an Orbax checkpoint, even if it lacks others."""
    return any((folder / name).exists() for name in _REMAINS)


def check_index(items: Path) -> None:
    """Reads the small files that say where the arrays are, and the files of Orbax beside them."""
    _check_regular(items)
    metadata = read_metadata(items)
    _check_parts(items, metadata.files)
    if (items / SHARDING).exists():
        _read_json(items / SHARDING)
    processes = [path.name.removeprefix(_OF_PROCESSES) for path in items.glob("ocdbt.process_*")]
    if (items / _OF_ARRAYS).is_dir():
        for process in processes:
            _read_json(items / _OF_ARRAYS / process)
    if (items / MANIFEST).exists():
        try:
            ts.KvStore.open(database(items), context=new_context()).result().list().result()
        except STORE_ERRORS as error:
            raise unreadable(_database(items, metadata), error) from error
    elif metadata.ocdbt or processes:
        raise Mismatch(
            f"{items / MANIFEST} is missing, without which {_arrays(metadata)} cannot be found; "
            "take an earlier checkpoint, or restore that file"
        )


def _check_regular(items: Path) -> None:
    """Raises Mismatch for a pipe or a device, which TensorStore would wait for."""
    for folder, _, names in () if isinstance(items, StorePath) else os.walk(items):
        for path in (Path(folder) / name for name in names):
            if path.exists() and not path.is_file():
                raise Mismatch(f"{path} is not a regular file, the checkpoint is damaged")


def check_databases(items: Path) -> None:
    """Reads the indices of all versions of every database, also of single processes."""
    processes = sorted(items.glob("ocdbt.process_*"))
    for folder in (items, *processes) if (items / MANIFEST).exists() else ():
        if not any(folder.glob("manifest.*")):
            arrays = _arrays(read_metadata(items))
            raise Mismatch(
                f"{folder / MANIFEST} is missing, which belongs to the database of {arrays}; "
                "take an earlier checkpoint, or restore that file"
            )
        base = in_folder(folder)
        try:
            # Files end with an index: a truncated one shows even where nothing in use is lost.
            manifest = ts.ocdbt.dump(ts.KvStore.open(base, context=new_context()).result()).result()
            for version in manifest["versions"]:
                number = version["generation_number"]
                spec = {**database(folder), "version": number}
                ts.KvStore.open(spec, context=new_context()).result().list().result()
        except STORE_ERRORS as error:
            raise unreadable(_database(folder, read_metadata(items)), error) from error


def unreadable(what: str, error: Exception) -> Exception:
    """The error for what is damaged or may not be read, with the reason that `error` gives.

    Mismatch, or where a store does not answer that of `refused`.
    """
    if lost(error):
        return refused(what, str(error).split("[")[0])
    if isinstance(error, PermissionError) or "PERMISSION_DENIED" in str(error):
        return Mismatch(
            f"{what} may not be read by this user, so it could not be checked; "
            "change its permissions, or run this as its owner"
        )
    said = getattr(error, "strerror", None) or str(error)  # the system's words, without its number
    said = unparsed(error) if isinstance(error, RecursionError) else said
    reason = with_real_paths(" ".join(said.split("[source locations")[0].split()))
    return Mismatch(f"{what} cannot be read, the checkpoint is damaged: {reason[:300]}")


def lost(error: Exception) -> bool:
    """Whether TensorStore says that a store did not answer."""
    return any(sign in str(error) for sign in _LOST)


def _database(folder: Path, metadata: Metadata) -> str:
    return f"the database of {_arrays(metadata)} in {folder}"


def _arrays(metadata: Metadata) -> str:
    """What messages call the arrays of a checkpoint: one of them, and how many others."""
    example = next((name for name in metadata.leaves if "/" in name), "")
    others = counted(len(metadata.leaves) - 1, "other array")
    return f"{example} and {others}" if example else "its arrays"


def _path(key: str, file: Path) -> str:
    """The path of a leaf from its key in `_METADATA`, a tuple written as Python does."""
    try:
        keys = ast.literal_eval(key)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        keys = None
    if not isinstance(keys, tuple) or not all(isinstance(part, str | int) for part in keys):
        raise _broken(file, f"{key[:100]} names no array")
    return "/".join(map(str, keys))


def _broken(file: Path, reason: str) -> Mismatch:
    return Mismatch(f"{file} cannot be read, the checkpoint is damaged: {reason}")


def _read_json(file: Path) -> checksums.Json:
    """The object in a JSON file. Raises Mismatch when the file is missing or damaged."""
    try:
        values = json.loads(read_regular(file), object_pairs_hook=once)
    except FileNotFoundError as error:
        raise Mismatch(f"{file} is missing, the checkpoint is damaged") from error
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(str(file), error) from error
    if not isinstance(values, dict):
        raise _broken(file, "it is not a JSON object")
    return values
