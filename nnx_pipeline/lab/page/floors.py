"""The part of the page that says how far a program is above what its step must hold."""

from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.page.markup import Markup, element, joined
from nnx_pipeline.lab.page.tables import Labelled, change, swatch, table
from nnx_pipeline.lab.report.floor_table import (
    ABOUT,
    expected_terms,
    floor_lines,
    gaps_of,
    signed,
    terms_of,
)
from nnx_pipeline.lab.report.memory_tables import megabytes

HEAD = ("what", "formula", "MB")


def floors(arms: Labelled) -> Markup | None:
    """Measured over floor of each program, with the terms and the roles between, to be opened.

    - `arms`: the programs; one whose floor is not known says why.
    """
    known = [(key, result) for key, _, result in arms if result and result.floor]
    if not known:
        return None
    return joined([_one(key, result) for key, result in known])


def _one(key: str, measured: Measurement) -> Markup:
    whose = f" of {key}" if key else ""
    lines = [element("p", line, class_="quiet") for line in floor_lines(measured)]
    floor = measured.floor
    if floor is None or floor.peak is None:
        return element("details", element("summary", f"Floor{whose}"), lines)
    terms = [
        (term.name, term.formula, megabytes(term.bytes))
        for term in (*floor.arguments, *terms_of(floor))
    ]
    expected = [(term.name, term.formula, signed(term.bytes)) for term in expected_terms(floor)]
    gaps = [
        (
            (swatch(gap.role), gap.role),
            megabytes(gap.bytes),
            megabytes(gap.least_bytes),
            change(gap.least_bytes, gap.bytes),
        )
        for gap in gaps_of(measured)
    ]
    most = floor.expected_peak
    caption = "The heap at its peak beside the floor, by role"
    return element(
        "details",
        element("summary", f"Floor{whose}: {ABOUT}"),
        lines,
        table(caption, ("role", "MB", "floor, MB", "above"), gaps, numbers=3) if gaps else None,
        table(f"Most at: {floor.peak.name}", HEAD, terms, numbers=1),
        table(f"Expected, most at: {most.name}", HEAD, expected, numbers=1) if most else None,
    )
