"""New folders that take their name when they are complete, whoever else writes there."""

import contextlib
import fcntl
import functools
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from nnx_pipeline import InputError
from nnx_pipeline.ending import cleared_away

_MARK = ".nnx-pipeline-is-writing"
_SUFFIX = ".incomplete"


@contextlib.contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `destination` when all went well.

    Until then it is a sibling with a name of its own and a mark in it, a file that this process
    keeps locked. On an error it is deleted; one that a killed process left behind is deleted by the
    next attempt, as nothing locks it any more. Raises InputError unless the destination is free,
    and FileExistsError when somebody else took the name in the meantime, whose folder stays.
    """
    check_free(destination)
    final = _place(destination)
    made = [parent for parent in final.parents if not parent.exists()]
    _clear_left_behind(final)
    temporary = final.with_name(f"{_short(final)}.{secrets.token_hex(4)}{_SUFFIX}")
    undo = functools.partial(_remove, temporary, made)
    with cleared_away(undo):
        try:
            _make(temporary, destination)
            with _marked(temporary):
                yield temporary
                (temporary / _MARK).unlink()
                _rename(temporary, final)
        except BaseException:
            undo()
            raise


def _remove(folder: Path, parents: list[Path]) -> None:
    """Deletes a folder, and then those of its parents that are empty."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)  # a write that had begun has made its folder again
    for parent in parents:
        with contextlib.suppress(OSError):
            parent.rmdir()


def check_free(destination: str | Path) -> None:
    """Raises InputError unless the destination is a new name or an empty folder, and can be one."""
    if not str(destination):
        raise InputError("the destination's name is empty; give the name of a new folder")
    final = _place(destination)
    above = next((parent for parent in final.parents if os.path.lexists(parent)), final)
    if not above.is_dir():
        raise InputError(f"{destination} cannot be made, {above} is no folder; choose another name")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(
            f"{destination} cannot be made, {above} may not be written by this user; choose "
            "another folder, or change its permissions"
        )
    if final.is_symlink():
        raise InputError(f"{destination} is a link; give the folder that it is to be itself")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError(f"{destination} exists already; choose a new folder or remove it")


def _place(destination: str | Path) -> Path:
    """Where a name leads: `..` is taken as the system does, and folders on the way need not be."""
    given = Path(destination).absolute()
    if given.name in ("", ".."):
        return Path(os.path.realpath(given))
    return Path(os.path.realpath(given.parent)) / given.name


def _make(folder: Path, destination: str | Path) -> None:
    """Makes a folder and those on the way; an error names what the user gave."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{destination} cannot be made: {error.strerror}; choose another folder"
        ) from error


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Keeps a locked mark in a folder; the system unlocks it when this process ends, killed or not.

    The mark gets its name when it is locked, so that nobody finds it unlocked meanwhile.
    """
    unnamed = folder / f"{_MARK}.new"
    with open(unnamed, "wb") as file:
        _lock(file.fileno())
        unnamed.rename(folder / _MARK)
        yield


def _clear_left_behind(final: Path) -> None:
    """Deletes what earlier attempts at this destination left behind, and nobody is writing."""
    for folder in final.parent.glob(f"{glob.escape(_short(final))}.*{_SUFFIX}"):
        with contextlib.suppress(OSError), open(folder / _MARK, "r+b") as mark:
            if _lock(mark.fileno()):
                shutil.rmtree(folder, ignore_errors=True)


def _short(final: Path) -> str:
    """The name of a folder, cut where it leaves no room for what is added to it.

    A name has 255 bytes or fewer, and those of one character stay together.
    """
    room = 255 - len(f".{'0' * 8}{_SUFFIX}")
    name = final.name
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return name


def _lock(file: int) -> bool:
    """Whether this process has the lock now; False also where files cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _rename(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError as error:
        if not os.path.lexists(final):
            raise
        raise FileExistsError(
            f"{final} was written by somebody else in the meantime and is left as it is; "
            "choose another destination, or remove it and run this again"
        ) from error
