"""What lives in the heap over the schedule, stacked by role, for one program or for two.

The chart is an SVG. A script reads the data beside it and shows the largest buffers of the position
that the reader points at; before that, and without the script, those of the peak are shown.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nnx_pipeline.lab._page.charts import (
    HEIGHT,
    SMALLEST,
    WIDTH,
    Axis,
    DrawnArm,
    axis_from_zero,
    plot,
)
from nnx_pipeline.lab._page.markup import Content, Markup, element, fragment
from nnx_pipeline.lab._page.tables import table, what
from nnx_pipeline.lab._report.view.buffers import BufferRow, buffer_rows
from nnx_pipeline.lab._report.view.figures import ROLE_COLOURS, megabytes, role_totals
from nnx_pipeline.lab.attribution._result import History

_LISTED = 12  # positions in the table below a chart
_SMALLEST = 0.002  # of what lives at a position; smaller buffers are not named
_FAR = 2.5  # a limit so many times above the highest peak would flatten the chart


class _Line(NamedTuple):
    """A program with its history over all positions of its schedule, 0 to `last`."""

    arm: DrawnArm
    history: History
    last: int

    @property
    def peak(self) -> int:
        """The index in the history of the peak."""
        return self.history.positions.index(self.arm.attribution.peak_position)


def timeline(arms: Sequence[DrawnArm]) -> Markup | None:
    """A chart for each program, both with one scale; None where no history is known."""
    lines = [
        _Line(arm, history, max(arm.attribution.positions, history.positions[-1] + 1))
        for arm in arms
        if (history := arm.attribution.history)
    ]
    if not lines:
        return None
    highest = max(max(line.history.totals()) for line in lines)
    rooms = [line.arm.room for line in lines if line.arm.room and line.arm.room < _FAR * highest]
    y = axis_from_zero(max([highest, *rooms]) / 1e6)
    roles = list(role_totals([_of_roles(line.history) for line in lines]))
    shown = [_panel(line, [one for one in lines if one is not line], roles, y) for line in lines]
    named = [element("span", _swatch(role), role) for role in roles if role in _seen(lines)]
    ends = element("span", "first instruction"), element("span", "last")
    return element(
        "figure",
        element("figcaption", "What lives in the heap over the program’s schedule, MB"),
        shown,
        element("div", ends, class_="x-ends"),
        element("p", named, class_="roles"),
        _cursor(lines),
        _table(lines),
        element("p", "The heap is larger by its fragmentation.", class_="quiet"),
        class_="timeline",
    )


def _of_roles(history: History) -> dict[str, int]:
    """The bytes of each role, summed over the positions."""
    return dict(zip(history.roles, map(sum, zip(*history.bytes, strict=True)), strict=True))


def _seen(lines: Sequence[_Line]) -> set[str]:
    """The roles that are drawn with more than a thin line at some position."""
    return {
        role
        for line in lines
        for role, sizes in zip(
            line.history.roles, zip(*line.history.bytes, strict=True), strict=True
        )
        if max(sizes) >= SMALLEST
    }


def _panel(line: _Line, others: Sequence[_Line], roles: Sequence[str], y: Axis) -> Markup:
    arm, size = line.arm, line.history.totals()[line.peak]
    position = arm.attribution.peak_position
    outlines = [
        element("path", d=_steps(one, one.history.totals(), y), class_="other") for one in others
    ]
    place = f"left:{100 * position / line.last:.2f}%;top:{100 * (1 - y.share(size / 1e6)):.2f}%"
    mark = element("span", class_=f"peak {arm.key}", style=place, aria_hidden="true")
    where = f"position {position} of {line.last} in the schedule"
    said = f"{arm.label} peaks at {megabytes(size)} MB, {where}"
    other = f"; dashed: {others[0].arm.key}" if others else ""
    return fragment(
        element("p", arm.letter, said, other, ". ", _room(arm, size, y), class_="panel"),
        plot([*_areas(line, roles, y), *outlines, *_limit(arm.room, y)], [mark], y, said),
    )


def _areas(line: _Line, roles: Sequence[str], y: Axis) -> list[Markup]:
    """An area for each role, from zero to the top of its bytes; the highest one is drawn first."""
    areas, heights = [], [0] * len(line.history.positions)
    for role in roles:
        if role in line.history.roles:
            column = line.history.roles.index(role)
            of_role = [row[column] for row in line.history.bytes]
            heights = [low + size for low, size in zip(heights, of_role, strict=True)]
            steps = f"{_steps(line, heights, y)}V{HEIGHT}z"
            area = element("path", d=steps, fill=ROLE_COLOURS[role])
            areas.append(element("g", element("title", role), area))
    return areas[::-1]


def _steps(line: _Line, heights: Sequence[int], y: Axis) -> str:
    """A path of steps, because bytes stay live until the next position; in whole units."""
    path, at, level = [f"M0 {HEIGHT}"], 0, 0
    for position, size in zip(line.history.positions, heights, strict=True):
        across, up = round(WIDTH * position / line.last), round(HEIGHT * y.share(size / 1e6))
        if up != level:
            path.append(f"h{across - at}" * (across > at) + f"v{level - up}")
            at, level = across, up
    return "".join([*path, f"H{WIDTH}"])


def _limit(room: int | None, y: Axis) -> list[Markup]:
    if room is None or not 0 < room / 1e6 <= y.high:
        return []
    up = f"{HEIGHT * (1 - y.share(room / 1e6)):.1f}"
    return [element("line", x1=0, x2=WIDTH, y1=up, y2=up, class_="limit")]


def _room(arm: DrawnArm, peak: int, y: Axis) -> str | None:
    """What the device leaves for the heap, and where that is in the chart."""
    if arm.room is None:
        return None
    if arm.room <= 0:
        return "Arguments, outputs and constants alone are more than the device has."
    where = "the line" if arm.room / 1e6 <= y.high else "above this chart"
    share = f"{peak / arm.room:.1%} of it"
    return (
        f"The device leaves {megabytes(arm.room)} MB for the heap ({where}); the peak is {share}."
    )


def _cursor(lines: Sequence[_Line]) -> Markup:
    """The data for the script, its slider, and what it changes: the buffers of one position."""
    data = json.dumps([_data(line) for line in lines], separators=(",", ":"), ensure_ascii=False)
    return fragment(
        element(
            "label",
            "Position in the schedule: point, drag, or use the arrow keys",
            element("input", type="range", min=0, max=1, value=0, step=1),
            class_="cursor",
            hidden=True,
        ),
        element("div", [_readout(line) for line in lines], class_="readout", aria_live="polite"),
        element("script", Markup(data.replace("<", "\\u003c")), type="application/json"),
    )


def _data(line: _Line) -> dict[str, object]:
    history, arm = line.history, line.arm
    return {
        "key": "" if arm.is_alone else arm.key,
        "last": line.last,
        "peak": line.peak,
        "positions": history.positions,
        "roles": [[role, ROLE_COLOURS[role]] for role in history.roles],
        "bytes": history.bytes,
        "buffers": [
            [history.roles.index(row.role), row.shape or row.operation, row.source, row.operation]
            for row in _rows(history)
        ],
        "largest": [_largest(history, at) for at in range(len(history.positions))],
    }


def _largest(history: History, at: int) -> list[tuple[int, int]]:
    """The largest buffers of a position, without those that are next to nothing of it."""
    least = _SMALLEST * sum(history.bytes[at])
    return [(number, size) for number, size in history.largest[at] if size >= least]


def _rows(history: History) -> Iterator[BufferRow]:
    return (buffer_rows([one])[0] for one in history.buffers)


def _readout(line: _Line) -> Markup:
    history = line.history
    rows, letter = list(_rows(history)), line.arm.letter
    total, position = history.totals()[line.peak], history.positions[line.peak]
    at_peak = zip(history.roles, history.bytes[line.peak], strict=True)
    sizes = sorted(at_peak, key=lambda one: -one[1])
    return element(
        "div",
        element(
            "p",
            letter,
            element("b", f"{megabytes(total)} MB"),
            f" at position {position}, the peak",
        ),
        element(
            "p",
            [
                element("span", _swatch(role), f"{role} {megabytes(size)}")
                for role, size in sizes
                if size and size >= _SMALLEST * total
            ],
            class_="roles",
        ),
        element(
            "ol",
            [_item(rows[number], held) for number, held in _largest(history, line.peak)],
        ),
    )


def _item(row: BufferRow, size: int) -> Markup:
    return element(
        "li",
        element("span", f"{megabytes(size)} MB", class_="number"),
        element("span", _swatch(row.role), row.role),
        element("span", row.shape or row.operation, class_="code"),
        element("span", row.source, class_="quiet code"),
    )


def _swatch(role: str) -> Markup:
    return element("span", class_="swatch", style=f"background:{ROLE_COLOURS[role]}")


def _table(lines: Sequence[_Line]) -> Markup:
    cells: list[tuple[Content, ...]] = []
    for line in lines:
        history, rows = line.history, list(_rows(line.history))
        totals, step = history.totals(), -(-len(history.positions) // _LISTED)
        for at in sorted({*range(0, len(totals), step), line.peak}):
            name = f"{history.positions[at]}" + ", the peak" * (at == line.peak)
            largest = what(rows[history.largest[at][0][0]]) if history.largest[at] else None
            cells.append(([line.arm.letter, name], largest, megabytes(totals[at])))
    head = ("position", "largest there", "MB")
    shown = table(None, head, cells, numbers=1)
    return element("details", element("summary", "Some positions as a table"), shown)
