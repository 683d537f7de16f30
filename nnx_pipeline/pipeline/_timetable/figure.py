"""Draws the timetable of a schedule as a picture; matplotlib is imported only when needed."""

import itertools
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nnx_pipeline.lab._files import check_picture, ink_on, save_figure
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline._timetable.actions import BACKWARD, FORWARD, Actions, actions_of
from nnx_pipeline.pipeline._timetable.text import Lane, lanes, phases, span, summary
from nnx_pipeline.pipeline.schedule import SCHEDULE_NAMES, CircularSchedule, Schedule, make_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

BUBBLE = "#e2e2e2"
# Okabe and Ito's colours, which colour-blind readers can tell apart. With more repeats than these
# colours, repeats go from dark to light instead.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
LANE_COLOURS = {"F": _COLOURS[0], "B": _COLOURS[1]}
_PHASE_BORDER = "#202020"
_MOST_IN_LEGEND = 16
_ROW = 0.9  # height of a stage's row, as a fraction of the distance between two stages
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 9.0  # points
_LETTER_WIDTH, _LETTER_HEIGHT = 0.64, 1.25  # as fractions of the font size, with a margin
_MOST_NUMBERS = 3000  # more would take seconds to draw, and would be too many to read


def write_picture(schedule: Schedule, path: str) -> None:
    """Writes the whole file or none; the suffix, .png or .svg, chooses the format."""
    check_picture(path)
    save_figure(make_figure(schedule), path)


def make_figure(schedule: Schedule) -> "Figure":
    from matplotlib.figure import Figure

    rows = schedule.stages * len(lanes(schedule))
    width = min(max(0.36 * schedule.ticks + 1.2, 8.0), 20.0)
    height = min(max(0.28 * rows + 1.9, 3.2), 16.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.5, schedule.ticks - 0.5)
    axes.set_ylim(schedule.stages - 0.5, -0.5)  # stage 0 on top
    axes.set_xlabel("tick (in the cells: microbatch)")
    axes.set_ylabel("stage")
    for axis, count in ((axes.xaxis, schedule.ticks), (axes.yaxis, schedule.stages)):
        numbers = range(0, count, _step(count, most=40))
        axis.set_ticks(numbers, [str(number) for number in numbers])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    figure.suptitle(_title(schedule, int(width * 11)), fontsize=10.5, fontweight="bold")
    handles = _legend(schedule)
    columns = min(len(handles), max(3, int(width / 1.1)))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )
    _mark_phases(axes, schedule)
    # The size of the cells is known only after everything around them has been laid out.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # else it would measure every number in every cell
    _fill(axes, schedule)
    return figure


def _step(count: int, *, most: int) -> int:
    """The smallest step of 1, 2, 5, 10, 20 … that labels at most `most` of `count` numbers."""
    steps = (digit * 10**zeros for zeros in itertools.count() for digit in (1, 2, 5))
    return int(next(step for step in steps if step * most >= count))


def _title(schedule: Schedule, letters: int) -> str:
    text = summary(schedule)
    parts = [text] if len(text) <= letters else text.replace(": ", ":\n", 1).splitlines()
    return "\n".join(textwrap.fill(part, letters) for part in parts)


def _legend(schedule: Schedule) -> "list[Patch]":
    from matplotlib.patches import Patch

    bubble = Patch(facecolor=BUBBLE, label="bubble")
    later = ", lighter in later repeats" if schedule.repeats > 1 else ""
    if not isinstance(schedule, CircularSchedule):
        return [
            Patch(facecolor=LANE_COLOURS["F"], label=f"forward (upper half){later}"),
            Patch(facecolor=LANE_COLOURS["B"], label=f"backward (lower half){later}"),
            bubble,
            Patch(facecolor="white", edgecolor="#b0b0b0", label="no such work in this phase"),
        ]
    if schedule.repeats == 1:
        return [Patch(facecolor=_COLOURS[0], label="work"), bubble]
    named = range(0, schedule.repeats, _step(schedule.repeats, most=_MOST_IN_LEGEND))
    return [
        *(Patch(facecolor=_repeat_colour(r, schedule.repeats), label=f"repeat {r}") for r in named),
        bubble,
    ]


