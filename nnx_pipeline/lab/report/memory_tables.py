"""Tables of what the heap holds at its peak, and of what changed in it."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.attribution import Attribution, Buffer, BufferDifference

TOP = 5  # rows of a difference below an A/B
SMALLEST = 10_000  # bytes of a row beside the heap

# Parts of a path of operations that say only that something was called, in a loop or under vmap.
_NO_WORK = re.compile(
    r"jit\(\w+\)|\w*\(?jvp\(\)\)?|while|body|closed_call|eval_jaxpr|checkpoint|vmap\(\)"
)


def megabytes(value: float | None) -> str:
    """Bytes as MB (10⁶) with one decimal, a dash where there is no figure."""
    return "–" if value is None else f"{value / 1e6:,.1f}"


def memory_view(title: str, attribution: Attribution, *, top: int) -> RenderableType:
    """The largest buffers at the peak, the totals by role, and where in the schedule it is."""
    heap = attribution.heap_bytes
    groups = grouped(attribution.buffers)
    table = Table(title="the heap of device memory at its peak", title_justify="left")
    for column in ("MB", "share", "×"):
        table.add_column(column, justify="right", no_wrap=True)
    _add_columns(table)
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
        _totals(attribution),
        _peak(attribution),
    )


def difference_view(
    title: str, rows: Sequence[BufferDifference], *, top: int = TOP
) -> RenderableType:
    """The largest changes from a to b."""
    table = Table(title=title, title_justify="left")
    for column in ("a MB", "b MB", "b − a"):
        table.add_column(column, justify="right", no_wrap=True)
    _add_columns(table)
    for row in rows[:top]:
        table.add_row(
            _size(row.a_bytes),
            _size(row.b_bytes),
            _signed(row.change),
            row.role,
            row.shape,
            short_operation(row.operation),
            short_source(row.source),
        )
    if rest := rows[top:]:
        table.add_row("", "", _signed(sum(row.change for row in rest)), f"{len(rest)} more")
    return table


def short_operation(operation: str) -> str:
    """`backward, recomputed: exp` of a path of operations; the name of an argument as it is."""
    if not operation.startswith("jit("):
        return operation
    parts = [part for part in _parts(operation) if not _NO_WORK.fullmatch(part)]
    backward, forward = "transpose(" in operation, "jvp(" in operation
    when = ["backward"] if backward else ["forward"] if forward else []
    if "rematted_computation" in parts:
        when.append("recomputed")
    last = parts[-1] if parts and parts[-1] != "rematted_computation" else "loop"
    if joined := re.fullmatch(r"\((.*?)(:.*)?\)", last):  # one for several, as in (a/b:c)
        last = joined[1].rpartition("/")[2]
    return f"{', '.join(when)}: {last}" if when else last


def _parts(operation: str) -> list[str]:
    """Between the slashes that stand in no bracket."""
    return re.split(r"/(?![^(]*\))", operation)


def short_source(source: str | None) -> str:
    """The file from the current directory on, or its last three parts; a dash without one."""
    if source is None:
        return "–"
    path, _, line = source.rpartition(":")
    file = Path(path)
    if file.is_relative_to(Path.cwd()):
        return f"{file.relative_to(Path.cwd())}:{line}"
    return f"{Path(*file.parts[-3:])}:{line}"


def grouped(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """Rows that read the same, as one; the largest sum first."""
    groups: dict[tuple[str | None, ...], list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        what = buffer.shape or ("" if buffer.source else buffer.name)
        groups[buffer.role, what, short_operation(buffer.operation), buffer.source].append(buffer)
    return sorted(groups.values(), key=lambda group: -sum(buffer.bytes for buffer in group))


def _add_columns(table: Table) -> None:
    for column in ("role", "shape", "operation", "source"):
        table.add_column(column, overflow="fold")


def _beside(attribution: Attribution, top: int) -> list[Table]:
    """What a device holds that is neither argument nor result nor heap, by line of source."""
    tables = []
    for title, buffers in beside_the_heap(attribution):
        groups = grouped(buffers)
        table = Table(title=title, title_justify="left")
        for column in ("MB", "×"):
            table.add_column(column, justify="right", no_wrap=True)
        _add_columns(table)
        for group in groups[:top]:
            table.add_row(_size(sum(buffer.bytes for buffer in group)), *_what(group))
        if rest := [buffer for group in groups[top:] for buffer in group]:
            size = sum(buffer.bytes for buffer in rest)
            table.add_row(_size(size), str(len(rest)), "all others")
        tables.append(table)
    return tables


def beside_the_heap(attribution: Attribution) -> list[tuple[str, list[Buffer]]]:
    """Constants, and temporaries in the place of outputs; small ones are in the JSON alone."""
    found = []
    for title, buffers in (
        ("Constants, beside the heap", attribution.constants),
        ("Temporaries where a result will be, beside the heap", attribution.in_outputs),
    ):
        if large := [buffer for buffer in buffers if buffer.bytes >= SMALLEST]:
            found.append((title, large))
    return found


def _add(table: Table, group: list[Buffer], heap: int) -> None:
    size = sum(buffer.bytes for buffer in group)
    table.add_row(_size(size), _share(size, heap), *_what(group))


def _what(group: list[Buffer]) -> tuple[str, ...]:
    """How many there are, and what they are."""
    buffer = group[0]
    return (
        str(len(group)) if len(group) > 1 else "",
        buffer.role,
        buffer.shape,
        short_operation(buffer.operation) or ("" if buffer.source else buffer.name),
        short_source(buffer.source),
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


def _totals(attribution: Attribution) -> Table:
    """From the heap to temp."""
    table = Table(title="heap to temp", title_justify="left", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_row("heap", _size(attribution.heap_bytes))
    for row in attribution.other:
        table.add_row(row.name, _signed(row.bytes))
    table.add_section()
    table.add_row("temp", _size(attribution.temp_bytes))
    return table


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
    """What has no line: the space between buffers has none by its nature."""
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
    """MB, with three decimals below one."""
    return megabytes(size) if size >= 1e6 or size == 0 else f"{size / 1e6:.3f}"


def _share(size: int, whole: int) -> str:
    return f"{size / whole:.1%}" if whole else "–"
