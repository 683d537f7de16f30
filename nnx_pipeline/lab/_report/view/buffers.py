"""The rows of what the heap holds at its peak, and of how that differs between two programs."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nnx_pipeline.lab._report.view.figures import DASH
from nnx_pipeline.lab._timing.result import TimeRow
from nnx_pipeline.lab.attribution._result import Attribution, Buffer, BufferDifference, Side

ARGUMENTS_AND_OUTPUTS = (
    "Outputs with memory of their own, outside the heap",
    "Arguments, outside the heap",
)
FEW = 3  # rows that are shown of these
SMALLEST = 10_000  # bytes from which a buffer outside the heap is shown

# Parts of an operation's path (JAX's op_name) that only say that something was called, in a loop or
# under vmap.
_NO_WORK = re.compile(
    r"jit\(\w+\)|\w*\(?jvp\(\)\)?|while|body|closed_call|eval_jaxpr|checkpoint|vmap\(\)"
)


@dataclass(frozen=True)
class BufferRow:
    """Buffers that read the same; or a change, whose `bytes` are b's less those of a."""

    bytes: int
    count: int
    role: str
    shape: str
    operation: str
    source: str


def grouped(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    groups: dict[tuple[str | None, ...], list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        name = buffer.shape or ("" if buffer.source else buffer.name)
        operation = short_operation(buffer.operation)
        groups[buffer.role, name, operation, buffer.source, buffer.caller].append(buffer)
    return sorted(groups.values(), key=lambda group: -sum(buffer.bytes for buffer in group))


def buffer_rows(buffers: Sequence[Buffer]) -> list[BufferRow]:
    return [
        BufferRow(
            bytes=sum(buffer.bytes for buffer in group),
            count=len(group),
            role=first.role,
            shape=first.shape,
            operation=short_operation(first.operation) or ("" if first.source else first.name),
            source=_with_path(group),
        )
        for group in grouped(buffers)
        for first in group[:1]
    ]


def difference_row(change: BufferDifference) -> BufferRow:
    """A change from a to b; where the two programs differ in a word, `a → b`."""

    def both(text: Callable[[Side], str]) -> str:
        return " → ".join(dict.fromkeys(map(text, change.sides)))

    return BufferRow(
        bytes=change.change,
        count=1,
        role=both(lambda side: side.role),
        shape=change.shape,
        operation=both(lambda side: short_operation(side.operation)),
        source=both(short_line),
    )


def outside_the_heap(attribution: Attribution) -> dict[str, list[BufferRow]]:
    tables = {
        "Constants, outside the heap": attribution.constants,
        "Temporaries in the memory of outputs, outside the heap": attribution.in_outputs,
        **dict(
            zip(ARGUMENTS_AND_OUTPUTS, (attribution.outputs, attribution.arguments), strict=True)
        ),
    }
    large = {
        title: [buffer for buffer in buffers if buffer.bytes >= SMALLEST]
        for title, buffers in tables.items()
    }
    return {title: buffer_rows(buffers) for title, buffers in large.items() if buffers}


def short_operation(operation: str) -> str:
    """A path of operations (op_name) as `backward, recomputed: exp`; other names stay."""
    if not operation.startswith("jit("):
        return operation
    # The path is split at the slashes outside brackets.
    path = re.split(r"/(?![^(]*\))", operation)
    parts = [part for part in path if not _NO_WORK.fullmatch(part)]
    backward, forward = "transpose(" in operation, "jvp(" in operation
    when = ["backward"] if backward else ["forward"] if forward else []
    if "rematted_computation" in parts:
        when.append("recomputed")
    last = parts[-1] if parts and parts[-1] != "rematted_computation" else "loop"
    if joined := re.fullmatch(r"\((.*?)(:.*)?\)", last):  # one name for several operations: (a/b:c)
        last = joined[1].rpartition("/")[2]
    return f"{', '.join(when)}: {last}" if when else last


def short_source(source: str | None) -> str:
    """The last three parts of a path from the current directory or the root, and the line."""
    if source is None:
        return DASH
    path, _, line = source.rpartition(":")
    file = Path(path)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{Path(*file.parts[-3:])}:{line}"


def _with_path(group: Sequence[Buffer]) -> str:
    """The line of buffers and then those that called it, as far as they share them, the nearest
    first: `a/m.py:3 ‹ 7 ‹ n.py:12`, where a line without a name is in the file before it. Behind an
    arrow stands the line of what half of them or more are copied into: `a/m.py:3 ‹ 7 → 15`."""
    first, paths = group[0], [buffer.path for buffer in group]
    alike = itertools.takewhile(lambda lines: len(set(lines)) == 1, zip(*paths, strict=False))
    common = [lines[0] for lines in alike]
    if first.caller and first.caller not in common:
        return short_line(first)
    text, file = short_source(first.source), (first.source or "").rpartition(":")[0]
    # A lambda of a line, and the call that it is given to, are two frames of one line.
    steps = [(" ‹ ", line) for line in dict.fromkeys(common) if line != first.source]
    into = Counter(buffer.into for buffer in group)
    steps += [(" → ", line) for line, n in into.items() if line and 2 * n >= len(group)][:1]
    for sign, line in steps:
        there, _, number = line.rpartition(":")
        text += f"{sign}{number if there == file else f'{Path(there).name}:{number}'}"
        file = there
    return text


def short_line(what: Buffer | Side | TimeRow) -> str:
    """The line of a buffer or of compute, and then of its caller: `a/m.py:3 from n.py:7`."""
    caller = f" from {Path(what.caller).name}" if what.caller else ""
    return short_source(what.source) + caller
