"""A run of `nnx-pipeline train`: its steps, two files beside them, and who may write there."""

import contextlib
import fcntl
import functools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from linen_compat.formats import _intact as checksums
from linen_compat.formats import _store_folder as stores
from linen_compat.formats._new_folder import (
    INCOMPLETE,
    check_free,
    clear_left_behind,
    remove_whole,
)
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._files import MOST_SETTINGS, TEMPORARY, place, write_text
from nnx_pipeline.lab._files.stores import StorePath

RUN_CONFIG, ORIGIN = "config.yml", "training.yml"
_CLAIM = ".nnx-pipeline-is-training"  # in a store
_CHECKSUM = "# crc32 of the lines below: "
_TRIES = 100  # to lock a file that other processes remove
_claimed: dict[Path, os.stat_result] = {}  # the files that this process has locked, by their runs


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, with steps or without."""
    return (folder / ORIGIN).is_file()


def has_steps(run: Path) -> bool:
    """Whether a folder is a run that has something with the name of a step."""
    return is_run(run) and bool(steps_of(run))


def steps_of(folder: Path) -> list[Path]:
    """Everything in a folder that is named like a step, in numerical order.

    In a store a step has its name before it is whole, so the last ones that a killed process of
    this project has left are left out.
    """
    steps = [child for child in folder.iterdir() if re.fullmatch("[0-9]+", child.name)]
    steps.sort(key=lambda step: int(step.name))
    while steps and stores.is_left(steps[-1]):
        steps.pop()
    return steps


def keep_steps(folder: str | Path, newest: int, most: int, every: int | None) -> None:
    """Deletes steps of a claimed run, but for the `most` last up to `newest` and each `every`-th.

    What only has the name of a step stays, and counts as none: files, links, and folders without
    arrays. The oldest go first, so that a process that is killed meanwhile leaves the newest.
    """
    run = place(folder)
    check_claim(run)
    ours = [
        step
        for step in steps_of(run)
        if int(step.name) <= newest
        and (isinstance(step, StorePath) or not step.is_symlink())
        and (step / "items").is_dir()
    ]
    for step in ours[:-most]:
        if every is None or int(step.name) % every:
            remove_whole(step)


def write(file: Path, text: str) -> None:
    """Writes a whole file or nothing."""
    if isinstance(file, StorePath):
        file.write_text(text)
    else:
        write_text(str(file), text)


def _has_begun(folder: Path) -> bool:
    """Whether a folder holds nothing but files from before the first step."""
    left = (path for path in folder.iterdir() if not path.name.startswith(TEMPORARY))
    return all(
        path.name.endswith(INCOMPLETE) or (path.name in (RUN_CONFIG, ORIGIN) and _has_sum(path))
        for path in left
    )


def _has_sum(file: Path) -> bool:
    """Whether a file is empty or begins with a checksum: no user wrote it."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_CHECKSUM)) in (b"", _CHECKSUM.encode())


def with_checksum(values: checksums.Json) -> str:
    """Values as YAML, with a first line that is a checksum of the others."""
    text = yaml.safe_dump(values, sort_keys=False)
    return f"{_CHECKSUM}{checksums.of_bytes(text.encode())}\n{text}"


def check_checksum(file: Path) -> None:
    """Raises Mismatch where the first line is a checksum, and the others have another one."""
    if not isinstance(file, StorePath) and not (
        file.is_file() and file.stat().st_size <= MOST_SETTINGS and os.access(file, os.R_OK)
    ):
        return  # who reads it says so
    first, _, rest = file.read_bytes().partition(b"\n")
    said = first.decode(errors="replace")
    if said.startswith(_CHECKSUM) and said != f"{_CHECKSUM}{checksums.of_bytes(rest)}":
        raise Mismatch(
            f"{file} does not match the checksum in its first line; restore it from a copy, or if "
            "it was changed on purpose, remove that line"
        )


