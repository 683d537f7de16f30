"""Tables of what the heap holds at its peak, and of how that differs between two programs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, figures
from nnx_pipeline.lab._report.small_table import small_table
from nnx_pipeline.lab._report.view.buffers import (
    BufferRow,
    buffer_rows,
    difference_row,
    outside_the_heap,
    short_operation,
    short_source,
)
from nnx_pipeline.lab._report.view.figures import DASH, megabytes
from nnx_pipeline.lab.attribution._result import Attribution, BufferDifference

TOP = 5  # rows of the table of differences below an A/B comparison

# What a buffer is. The line of source stays as long as anything does: it says what to change.
_WHAT = (
    Column("role"),
    Column("shape", 3),
    Column("operation", 2),
    Column("source", 1, shorter=lambda source: re.sub(r"[^ ]+/(?=[^ ]*/)", "", source)),
)


def memory_view(title: str, attribution: Attribution, *, top: int) -> RenderableType:
    """The largest buffers at the peak, the totals by role, and where in the schedule the peak is.

    Each list has `top` rows; the other buffers are summed in one more row.
    """
    heap = attribution.heap_bytes
    heads = [*figures("MB"), Column("share", 4, is_number=True), *figures("×")]
    table = Columns([*heads, *_WHAT], title="the heap of device memory at its peak")
    _fill(table, buffer_rows(attribution.buffers), top, heap)
    tables = [table]
    for other, rows in outside_the_heap(attribution).items():
        tables.append(Columns([*figures("MB", "×"), *_WHAT], title=other))
        _fill(tables[-1], rows, top)
    roles = [(role, _size(n), _share(n, heap)) for role, n in attribution.by_role().items()]
    by_role = small_table("by role", ("role", "MB", "share"), roles, [("heap", _size(heap), "")])
    parts: list[RenderableType] = [Text(title, style="bold"), *tables, by_role]
    if attribution.temp_bytes is not None:
        sums = [
            ("heap", _size(heap)),
            *((row.name, _signed(row.bytes)) for row in attribution.other),
        ]
        temp = [("temp", _size(attribution.temp_bytes))]
        parts.append(small_table("heap to temp", ("", ""), sums, temp))
    return Group(*parts, _peak(attribution))


def difference_view(title: str, changes: Sequence[BufferDifference], *, top: int = TOP) -> Columns:
    """A table of the first `top` changes from a to b, which come largest first."""
    table = Columns([*figures("a MB", "b MB", "b − a"), *_WHAT], title=title)
    for change in changes[:top]:
        row = difference_row(change)
        table.add_row(_size(change.a_bytes), _size(change.b_bytes), _signed(row.bytes), *_what(row))
    if rest := changes[top:]:
        table.add_row("", "", _signed(sum(row.change for row in rest)), f"{len(rest)} more")
    return table


def _fill(table: Columns, rows: Sequence[BufferRow], top: int, heap: int | None = None) -> None:
    """Adds the first rows and a sum of the others, with their shares where the heap is given."""

    def add(some: Iterable[BufferRow], count: str, *what: str) -> None:
        size = sum(row.bytes for row in some)
        shares = [] if heap is None else [_share(size, heap)]
        table.add_row(_size(size), *shares, count, *what)

    for row in rows[:top]:
        add([row], str(row.count) if row.count > 1 else "", *_what(row))
    if rest := rows[top:]:
        add(rest, str(sum(row.count for row in rest)), "all others")


def _what(row: BufferRow) -> tuple[str, str, str, str]:
    return row.role, row.shape, row.operation, row.source


def _peak(attribution: Attribution) -> Text:
    doing = short_operation(attribution.peak_operation) or DASH
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
    parts = [f"{role} {_share(n, heap)}" for role, n in sizes.items() if n >= 0.001 * heap]
    return f"; without one: {', '.join(parts)}" if parts else ""


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '−'}{_size(abs(size))}"


def _size(size: int) -> str:
    """Bytes as MB, with three decimals below one MB."""
    return megabytes(size) if size >= 1e6 or size == 0 else f"{size / 1e6:.3f}"


def _share(size: int, whole: int) -> str:
    return f"{size / whole:.1%}" if whole else DASH
