"""The timetable of a schedule, as text."""

from rich.table import Table
from rich.text import Text

from nnx_pipeline.pipeline.schedule import CircularSchedule


def timetable(schedule: CircularSchedule, *, most: int = 64) -> Table:
    """A row per stage, a column per tick: the microbatch, its repeat as a colour and a letter.

    Repeats are written a, b, c …: `3b` is microbatch 3 in its second round; a dot is a bubble. At
    most `most` ticks are shown, the first and the last of them.
    """
    table = Table(show_edge=False, pad_edge=False, box=None)
    table.add_column("stage", no_wrap=True)
    ticks = _shown(schedule.ticks, most)
    for tick in ticks:
        table.add_column("…" if tick is None else str(tick), justify="right", no_wrap=True)
    for stage in range(schedule.stages):
        cells = [_cell(schedule, tick, stage) for tick in ticks]
        table.add_row(str(stage), *cells)
    return table


def summary(schedule: CircularSchedule) -> str:
    """Ticks and bubble in one line."""
    return (
        f"{schedule.stages} stages, {schedule.microbatches} microbatches, "
        f"{schedule.repeats} repeats: {schedule.ticks} ticks, {schedule.bubble_ticks} of them "
        f"idle on each stage (bubble {schedule.bubble_share:.1%})"
    )


def _shown(ticks: int, most: int) -> list[int | None]:
    if ticks <= most:
        return list(range(ticks))
    half = most // 2
    return [*range(half), None, *range(ticks - half, ticks)]


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def _cell(schedule: CircularSchedule, tick: int | None, stage: int) -> Text:
    if tick is None:
        return Text("…", style="dim")
    work = schedule.work(tick, stage)
    if work is None:
        return Text("·", style="dim")
    letters = _letters(work.repeat) if schedule.repeats > 1 else ""
    return Text(f"{work.microbatch}{letters}", style=_COLOURS[work.repeat % len(_COLOURS)])


def _letters(number: int) -> str:
    """a … z, aa, ab …"""
    text = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) + text
    return text
