"""A sweep as a table for the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.small_table import texts
from nnx_pipeline.lab._report.view.figures import DASH, estimated, megabytes
from nnx_pipeline.lab._report.view.remarks import Remark, closing_remarks
from nnx_pipeline.lab.comparison.sweep import Fit, Point, Sweep

BYTES = ("temp_bytes", "heap_bytes", "peak_bytes", "account_bytes")
# The columns, and the order in which a narrow screen leaves them out.
COLUMNS = {
    "temp MB": 0,
    "heap MB": 1,
    "peak MB": 3,
    "account MB": 0,
    "GFLOP": 2,
    "step ms": 0,
    "collectives ms": 4,
}
# What each figure is divided by before it is shown, in the order of the columns.
TIMES = ("step_seconds", "collective_seconds")
UNITS = {**dict.fromkeys(BYTES, 1e6), "flops": 1e9, **dict.fromkeys(TIMES, 1e-3)}


def sweep_view(title: str, sweep: Sweep) -> RenderableType:
    """A table per arm: one line per program, then slopes where the field is a number."""
    parts: list[RenderableType] = [Text(title, style="italic")]
    for label, points in sweep.arms:
        fits = [sweep.fit(name, label) for name in UNITS]
        unit = sweep.field.rpartition(".")[2] if sweep.along else "unit"
        table = _table(dict(zip(sweep.names(), points, strict=True)), fits, unit)
        parts += [Text(f"{label}, by {sweep.heading()}", style="bold"), table]
    measured = [point.result for _, points in sweep.arms for point in points if point.result]
    failed = [Remark(error, "error") for error in sweep.errors]
    return Group(*parts, *texts([*failed, *closing_remarks(measured, hint=False)]))


def _table(points: Mapping[str, Point], fits: Sequence[Fit | None], unit: str) -> Columns:
    """One line per program, then slopes; columns without any known figure are left out."""
    rows = [_figures(point) for point in points.values()]
    known = [at for at in range(len(COLUMNS)) if any(row[at] != DASH for row in rows)]
    heads = [Column(name, order, is_number=True) for name, order in COLUMNS.items()]
    table = Columns([Column(""), *(heads[at] for at in known)], is_bare=True)

    def add(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *(cells[at] for at in known))

    for name, row in zip(points, rows, strict=True):
        add(name, row)
    if any(fits):
        table.add_section()
        add(f"slope per {unit}", list(map(_slope, fits, UNITS.values())))
        add("r²", list(map(_explained, fits)))
    return table


def _figures(point: Point) -> list[str]:
    if point.result is None:
        return [DASH] * len(COLUMNS)
    flops = point.figure("flops")
    return [
        *(megabytes(getattr(point.result.memory, name)) for name in BYTES),
        DASH if flops is None else f"{flops / 1e9:,.2f}",
        *(estimated(point.result.time, name) for name in TIMES),
    ]


def _slope(fit: Fit | None, unit: float) -> str:
    if fit is None:
        return DASH
    value = fit.slope / unit
    shown = f"{value:+,.3f}" if abs(value) >= 0.1 or not value else f"{value:+.2g}"
    return shown.replace("-", "−")


def _explained(fit: Fit | None) -> str:
    return DASH if fit is None or fit.r_squared is None else f"{fit.r_squared:.3f}"
