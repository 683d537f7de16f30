"""Runs another process, which ends with this one."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.compile.measure import Progress

_running: set[subprocess.Popen[str]] = set()


def end_all() -> None:
    """Ends the processes that `execute` runs in other threads."""
    for process in tuple(_running):
        process.kill()


def execute(
    command: Sequence[str],
    *,
    say: Progress = lambda line: None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    keep_output: bool = False,
) -> tuple[int, str]:
    """The exit code of a process, and what it said on standard error.

    - `say`: called with each line of that.
    - `environment`: its variables; None for those of this process.
    - `folder`: where it runs; None for the current folder.
    - `keep_output`: whether what it prints is kept too.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if keep_output else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if keep_output else subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        cwd=folder,
    )
    lines = []
    _running.add(process)
    try:
        with process, cleared_away(process.kill):
            for line in process.stdout or process.stderr or ():
                lines.append(line)
                say(line.rstrip())
    finally:
        _running.discard(process)
    return process.returncode, "".join(lines)
