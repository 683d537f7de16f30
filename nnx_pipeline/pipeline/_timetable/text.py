"""Draws the timetable of a schedule as text."""

import functools
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline._timetable.actions import Actions
from nnx_pipeline.pipeline.schedule import CircularSchedule, Schedule, ScheduledVisit, Visits


class Lane(NamedTuple):
    """One kind of work, such as forward visits; drawings give it one row within each stage."""

    name: str
    sign: str
    ticks: range  # the ticks that have such work at all; elsewhere no stage counts as idle
    visits: Visits


def lanes(schedule: Schedule) -> tuple[Lane, ...]:
    if isinstance(schedule, CircularSchedule):
        return (Lane("work", "", range(schedule.ticks), schedule.visits),)
    before, both, after = schedule.phases
    return (
        Lane("forward", "F", range(before.start, both.stop), schedule.forward),
        Lane("backward", "B", range(both.start, after.stop), schedule.backward),
    )


def phases(schedule: Schedule) -> list[tuple[str, str, range]]:
    """Name, sign and ticks of each phase with at least one tick; only 1F1B has phases."""
    if isinstance(schedule, CircularSchedule):
        return []
    names = (("forward only", "F"), ("both", "FB"), ("backward only", "B"))
    parts = zip(names, schedule.phases, strict=True)
    return [(name, sign, ticks) for (name, sign), ticks in parts if ticks]


def summary(schedule: Schedule) -> str:
    stages, repeats = schedule.stages, schedule.repeats
    sizes = f"{counted(stages, 'stage')}, {counted(schedule.microbatches, 'microbatch')}"
    if isinstance(schedule, CircularSchedule):
        return (
            f"{sizes}, {counted(repeats, 'repeat')}: {counted(schedule.ticks, 'tick')}, "
            f"{schedule.bubble_ticks} of them idle on each stage "
            f"(bubble {schedule.bubble_share:.1%})"
        )
    if repeats == 1:
        kind, unit = "one forward one backward", "microbatches"
        sum_of_ticks = f"{schedule.microbatches} + 2 · {stages - 1}"
    else:
        kind, unit = f"{repeats} repeats, interleaved one forward one backward", "visits"
        sum_of_ticks = f"{schedule.microbatches} · {repeats} + {stages} · {repeats + 1} - 2"
    return (
        f"{sizes}, {kind}: {schedule.ticks} ticks = {sum_of_ticks} "
        f"(bubble {schedule.bubble_share:.1%}), ring slots per stage: {schedule.ring_slots} "
        f"({unit} kept at most)"
    )


@dataclass(frozen=True)
class Timetable:
    """A table to print, with a row per stage and a column per tick, at most `most` of them.

    A cell has the number of the microbatch, and its repeat as a colour and a letter: `3b` is
    microbatch 3 in its second repeat. With 1F1B a stage has two rows, such as `F3` above `B1`. A
    dot is a bubble.
    """

    schedule: Schedule
    most: int = 64

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        schedule, parts, kinds = self.schedule, phases(self.schedule), lanes(self.schedule)
        highest = ScheduledVisit(schedule.microbatches - 1, schedule.repeats - 1)
        width = max(len(_label(schedule, lane, highest)) for lane in kinds)
        borders = 2 * max(0, len(parts) - 1)
        room = _room(options.max_width - len("stage ") - borders, schedule.ticks, width)
        columns = list(_with_borders(_shown(schedule.ticks, min(room, self.most)), schedule))
        table = _table("stage", columns)
        if parts:
            signs = {tick: sign for _, sign, ticks in parts for tick in ticks}
            table.add_row("phase", *_each(columns, lambda tick: Text(signs[tick], style="dim")))
        for stage in range(schedule.stages):
            for index, lane in enumerate(kinds):
                cells = _each(columns, functools.partial(_cell, schedule, lane, stage))
                table.add_row("" if index else str(stage), *cells)
        yield table


def _room(width: int, steps: int, cell: int) -> int:
    """How many steps fit, each in a column of at least so many letters."""
    columns = width // (max(cell, len(str(steps))) + 1)
    # If steps are left out, one column is needed for the dots in their place.
    return steps if steps <= columns else max(2, columns - 1)


def _table(first: str, columns: Sequence[int | str]) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    return table


def legend(schedule: Schedule) -> str:
    highest = min(3, schedule.microbatches - 1)
    if isinstance(schedule, CircularSchedule):
        if schedule.repeats > 1:
            return f"{highest}b: microbatch {highest} in its second repeat; ·: bubble"
        return f"{highest}: microbatch {highest}; ·: bubble"
    lower, letter, second = min(1, highest), "", ""
    if schedule.repeats > 1:
        letter, second = "b", " in its second repeat"
    marked = ", ".join(f"{sign} {name} ({span(ticks)})" for name, sign, ticks in phases(schedule))
    return (
        f"F{highest}{letter}: microbatch {highest} forward{second}; "
        f"B{lower}{letter}: microbatch {lower} backward{second}; ·: bubble; phases: {marked}"
    )


def summary_of_actions(actions: Actions) -> str:
    kept = ", ".join(map(str, actions.kept))
    return (
        f"{actions.ranks} ranks, {actions.stages} stages, {actions.microbatches} microbatches: "
        f"{actions.steps} steps ({actions.idle_share:.1%} idle); each rank keeps at most {kept} "
        "visits"
    )


