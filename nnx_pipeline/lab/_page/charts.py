"""The charts of a page: shapes as inline SVG that stretches, words as HTML that does not.

Words inside an SVG would scale with it, down to letters of four points on a phone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from nnx_pipeline.lab._page.markup import Markup, element
from nnx_pipeline.lab._report.view.figures import ROLE_COLOURS, megabytes, role_totals
from nnx_pipeline.lab.attribution._result import Attribution

_MOST_POINTS = 400  # of a line: more than a phone has pixels across
_WIDTH, _HEIGHT = 1000, 300  # of a drawing in SVG units, before it is stretched


class DrawnArm(NamedTuple):
    """One program in a chart; its letter also decides its colour, and is not shown if alone."""

    key: str
    label: str
    attribution: Attribution
    is_alone: bool = False


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
        width = _WIDTH * sizes.get(role, 0) / largest
        if width:
            words = f"{role}: {megabytes(sizes[role])} MB"
            piece = {"x": f"{at:.2f}", "width": f"{width:.2f}", "fill": ROLE_COLOURS[role]}
            pieces.append(
                element("g", element("title", words), element("rect", y=0, height=30, **piece))
            )
        at += width
    said = ", ".join(f"{role} {megabytes(sizes[role])} MB" for role in order if sizes.get(role))
    letter = [] if arm.is_alone else [element("b", arm.key, class_=f"letter {arm.key}"), " "]
    return element(
        "div",
        element(
            "p",
            element("span", letter, arm.label, class_="arm"),
            element("span", f"{megabytes(arm.attribution.heap_bytes)} MB", class_="number"),
            class_="bar-label",
        ),
        _svg(pieces, 30, f"{arm.label}: {said}"),
        class_="bar",
    )


def _svg(shapes: Sequence[Markup], height: int, label: str) -> Markup:
    """A drawing that stretches to its place; screen readers get the label."""
    box = {"viewBox": f"0 0 {_WIDTH} {height}", "preserveAspectRatio": "none"}
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


def timeline(arms: Sequence[DrawnArm]) -> Markup:
    """Live bytes of the heap over the schedule; each program is stretched to the whole width."""
    y = axis_from_zero(max(arm.attribution.heap_bytes for arm in arms) / 1e6)
    lines, marks, words = [], [], []
    for arm in arms:
        points = thinned(arm.attribution.timeline)
        last = max(arm.attribution.positions, points[-1][0], 1)
        # The timeline has the positions at which bytes change; the line is over all positions.
        if points[0][0] > 0:
            points.insert(0, (0, 0))
        points.append((last, points[-1][1]))
        x = Axis(last, ())
        lines.append(element("path", d=_steps(points, x, y), class_=f"line {arm.key}"))
        position, size = peak_of(arm.attribution)
        at_peak = f"left:{100 * x.share(position):.2f}%;top:{100 * (1 - y.share(size / 1e6)):.2f}%"
        marks.append(element("span", class_=f"peak {arm.key}", style=at_peak, aria_hidden="true"))
        who = arm.label if arm.is_alone else f"{arm.key} ({arm.label})"
        where = f"position {position} of {last} in the schedule"
        words.append(f"{who} peaks at {megabytes(size)} MB, {where}")
    said = "; ".join(words)
    return element(
        "figure",
        element("figcaption", "What lives in the heap over the program’s schedule, MB"),
        _plot(lines, marks, y, said),
        element(
            "div", element("span", "first instruction"), element("span", "last"), class_="x-ends"
        ),
        element("p", f"{said}. The heap is larger by its fragmentation.", class_="quiet"),
        class_="timeline",
    )


def _plot(shapes: Sequence[Markup], marks: Sequence[Markup], y: Axis, label: str) -> Markup:
    """SVG `shapes`, `_WIDTH` by `_HEIGHT`, under HTML `marks`, with a grid line at each tick."""
    grid, names = [], []
    for tick in y.ticks:
        share = 1 - y.share(tick)
        height = f"{share * _HEIGHT:.2f}"
        grid.append(element("line", x1=0, x2=_WIDTH, y1=height, y2=height, class_="grid"))
        names.append(element("span", f"{tick:,g}", style=f"top:{100 * share:.2f}%"))
    return element(
        "div",
        element("div", names, class_="y-ticks", aria_hidden="true"),
        element("div", _svg([*grid, *shapes], _HEIGHT, label), list(marks), class_="area"),
        class_="plot",
    )


def peak_of(attribution: Attribution) -> tuple[int, int]:
    return max(attribution.timeline, key=lambda point: point[1])


def thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Some 400 points at most: the highest of each group of neighbours, so that no peak is lost."""
    group = math.ceil(len(points) / _MOST_POINTS)
    if group <= 1:
        return list(points)
    parts = [points[at : at + group] for at in range(0, len(points), group)]
    highest = [max(part, key=lambda point: point[1]) for part in parts]
    return list(dict.fromkeys([points[0], *highest, points[-1]]))


def _steps(points: Sequence[tuple[int, int]], x: Axis, y: Axis) -> str:
    """A path of steps, because bytes stay live until the next point."""
    path: list[str] = []
    for position, size in points:
        across, up = _WIDTH * x.share(position), _HEIGHT * (1 - y.share(size / 1e6))
        path.append(f"M{across:.1f} {up:.1f}" if not path else f"H{across:.1f}V{up:.1f}")
    return "".join(path)
