"""Which lines of source have changed, and where a line of the old files is in the new ones."""

import dataclasses
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nnx_pipeline.lab._timing.result import TimeRow
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.compile.measure import Measurement

_Row = TypeVar("_Row", Buffer, TimeRow)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """`size` lines from `start` on became `new_size` lines from `new_start` on; where a size is 0,
    they are behind the line `start`, or `new_start`."""

    start: int
    size: int
    new_start: int
    new_size: int


@dataclass(frozen=True)
class Changes:
    """The changes between two states of a folder; paths are relative to it.

    - `hunks`: the changes in each file by its old path, in their order.
    - `renamed`: the new path of a file by its old one.
    """

    hunks: dict[str, list[Hunk]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def lines(self) -> dict[str, list[range]]:
        """The lines that are new or changed, by the new path of their file."""
        return {
            self.renamed.get(path, path): [
                range(one.new_start, one.new_start + one.new_size) for one in hunks
            ]
            for path, hunks in self.hunks.items()
        }

    def moved(self, path: str, line: int) -> tuple[str, int]:
        """Where a line of the old files is now; one that was replaced is at what replaces it."""
        new_path, shift = self.renamed.get(path, path), 0
        for one in self.hunks.get(path, []):
            behind = line - one.start
            if 0 <= behind < one.size:
                return new_path, max(1, one.new_start + min(behind, max(one.new_size - 1, 0)))
            if behind > 0:
                shift += one.new_size - one.size
        return new_path, line + shift


def changes_of(diff: str) -> Changes:
    """Reads what `git diff --unified=0` prints."""
    renamed: dict[str, str] = {}
    hunks: dict[str, list[Hunk]] = defaultdict(list)
    old, content = "", 0  # lines of a hunk that are still to come
    for line in diff.splitlines():
        if content and line[:1] in "+-":
            content -= 1
        elif line.startswith("--- "):
            old = line[4:].removeprefix("a/").rstrip("\t")
        elif line.startswith("+++ "):
            new = line[4:].removeprefix("b/").rstrip("\t")
            old = new if old == "/dev/null" else old
            if new not in (old, "/dev/null"):
                renamed[old] = new
        elif match := _HUNK.match(line):
            hunk = Hunk(*(1 if number is None else int(number) for number in match.groups()))
            hunks[old].append(hunk)
            content = hunk.size + hunk.new_size
    return Changes(dict(hunks), renamed)


def in_present_lines(
    measured: Measurement, files: Path, root: Path, changes: Changes
) -> Measurement:
    """A measurement of files of another state, with each line of source where it is now.

    - `files`: where the files were when it was compiled.
    - `root`: where they are now.
    """

    def present(source: str | None) -> str | None:
        path, _, line = (source or "").rpartition(":")
        if not path or not Path(path).is_relative_to(files):
            return source
        now, number = changes.moved(str(Path(path).relative_to(files)), int(line))
        return f"{root / now}:{number}"

    def rows(those: tuple[_Row, ...]) -> tuple[_Row, ...]:
        return tuple(
            dataclasses.replace(one, source=present(one.source), caller=present(one.caller))
            for one in those
        )

    def buffers(those: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(
            dataclasses.replace(
                one,
                path=tuple(str(present(line)) for line in one.path),
                into=present(one.into),
            )
            for one in rows(those)
        )

    found, time = measured.attribution, measured.time
    if found is not None:
        found = dataclasses.replace(
            found,
            peak_source=present(found.peak_source),
            buffers=buffers(found.buffers),
            other=buffers(found.other),
            constants=buffers(found.constants),
            in_outputs=buffers(found.in_outputs),
            outputs=buffers(found.outputs),
            arguments=buffers(found.arguments),
        )
    if time is not None:
        time = dataclasses.replace(time, rows=rows(time.rows))
    return dataclasses.replace(measured, attribution=found, time=time)
