"""A sweep on a page: for each figure a chart with its fitted line, and a table for each arm."""

from collections.abc import Sequence

from nnx_pipeline.lab._page.charts import HEIGHT, WIDTH, Axis, axis_from_zero, plot
from nnx_pipeline.lab._page.markup import Content, Markup, element, fragment
from nnx_pipeline.lab._page.tables import table
from nnx_pipeline.lab._report.sweep import (
    COLUMNS,
    PANELS,
    UNITS,
    figures_of,
    places_of,
    sign_of,
    slope_words,
)
from nnx_pipeline.lab._report.view.figures import DASH
from nnx_pipeline.lab.comparison.sweep import Sweep

_TITLES = PANELS | {"peak_bytes": "peak, MB"}


def sweep_sections(sweep: Sweep) -> Markup:
    charts = [chart for name in UNITS if (chart := _chart(name, sweep))]
    keys = [
        element("p", element("b", key, class_=f"letter {key}"), f" {label}")
        for key, (label, _) in zip("ab", sweep.arms, strict=False)
    ]
    return fragment(
        element("section", [_table(sweep, at) for at in range(len(sweep.arms))], class_="card"),
        element(
            "section",
            element("h2", f"Each figure against {sweep.heading()}"),
            keys if len(sweep.arms) > 1 else None,
            element("p", "Dashed: the line that was fitted by least squares.", class_="quiet"),
            element("div", charts, class_="plots"),
            class_="card",
        ),
    )


def _table(sweep: Sweep, arm: int) -> Markup:
    label, points = sweep.arms[arm]
    rows: list[list[Content]] = [
        [name, *figures_of(point)] for name, point in zip(sweep.names(), points, strict=True)
    ]
    fits = [sweep.fit(name, label) for name in UNITS]
    if any(fits):
        rows.append([f"slope per {_unit(sweep)}", *map(slope_words, fits, UNITS.values())])
        shares = [fit.r_squared if fit else None for fit in fits]
        rows.append(["r²", *(DASH if share is None else f"{share:.3f}" for share in shares)])
    known = [at for at in range(1, len(COLUMNS) + 1) if any(row[at] != DASH for row in rows)]
    cells = [[row[0], *(row[at] for at in known)] for row in rows]
    names = list(COLUMNS)
    head = [sweep.heading(), *(names[at - 1] for at in known)]
    return table(label, head, cells, numbers=len(known))


def _unit(sweep: Sweep) -> str:
    """What a slope is per: with several fields, the first of them."""
    return sweep.field.rpartition(".")[2] if sweep.along else "unit"


def _chart(name: str, sweep: Sweep) -> Markup | None:
    unit, places = UNITS[name], places_of(sweep.arms[0][1])
    of_arms = [[point.figure(name) for point in points] for _, points in sweep.arms]
    known = [value / unit for values in of_arms for value in values if value is not None]
    if not known:
        return None
    y, x = axis_from_zero(max(known)), _Across(places)
    lines, marks, said = [], [], []
    for key, (label, _), values in zip("ab", sweep.arms, of_arms, strict=False):
        fit = sweep.fit(name, label)
        if fit:
            ends = [(fit.intercept + fit.slope * at) / unit for at in (min(places), max(places))]
            lines.append(_line(key, x, y, ends))
        said.append(f"{label}: {slope_words(fit, unit)} per {_unit(sweep)}" if fit else label)
        marks += [
            _mark(key, x.share(at), y.share(value / unit), f"{place}: {value / unit:,.2f}")
            for at, place, value in zip(places, sweep.names(), values, strict=True)
            if value is not None
        ]
    title = _TITLES[name] + sign_of(name, sweep)
    ticks = [
        element("span", place, style=f"left:{100 * x.share(at):.2f}%")
        for at, place in zip(places, sweep.names(), strict=True)
    ]
    words = "; ".join(said)
    return element(
        "figure",
        element("figcaption", title),
        plot(lines, marks, y, f"{title}: {words}"),
        element("div", ticks, class_="x-values"),
        element("p", words, class_="quiet"),
    )


class _Across:
    """The horizontal places of the values, with a margin at both ends."""

    def __init__(self, places: Sequence[float]) -> None:
        self.low, self.wide = min(places), (max(places) - min(places)) or 1.0

    def share(self, at: float) -> float:
        return 0.05 + 0.9 * (at - self.low) / self.wide


def _line(key: str, x: _Across, y: Axis, ends: Sequence[float]) -> Markup:
    up = [f"{HEIGHT * (1 - y.share(end)):.1f}" for end in ends]
    across = [f"{WIDTH * share:.1f}" for share in (0.05, 0.95)]
    of_line = {"x1": across[0], "x2": across[1], "y1": up[0], "y2": up[1]}
    return element("line", **of_line, class_=f"fitted {key}")


def _mark(key: str, across: float, up: float, words: str) -> Markup:
    place = f"left:{100 * across:.2f}%;top:{100 * (1 - up):.2f}%"
    return element("span", class_=f"peak {key}", style=place, title=words)
