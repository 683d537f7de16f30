"""The git repository around the current folder: its revisions, their files, what has changed."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nnx_pipeline.lab._baseline.lines import Changes, changes_of
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.errors import InputError

_SHORT = 9  # letters of a commit's name that a person reads


@dataclass(frozen=True)
class Commit:
    """A commit by its whole name, and what its author wrote of it in one line."""

    id: str
    subject: str

    @property
    def short(self) -> str:
        return self.id[:_SHORT]

    def __str__(self) -> str:
        return f"{self.short} {self.subject}".strip()


@dataclass(frozen=True)
class Repository:
    """A git repository; `root` is its top folder."""

    root: Path

    @classmethod
    def here(cls) -> "Repository":
        """The one around the current folder; raises InputError where there is none."""
        try:
            done = _git(Path.cwd(), "rev-parse", "--show-toplevel")
        except FileNotFoundError as error:
            raise InputError("a revision needs git, which is not installed here") from error
        if done.returncode or not done.stdout.strip():
            why = (done.stderr.strip().splitlines() or ["it has no files"])[0]
            raise InputError(
                f"a revision needs a git repository, and {Path.cwd()} is in none ({why}); go to "
                "its folder"
            )
        return cls(Path(done.stdout.strip()))

    def commit(self, revision: str) -> Commit:
        """The commit that a revision names; raises InputError where there is none."""
        named = f"{revision}^{{commit}}"
        done = self._run("rev-parse", "--verify", "--quiet", "--end-of-options", named)
        if done.returncode:
            remote = self._run(
                "rev-parse", "--verify", "--quiet", f"refs/remotes/origin/{revision}"
            )
            cure = (
                f"write origin/{revision}"
                if not remote.returncode
                else "fetch it (git fetch origin; a shallow clone has few commits), or name another"
            )
            raise InputError(f"{revision!r} is no revision of {self.root}; {cure}")
        name = done.stdout.strip()
        return Commit(name, self.read("log", "-1", "--format=%s", name).strip())

    def between(self, good: Commit, bad: Commit) -> list[Commit]:
        """The commits after `good` up to `bad`, oldest first, along the first parents; raises
        InputError unless `good` is an ancestor."""
        if self._run("merge-base", "--is-ancestor", good.id, bad.id).returncode:
            raise InputError(f"{good} is no ancestor of {bad}; the good revision is the older one")
        return self.along(good, bad)

    def along(self, without: Commit, end: Commit) -> list[Commit]:
        """The first parents of `end` and itself that `without` does not have, oldest first."""
        options = ("--first-parent", "--reverse", "--format=%H %s")
        listed = self.read("log", *options, f"{without.id}..{end.id}")
        return [Commit(*line.split(" ", 1)) for line in listed.splitlines()]

    def parents(self, commit: Commit) -> list[Commit]:
        listed = self.read("log", "-1", "--format=%P", commit.id).split()
        return [self.commit(parent) for parent in listed]

    @contextlib.contextmanager
    def files_of(self, commit: Commit) -> Iterator[Path]:
        """All files of a commit, in a folder of their own; nothing stays in the repository."""
        with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as made:
            # An index of its own leaves that of the user, and the list of worktrees, as they are.
            folder = Path(made).resolve() / (re.sub(r"\W+", "-", self.root.name) or "files")
            with cleared_away(functools.partial(shutil.rmtree, made, ignore_errors=True)):
                index = {"GIT_INDEX_FILE": str(Path(made) / "index")}
                self.read("read-tree", commit.id, more=index)
                self.read("checkout-index", "--all", f"--prefix={folder}/", more=index)
                folder.mkdir(exist_ok=True)
                yield folder

    def changes(self, commit: Commit) -> Changes:
        """The lines that differ between a commit and the files as they are now."""
        return changes_of(
            self.read("diff", "--unified=0", "--no-color", "--no-ext-diff", "-M", commit.id)
        )

    def read(self, *words: str, more: Mapping[str, str] | None = None) -> str:
        """What git prints; raises InputError with its own words."""
        done = self._run(*words, more=more)
        if done.returncode:
            raise InputError(f"git {words[0]}: {' '.join(done.stderr.split()) or 'it failed'}")
        return done.stdout

    def _run(
        self, *words: str, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return _git(self.root, *words, more=more)


def _git(
    folder: Path, *words: str, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # A file name that is no ASCII is written as it is, and a diff has the prefixes a/ and b/.
    settings = ("core.quotePath=false", "diff.noprefix=false", "diff.mnemonicPrefix=false")
    options = [word for setting in settings for word in ("-c", setting)]
    environment = {**os.environ, "LC_ALL": "C", **(more or {})}
    return subprocess.run(
        ["git", *options, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
