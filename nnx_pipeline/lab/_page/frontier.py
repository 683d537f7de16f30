"""Programs on a page by their memory and their time, with those marked that none beats in both."""

from collections.abc import Sequence
from typing import NamedTuple

from nnx_pipeline.lab._page.charts import Axis, axis_from_zero, plot
from nnx_pipeline.lab._page.markup import Content, Markup, element, fragment
from nnx_pipeline.lab._page.tables import table


class Spot(NamedTuple):
    """One program: its account in bytes, its step in seconds, and how both are written."""

    label: str
    account: int
    step: float
    shown: tuple[str, str]
    fits: bool
    on_frontier: bool


def frontier_sections(title: str, spots: Sequence[Spot], limit: int) -> Markup:
    """The chart and the table of some programs; the first is the best."""
    x = axis_from_zero(max([limit, *(spot.account for spot in spots)]) / 1e9)
    y = axis_from_zero(max((spot.step for spot in spots), default=1.0) * 1e3)
    marks = [_mark(spot, x, y) for spot in spots]
    ticks = [
        element("span", f"{tick:,g}", style=f"left:{100 * x.share(tick):.2f}%") for tick in x.ticks
    ]
    words = "step, ms, against account, GB; filled: no other is both smaller and faster"
    rows: list[list[Content]] = [
        [
            spot.label,
            "best" if at == 0 and spot.fits else "frontier" if spot.on_frontier else "",
            *spot.shown,
        ]
        for at, spot in enumerate(spots)
    ]
    head = ["layout", "", "account, GB", "step, ms"]
    return element(
        "section",
        element("h2", title),
        element(
            "figure",
            element("figcaption", words),
            plot([_limit(limit / 1e9, x)], marks, y, f"{title}: {words}"),
            element("div", ticks, class_="x-values"),
            element("p", f"Dashed: the memory of a device, {limit / 1e9:,.1f} GB.", class_="quiet"),
        ),
        fragment(table(None, head, rows, numbers=2)) if rows else None,
        class_="card",
    )


def _limit(limit: float, x: Axis) -> Markup:
    across = f"{1000 * x.share(limit):.1f}"
    return element("line", x1=across, x2=across, y1="0", y2="1000", class_="fitted b")


def _mark(spot: Spot, x: Axis, y: Axis) -> Markup:
    left, top = 100 * x.share(spot.account / 1e9), 100 * (1 - y.share(spot.step * 1e3))
    filled = "" if spot.on_frontier else ";background:none;border:2px solid currentColor"
    style = f"left:{left:.2f}%;top:{top:.2f}%{filled}"
    account, step = spot.shown
    words = f"{spot.label}: {account} GB, {step} ms"
    return element("span", class_="peak a" if spot.fits else "peak b", style=style, title=words)
