"""The event files of `--tensorboard`, which TensorBoard reads."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._files import local
from nnx_pipeline.lab.errors import InputError, optional

Board = Callable[[int, Mapping[str, float | None]], None]
_SECONDS = 2.0  # from one flush to the next: each waits for the disk


def check_board(folder: str | None) -> None:
    """Raises InputError, before any work is done, unless an event file can be written."""
    if folder is None:
        return
    _writers(folder)
    check_folder(f"--tensorboard {folder or repr(folder)}", folder)


def check_folder(asked: str, folder: str) -> None:
    """Raises InputError, which begins with `asked`, unless files can be written in a folder."""
    path = local(folder).absolute()
    # Called only for the OSError of a name that is too long or of links in a circle.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        os.stat(path)
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not folder or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{asked} cannot be written; choose a writable folder")


def make_folder(asked: str, folder: str) -> Path:
    """Makes a folder that was checked; raises InputError as `check_folder`, as in /proc."""
    path = local(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{asked} cannot be written: {error.strerror}; choose a writable folder"
        ) from error
    return path


@contextlib.contextmanager
def board(folder: str | None, first: int) -> Iterator[Board | None]:
    """A function that adds the numbers of a step to a new event file, in a training after `first`;
    None without a folder.

    It flushes every two seconds, at the end, and where the command is interrupted. The queue and
    the thread of tensorboardX's `SummaryWriter` would wait for ever after an error.
    """
    if folder is None:
        yield None
        return
    writers = _writers(folder)
    path = make_folder(f"--tensorboard {folder}", folder)
    # Files of one second have the same name otherwise, and are read in the order of their names.
    writer = writers.EventsWriter(str(path / "events"), f".{time.time_ns()}")

    flushed = float("-inf")

    def write(step: int, **what: object) -> None:
        nonlocal flushed
        writer.write_event(writers.event_pb2.Event(step=step, wall_time=time.time(), **what))
        if time.monotonic() - flushed >= _SECONDS:
            writer.flush()
            flushed = time.monotonic()

    def add(step: int, values: Mapping[str, float | None]) -> None:
        known = ((tag, value) for tag, value in values.items() if value is not None)
        write(step, summary={"value": [{"tag": tag, "simple_value": one} for tag, one in known]})

    with contextlib.closing(writer), cleared_away(writer.flush):
        # TensorBoard hides what older files have from here on: steps that are done again.
        write(first + 1, session_log={"status": "START"})
        yield add


def _writers(folder: str) -> ModuleType:
    user = f"--tensorboard {folder}"
    return optional("tensorboardX.event_file_writer", "tensorboard", user)
