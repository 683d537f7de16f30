"""Folders as TensorStore takes them, whatever the names on the way to them.

A path is never written as a URL: `%31`, `?` and `#` mean something there. As plain text TensorStore
takes every name but those of `_is_plain`; a folder below one of these is reached through a link.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nnx_pipeline import InputError

_LINKS: dict[str, str] = {}  # link to the folder that it stands for


def in_folder(folder: Path, inside: str = "") -> dict[str, Any]:
    """The key-value store of TensorStore that has the files of a folder, below `inside`."""
    real = os.path.realpath(folder)
    return {"driver": "file", "path": f"{real if _is_plain(real) else _link(real)}/{inside}"}


def with_own_names(message: str) -> str:
    """A message of TensorStore with the names that the user knows instead of links."""
    for link, real in _LINKS.items():
        message = message.replace(link, real)
    return message


def _is_plain(path: str) -> bool:
    """Whether TensorStore takes a path as it is: it is text, a backslash separates nothing in it,
    and no part of it has the ending of TensorStore's own locks."""
    try:
        path.encode()
    except UnicodeEncodeError:  # bytes of a file system that are no UTF-8
        return False
    return "\\" not in path and not any(part.endswith(".__lock") for part in path.split("/"))


@functools.cache
def _link(real: str) -> str:
    """A link to a folder, below a folder of this process that is deleted when it ends."""
    link = os.path.join(_own_folder(), str(len(_LINKS)))
    os.symlink(real, link)
    _LINKS[link] = real
    return link


@functools.cache
def _own_folder() -> str:
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        parent = os.path.realpath(parent)
        if _is_plain(parent) and os.access(parent, os.W_OK | os.X_OK):
            folder = tempfile.mkdtemp(prefix="linen-compat-", dir=parent)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder
    raise InputError(
        f"the folder for temporary files, {tempfile.gettempdir()!r}, cannot be used: it has a "
        "backslash or bytes that are no UTF-8, or cannot be written; set TMPDIR to another one"
    )
