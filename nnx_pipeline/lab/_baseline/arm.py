"""One of several states of a program: at a revision, with other packages, or measured before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnx_pipeline.lab._baseline.environment import HERE, Environment
from nnx_pipeline.lab._baseline.lines import Changes, in_present_lines
from nnx_pipeline.lab._baseline.process import Files, run_with
from nnx_pipeline.lab._baseline.repository import Commit, Repository
from nnx_pipeline.lab._baseline.saved import measurements_of
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.errors import InputError

_BAD_INPUT = 2  # the exit code of a command


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Where a program comes from.

    - `label`: what it is called.
    - `words`: of a command line, what to measure and on what.
    - `environment`, `files`: with what it is compiled; None for the present files.
    - `changes`: between its files and the present ones.
    - `saved`: what was measured before; where there is some, nothing is compiled.
    - `notes`: what the reader should know of it.
    """

    label: str
    words: tuple[str, ...] = ()
    environment: Environment = HERE
    files: Files | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)
    saved: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    def measured(self, say: Progress) -> list[Measurement] | str:
        """Its programs, one for each kind of matrix products, or why it did not compile.

        Raises InputError where the program cannot be found or called.
        """
        if self.saved:
            return [*self.saved]
        told = functools.partial(_told, say, self.label)
        command = ["memory", *self.words, "--top", "1"]
        done = run_with(command, environment=self.environment, files=self.files, say=told)
        if done.result is None:
            if done.code == _BAD_INPUT:
                raise InputError(f"{self.label}: {done.reason}")
            return done.reason
        found = measurements_of(done.result, self.label)
        if self.files is None:
            return found
        present = functools.partial(
            in_present_lines, files=self.files.folder, root=self.files.root, changes=self.changes
        )
        return [*map(present, found)]


def _told(say: Progress, label: str, line: str) -> None:
    say(f"{label}: {line}")


@contextlib.contextmanager
def at_revision(
    repository: Repository,
    commit: Commit,
    label: str,
    words: Sequence[str],
    environment: Environment = HERE,
) -> Iterator[Arm]:
    """The arm with all files of a commit; those that say what to measure may be of now."""
    with repository.files_of(commit) as folder:
        files = Files(repository.root, folder)
        there = [_from_here(word, repository.root) for word in words]
        added = [name for word in there for name in _copied(word, files)]
        yield Arm(
            label=label,
            words=tuple(there),
            environment=environment,
            files=files,
            changes=repository.changes(commit),
            notes=tuple(f"{name} is not in {label}: that of now is taken" for name in added),
        )


def _from_here(word: str, root: Path) -> str:
    """`FILE.py:FUNCTION` with a path from the current folder, which other files have too."""
    path, colon, function = word.rpartition(":")
    inside = path.endswith(".py") and Path(path).resolve().is_relative_to(root.resolve())
    return f"{os.path.relpath(path)}{colon}{function}" if inside else word


def _copied(word: str, files: Files) -> list[str]:
    """Adds the file of a function where a revision has none; returns its name."""
    module, colon, _ = word.rpartition(":")
    file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    there = files.here() / file
    if not colon or file.is_absolute() or not file.is_file() or there.exists():
        return []
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, there)
    return [str(file)]
