"""A timetable as actions of ranks, which can be written and read as CSV.

The form is that of PyTorch's pipelining: one row per rank, one column per step, and in a cell the
number of a stage, a letter and the number of a microbatch, such as `2F0`; an empty cell is idle. F
is a forward visit and B a backward visit, which may be split into I, the gradient of the input, and
W, the gradient of the weights. Stages are counted through all repeats: with S ranks, rank r in
repeat p is stage p · S + r.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.schedule import CircularSchedule, Schedule, Visits

KINDS = {
    "F": "forward visit",
    "B": "backward visit",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}
_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """What a rank does in one step.

    - `stage`: counted through all repeats.
    - `kind`: one of `KINDS`.
    - `microbatch`: its number.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Actions:
    """The actions of all ranks, step by step.

    - `rows`: one tuple per rank, all of one length; None where the rank is idle.

    Raises InputError unless every stage is on one rank, visits every microbatch once in each kind
    that occurs, and no action reads what another one gives in the same step or later.
    """

    rows: tuple[tuple[Action | None, ...], ...]

    def __post_init__(self) -> None:
        steps = self._steps()
        stages = {action.stage: rank for rank, _, action in self}
        last = max(stages)
        for rank, step, action in self:
            if stages[action.stage] != rank:
                raise InputError(
                    f"stage {action.stage} is on the ranks {stages[action.stage]} and {rank}; keep "
                    "each stage on one rank"
                )
            for before in _reads(action, steps, last=last):
                if before not in steps:
                    raise InputError(
                        f"{action} in step {step} needs {before}, which is in no step; add it"
                    )
                if steps[before] >= step:
                    raise InputError(
                        f"{action} in step {step} needs {before}, which is in step "
                        f"{steps[before]}; move it to an earlier step"
                    )
        for rank, row in enumerate(self.rows):
            if not any(row):
                raise InputError(f"rank {rank} has no action in any step; leave its line out")
        self._check_whole(steps)

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Rank, step and action of every cell that is not idle."""
        for rank, row in enumerate(self.rows):
            for step, action in enumerate(row):
                if action is not None:
                    yield rank, step, action

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.rows[0])

    @property
    def stages(self) -> int:
        """The number of stages, counted through all repeats."""
        return 1 + max(action.stage for _, _, action in self)

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(action.microbatch for _, _, action in self)

    @property
    def idle_share(self) -> float:
        """The share of cells that are idle, where every action takes one step."""
        return 1 - sum(1 for _ in self) / (self.steps * len(self.rows))

    @property
    def kept(self) -> tuple[int, ...]:
        """For each rank, of how many visits it keeps something at most, with the visit at hand.

        It keeps that from the forward visit to the backward visit, or where this is split to the
        gradient of the weights.
        """
        return tuple(map(_most_kept, self.rows))

    def to_json(self) -> dict[str, Any]:
        """The numbers and the cells, null where a rank is idle."""
        return {
            "ranks": len(self.rows),
            "stages": self.stages,
            "microbatches": self.microbatches,
            "steps": self.steps,
            "idle_share": self.idle_share,
            "kept": list(self.kept),
            "actions": [[action and str(action) for action in row] for row in self.rows],
        }

    def to_csv(self) -> str:
        """The text of a CSV file."""
        out = io.StringIO()
        rows = [["" if action is None else str(action) for action in row] for row in self.rows]
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()

    def _steps(self) -> dict[Action, int]:
        steps: dict[Action, int] = {}
        for _, step, action in self:
            if action in steps:
                raise InputError(f"{action} is in the steps {steps[action]} and {step}; keep one")
            steps[action] = step
        if not steps:
            raise InputError("the timetable has no action; write cells such as 0F0")
        return steps

    def _check_whole(self, steps: dict[Action, int]) -> None:
        """Raises InputError unless all microbatches pass all stages, forward and perhaps back."""
        trains = any(action.kind != "F" for action in steps)
        stages, microbatches = self.stages, self.microbatches
        for stage in range(stages):
            for microbatch in range(microbatches):
                kinds = "".join(k for k in KINDS if Action(stage, k, microbatch) in steps)
                if kinds not in (("FB", "FIW") if trains else ("F",)):
                    found = ", ".join(kinds) or "nothing"
                    raise InputError(
                        f"stage {stage} has {found} of microbatch {microbatch}; it must have "
                        + ("F and B, or F, I and W" if trains else "F")
                    )


def _reads(action: Action, steps: dict[Action, int], *, last: int) -> list[Action]:
    """The actions whose results an action reads.

    - `steps`: the step of every action.
    - `last`: the last stage, whose backward visit begins with the loss.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    forward = Action(stage, "F", microbatch)
    if stage == last:
        return [forward]
    whole, split = (Action(stage + 1, kind, microbatch) for kind in "BI")
    return [forward, split if split in steps else whole]


def _most_kept(row: tuple[Action | None, ...]) -> int:
    kept = most = 0
    for action in row:
        if action is not None:
            kept += action.kind == "F"
            most = max(most, kept)
            kept -= action.kind in "BW"
    return most


def actions_of(schedule: Schedule) -> Actions:
    """The actions of a schedule of this library, every visit in a step of its own.

    Of the circular schedule the backward visits are those of JAX's derivative: the ticks in
    reverse. A tick of 1F1B becomes two steps, its forward visits and its backward visits.
    """
    if isinstance(schedule, CircularSchedule):
        forward = _cells(schedule.visits, "F", schedule.stages)
        columns = forward + _cells(schedule.visits, "B", schedule.stages)[::-1]
    else:
        pairs = zip(
            _cells(schedule.forward, "F", schedule.stages),
            _cells(schedule.backward, "B", schedule.stages),
            strict=True,
        )
        columns = [column for pair in pairs for column in pair if any(column)]
    return Actions(tuple(zip(*columns, strict=True)))


def _cells(visits: Visits, kind: str, stages: int) -> list[list[Action | None]]:
    """The actions of all ranks, tick by tick."""
    table = []
    for tick in range(len(visits.active)):
        works = [visits.at(tick, rank) for rank in range(stages)]
        table.append(
            [
                None if work is None else Action(work.repeat * stages + rank, kind, work.microbatch)
                for rank, work in enumerate(works)
            ]
        )
    return table


def read_csv(text: str) -> Actions:
    """The actions of a CSV file; raises InputError for a cell or an order that is none.

    - `text`: one line per rank. Shorter lines end in idle steps.
    """
    rows = [[_parsed(cell, line) for cell in row] for line, row in enumerate(_lines(text), start=1)]
    steps = max(map(len, rows), default=0)
    return Actions(tuple((*row, *[None] * (steps - len(row))) for row in rows))


def _lines(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"the timetable is not CSV: {error}; separate cells by commas") from error


def _parsed(cell: str, line: int) -> Action | None:
    cell = cell.strip()
    if not cell:
        return None
    found = _CELL.fullmatch(cell)
    if found is None:
        raise InputError(
            f"line {line} of the timetable has the cell {cell!r}; write a stage, one of "
            f"{', '.join(KINDS)} and a microbatch, such as 2F0, or nothing; lines with sends and "
            "receives cannot be read"
        )
    return Action(int(found[1]), found[2], int(found[3]))
