"""Shows what a step must hold and take, and how much more its program does."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.small_table import small_table
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.floor import (
    ABOUT,
    ABOUT_EXPECTED,
    TermRow,
    floor_lines,
    gaps_of,
    rows_at,
    term_rows,
)
from nnx_pipeline.lab.attribution._floor import Gap
from nnx_pipeline.lab.compile.measure import Measurement

_OF_TERMS = (Column(""), Column("MB", is_number=True), Column("formula", 1, is_prose=True))


def floor_view(measurement: Measurement) -> list[RenderableType]:
    """The terms of the floor, how far the program is above it, and the roles between."""
    floor = measurement.floor
    lines = [Text(line) for line in floor_lines(measurement)]
    if floor is None or floor.peak is None:
        return list(lines)
    totals = [
        TermRow("arguments", megabytes(floor.argument_bytes), ""),
        TermRow("heap", megabytes(floor.heap_bytes), ""),
    ]
    arguments = term_rows(floor.arguments)
    title = f"{ABOUT}; most at: {floor.peak.name}"
    tables: list[RenderableType] = [_terms(title, arguments, rows_at(floor.peak), totals)]
    if moment := floor.expected_peak:
        title = f"{ABOUT_EXPECTED}; most at: {moment.name}"
        heap = TermRow("heap", megabytes(moment.bytes), "")
        tables.append(_terms(title, rows_at(moment), [heap]))
    gaps = gaps_of(measurement)
    return [*tables, *([_gaps(gaps)] if gaps else []), *lines]


def _terms(title: str, *sections: list[TermRow]) -> Columns:
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
