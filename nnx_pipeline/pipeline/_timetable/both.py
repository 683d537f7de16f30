"""Draws the circular schedule above 1F1B: both passes of each, and what is kept between them."""

from typing import TYPE_CHECKING

import numpy as np

from nnx_pipeline.lab._files import ink_on
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline._timetable.actions import BACKWARD, FORWARD, Actions, actions_of
from nnx_pipeline.pipeline._timetable.figure import BUBBLE, LANE_COLOURS
from nnx_pipeline.pipeline.schedule import SCHEDULE_NAMES, make_schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {FORWARD: LANE_COLOURS["F"], BACKWARD: LANE_COLOURS["B"]}
_LINES = ("#202020", "#009e73")
_MOST_NUMBERS = 1500  # more cells are too small for a number


def make_both(*, stages: int, microbatches: int, repeats: int) -> "Figure":
    """A figure with the actions of both schedules, and below them the live microbatches of each.

    A microbatch is live on a stage from its forward visit to its backward visit: for so long the
    stage keeps what the backward visit needs. Drawn is the stage that keeps most. All columns are
    equally wide, though a backward visit takes about twice as long as a forward one.
    """
    from matplotlib.figure import Figure

    sizes = {"stages": stages, "microbatches": microbatches, "repeats": repeats}
    found = {name: actions_of(make_schedule(name, **sizes)) for name in SCHEDULE_NAMES}
    steps = max(actions.steps for actions in found.values())
    width = min(max(0.3 * steps + 1.5, 8.0), 20.0)
    rows = min(max(0.3 * stages, 1.2), 6.0)
    figure = Figure(figsize=(width, 2 * rows + 4.2), layout="constrained")
    heights = [*[rows] * len(found), 1.8]
    *panels, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, (name, actions) in zip(panels, found.items(), strict=True):
        most = int(live(actions).max())
        idle = f"{actions.idle_share:.1%} of all steps idle"
        axes.set_title(
            f"{name}: {actions.steps} steps, {idle}, at most {most} live microbatches per stage",
            loc="left",
            fontsize=10,
        )
        _draw(axes, actions)
    for colour, (name, actions) in zip(_LINES, found.items(), strict=True):
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
    _legend(figure)
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
    numbered = actions.ranks * actions.steps <= _MOST_NUMBERS
    for rank in range(actions.ranks):
        kinds = actions.kind[rank]
        colours = [_COLOURS.get(int(kind), BUBBLE) for kind in kinds]
        axes.broken_barh(
            [(step - 0.5, 1) for step in range(actions.steps)],
            (rank - 0.45, 0.9),
            facecolors=colours,
            edgecolors="white",
            linewidth=0.5,
        )
        for step in map(int, np.flatnonzero(kinds)) if numbered else ():
            axes.text(
                step,
                rank,
                str(actions.microbatch[rank, step]),
                ha="center",
                va="center_baseline",
                fontsize=7,
                color=ink_on(colours[step]),
            )


def _legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    named = {"forward": _COLOURS[FORWARD], "backward": _COLOURS[BACKWARD], "idle": BUBBLE}
    handles = [Patch(facecolor=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
