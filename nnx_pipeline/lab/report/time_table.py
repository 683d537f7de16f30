"""Shows the estimated time of a program as tables."""

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.report.columns import Column, Columns, figures
from nnx_pipeline.lab.report.memory_tables import short_source
from nnx_pipeline.lab.timing.result import PASSES, Row, Time

_BOUNDED = ("compute_seconds", "step_seconds")
BASES = {"cycles": "by the compiler's cycles", "roofline": "a roofline: no program reaches it"}


def time_table(time: Time | None) -> RenderableType:
    """Compute, collectives, what of these the compute waits for, and the step.

    - `time`: the estimate; None for a line that says that there is none.
    """
    if time is None:
        return Text("estimated time: –")
    table = Table(title=f"estimated time, {BASES[time.basis]}", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_row("compute", estimated(time, "compute_seconds"))
    if time.compute_seconds is None:
        table.add_row("  of this, known", _bounded(time, time.known_seconds))
    table.add_row("+ collectives that the compute waits for", milliseconds(time.exposed_seconds))
    table.add_row("+ transfers that the compute waits for", milliseconds(time.memory_wait_seconds))
    table.add_row("= step", estimated(time, "step_seconds"))
    table.add_section()
    table.add_row("all collectives", milliseconds(time.collective_seconds))
    hidden, stopping = time.range_seconds or (None, None)
    table.add_row("step if all of them were hidden", _bounded(time, hidden))
    table.add_row("step if none of them were", _bounded(time, stopping))
    if time.host_seconds:
        table.add_row("all transfers to and from the host", milliseconds(time.host_seconds))
    return Group(table, Text(shares(time)))


def lines_table(time: Time, *, top: int) -> Columns:
    """Where the compute goes: one row per source line, its passes side by side.

    - `time`: the estimate.
    - `top`: the most rows; the other lines are summed in one row.
    """
    passes = [Column(name, at, is_number=True) for at, name in enumerate(PASSES, 2)]
    heads = [*figures("all"), *passes, Column("launches", 5, is_number=True), Column("line")]
    least = "at least, " * time.is_lower_bound
    table = Columns(heads, title=f"where the estimated compute goes, {least}ms")
    ordered = rows_by_line(time)
    for source, rows in ordered[:top]:
        table.add_row(*_cells(rows), short_source(source))
    if rest := [row for _, rows in ordered[top:] for row in rows]:
        table.add_row(*_cells(rest), "all others")
    return table


def rows_by_line(time: Time) -> list[tuple[str | None, list[Row]]]:
    """Each line of source with the rows of its compute, the line that takes longest first."""
    lines: dict[str | None, list[Row]] = defaultdict(list)
    for row in time.rows:
        lines[row.source].append(row)
    return sorted(lines.items(), key=lambda item: -seconds_of(item[1]))


def seconds_of(rows: Sequence[Row]) -> float:
    """The compute of some rows together."""
    return sum(row.seconds for row in rows)


def _cells(rows: Sequence[Row]) -> list[str]:
    parts = [[row for row in rows if row.pass_name == name] for name in PASSES]
    sums = [milliseconds(seconds_of(part) if part else None) for part in parts]
    return [milliseconds(seconds_of(rows)), *sums, f"{sum(row.launches for row in rows):,}"]


def shares(time: Time) -> str:
    """What part of the step is useful, and how many instructions are launched, as one line."""
    told = [("MFU", time.mfu), ("HFU", time.hfu), ("bubble", time.bubble_share)]
    most = "≤ " * time.is_lower_bound
    parts = [
        f"{name} {'' if name == 'bubble' else most}{value:.1%}"
        for name, value in told
        if value is not None
    ]
    count = "–" if time.launches is None else f"{time.launches:,}"
    return ", ".join([*parts, f"{count} launches"])


def estimated(time: Time | None, figure: str) -> str:
    """A figure of the estimate in milliseconds, with ≥ where it is a lower bound.

    - `time`: the estimate; None for a dash.
    - `figure`: one of the seconds of a `Time`.
    """
    if time is None:
        return milliseconds(None)
    seconds = getattr(time, figure)
    return _bounded(time, seconds) if figure in _BOUNDED else milliseconds(seconds)


def are_alike(one: Time | None, other: Time | None) -> bool:
    """Whether two estimates are both lower bounds, or neither is: their ratio says something."""
    return bool(one and other and one.is_lower_bound == other.is_lower_bound)


def _bounded(time: Time, seconds: float | None) -> str:
    return "≥ " * (time.is_lower_bound and seconds is not None) + milliseconds(seconds)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds; a dash where there is no figure."""
    if seconds is None:
        return "–"
    value = 1e3 * seconds
    if 0 < value < 0.01:
        return f"{value:.1g}" if value >= 1e-4 else f"{value:.0e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
