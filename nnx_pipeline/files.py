"""Writing results without leaving half a file."""

import os
import tempfile
from pathlib import Path


def write_whole(path: str, content: bytes) -> None:
    """Writes the whole file or nothing; what was there before stays until all is written.

    A link is followed, and a device or a pipe is written to as it is.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str, text: str) -> None:
    """The same for text, in UTF-8."""
    write_whole(path, text.encode())
