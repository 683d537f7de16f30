"""The charts of a page: shapes as inline SVG that stretches, words as HTML that does not.

Words inside an SVG would scale with it, down to letters of four points on a phone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from nnx_pipeline.lab._page.markup import Content, Markup, element
from nnx_pipeline.lab._report.view.figures import ROLE_COLOURS, megabytes, role_totals
from nnx_pipeline.lab.attribution._result import Attribution

WIDTH, HEIGHT = 1000, 1000  # of a drawing in SVG units, before it is stretched
SMALLEST = 0.05e6  # bytes; anything less is shown as 0.0 MB


class DrawnArm(NamedTuple):
    """One program in a chart; its letter also decides its colour, and is not shown if alone."""

    key: str
    label: str
    attribution: Attribution
    is_alone: bool = False
    room: int | None = None  # bytes that the device leaves for the heap; None where not known

    @property
    def letter(self) -> Content:
        return [] if self.is_alone else [element("b", self.key, class_=f"letter {self.key}"), " "]


def role_bars(arms: Sequence[DrawnArm]) -> Markup:
    order = roles_of(arms)
    largest = max(arm.attribution.heap_bytes for arm in arms) or 1
    return element(
        "figure",
        element("figcaption", "The heap of device memory at its peak, by role"),
        [_bar(arm, order, largest) for arm in arms],
        class_="bars",
    )


def roles_of(arms: Sequence[DrawnArm]) -> list[str]:
    return list(role_totals([arm.attribution.by_role() for arm in arms]))


def _bar(arm: DrawnArm, order: Sequence[str], largest: int) -> Markup:
    sizes, at, pieces = arm.attribution.by_role(), 0.0, []
    for role in order:
        width = WIDTH * sizes.get(role, 0) / largest
        if width:
            words = f"{role}: {megabytes(sizes[role])} MB"
            piece = {"x": f"{at:.2f}", "width": f"{width:.2f}", "fill": ROLE_COLOURS[role]}
            pieces.append(
                element("g", element("title", words), element("rect", y=0, height=30, **piece))
            )
        at += width
    seen = [role for role in order if sizes.get(role, 0) >= SMALLEST]
    said = ", ".join(f"{role} {megabytes(sizes[role])} MB" for role in seen)
    return element(
        "div",
        element(
            "p",
            element("span", arm.letter, arm.label, class_="arm"),
            element("span", f"{megabytes(arm.attribution.heap_bytes)} MB", class_="number"),
            class_="bar-label",
        ),
        _svg(pieces, 30, f"{arm.label}: {said}"),
        class_="bar",
    )


def _svg(shapes: Sequence[Markup], height: int, label: str) -> Markup:
    """A drawing that stretches to its place; screen readers get the label."""
    box = {"viewBox": f"0 0 {WIDTH} {height}", "preserveAspectRatio": "none"}
    return element("svg", shapes, **box, role="img", aria_label=label)


class Axis(NamedTuple):
    """An axis from 0 to `high`, with grid lines at `ticks`."""

    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        return value / self.high


def axis_from_zero(largest: float, *, most: int = 5) -> Axis:
    if largest <= 0:
        return Axis(1.0, (0.0, 1.0))
    rough = largest / most
    # The smallest round step of which `most` or fewer reach the largest value.
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    ticks = tuple(step * index for index in range(math.ceil(largest / step) + 1))
    return Axis(ticks[-1], ticks)


def plot(shapes: Sequence[Markup], marks: Sequence[Markup], y: Axis, label: str) -> Markup:
    """SVG `shapes`, `WIDTH` by `HEIGHT`, under HTML `marks`, with a grid line at each tick."""
    grid, names = [], []
    for tick in y.ticks:
        share = 1 - y.share(tick)
        height = f"{share * HEIGHT:.2f}"
        grid.append(element("line", x1=0, x2=WIDTH, y1=height, y2=height, class_="grid"))
        names.append(element("span", f"{tick:,g}", style=f"top:{100 * share:.2f}%"))
    return element(
        "div",
        element("div", names, class_="y-ticks", aria_hidden="true"),
        element("div", _svg([*grid, *shapes], HEIGHT, label), list(marks), class_="area"),
        class_="plot",
    )
