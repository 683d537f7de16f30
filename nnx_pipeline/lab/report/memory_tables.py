"""Tables of what the heap holds at its peak, and of how that differs between two programs."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.attribution.result import Attribution, Buffer, BufferDifference, Side
from nnx_pipeline.lab.report.columns import Column, Columns, figures

TOP = 5  # rows of the table of differences below an A/B comparison
SMALLEST = 10_000  # bytes from which a buffer outside the heap is shown

# What a buffer is. The line of source stays as long as anything does: it says what to change.
_WHAT = (
    Column("role"),
    Column("shape", 3),
    Column("operation", 2),
    Column("source", 1, shorter=lambda source: re.sub(r"[^ ]+/(?=[^ ]*/)", "", source)),
)

# Parts of an operation's path (JAX's op_name) that only say that something was called, in a loop or
# under vmap.
_NO_WORK = re.compile(
    r"jit\(\w+\)|\w*\(?jvp\(\)\)?|while|body|closed_call|eval_jaxpr|checkpoint|vmap\(\)"
)


def megabytes(value: float | None) -> str:
    """Bytes as MB (10⁶) with one decimal, a dash where there is no figure."""
    return "–" if value is None else f"{value / 1e6:,.1f}"


def memory_view(title: str, attribution: Attribution, *, top: int) -> RenderableType:
    """The largest buffers at the peak, the totals by role, and where in the schedule the peak is.

    - `title`: the first line.
    - `attribution`: what the heap holds.
    - `top`: the most rows that a list of buffers has; the others are summed in one row.
    """
    heap = attribution.heap_bytes
    groups = grouped(attribution.buffers)
    heads = [*figures("MB"), Column("share", 4, is_number=True), *figures("×")]
    table = Columns([*heads, *_WHAT], title="the heap of device memory at its peak")
    for group in groups[:top]:
        _add(table, group, heap)
    if rest := [buffer for group in groups[top:] for buffer in group]:
        size = sum(buffer.bytes for buffer in rest)
        table.add_row(_size(size), _share(size, heap), str(len(rest)), "all others")
    return Group(
        Text(title, style="bold"),
        table,
        *_beside(attribution, top),
        _roles(attribution),
        *_totals(attribution),
        _peak(attribution),
    )


def difference_view(title: str, rows: Sequence[BufferDifference], *, top: int = TOP) -> Columns:
    """A table of the largest changes from a to b.

    - `rows`: the changes, largest first, as `attribution.result.difference` gives them.
    - `top`: the most rows that are shown; the others are summed in one row.
    """
    table = Columns([*figures("a MB", "b MB", "b − a"), *_WHAT], title=title)
    for row in rows[:top]:
        table.add_row(
            _size(row.a_bytes),
            _size(row.b_bytes),
            _signed(row.change),
            both(row, lambda side: side.role),
            row.shape,
            both(row, lambda side: short_operation(side.operation)),
            both(row, short_line),
        )
    if rest := rows[top:]:
        table.add_row("", "", _signed(sum(row.change for row in rest)), f"{len(rest)} more")
    return table


def both(row: BufferDifference, said: Callable[[Side], str]) -> str:
    """What a row says of its side a and of b, `a → b`; once where that is the same.

    - `said`: the words for one side.
    """
    return " → ".join(dict.fromkeys(map(said, row.sides)))


def short_operation(operation: str) -> str:
    """A short name of an operation, such as `backward, recomputed: exp`.

    - `operation`: JAX's op_name, a path of operations; anything else, such as the name of an
      argument, is returned as it is.
    """
    if not operation.startswith("jit("):
        return operation
    parts = [part for part in _parts(operation) if not _NO_WORK.fullmatch(part)]
    backward, forward = "transpose(" in operation, "jvp(" in operation
    when = ["backward"] if backward else ["forward"] if forward else []
    if "rematted_computation" in parts:
        when.append("recomputed")
    last = parts[-1] if parts and parts[-1] != "rematted_computation" else "loop"
    if joined := re.fullmatch(r"\((.*?)(:.*)?\)", last):  # one name for several operations: (a/b:c)
        last = joined[1].rpartition("/")[2]
    return f"{', '.join(when)}: {last}" if when else last


def _parts(operation: str) -> list[str]:
    """The parts of a path of operations, split at the slashes outside brackets."""
    return re.split(r"/(?![^(]*\))", operation)


def short_source(source: str | None) -> str:
    """The last three parts of a file's path from the current directory or the root, and the line.

    - `source`: as in `path/file.py:123`; None gives a dash.
    """
    if source is None:
        return "–"
    path, _, line = source.rpartition(":")
    file = Path(path)
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{Path(*file.parts[-3:])}:{line}"


def short_line(what: Buffer | Side) -> str:
    """The line of a buffer, and behind it that of the caller: `a/m.py:3 from n.py:7`."""
    caller = f" from {Path(what.caller).name}" if what.caller else ""
    return short_source(what.source) + caller


def grouped(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """The buffers in groups that would read the same in a table, largest sum first."""
    groups: dict[tuple[str | None, ...], list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        what = buffer.shape or ("" if buffer.source else buffer.name)
        operation = short_operation(buffer.operation)
        groups[buffer.role, what, operation, buffer.source, buffer.caller].append(buffer)
    return sorted(groups.values(), key=lambda group: -sum(buffer.bytes for buffer in group))


def _beside(attribution: Attribution, top: int) -> list[Columns]:
    """Tables of what a device holds besides arguments, results and heap, by line of source."""
    tables = []
    for title, buffers in beside_the_heap(attribution):
        groups = grouped(buffers)
        table = Columns([*figures("MB", "×"), *_WHAT], title=title)
        for group in groups[:top]:
            table.add_row(_size(sum(buffer.bytes for buffer in group)), *_what(group))
        if rest := [buffer for group in groups[top:] for buffer in group]:
            size = sum(buffer.bytes for buffer in rest)
            table.add_row(_size(size), str(len(rest)), "all others")
        tables.append(table)
    return tables


def beside_the_heap(attribution: Attribution) -> list[tuple[str, list[Buffer]]]:
    """Constants, and temporaries in the place of outputs, each with the title of its table.

    Buffers of less than `SMALLEST` bytes are left out; the JSON has them.
    """
    found = []
    for title, buffers in (
        ("Constants, outside the heap", attribution.constants),
        ("Temporaries in the memory of outputs, outside the heap", attribution.in_outputs),
    ):
        if large := [buffer for buffer in buffers if buffer.bytes >= SMALLEST]:
            found.append((title, large))
    return found


def _add(table: Columns, group: list[Buffer], heap: int) -> None:
    size = sum(buffer.bytes for buffer in group)
    table.add_row(_size(size), _share(size, heap), *_what(group))


def _what(group: list[Buffer]) -> tuple[str, ...]:
    """The cells that say how many buffers a group has, and what they are."""
    buffer = group[0]
    return (
        str(len(group)) if len(group) > 1 else "",
        buffer.role,
        buffer.shape,
        short_operation(buffer.operation) or ("" if buffer.source else buffer.name),
        short_line(buffer),
    )


def _roles(attribution: Attribution) -> Table:
    table = Table(title="by role", title_justify="left")
    table.add_column("role", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for role, size in attribution.by_role().items():
        table.add_row(role, _size(size), _share(size, attribution.heap_bytes))
    table.add_section()
    table.add_row("heap", _size(attribution.heap_bytes), "")
    return table


def _totals(attribution: Attribution) -> list[Table]:
    """A table of what adds up from the heap to temp, where temp is known."""
    if attribution.temp_bytes is None:
        return []
    table = Table(title="heap to temp", title_justify="left", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_row("heap", _size(attribution.heap_bytes))
    for row in attribution.other:
        table.add_row(row.name, _signed(row.bytes))
    table.add_section()
    table.add_row("temp", _size(attribution.temp_bytes))
    return [table]


def _peak(attribution: Attribution) -> Text:
    doing = short_operation(attribution.peak_operation) or "–"
    heap = attribution.heap_bytes
    sized = sum(buffer.bytes for buffer in attribution.buffers if buffer.source)
    return Text(
        f"peak at position {attribution.peak_position} of {attribution.positions} in the schedule: "
        f"{doing}, {short_source(attribution.peak_source)}\n"
        f"{_share(sized, heap)} of the heap has a line of source{_without_source(attribution)}"
    )


def _without_source(attribution: Attribution) -> str:
    """The share of each role without a source line; space between buffers never has one."""
    sizes: dict[str, int] = defaultdict(int)
    for buffer in attribution.buffers:
        if not buffer.source:
            sizes[buffer.role] += buffer.bytes
    heap = attribution.heap_bytes
    told = [f"{role} {_share(n, heap)}" for role, n in sizes.items() if n >= 0.001 * heap]
    return f"; without one: {', '.join(told)}" if told else ""


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '−'}{_size(abs(size))}"


def _size(size: int) -> str:
    """Bytes as MB, with three decimals below one MB."""
    return megabytes(size) if size >= 1e6 or size == 0 else f"{size / 1e6:.3f}"


def _share(size: int, whole: int) -> str:
    return f"{size / whole:.1%}" if whole else "–"
