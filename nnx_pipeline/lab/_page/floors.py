"""The part of the page that says how far a program is above what its step must hold."""

from collections.abc import Sequence

from nnx_pipeline.lab._page.markup import Markup, element, fragment
from nnx_pipeline.lab._page.tables import LabelledProgram, change, swatch, table
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.floor import (
    ABOUT,
    TermRow,
    floor_lines,
    gaps_of,
    rows_at,
    term_rows,
)
from nnx_pipeline.lab.compile.measure import Measurement


def floors(arms: Sequence[LabelledProgram]) -> Markup | None:
    """Measured over floor of each program, with the terms and the roles between, to be opened."""
    known = [_floor(arm.key, arm.result) for arm in arms if arm.result and arm.result.floor]
    return fragment(known) if known else None


def _floor(key: str, measured: Measurement) -> Markup:
    whose = f" of {key}" if key else ""
    lines = [element("p", line, class_="quiet") for line in floor_lines(measured)]
    floor = measured.floor
    if floor is None or floor.peak is None:
        return element("details", element("summary", f"Floor{whose}"), lines)
    gaps = [
        (
            (swatch(gap.role), gap.role),
            megabytes(gap.bytes),
            megabytes(gap.least_bytes),
            change(gap.least_bytes, gap.bytes),
        )
        for gap in gaps_of(measured)
    ]
    caption = "The heap at its peak beside the floor, by role"
    rows = [*term_rows(floor.arguments), *rows_at(floor.peak)]
    most = floor.expected_peak
    return element(
        "details",
        element("summary", f"Floor{whose}: {ABOUT}"),
        lines,
        table(caption, ("role", "MB", "floor, MB", "above"), gaps, numbers=3) if gaps else None,
        _terms(f"Most at: {floor.peak.name}", rows),
        _terms(f"Expected, most at: {most.name}", rows_at(most)) if most else None,
    )


def _terms(caption: str, rows: Sequence[TermRow]) -> Markup:
    cells = [(row.name, row.formula, row.size) for row in rows]
    return table(caption, ("what", "formula", "MB"), cells, numbers=1)
