"""A sweep as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab.comparison.sweep import Fit, Point, Sweep
from nnx_pipeline.lab.report.columns import Column, Columns
from nnx_pipeline.lab.report.memory_tables import megabytes
from nnx_pipeline.lab.report.tables import closing_lines
from nnx_pipeline.lab.report.time_table import milliseconds

BYTES = ("temp_bytes", "heap_bytes", "peak_bytes", "account_bytes")
# The columns, and the order in which a narrow screen leaves them out.
COLUMNS = {
    "temp MB": 0,
    "heap MB": 1,
    "peak MB": 3,
    "account MB": 0,
    "GFLOP": 2,
    "step ms": 0,
    "compile s": 4,
}
# What each figure is divided by before it is shown, in the order of the columns.
UNITS = {**dict.fromkeys(BYTES, 1e6), "flops": 1e9, "step_seconds": 1e-3, "compile_seconds": 1.0}


def sweep_view(title: str, sweep: Sweep) -> RenderableType:
    """A table per arm: one line per program, then slopes where the field is a number."""
    parts: list[RenderableType] = [Text(title, style="italic")]
    for label, points in sweep.arms:
        heads = [Column(name, order, is_number=True) for name, order in COLUMNS.items()]
        table = Columns([Column(""), *heads], is_bare=True)
        for point in points:
            table.add_row(str(point.value), *_figures(point))
        fits = [(sweep.fit(name, label), unit) for name, unit in UNITS.items()]
        if any(fit for fit, _ in fits):
            table.add_section()
            table.add_row("slope per unit", *(_slope(fit, unit) for fit, unit in fits))
            table.add_row("r²", *(_explained(fit) for fit, _ in fits))
        parts += [Text(f"{label}, by {sweep.field}", style="bold"), table]
    failed = [Text(error, style="red") for error in sweep.errors]
    measured = [point.result for _, points in sweep.arms for point in points if point.result]
    return Group(*parts, *failed, *closing_lines(measured, hint=False))


def _figures(point: Point) -> list[str]:
    if point.result is None:
        return ["–"] * len(COLUMNS)
    flops, seconds = point.figure("flops"), point.figure("compile_seconds")
    return [
        *(megabytes(getattr(point.result.memory, name)) for name in BYTES),
        "–" if flops is None else f"{flops / 1e9:,.2f}",
        milliseconds(point.figure("step_seconds")),
        "–" if seconds is None else f"{seconds:.1f}",
    ]


def _slope(fit: Fit | None, unit: float) -> str:
    return "–" if fit is None else f"{fit.slope / unit:+,.3f}"


def _explained(fit: Fit | None) -> str:
    return "–" if fit is None or fit.r_squared is None else f"{fit.r_squared:.3f}"