@contextlib.contextmanager
def claimed(run: str | Path) -> Iterator[None]:
    """Keeps the folder of a run to this process, which locks `ORIGIN` until it ends or is killed.

    Unfinished folders of killed processes are deleted. If there is no step at the end, the files of
    the run are deleted, and so are the folders that were made. In a store, which has no locks, a
    later process takes the run over, and the earlier one ends before it saves another step.
    """
    folder = place(run)
    if isinstance(folder, StorePath):
        with _claimed_in_store(folder):
            yield
        return
    try:
        is_there = is_run(folder) and (steps_of(folder) or _has_begun(folder))
    except PermissionError as error:
        raise InputError(
            f"{folder} may not be read by this user; choose another folder, or change its "
            "permissions"
        ) from error
    if not is_there:
        check_free(run)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with _locked(folder) as lock:
        undo = functools.partial(_forget, folder, made, lock)
        _claimed[folder.absolute()] = lock
        with cleared_away(undo):
            try:
                clear_left_behind(folder)
                for file in folder.glob(f"{TEMPORARY}*"):
                    file.unlink()
                yield
            finally:
                del _claimed[folder.absolute()]
                undo()


@contextlib.contextmanager
def _claimed_in_store(run: StorePath) -> Iterator[None]:
    claim, known = stores.Claim(run, _CLAIM), (_CLAIM, RUN_CONFIG, ORIGIN)
    if not is_run(run) and any(not child.name.startswith(known) for child in run.iterdir()):
        check_free(run)  # which says that something is there
    run.require_bucket()
    undo = functools.partial(_forget_in_store, claim)
    with cleared_away(undo), claim.taken():
        try:
            for step in run.iterdir():
                if step.name.isdecimal() and stores.is_left(step):
                    stores.remove(step)
            yield
        finally:
            undo()


def _forget_in_store(claim: stores.Claim) -> None:
    """Deletes the claim, and the files of a run without steps, unless another process has it."""
    run = claim.folder
    with contextlib.suppress(Exception):  # the store may be out of reach
        if claim.file.is_file():
            for name in () if steps_of(run) else (RUN_CONFIG, ORIGIN):
                (run / name).unlink(missing_ok=True)
            claim.file.unlink(missing_ok=True)


def check_claim(run: Path) -> None:
    """Raises Mismatch where another folder has replaced a run that this process has claimed."""
    stores.check_claim(run)
    lock = _claimed.get(run.absolute())
    if lock is not None and not _is_at(lock, run):
        raise Mismatch(
            f"{run} is not the folder of this training any more: it, or its {ORIGIN}, was moved, "
            "removed or replaced; leave a run as it is while it is trained, and go on after its "
            "newest step with --resume"
        )


def _is_at(lock: os.stat_result, folder: Path) -> bool:
    """Whether the file that is locked is the `ORIGIN` of a folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(lock, os.stat(folder / ORIGIN))
    return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[os.stat_result]:
    """Makes a folder, locks its `ORIGIN`, and yields the stat of that file."""
    for left in reversed(range(_TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # as a step will be made there
            handle = os.open(folder / ORIGIN, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and left:
                continue  # another process has just removed the folder that it had made
            raise InputError(
                f"{folder} cannot be written: {error.strerror}; choose another folder, or change "
                "its permissions"
            ) from error
        with os.fdopen(handle, "rb"):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"another process is training in {folder}; wait until it has ended, or choose "
                    "another folder"
                ) from error
            except OSError as error:
                raise InputError(
                    f"{folder} is where files cannot be locked ({error.strerror}), so that two "
                    "trainings could mix in it; choose a folder on another file system"
                ) from error
            lock = os.fstat(handle)
            if _is_at(lock, folder):  # else who had it locked has removed it since
                yield lock
                return
    raise InputError(
        f"{folder} is where one file is two to the system, so that it cannot be locked; choose a "
        "folder on another file system"
    )


def _forget(folder: Path, made: list[Path], lock: os.stat_result) -> None:
    """Deletes the files of a run without steps, and then the `made` folders if they are empty."""
    with contextlib.suppress(OSError):
        if _is_at(lock, folder) and not steps_of(folder):  # the file may be in another folder now
            for name in (RUN_CONFIG, ORIGIN):
                (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()
