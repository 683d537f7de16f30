"""Writing results without leaving half a file."""

import functools
import os
import stat
import tempfile
from pathlib import Path

from nnx_pipeline.ending import cleared_away


def write_whole(path: str, content: bytes) -> None:
    """Writes the whole file or nothing; what was there before stays until all is written.

    A link is followed, and a device or a pipe is written to as it is. The rights are those of the
    file that was there, or of any new file. An OSError names the file.
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
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    # Not by the name of the target, which may be as long as names can be.
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
    """What this process takes from the rights of new files; asking is setting."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_text(path: str, text: str) -> None:
    """The same for text, in UTF-8."""
    write_whole(path, text.encode())