@dataclass(frozen=True)
class ActionsTable:
    actions: Actions

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        steps, width = self.actions.steps, options.max_width - len("rank ")
        # All stages have all microbatches, and so the longest numbers meet in a cell.
        longest = f"{self.actions.stages - 1}F{self.actions.microbatches - 1}"
        columns = _shown(steps, _room(width, steps, len(longest)))
        table = _table("rank", columns)
        for rank, cells in enumerate(self.actions.cells()):
            table.add_row(str(rank), *_each(columns, functools.partial(_action, cells)))
        yield table


def _each(columns: Sequence[int | str], cell: Callable[[int], Text]) -> list[Text]:
    """The cells of a row, with borders and dots as they are."""
    return [Text(at, style="dim") if isinstance(at, str) else cell(at) for at in columns]


def _action(cells: list[str], step: int) -> Text:
    letter = cells[step].strip(string.digits)
    style = _LANE_COLOURS.get(letter, "magenta") if letter else "dim"
    return Text(cells[step] or "·", style=style)


_BORDER, _LEFT_OUT = "│", "…"


def _shown(ticks: int, most: int) -> list[int | str]:
    if ticks <= most:
        return list(range(ticks))
    half = most // 2
    return [*range(half), _LEFT_OUT, *range(ticks - half, ticks)]


def _with_borders(columns: list[int | str], schedule: Schedule) -> Iterator[int | str]:
    starts = [ticks.start for _, _, ticks in phases(schedule)][1:]
    for column in columns:
        if column in starts:
            yield _BORDER
        yield column


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_LANE_COLOURS = {"F": "cyan", "B": "yellow"}


def _cell(schedule: Schedule, lane: Lane, stage: int, tick: int) -> Text:
    if tick not in lane.ticks:
        return Text("")
    work = lane.visits.at(tick, stage)
    if work is None:
        return Text("·", style="dim")
    colour = _LANE_COLOURS.get(lane.sign) or _COLOURS[work.repeat % len(_COLOURS)]
    return Text(_label(schedule, lane, work), style=colour)


def _label(schedule: Schedule, lane: Lane, work: ScheduledVisit) -> str:
    return f"{lane.sign}{work.microbatch}{letters(work.repeat) if schedule.repeats > 1 else ''}"


def letters(number: int) -> str:
    """The letters of a repeat, counted from 0: a … z, aa, ab …"""
    text = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) + text
    return text


def span(numbers: range) -> str:
    """Such as 0–7."""
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def layer_times(stack: Stack, schedule: Schedule) -> int:
    """How long all ticks with work of one direction take, in the time of one layer."""
    if isinstance(schedule, CircularSchedule):
        return int(schedule.depth_at_ticks(stack.depths).sum())
    return (schedule.visits + schedule.bubble_ticks) * stack.per_stage


def busy_shares(stack: Stack, schedule: Schedule) -> list[float]:
    """The fraction of its time in which each stage works on layers; the rest is bubble, padding
    and waiting for stages with more layers."""
    of_stages = np.reshape(stack.of_visits, (stack.repeats, stack.stages)).sum(axis=0)
    time = layer_times(stack, schedule)
    return [int(layers) * schedule.microbatches / time for layers in of_stages]


def idle_share(stack: Stack, schedule: Schedule) -> float:
    """The fraction of the stages' time in which they idle or compute on padding."""
    return 1 - sum(busy_shares(stack, schedule)) / stack.stages


def summary_of_layers(stack: Stack, schedule: Schedule) -> str:
    visit = counted(stack.per_stage, "layer")
    if not stack.padding:
        return f"{counted(stack.layers, 'layer')}: {visit} per visit of a stage, no padding"
    places, verb = stack.layers + stack.padding, "is" if stack.padding == 1 else "are"
    time, less = layer_times(stack, schedule), ""
    whole = schedule.ticks * stack.per_stage
    if isinstance(schedule, CircularSchedule) and time < whole:
        less = f"; ticks take {time} layer times in the place of {whole}"
    return (
        f"{counted(stack.layers, 'layer')}: {visit} per visit of a stage; {stack.padding} of "
        f"{places} places {verb} padding, so that bubble and padding take "
        f"{idle_share(stack, schedule):.1%} of the stages' time{less}"
    )


def layers_table(stack: Stack, schedule: Schedule) -> Table:
    """A row per stage: the layers of each visit, and the share of its time that they take."""
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    for repeat in range(stack.repeats):
        name = "layers" if stack.repeats == 1 else f"layers in repeat {letters(repeat)}"
        table.add_column(name, no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    busy = busy_shares(stack, schedule)
    for stage, visits in enumerate(_of_stages(stack)):
        cells = [_visit(numbers, stack) for numbers in visits]
        table.add_row(str(stage), *cells, f"{busy[stage]:.1%}")
    return table


def layers_to_json(stack: Stack, schedule: Schedule) -> dict[str, object]:
    return {
        "layers": stack.layers,
        "layers_per_visit": stack.per_stage,
        "padding": stack.padding,
        "layer_times": layer_times(stack, schedule),
        "idle_share": idle_share(stack, schedule),
        "busy_share_of_stage": busy_shares(stack, schedule),
        "of_stage": [[[*numbers] for numbers in visits] for visits in _of_stages(stack)],
    }


def _of_stages(stack: Stack) -> list[list[range]]:
    def visit(stage: int, repeat: int) -> range:
        number = repeat * stack.stages + stage
        first = int(stack.starts[number])
        return range(first, first + stack.of_visits[number])

    return [
        [visit(stage, repeat) for repeat in range(stack.repeats)] for stage in range(stack.stages)
    ]


def _visit(numbers: range, stack: Stack) -> Text:
    padding = stack.per_stage - len(numbers)
    text = Text(span(numbers) if numbers else "")
    if padding:
        text.append(f"{' + ' if numbers else ''}{padding} padding", style="dim")
    return text
