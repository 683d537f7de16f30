"""Writing files so that an interruption never leaves half a file."""

import functools
import os
import stat
import tempfile
from pathlib import Path

from nnx_pipeline.ending import cleared_away
from nnx_pipeline.errors import InputError


def write_whole(path: str, content: bytes) -> None:
    """Writes the whole file or nothing; an old file stays until the new one is complete.

    - `path`: a link is followed; a device or a pipe is written to directly.

    The permissions are those of the old file, or the usual ones of a new file. Raises OSError,
    which names `path` and not a temporary file.
    """
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(target, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _replace(target: Path, content: bytes) -> None:
    """Writes a temporary file in the same folder and renames it to `target`."""
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    # The temporary name does not contain the target's, which may have the greatest length allowed.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".nnx-pipeline.")
    undo = functools.partial(Path(temporary).unlink, missing_ok=True)
    with cleared_away(undo):
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            undo()
            raise


def _umask() -> int:
    """The umask of this process, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_text(path: str, text: str) -> None:
    """Writes text in UTF-8: the whole file or nothing, as `write_whole`."""
    write_whole(path, text.encode())


def read_text(path: str) -> str:
    """The text of a file that the user named; raises InputError where it cannot be read."""
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{path} cannot be read: {why}; name another file") from error
