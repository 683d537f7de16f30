"""Tables of one program: what the heap holds, where the time goes, how far above the floor."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, number_columns, small_table, texts
from nnx_pipeline.lab._report.view import figures, floor, remarks
from nnx_pipeline.lab._report.view.buffers import (
    ARGUMENTS_AND_OUTPUTS,
    FEW,
    BufferRow,
    buffer_rows,
    difference_row,
    outside_the_heap,
    short_line,
    short_operation,
    short_source,
)
from nnx_pipeline.lab._report.view.figures import DASH, megabytes, milliseconds
from nnx_pipeline.lab._timing.result import PASSES, Time, TimeRow
from nnx_pipeline.lab.attribution._floor import Gap
from nnx_pipeline.lab.attribution._result import Attribution, BufferDifference
from nnx_pipeline.lab.compile.measure import Measurement

TOP = 5  # rows of the table of differences below an A/B comparison

# What a buffer is. The line of source stays as long as anything does: it says what to change.
_WHAT = (
    Column("role"),
    Column("shape", 3),
    Column("operation", 2),
    Column("source", 1, shorter=lambda source: re.sub(r"[^ ]+/(?=[^ ]*/)", "", source)),
)


def memory_view(title: str, attribution: Attribution, *, top: int) -> RenderableType:
    heap = attribution.heap_bytes
    heads = [*number_columns("MB"), Column("share", 4, is_number=True), *number_columns("×")]
    table = Columns([*heads, *_WHAT], title="the heap of device memory at its peak")
    _fill(table, buffer_rows(attribution.buffers), top, heap)
    tables = [table]
    for other, rows in outside_the_heap(attribution).items():
        tables.append(Columns([*number_columns("MB", "×"), *_WHAT], title=other))
        _fill(tables[-1], rows, min(top, FEW) if other in ARGUMENTS_AND_OUTPUTS else top)
    roles = [(role, sized(n), _share(n, heap)) for role, n in attribution.by_role().items()]
    by_role = small_table("by role", ("role", "MB", "share"), roles, [("heap", sized(heap), "")])
    parts: list[RenderableType] = [Text(title, style="bold"), *tables, by_role]
    if attribution.temp_bytes is not None:
        sums = [
            ("heap", sized(heap)),
            *((row.name, signed(row.bytes)) for row in attribution.other),
        ]
        temp = [("temp", sized(attribution.temp_bytes))]
        parts.append(small_table("heap to temp", ("", ""), sums, temp))
    return Group(*parts, _peak(attribution))


def difference_view(title: str, changes: Sequence[BufferDifference], *, top: int = TOP) -> Columns:
    table = Columns([*number_columns("a MB", "b MB", "b − a"), *_WHAT], title=title)
    for change in changes[:top]:
        row = difference_row(change)
        table.add_row(sized(change.a_bytes), sized(change.b_bytes), signed(row.bytes), *_what(row))
    if rest := changes[top:]:
        table.add_row("", "", signed(sum(row.change for row in rest)), f"{len(rest)} more")
    return table


def _fill(table: Columns, rows: Sequence[BufferRow], top: int, heap: int | None = None) -> None:
    def add(some: Iterable[BufferRow], count: str, *what: str) -> None:
        size = sum(row.bytes for row in some)
        shares = [] if heap is None else [_share(size, heap)]
        table.add_row(sized(size), *shares, count, *what)

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
    sizes: dict[str, int] = defaultdict(int)
    for buffer in attribution.buffers:
        if not buffer.source:
            sizes[buffer.role] += buffer.bytes
    heap = attribution.heap_bytes
    parts = [f"{role} {_share(n, heap)}" for role, n in sizes.items() if n >= 0.001 * heap]
    return f"; without one: {', '.join(parts)}" if parts else ""


def signed(size: int) -> str:
    return f"{'+' if size >= 0 else '−'}{sized(abs(size))}"


def sized(size: int) -> str:
    return megabytes(size) if size >= 1e6 or size == 0 else f"{size / 1e6:.3f}"


def _share(size: int, whole: int) -> str:
    return f"{size / whole:.1%}" if whole else DASH


def time_table(time: Time | None) -> RenderableType:
    if time is None:
        return Text("estimated time: –")
    known = [("  of this, known", figures.bounded(time, time.known_seconds))]
    waits = "that the compute waits for"
    step = [
        ("compute", figures.estimated(time, "compute_seconds")),
        *(known if time.compute_seconds is None else ()),
        (f"+ collectives {waits}", milliseconds(time.exposed_seconds)),
        (f"+ transfers {waits}", milliseconds(time.memory_wait_seconds)),
        ("= step", figures.estimated(time, "step_seconds")),
    ]
    hidden, stopping = time.range_seconds or (None, None)
    traffic = [
        ("all collectives", milliseconds(time.collective_seconds)),
        ("step if all of them were hidden", figures.bounded(time, hidden)),
        ("step if none of them were", figures.bounded(time, stopping)),
    ]
    if time.host_seconds:
        traffic.append(("all transfers to and from the host", milliseconds(time.host_seconds)))
    table = small_table(f"estimated time, {figures.basis_of(time)}", ("", "ms"), step, traffic)
    return Group(table, Text(figures.shares(time)), Text(figures.band(time)))


def times_view(measurement: Measurement, *, top: int) -> RenderableType:
    """The time by line and as a whole, and below that what is missing from it."""
    time, lines = measurement.time, texts(remarks.warnings(remarks.unread_lines([measurement])))
    return Group(*([lines_table(time, top=top), time_table(time)] if time else []), *lines)


def lines_table(time: Time, *, top: int) -> Columns:
    passes = [Column(name, at, is_number=True) for at, name in enumerate(PASSES, 2)]
    heads = [*number_columns("all"), *passes, Column("launches", 5, is_number=True), Column("line")]
    title = f"where the estimated compute goes, {figures.sign(time)}ms"
    table = Columns(heads, title=title)
    ordered = rows_by_line(time)
    for rows in ordered[:top]:
        table.add_row(*_cells(rows), short_line(rows[0]))
    if rest := [row for rows in ordered[top:] for row in rows]:
        table.add_row(*_cells(rest), "all others")
    return table


def rows_by_line(time: Time) -> list[list[TimeRow]]:
    lines: dict[tuple[str | None, str | None], list[TimeRow]] = defaultdict(list)
    for row in time.rows:
        lines[row.source, row.caller].append(row)
    return sorted(lines.values(), key=lambda rows: -seconds_of(rows))


def seconds_of(rows: Sequence[TimeRow]) -> float:
    return sum(row.seconds for row in rows)


def _cells(rows: Sequence[TimeRow]) -> list[str]:
    parts = [[row for row in rows if row.pass_name == name] for name in PASSES]
    sums = [milliseconds(seconds_of(part) if part else None) for part in parts]
    return [milliseconds(seconds_of(rows)), *sums, f"{sum(row.launches for row in rows):,}"]


_OF_TERMS = (Column(""), Column("MB", is_number=True), Column("formula", 1, is_prose=True))


def floor_view(measurement: Measurement) -> list[RenderableType]:
    least = measurement.floor
    lines = [Text(line) for line in floor.floor_lines(measurement)]
    if least is None or least.peak is None:
        return list(lines)
    totals = [
        floor.TermRow("arguments", megabytes(least.argument_bytes), ""),
        floor.TermRow("heap", megabytes(least.heap_bytes), ""),
    ]
    arguments, most = floor.term_rows(least.arguments), floor.rows_at(least.peak)
    title = f"{floor.ABOUT}; most at: {least.peak.name}"
    tables: list[RenderableType] = [_terms(title, arguments, most, totals)]
    if moment := least.expected_peak:
        title = f"{floor.ABOUT_EXPECTED}; most at: {moment.name}"
        heap = floor.TermRow("heap", megabytes(moment.bytes), "")
        tables.append(_terms(title, floor.rows_at(moment), [heap]))
    gaps = floor.gaps_of(measurement)
    return [*tables, *([_gaps(gaps)] if gaps else []), *lines]


def _terms(title: str, *sections: list[floor.TermRow]) -> Columns:
    table = Columns(_OF_TERMS, title=title)
    for at, rows in enumerate(sections):
        if at:
            table.add_section()
        for row in rows:
            table.add_row(*row)
    return table


def _gaps(gaps: list[Gap]) -> Table:
    rows = []
    for gap in gaps:
        above = f"{gap.excess / 1e6:+,.1f}".replace("-", "−")
        rows.append((gap.role, megabytes(gap.bytes), megabytes(gap.least_bytes), above))
    title = "the heap at its peak beside the floor, by role"
    return small_table(title, ("role", "MB", "floor", "above"), rows)
