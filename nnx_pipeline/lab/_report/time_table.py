"""Shows the estimated time of a program as tables."""

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, figures
from nnx_pipeline.lab._report.small_table import small_table
from nnx_pipeline.lab._report.view.buffers import short_line
from nnx_pipeline.lab._report.view.figures import basis_of, bounded, estimated, milliseconds, shares
from nnx_pipeline.lab._timing.result import PASSES, Time, TimeRow


def time_table(time: Time | None) -> RenderableType:
    """Compute, collectives, what of these the compute waits for, and the step."""
    if time is None:
        return Text("estimated time: –")
    known = [("  of this, known", bounded(time, time.known_seconds))]
    waits = "that the compute waits for"
    step = [
        ("compute", estimated(time, "compute_seconds")),
        *(known if time.compute_seconds is None else ()),
        (f"+ collectives {waits}", milliseconds(time.exposed_seconds)),
        (f"+ transfers {waits}", milliseconds(time.memory_wait_seconds)),
        ("= step", estimated(time, "step_seconds")),
    ]
    hidden, stopping = time.range_seconds or (None, None)
    traffic = [
        ("all collectives", milliseconds(time.collective_seconds)),
        ("step if all of them were hidden", bounded(time, hidden)),
        ("step if none of them were", bounded(time, stopping)),
    ]
    if time.host_seconds:
        traffic.append(("all transfers to and from the host", milliseconds(time.host_seconds)))
    table = small_table(f"estimated time, {basis_of(time)}", ("", "ms"), step, traffic)
    return Group(table, Text(shares(time)))


def lines_table(time: Time, *, top: int) -> Columns:
    """Where the compute goes: one row per source line, its passes side by side."""
    passes = [Column(name, at, is_number=True) for at, name in enumerate(PASSES, 2)]
    heads = [*figures("all"), *passes, Column("launches", 5, is_number=True), Column("line")]
    least = "at least, " * time.is_lower_bound
    table = Columns(heads, title=f"where the estimated compute goes, {least}ms")
    ordered = rows_by_line(time)
    for rows in ordered[:top]:
        table.add_row(*_cells(rows), short_line(rows[0]))
    if rest := [row for rows in ordered[top:] for row in rows]:
        table.add_row(*_cells(rest), "all others")
    return table


def rows_by_line(time: Time) -> list[list[TimeRow]]:
    """The compute of each line of source and caller, the line that takes longest first."""
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
