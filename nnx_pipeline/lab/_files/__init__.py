"""Files, pictures and the standard streams; an interruption never leaves half a file."""

import functools
import io
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.errors import InputError, optional, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
TEMPORARY = ".nnx-pipeline."  # begins the name of a file that is not yet complete
# Of a file that is read as a whole: of settings and timetables, and of texts to train on.
MOST_SETTINGS, MOST_TEXT = 2**28, 2**31
# What begins as an address does, or with the name of a store alone, as `gs:bucket`.
_STORES = "gs|gcs|s3|s3a|r2|oss|abfss?|adl|azure|az|wasbs?|hdfs|hf|https?|ftp|file|memory"
_ADDRESS = re.compile(rf"\s*(?:[a-z][a-z0-9+.-]+:/|(?:{_STORES}):)", re.IGNORECASE)
_waiting: dict[Path, int] = {}  # pipes that are open until their text is written


def local(path: str | os.PathLike[str], known: str = "files and folders of this machine") -> Path:
    """The path that a user named; raises InputError for an address such as `gs://…`.

    - `known`: what is read and written, in the words of the error.
    """
    named = str(path) if isinstance(path, Path) else os.fspath(path)
    if _ADDRESS.match(named):
        raise InputError(
            f"{named} is an address, and only {known} are read and written; copy what it names, "
            "and give the path of the copy, or begin it with ./ where a folder here has that name"
        )
    local_path = Path(named)
    # Without its `./` it would be taken for an address where it comes by here again.
    return local_path.absolute() if _ADDRESS.match(str(local_path)) else local_path


def place(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint that a user named: of this machine or `file://`, or into a store.

    Raises InputError for other addresses, and for what no object of a store is called.
    """
    from nnx_pipeline.lab._files.stores import SCHEMES, StorePath  # most commands need no store

    if isinstance(path, StorePath):
        return path
    named = os.fspath(path)
    scheme, is_address, rest = named.partition("://")
    if is_address and scheme == "file":
        return _of_file_address(named)
    if not is_address or scheme not in SCHEMES:
        return local(path, "gs://bucket/…, s3://bucket/…, file:///… and folders of this machine")
    parts = rest.removesuffix("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InputError(
            f"{named} names no folder of a store: its parts are a bucket and names, none of them "
            f"empty, . or ..; write it as {scheme}://bucket/name"
        )
    return StorePath(f"{scheme}:/{'/'.join(parts)}")


def _of_file_address(named: str) -> Path:
    parts = urlsplit(named)
    path = unquote(parts.path, errors="surrogateescape")
    strange = parts.query or parts.fragment or "\0" in path
    if parts.netloc not in ("", "localhost") or not path or strange:
        raise InputError(
            f"{named} is not a file of this machine as file:///folder/name says one, with %3F and "
            "%23 for ? and #; give it so, or as a path"
        )
    return Path(path)


def hold_pipe(path: str | os.PathLike[str]) -> None:
    """Opens a pipe for `write_whole`, so that its reader stays; does nothing for another file.

    Raises OSError of ENXIO for a pipe that nobody reads: to write to it would wait for ever.
    """
    pipe = local(path)
    if pipe.is_fifo():
        opened = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        if pipe in _waiting:
            os.close(_waiting[pipe])
        _waiting[pipe] = opened


def write_whole(path: str, content: bytes) -> None:
    """Writes the whole file or nothing; an old file stays until the new one is complete.

    A link is followed; a device or a pipe is written to directly. Raises OSError, which names
    `path` and not a temporary file.
    """
    target = local(path)
    try:
        if target.exists() and not target.is_file():
            hold_pipe(target)
            with open(_waiting.pop(target, target), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(content)
        else:
            replace(target.resolve(), content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def replace(target: Path, content: bytes) -> None:
    """Writes a file by renaming another one in its folder; a link of that name is replaced."""
    old = target.lstat().st_mode if os.path.lexists(target) else 0
    mode = stat.S_IMODE(old) if stat.S_ISREG(old) else 0o666 & ~_umask()
    # The temporary name does not contain the target's, which may have the greatest length allowed.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=TEMPORARY)
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
    write_whole(path, text.encode())


def read_regular(
    path: str | os.PathLike[str], most: int = MOST_SETTINGS, errors: str = "strict"
) -> str:
    """The text of a regular file of `most` bytes or fewer, in UTF-8 with or without a mark.

    - `errors`: what becomes of bytes that are no UTF-8, as for `open`.

    Raises InputError for another one: a pipe would be waited for, and a device may have no end.
    """
    from nnx_pipeline.lab._files.stores import StorePath

    if isinstance(path, StorePath):
        found = path.stamp()
        _check_size(path, found.size if found else 0, most)
        return path.read_text("utf-8-sig", errors)
    named = local(path)
    with open(named, encoding="utf-8-sig", errors=errors, opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} cannot be read: it is not a regular file; name another file")
        _check_size(path, status.st_size, most)
        return file.read()


def _check_size(path: str | os.PathLike[str], size: int, most: int) -> None:
    if size > most:
        raise InputError(
            f"{path} cannot be read: it has {size:,} bytes, more than {most:,}; name another file"
        )


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe too, without waiting until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: str | os.PathLike[str], most: int = MOST_SETTINGS) -> str:
    try:
        return read_regular(path, most)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InputError(f"{path} cannot be read: {why}; name another file") from error


class Lasting(str):
    """A line about the progress that stays on a terminal, where others take each other's place."""


def say(text: str, keep: str = "") -> None:
    """Writes a line to standard error at once; characters in `keep` stay as they are."""
    # In one piece, as `print` does not.
    sys.stderr.write(f"{printable(text, keep)}\n")
    sys.stderr.flush()


def write_output(text: str) -> None:
    print(printable(text, keep="\n\t"))


def use_any_encoding() -> None:
    """From now on characters that standard output's encoding lacks are written as `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def check_picture(path: str | None, option: str = "--picture") -> None:
    if path is None:
        return
    if Path(path).suffix.lower() not in KINDS:
        raise InputError(f"{option} {path}: the name of a picture must end in {' or '.join(KINDS)}")
    optional("matplotlib.figure", "report", f"{option} {path}")


def save_figure(figure: "Figure", path: str) -> None:
    import matplotlib
    from matplotlib.text import Text

    kind = Path(path).suffix.lower().removeprefix(".")
    # Text stays text in an SVG, in place of outlines, and the same figure gives the same bytes: no
    # random ids, no date.
    options = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nnx-pipeline"})
    metadata = {"Date": None} if kind == "svg" else None
    drawn = io.BytesIO()
    for text in figure.findobj(Text):
        text.set(text=printable(text.get_text(), keep="\n"), parse_math=False)
    with options:
        figure.savefig(drawn, format=kind, dpi=150, metadata=metadata)
    write_whole(path, drawn.getvalue())


def ink_on(colour: str) -> str:
    """Black or white, whichever has the higher contrast on a `#rrggbb` by the WCAG formula."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    weights = (0.2126, 0.7152, 0.0722)
    luminance = sum(w * c**2.2 for w, c in zip(weights, channels, strict=True))
    # At a luminance of sqrt(1.05 · 0.05) - 0.05 = 0.18 both have the same contrast.
    return "white" if luminance < 0.18 else "black"