def _colour(lane: Lane, repeat: int, repeats: int) -> str:
    from matplotlib.colors import to_hex, to_rgb

    colour = LANE_COLOURS.get(lane.sign)
    if colour is None:
        return _repeat_colour(repeat, repeats)
    white = 0.65 * repeat / max(repeats - 1, 1)
    red, green, blue = (white + (1 - white) * channel for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def _repeat_colour(repeat: int, repeats: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if repeats <= len(_COLOURS):
        return _COLOURS[repeat]
    return to_hex(colormaps["viridis"](0.1 + 0.85 * repeat / (repeats - 1)))


def _mark_phases(axes: "Axes", schedule: Schedule) -> None:
    parts = phases(schedule)
    for index, (name, _, ticks) in enumerate(parts):
        left, right = ticks.start - 0.5, ticks.stop - 0.5
        if index:
            axes.axvline(left, color=_PHASE_BORDER, linewidth=1.4, linestyle="--", zorder=3)
        # The outer phases may be narrower than their names, which then extend into the middle one.
        align, x = "center", (left + right) / 2
        if len(parts) == 3 and index != 1:
            align, x = ("left", left) if index == 0 else ("right", right)
        axes.annotate(
            name,
            (x, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha=align,
            fontsize=9,
        )


class _Size(NamedTuple):
    """In points."""

    width: float
    height: float


class _Bar(NamedTuple):
    ticks: range
    colour: str
    microbatches: range  # one per tick; empty in a bubble


def _bars(schedule: Schedule, lane: Lane, stage: int) -> Iterator[_Bar]:
    def repeat(tick: int) -> int | None:
        work = lane.visits.at(tick, stage)
        return None if work is None else work.repeat

    for key, group in itertools.groupby(lane.ticks, key=repeat):
        members = list(group)
        ticks = range(members[0], members[-1] + 1)
        if key is None:
            yield _Bar(ticks, BUBBLE, range(0))
            continue
        first = lane.visits.at(ticks[0], stage)
        assert first is not None, "a bar is made of work"
        colour = _colour(lane, key, schedule.repeats)
        yield _Bar(ticks, colour, range(first.microbatch, first.microbatch + len(ticks)))


def _fill(axes: "Axes", schedule: Schedule) -> None:
    """Draws cells with the numbers of their microbatches, or whole bars if there is no room."""
    kinds = lanes(schedule)
    height = _ROW / len(kinds)
    box = axes.get_window_extent()
    points = 72 / axes.figure.dpi
    cell = _Size(
        box.width * points / schedule.ticks, box.height * points / schedule.stages * height
    )
    numbers = schedule.stages * len(kinds) * schedule.microbatches * schedule.repeats
    size = _font_size(str(schedule.microbatches - 1), cell) if numbers <= _MOST_NUMBERS else None
    for stage, (index, lane) in itertools.product(range(schedule.stages), enumerate(kinds)):
        top = stage - _ROW / 2 + index * height
        bars = list(_bars(schedule, lane, stage))
        axes.broken_barh(
            [(bar.ticks.start - 0.5, len(bar.ticks)) for bar in bars],
            (top, height),
            facecolors=[bar.colour for bar in bars],
            edgecolors="white",
            linewidth=0.6,
        )
        for bar in bars:
            _number(axes, bar, top + height / 2, cell, size)
    if size is not None:
        inner = [tick + 0.5 for tick in range(schedule.ticks - 1)]
        axes.vlines(inner, -0.5, schedule.stages - 0.5, colors="white", linewidth=0.8)


def _number(axes: "Axes", bar: _Bar, y: float, cell: _Size, size: float | None) -> None:
    if size is not None:
        for tick, microbatch in zip(bar.ticks, bar.microbatches, strict=False):
            _write(axes, bar.colour, tick, y, str(microbatch), size)
    if size is not None or not bar.microbatches:
        return
    text = span(bar.microbatches)
    # A space on either side keeps the numbers of neighbouring bars apart.
    size = _font_size(f" {text} ", _Size(cell.width * len(bar.ticks), cell.height))
    if size is not None:
        _write(axes, bar.colour, (bar.ticks[0] + bar.ticks[-1]) / 2, y, text, size)


def _write(axes: "Axes", behind: str, x: float, y: float, text: str, size: float) -> None:
    ink = ink_on(behind)
    axes.text(x, y, text, color=ink, fontsize=size, ha="center", va="center_baseline")


def _font_size(text: str, room: _Size) -> float | None:
    """The font size in points at which a text fits; None if it is too small to read."""
    size = min(
        room.width / (_LETTER_WIDTH * len(text)), room.height / _LETTER_HEIGHT, _LARGEST_FONT
    )
    return size if size >= _SMALLEST_FONT else None


_KIND_COLOURS = {FORWARD: LANE_COLOURS["F"], BACKWARD: LANE_COLOURS["B"]}
_LINES = ("#202020", "#009e73")
_MOST_NUMBERS_OF_BOTH = 1500  # more cells are too small for a number


def make_both(*, stages: int, microbatches: int, repeats: int) -> "Figure":
    """The actions of both schedules, and below them the live microbatches of each."""
    # A microbatch is live on a stage from its forward visit to its backward visit: for so long the
    # stage keeps what the backward visit needs. All columns are equally wide, though a backward
    # visit takes about twice as long as a forward one.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sizes = {"stages": stages, "microbatches": microbatches, "repeats": repeats}
    timetables = {name: actions_of(make_schedule(name, **sizes)) for name in SCHEDULE_NAMES}
    steps = max(actions.steps for actions in timetables.values())
    width = min(max(0.3 * steps + 1.5, 8.0), 20.0)
    rows = min(max(0.3 * stages, 1.2), 6.0)
    figure = Figure(figsize=(width, 2 * rows + 4.2), layout="constrained")
    heights = [*[rows] * len(timetables), 1.8]
    *panels, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, (name, actions) in zip(panels, timetables.items(), strict=True):
        most = int(live(actions).max())
        idle = f"{actions.idle_share:.1%} of all steps idle"
        axes.set_title(
            f"{name}: {actions.steps} steps, {idle}, at most {most} live microbatches per stage",
            loc="left",
            fontsize=10,
        )
        _draw(axes, actions)
    for colour, (name, actions) in zip(_LINES, timetables.items(), strict=True):
        line = live(actions).max(axis=0)
        below.step(range(len(line)), line, where="mid", label=name, color=colour)
    below.set_title("live microbatches on the stage that keeps most", loc="left", fontsize=10)
    below.set_xlabel("step: one visit, forward or backward")
    below.set_ylim(bottom=0)
    below.spines[["top", "right"]].set_visible(False)
    below.legend(fontsize=9, frameon=False)
    numbers = [(stages, "stage"), (microbatches, "microbatch"), (repeats, "repeat")]
    title = ", ".join(counted(number, what) for number, what in numbers)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    named = {"forward": _KIND_COLOURS[FORWARD], "backward": _KIND_COLOURS[BACKWARD], "idle": BUBBLE}
    handles = [Patch(facecolor=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def live(actions: Actions) -> np.ndarray:
    """How many microbatches each rank keeps after each step: `[ranks, steps]`."""
    change = (actions.kind == FORWARD).astype(int) - (actions.kind == BACKWARD)
    return np.cumsum(change, axis=1)


def _draw(axes: "Axes", actions: Actions) -> None:
    axes.set_ylabel("stage")
    axes.set_yticks(range(actions.ranks))
    axes.set_ylim(actions.ranks - 0.5, -0.5)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    numbered = actions.ranks * actions.steps <= _MOST_NUMBERS_OF_BOTH
    for rank in range(actions.ranks):
        kinds = actions.kind[rank]
        colours = [_KIND_COLOURS.get(int(kind), BUBBLE) for kind in kinds]
        axes.broken_barh(
            [(step - 0.5, 1) for step in range(actions.steps)],
            (rank - 0.45, 0.9),
            facecolors=colours,
            edgecolors="white",
            linewidth=0.5,
        )
        for step in map(int, np.flatnonzero(kinds)) if numbered else ():
            _write(axes, colours[step], step, rank, str(actions.microbatch[rank, step]), 7)
