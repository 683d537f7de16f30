"""Whether the files of an Orbax checkpoint are whole, beside what reading its arrays shows."""

import ast
import json
from pathlib import Path
from typing import Any

import tensorstore as ts

from linen_compat.streams import Mismatch

METADATA, MANIFEST, SHARDING = "_METADATA", "manifest.ocdbt", "_sharding"
_OF_ARRAYS, _OF_PROCESSES = "array_metadatas", "ocdbt."
_REMAINS = (MANIFEST, SHARDING, _OF_ARRAYS, f"{_OF_PROCESSES}process_0")


def read_metadata(items: Path) -> dict[str, Any]:
    """What `_METADATA` of a checkpoint holds. Raises Mismatch when it is damaged."""
    return _read_json(items / METADATA)


def was_orbax(folder: Path) -> bool:
    """Whether a folder has some files of an Orbax checkpoint, which may lack others."""
    return any((folder / name).exists() for name in _REMAINS)


def check_index(items: Path) -> None:
    """Reads what says where the arrays are, and what Orbax keeps beside them, all of it small.

    Raises Mismatch, naming the file, when something of it is damaged or missing.
    """
    metadata = read_metadata(items)
    if (items / SHARDING).exists():
        _read_json(items / SHARDING)
    processes = [path.name.removeprefix(_OF_PROCESSES) for path in items.glob("ocdbt.process_*")]
    if (items / _OF_ARRAYS).is_dir():
        for process in processes:
            _read_json(items / _OF_ARRAYS / process)
    if (items / MANIFEST).exists():
        try:
            base = {"driver": "ocdbt", "base": f"file://{items}/"}
            ts.KvStore.open(base).result().list().result()
        except ValueError as error:
            raise damaged(_database(items, metadata), error) from error
    elif metadata.get("use_ocdbt") or processes:
        raise Mismatch(
            f"{items / MANIFEST} is missing, and with it where {_arrays(metadata)} are; "
            "take an earlier checkpoint, or restore that file"
        )


def check_databases(items: Path) -> None:
    """Reads the indices of every database and version here, the process-wise ones too.

    Files end with an index, so one that was cut off shows even where nothing that the checkpoint
    refers to is lost. Raises Mismatch, naming the folder and a leaf.
    """
    processes = sorted(items.glob("ocdbt.process_*"))
    for folder in (items, *processes) if (items / MANIFEST).exists() else ():
        if not any(folder.glob("manifest.*")):
            arrays = _arrays(read_metadata(items))
            raise Mismatch(f"{folder / MANIFEST} is missing, of the database of {arrays}")
        base = f"file://{folder}/"
        try:
            manifest = ts.ocdbt.dump(ts.KvStore.open(base).result()).result()
            for version in manifest["versions"]:
                number = version["generation_number"]
                spec = {"driver": "ocdbt", "base": base, "version": number}
                ts.KvStore.open(spec).result().list().result()
        except ValueError as error:
            raise damaged(_database(folder, read_metadata(items)), error) from error


def damaged(what: str, error: Exception) -> Mismatch:
    """The error for what cannot be read, with the reason that TensorStore gives."""
    reason = " ".join(str(error).split("[source locations")[0].split())
    return Mismatch(f"{what} cannot be read, the checkpoint is damaged: {reason[:300]}")


def _database(folder: Path, metadata: dict[str, Any]) -> str:
    return f"the database of {_arrays(metadata)} in {folder}"


def _arrays(metadata: dict[str, Any]) -> str:
    """One array below a folder, and how many others there are."""
    names = ["/".join(map(str, ast.literal_eval(key))) for key in metadata["tree_metadata"]]
    example = next((name for name in names if "/" in name), "")
    return f"{example} and {len(names) - 1} other arrays" if example else "its arrays"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Mismatch(f"{file} is missing, the checkpoint is damaged") from error
    except (OSError, ValueError) as error:
        raise Mismatch(f"{file} cannot be read, the checkpoint is damaged: {error}") from error
    if not isinstance(values, dict):
        raise Mismatch(f"{file} cannot be read, the checkpoint is damaged: it is no JSON object")
    return values
