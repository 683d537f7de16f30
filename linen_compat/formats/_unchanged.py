"""Whether the files of a checkpoint stay as they are while it is read."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from linen_compat.formats._streams import Mismatch

Stamp = tuple[int, int, int]


class Unchanged:
    """A context in which a checkpoint is read.

    Raises Mismatch at the end for a file whose size, time of change or inode has changed since this
    object was made, in the place of errors from reading it. Later files may come.
    """

    def __init__(self, folder: str | Path, files: Iterable[Path] | None = None) -> None:
        found = Path(folder).glob("**/*") if files is None else files
        self._stamps = {path: _stamp(path) for path in found if path.is_file()}

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Mismatch | OSError):
            return
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise Mismatch(
                    f"{path} changed while it was read; read it again when nothing writes to it, "
                    "or read a copy"
                ) from error


def _stamp(path: Path) -> Stamp | None:
    """Size, time of change and inode of a file; None without a file."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns, found.st_ino
    return None
