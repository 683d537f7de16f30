"""New folders in object stores, which have neither names to change nor locks.

Orbax's `COMMITTED`, or the `config.json` of a Hugging Face folder, is written last. Until after
that the folder has a claim: an empty object with a name that only the process that writes there
uses. Who comes later deletes it, and then the earlier process ends with an error.
"""

import contextlib
import functools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._files.stores import StorePath

COMMITTED = "commit_success.txt"  # which Orbax writes too, and asks for in `gs://`
MARK = ".nnx-pipeline-is-writing"
_LAST = "config.json"
_claims: dict[Path, "Claim"] = {}  # of this process, by their folders


@dataclass(frozen=True)
class Claim:
    """The right to write to a folder, which the last process has that took it.

    Its name begins with `kind`. No process ever deletes another one's by mistake for its own, so
    that a folder has one until the process that took it last is done.
    """

    folder: StorePath
    kind: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def file(self) -> StorePath:
        return self.folder / f"{self.kind}.{self.token}"

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        self.file.write_bytes(b"")
        _claims[self.folder] = self
        try:
            for other in self.folder.iterdir():
                if other.name.startswith(self.kind) and other != self.file:
                    other.unlink(missing_ok=True)
            yield
        finally:
            _claims.pop(self.folder, None)


def check_claim(folder: Path) -> None:
    """Raises Mismatch where this process has claimed a folder, and another one has it now."""
    claim = _claims.get(folder)
    if claim is not None and not claim.file.is_file():
        raise Mismatch(
            f"{folder} was taken by another process that writes there, or was removed, and is left "
            "as it is; choose another destination, or run this again when the other one has ended"
        )


def is_left(folder: Path) -> bool:
    """Whether a folder of a store is what a process that was killed, or writes still, has begun."""
    return isinstance(folder, StorePath) and any(
        child.name.startswith(MARK) for child in folder.iterdir()
    )


def require_done(folder: Path) -> None:
    """Raises Mismatch for what `is_left`."""
    if is_left(folder):
        raise Mismatch(
            f"{folder} is not finished: a process writes there, or was killed while it did; write "
            "it again, or give another one"
        )


def is_committed(folder: Path) -> bool:
    """Whether a folder, if it is one of a store, is marked as a whole Orbax checkpoint.

    Orbax asks for the mark in `gs://`, and has no `s3://`. A copy of a folder that was written on a
    file system has none, and half a copy looks the same.
    """
    return not isinstance(folder, StorePath) or (folder / COMMITTED).is_file()


def check_free(destination: StorePath) -> None:
    """Raises InputError unless nothing has this name but what a killed process has left."""
    if not destination.key:
        raise InputError(f"{destination} is a whole bucket; give the name of a new folder in it")
    if destination.is_file() or (any(destination.iterdir()) and not is_left(destination)):
        raise InputError(f"{destination} exists already; choose a new folder or remove it")
    destination.require_bucket()


@contextlib.contextmanager
def claimed_folder(folder: StorePath) -> Iterator[Claim]:
    """Keeps a new folder to this process, and empties it; on an error it is deleted."""
    claim = Claim(folder, MARK)
    undo = functools.partial(_remove, claim)
    with cleared_away(undo), claim.taken():
        try:
            _empty(folder, claim.file)
            yield claim
        except BaseException:
            undo()
            raise


def commit(claim: Claim, staged: Path | None) -> None:
    """Makes a claimed folder a whole one; `staged` has its files, if TensorStore did not write."""
    folder = claim.folder
    check_claim(folder)
    if staged is None:
        (folder / COMMITTED).write_bytes(b"")
    else:
        files = [file for file in staged.iterdir() if file.name != MARK]
        for file in sorted(files, key=lambda file: (file.name == _LAST, file.name)):
            check_claim(folder)
            (folder / file.name).upload(file)
    claim.file.unlink(missing_ok=True)


def remove_whole(folder: StorePath) -> None:
    """Deletes a whole folder, which `is_left` from the first object on that goes."""
    (folder / MARK).write_bytes(b"")
    remove(folder)


def remove(folder: StorePath) -> None:
    """Deletes what `is_left`, and last what shows that it is."""
    marks = [child for child in folder.iterdir() if child.name.startswith(MARK)]
    _empty(folder, *marks)
    for mark in marks:
        mark.unlink(missing_ok=True)


def _empty(folder: StorePath, *kept: StorePath) -> None:
    for path in folder.below():
        if path not in kept:
            path.unlink(missing_ok=True)


def _remove(claim: Claim) -> None:
    """Deletes a folder unless another process has it now; the claim goes last."""
    with contextlib.suppress(Exception):  # the store may be out of reach; the next attempt does it
        if claim.file.is_file():
            _empty(claim.folder, claim.file)
            claim.file.unlink(missing_ok=True)
