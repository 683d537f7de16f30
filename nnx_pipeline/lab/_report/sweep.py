"""A sweep as tables for the terminal, and as a picture with a fitted line for each figure."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view.figures import DASH, compiler, estimated, megabytes, sign
from nnx_pipeline.lab._report.view.remarks import Remark, closing_remarks, settings_lines
from nnx_pipeline.lab.comparison.sweep import Fit, Point, Sweep, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    parts: list[RenderableType] = [Text(title, style="italic")]
    for label, points in sweep.arms:
        fits = [sweep.fit(name, label) for name in UNITS]
        unit = sweep.field.rpartition(".")[2] if sweep.along else "unit"
        table = _table(dict(zip(sweep.names(), points, strict=True)), fits, unit)
        parts += [Text(f"{label}, by {sweep.heading()}", style="bold"), table]
    measured = [point.result for _, points in sweep.arms for point in points if point.result]
    failed = [Remark(error, "error") for error in sweep.errors]
    return Group(*parts, *texts([*failed, *closing_remarks(measured, hint=False, fresh=True)]))


def _table(points: Mapping[str, Point], fits: Sequence[Fit | None], unit: str) -> Columns:
    rows = [figures_of(point) for point in points.values()]
    known = [at for at in range(len(COLUMNS)) if any(row[at] != DASH for row in rows)]
    heads = [Column(name, order, is_number=True) for name, order in COLUMNS.items()]
    table = Columns([Column(""), *(heads[at] for at in known)], is_bare=True)

    def add(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *(cells[at] for at in known))

    for name, row in zip(points, rows, strict=True):
        add(name, row)
    if any(fits):
        table.add_section()
        add(f"slope per {unit}", list(map(slope_words, fits, UNITS.values())))
        shares = [fit.r_squared if fit else None for fit in fits]
        add("r²", [DASH if share is None else f"{share:.3f}" for share in shares])
    return table


def figures_of(point: Point) -> list[str]:
    if point.result is None:
        return [DASH] * len(COLUMNS)
    flops = point.figure("flops")
    return [
        *(megabytes(getattr(point.result.memory, name)) for name in BYTES),
        DASH if flops is None else f"{flops / 1e9:,.2f}",
        *(estimated(point.result.time, name) for name in TIMES),
    ]


def slope_words(fit: Fit | None, unit: float) -> str:
    if fit is None:
        return DASH
    value = fit.slope / unit
    shown = f"{value:+,.3f}" if abs(value) >= 0.1 or not value else f"{value:+.2g}"
    return shown.replace("-", "−")


ARM_COLOURS = ("#b04f0a", "#1560b8")  # of arms a and b, as on an HTML page
# The titles of figures, row by row: what fits on the left, how long it takes on the right.
PANELS = {
    "temp_bytes": "temp, MB",
    "step_seconds": "estimated step, ms",
    "heap_bytes": "heap, MB",
    "flops": "matrix products, GFLOP",
    "account_bytes": "account, MB",
    "collective_seconds": "estimated collectives, ms",
}


def sweep_chart(title: str, sweep: Sweep) -> "Figure":
    from matplotlib.figure import Figure

    rows = len(PANELS) // 2
    figure = Figure(figsize=(10.0, 3.2 * rows), layout="constrained")
    results = [p.result for _, points in sweep.arms for p in points if p.result]
    head = "\n".join(textwrap.fill(line, 110) for line in [title, *settings_lines(results)])
    figure.suptitle(head, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, name in zip(figure.subplots(rows, 2).flat, PANELS, strict=True):
        _draw(axes, name, sweep)
    if results:
        figure.supxlabel(f"compiler: {compiler(results[0])}", x=0.01, ha="left", fontsize=8)
    return figure


def _draw(axes: "Axes", name: str, sweep: Sweep) -> None:
    title, unit = PANELS[name] + sign_of(name, sweep), UNITS[name]
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel(sweep.heading(), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e5ea", linewidth=0.8)
    axes.tick_params(labelsize=8)
    places = places_of(sweep.arms[0][1])
    axes.set_xticks(places, sweep.names())
    for colour, (label, points) in zip(ARM_COLOURS, sweep.arms, strict=False):
        figures = [point.figure(name) for point in points]
        known = [(x, y / unit) for x, y in zip(places, figures, strict=True) if y is not None]
        words = label if known else f"{label}: –"
        if fit := sweep.fit(name, label):
            words = f"{label}: {fit.slope / unit:+,.4g} per unit"
            limits = [min(places), max(places)]
            line = [(fit.intercept + fit.slope * x) / unit for x in limits]
            axes.plot(limits, line, color=colour, linestyle="--", linewidth=1)
        axes.plot([x for x, _ in known], [y for _, y in known], "o", color=colour, label=words)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    if all(point.figure(name) is None for _, points in sweep.arms for point in points):
        axes.set_yticks([])  # a scale would show numbers that nothing has
    axes.legend(fontsize=8, frameon=False)


def sign_of(name: str, sweep: Sweep) -> str:
    """What stands before the step of any of the programs, in brackets."""
    results = [point.result for _, points in sweep.arms for point in points if point.result]
    signs = {sign(one.time).strip() for one in results if name == "step_seconds"} - {""}
    return f" ({' or '.join(sorted(signs))})" if signs else ""


def places_of(points: Sequence[Point]) -> list[float]:
    """The x position of each value; values that are not all numbers are spaced evenly."""
    values = [point.value for point in points]
    return list(map(float, values if all(map(is_number, values)) else range(len(values))))
