"""New folders that get their name only when complete, even if others write there meanwhile."""

import contextlib
import errno
import fcntl
import functools
import glob
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linen_compat.formats import _store_folder as stores
from linen_compat.formats._store_folder import MARK as _MARK
from nnx_pipeline import InputError
from nnx_pipeline.lab._ending import cleared_away, stay_if_ending
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath

INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class Room:
    """Bytes of the arrays of a new folder.

    - `by_tensorstore`: whether TensorStore writes them, which it can in a store too.
    """

    nbytes: int
    by_tensorstore: bool


@contextlib.contextmanager
def new_folder(destination: str | Path, room: Room | None = None) -> Iterator[Path]:
    """A folder to fill, which takes the name `destination` if the context ends without an error.

    Until then the folder stands beside the destination under another name. It contains a mark, a
    file that this process keeps locked. On an error the folder is deleted. A folder that a killed
    process left behind has a mark that nobody locks: the next attempt at the same destination
    deletes it. In a store the folder is filled where it is (see `_store_folder`), or if it is not
    TensorStore's, in the folder for temporary files of this machine, and then copied.

    Raises InputError unless the destination is free and has the room, FileExistsError when another
    writer took the name in the meantime, and an OSError that names it when the disk is full.
    """
    check_free(destination)
    final = _resolved(destination)
    if isinstance(final, StorePath):
        with _in_store(final, room) as folder:
            yield folder
        return
    if room is not None:
        _check_room(room, destination, next(folder for folder in final.parents if folder.exists()))
    # Parents to be made here, nearest first: after an error they are removed in this order.
    made = [parent for parent in final.parents if not parent.exists()]
    with _temporary(final, made, destination) as temporary:
        yield temporary
        (temporary / _MARK).unlink()  # the complete folder has no mark
        _rename(temporary, final)


@contextlib.contextmanager
def _in_store(final: StorePath, room: Room | None) -> Iterator[Path]:
    """The same in a store; what this machine is filled with first is gone in the end."""
    if room is None or room.by_tensorstore:
        with stores.claimed_folder(final) as claim:
            yield final
            stores.commit(claim, None)
        return
    parent = Path(tempfile.gettempdir())
    _check_room(
        room, f"{final}, which is made in the folder for temporary files (TMPDIR) first,", parent
    )
    here = parent / f"linen-compat-{zlib.crc32(str(final).encode()):08x}"
    with _temporary(here, [], final) as temporary, stores.claimed_folder(final) as claim:
        yield temporary
        stores.commit(claim, temporary)
    _remove(temporary, [])


@contextlib.contextmanager
def _temporary(final: Path, made: list[Path], destination: str | Path) -> Iterator[Path]:
    """A folder beside `final`, with a mark; on an error it and the `made` parents are deleted."""
    _clear(final.parent, f"{glob.escape(_short(final))}.*{INCOMPLETE}")
    temporary = final.with_name(f"{_short(final)}.{secrets.token_hex(4)}{INCOMPLETE}")
    undo = functools.partial(_remove, temporary, made)
    with cleared_away(undo):
        try:
            stay_if_ending()  # a thread in the background would make it after it was cleared away
            _make(temporary, destination)
            with _marked(temporary):
                yield temporary
        except BaseException as error:
            undo()
            full = _full(error)
            if full is None:
                raise
            raise OSError(
                f"{destination} cannot be written: {full}; free some space there, or choose "
                "another folder"
            ) from error


def _check_room(room: Room, destination: str | Path, parent: Path) -> None:
    stats = os.statvfs(parent)
    # Blocks that are reserved are for the superuser; a file system that counts none cannot say.
    blocks = stats.f_bavail if os.geteuid() else stats.f_bfree
    free = blocks * stats.f_frsize
    if not stats.f_blocks or room.nbytes <= free:
        return
    raise InputError(
        f"{destination} takes {room.nbytes:,} bytes, and {parent} has {free:,} bytes free; "
        "free some space there, or choose another folder"
    )


