"""A command of this package in another process: with other files or other packages than here."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx_pipeline.lab._baseline.environment import HERE, Environment
from nnx_pipeline.lab._baseline.execute import execute
from nnx_pipeline.lab.compile.measure import Progress

# Without -P the current folder, where a user's modules may be, would come first.
START = """
import json, site, sys
given = json.loads(sys.argv.pop(1))
for folder in given["packages"]:
    site.addsitedir(folder)
sys.path += given["paths"]
from nnx_pipeline.lab._baseline import child
getattr(child, given["what"])(given["root"], given["files"])
"""


@dataclass(frozen=True)
class Files:
    """The files of another state of a folder: `folder` has what `root` had in that state."""

    root: Path
    folder: Path

    def here(self) -> Path:
        """The folder that stands for the current one; it is made where that state had none."""
        inside = self.folder / Path.cwd().resolve().relative_to(self.root.resolve())
        inside.mkdir(parents=True, exist_ok=True)
        return inside


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, what it wrote as JSON, and why it wrote nothing."""

    code: int
    result: dict[str, Any] | None
    reason: str = ""


def run_with(
    words: Sequence[str],
    *,
    environment: Environment = HERE,
    files: Files | None = None,
    say: Progress = lambda line: None,
) -> Ended:
    """Runs a command that takes `--json`, such as `measure`, and returns what it wrote there."""
    with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as made:
        written = Path(made) / "result.json"
        given = [*words, "--json", str(written)]
        code, said = started("run_command", given, environment, files, Path(made), say)
        if code == 0:
            return Ended(code=code, result=json.loads(written.read_text("utf-8")))
    return Ended(code=code, result=None, reason=_reason(code, said))


def started(
    what: str,
    words: Sequence[str],
    environment: Environment,
    files: Files | None,
    folder: Path,
    say: Progress,
) -> tuple[int, str]:
    """Runs a function of `child` with words; returns the exit code and standard error."""
    roots = {"root": str(files.root), "files": str(files.folder)} if files else {}
    paths = environment.behind(folder)
    job = json.dumps({"what": what, "root": None, "files": None, **paths, **roots})
    return execute(
        [environment.python, "-P", "-c", START, job, *words],
        say=say,
        environment={**os.environ, **environment.variables},
        folder=files.here() if files else None,
    )


def _reason(code: int, said: str) -> str:
    """Why a process gave no figures, in one line; a `code` below 0 is the signal that ended it."""
    lines = [line for line in said.splitlines() if line.strip()]
    if code >= 0:
        return (lines or [f"exit status {code}"])[-1].removeprefix("nnx-pipeline: ")
    # A compiler that finds a fault of its own ends the process, and C++ says why in a line that
    # begins with F and the date; then comes its stack.
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    ended = f"the process was ended by a signal ({signal.strsignal(-code)})"
    return ": ".join([ended, *(fatal[:1] or lines[-1:])])
