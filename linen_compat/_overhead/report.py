"""Shows the overhead of each style as a table and as a picture."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from linen_compat._overhead.measure import Overhead, OverheadRow
from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.errors import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first two are of the palette of Okabe and Ito.
_TRACE, _LOWER, _INK = "#0072b2", "#56b4e9", "#404040"


def overhead_view(result: Overhead) -> RenderableType:
    """A table per loop: the figures of each arm, and their ratio to the native arm."""
    views: list[RenderableType] = [Text(_title(result), style="bold")]
    views += [_table(loop, rows) for loop, rows in _by_loop(result).items()]
    views.append(
        Text(
            "init, trace, lower, both (trace + lower): seconds of CPU time. × both, × calls: the "
            "time and the number of Python calls of trace + lower, divided by those of the native "
            "style of what is wrapped (for the time, the median over the repetitions). "
            "compile: seconds. temp: temporary buffers per device. HLO: instructions of the "
            "compiled program. call: microseconds until the call of a step returns. host: peak "
            "size of Python objects."
        )
    )
    failed = [row for row in result.rows if row.error]
    views += [Text(f"{row.loop}, {row.arm}: {row.error}", style="yellow") for row in failed]
    packages = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    return Group(*views, Text(f"on the CPU, {packages}"))


def _by_loop(result: Overhead) -> dict[str, list[OverheadRow]]:
    return {key: list(rows) for key, rows in itertools.groupby(result.rows, lambda row: row.loop)}


def _title(result: Overhead) -> str:
    model, train = result.config.model, result.config.train
    return (
        f"value and gradient of {counted(model.num_layers, 'layer')} of {model.embed_dim} units, "
        f"batch {train.global_batch} × {train.sequence_length}: "
        f"medians of {counted(result.repetitions, 'repetition')}"
    )


# The figures of a style, and the order in which a narrow screen leaves them out.
_TIMES = {"init": 8, "trace": 6, "lower": 5, "both": 0, "× both": 0, "× calls": 4, "compile": 3}
_COLUMNS = {**_TIMES, "temp MB": 0, "HLO": 9, "call µs": 1, "host MB": 7}


def _table(loop: str, rows: Sequence[OverheadRow]) -> Columns:
    heads = [Column(name, order, is_number=True) for name, order in _COLUMNS.items()]
    table = Columns([Column("style"), *heads], title=loop)
    for row in rows:
        figures = row.figures
        seconds = (figures.abstract_init, figures.trace, figures.lower, figures.trace_and_lower)
        table.add_row(
            row.arm,
            *(_cell(value, ".3f") for value in seconds),
            *(_cell(row.ratios[name], ".2f") for name in ("trace_and_lower", "python_calls")),
            _cell(figures.compile, ".3f"),
            megabytes(figures.temp_bytes),
            _cell(figures.hlo_instructions, ",d"),
            _cell(None if figures.dispatch is None else figures.dispatch * 1e6, ",.0f"),
            megabytes(figures.host_bytes),
        )
    return table


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def overhead_figure(result: Overhead) -> "Figure":
    """Bars of tracing and lowering, a panel per loop, with the ratio to the native style."""
    from matplotlib.figure import Figure

    loops = _by_loop(result)
    arms = len(result.rows) // len(loops)
    figure = Figure(figsize=(4.2 * len(loops) + 1.2, 0.42 * arms + 1.8), layout="constrained")
    panels = figure.subplots(1, len(loops), sharey=True, squeeze=False)[0]
    for axes, (loop, rows) in zip(panels, loops.items(), strict=True):
        _draw(axes, loop, rows)
    figure.suptitle(_title(result), fontsize=10.5, fontweight="bold")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _draw(axes: "Axes", loop: str, rows: Sequence[OverheadRow]) -> None:
    places = range(len(rows))
    trace = [row.figures.trace or 0.0 for row in rows]
    lower = [row.figures.lower or 0.0 for row in rows]
    axes.barh(places, trace, color=_TRACE, label="trace")
    axes.barh(places, lower, left=trace, color=_LOWER, label="lower")
    for index, row in enumerate(rows):
        ratio = row.ratios["trace_and_lower"]
        text = "not measured" if ratio is None else f"{ratio:.2f}× {row.native}"
        end = (trace[index] + lower[index], index)
        axes.annotate(
            text, end, (4, 0), textcoords="offset points", va="center", fontsize=8, color=_INK
        )
    # Beyond the longest bar there is room for its text.
    axes.set_xlim(0, 1.55 * max([a + b for a, b in zip(trace, lower, strict=True)] + [1e-9]))
    axes.set_yticks(places, [row.arm for row in rows])
    if not axes.yaxis_inverted():  # the panels share this axis
        axes.invert_yaxis()
    axes.set_title(loop, fontsize=10)
    axes.set_xlabel("seconds of processor time", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