def _full(error: BaseException) -> str | None:
    """The system's words for a disk that takes no more, if that is what an error is about."""
    words = {code: os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
    if not isinstance(error, OSError):
        return None
    if error.errno in words:
        return words[error.errno]
    return next((said for said in words.values() if said in str(error)), None)  # by TensorStore


def _remove(folder: Path, parents: list[Path]) -> None:
    """Deletes a folder, and then those of the given parents that are empty."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)  # a write already under way has made its folder again
    for parent in parents:
        with contextlib.suppress(OSError):  # another writer may use this one
            parent.rmdir()


def remove_whole(folder: Path) -> None:
    """Deletes a folder; who is killed meanwhile leaves what the next claim of the run deletes."""
    if isinstance(folder, StorePath):
        stores.remove_whole(folder)
        return
    left = folder.with_name(f"{_short(folder)}.{secrets.token_hex(4)}{INCOMPLETE}")
    (folder / _MARK).touch()  # the last to go
    os.rename(folder, left)
    for path in left.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARK:
            path.unlink()
    shutil.rmtree(left)


def check_free(destination: str | Path) -> None:
    """Raises InputError unless this is a new name or an empty folder, and can be made."""
    if not str(destination):
        raise InputError("the destination's name is empty; give the name of a new folder")
    final = _resolved(destination)
    if isinstance(final, StorePath):
        stores.check_free(final)
        return
    above = next((parent for parent in final.parents if os.path.lexists(parent)), final)
    if not above.is_dir():
        raise InputError(
            f"{destination} cannot be made: {above} is not a folder; choose another name"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(
            f"{destination} cannot be made: this user may not write to {above}; choose "
            "another folder, or change its permissions"
        )
    if final.is_symlink():
        raise InputError(f"{destination} is a symlink; give a real path")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError(f"{destination} exists already; choose a new folder or remove it")


def _resolved(destination: str | Path) -> Path:
    """The absolute path that a name leads to; folders on the way need not exist."""
    # `..` is resolved as the system does it, after symbolic links; a link in the last place stays.
    path = place(destination).absolute()
    if isinstance(path, StorePath):
        return path
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _make(folder: Path, destination: str | Path) -> None:
    """Makes a folder and its parents; an error names the destination as the user gave it."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{destination} cannot be made: {error.strerror}; choose another folder"
        ) from error


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Keeps a locked mark in a folder; the system unlocks it when this process ends or dies."""
    unnamed = folder / f"{_MARK}.new"
    with open(unnamed, "wb") as file:
        _lock(file.fileno())
        unnamed.rename(folder / _MARK)  # once it is locked, so that none finds it unlocked
        yield


def clear_left_behind(parent: str | Path) -> None:
    """Deletes what killed processes left of folders that they were making in this one."""
    _clear(Path(parent), f"*{INCOMPLETE}")


def _clear(parent: Path, pattern: str) -> None:
    """Deletes unfinished folders with such names that nobody is writing to."""
    for folder in parent.glob(pattern):
        with contextlib.suppress(OSError), open(folder / _MARK, "r+b") as mark:
            if _lock(mark.fileno()):  # so the process that wrote here has ended
                shutil.rmtree(folder, ignore_errors=True)


def _short(final: Path) -> str:
    """The name of a folder, cut to leave room for what is added; a name has 255 bytes at most."""
    room = 255 - len(f".{'0' * 8}{INCOMPLETE}")
    name = final.name
    while len(os.fsencode(name)) > room:
        name = name[:-1]  # whole characters, so that none is split
    return name


def _lock(file: int) -> bool:
    """Takes the lock of a file; False when another holds it or files cannot be locked here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _rename(temporary: Path, final: Path) -> None:
    """Gives a complete folder its name. Raises FileExistsError when that name was taken."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if not os.path.lexists(final):
            raise
        raise FileExistsError(
            f"{final} was written by somebody else in the meantime and is left as it is; "
            "choose another destination, or remove it and run this again"
        ) from error
