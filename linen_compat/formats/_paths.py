"""How TensorStore is given a folder, whatever characters the folder's path contains.

A path is never written as a URL, because `%31`, `?` and `#` have a meaning there. As plain text
TensorStore takes every path but those that `_is_plain` refuses; such a folder is reached through a
symbolic link.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tensorstore as ts

from nnx_pipeline import InputError
from nnx_pipeline.lab._files.stores import StorePath

_LINKS: dict[str, str] = {}  # from each link to the folder that it stands for


_INDEX = "cache_pool#ocdbt"  # what TensorStore keeps of the indices of databases in stores
# It tries again for about a minute what a store did not answer.
_OF_STORES = {
    _INDEX: {"total_bytes_limit": 64 * 2**20},
    **{f"{driver}_request_retries": {"max_retries": 6} for driver in ("gcs", "s3")},
}


def in_folder(folder: Path, inside: str = "") -> dict[str, str]:
    """TensorStore's key-value store of the files of a folder whose names begin with `inside`."""
    if isinstance(folder, StorePath):
        return folder.kvstore(inside)
    real = os.path.realpath(folder)
    return {"driver": "file", "path": f"{real if _is_plain(real) else _link(real)}/{inside}"}


def database(folder: Path, inside: str = "") -> dict[str, Any]:
    """TensorStore's OCDBT database in a folder; a store is not asked again for its index."""
    kept = {"cache_pool": _INDEX} if isinstance(folder, StorePath) else {}
    return {"driver": "ocdbt", "base": in_folder(folder), "path": inside, **kept}


def new_context(parent: ts.Context | None = None, **own: object) -> ts.Context:
    """A context of TensorStore, with what a parent keeps of the indices of databases."""
    return ts.Context({**_OF_STORES, **own}) if parent is None else ts.Context(own, parent)


def with_real_paths(message: str) -> str:
    """A message of TensorStore, with the paths that the user knows in place of links."""
    for link, real in _LINKS.items():
        message = message.replace(link, real)
    return message


def _is_plain(path: str) -> bool:
    """Whether TensorStore takes a path as it is.

    It must be valid text, contain no backslash, which TensorStore reads as a separator, and have no
    component that ends in `.__lock`, as the names of TensorStore's own locks do.
    """
    try:
        path.encode()
    except UnicodeEncodeError:  # a file name whose bytes are not UTF-8
        return False
    return "\\" not in path and not any(part.endswith(".__lock") for part in path.split("/"))


@functools.cache
def _link(real: str) -> str:
    """A symbolic link to a folder, made below this process's own temporary folder."""
    link = os.path.join(temporary_folder(), str(len(_LINKS)))
    os.symlink(real, link)
    _LINKS[link] = real
    return link


@functools.cache
def temporary_folder() -> str:
    """A new temporary folder with a plain path, deleted when this process ends."""
    # The user's own choice comes first, but its path may be one that TensorStore does not take.
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        parent = os.path.realpath(parent)
        if _is_plain(parent) and os.access(parent, os.W_OK | os.X_OK):
            folder = tempfile.mkdtemp(prefix="linen-compat-", dir=parent)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder
    raise InputError(
        f"the folder for temporary files, {tempfile.gettempdir()!r}, cannot be used: its path "
        "has a backslash or is not valid UTF-8, or it is not writable; set TMPDIR to another one"
    )
