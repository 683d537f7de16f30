"""A timetable as arrays of actions of ranks, which can be written and read as CSV.

The form is that of PyTorch's pipelining: one row per rank, one column per step, and in a cell the
number of a stage, a letter and the number of a microbatch, such as `2F0`; an empty cell is idle. F
is a forward visit and B a backward visit, which may be split into I, the gradient of the input, and
W, the gradient of the weights. With S ranks, rank r in repeat p is stage p · S + r.
"""

import csv
import functools
import io
import re
from dataclasses import dataclass

import numpy as np

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline.schedule import CircularSchedule, Schedule, Visits

# What a rank does in a step, and the letters of it.
IDLE, FORWARD, BACKWARD, OF_INPUT, OF_WEIGHTS = range(5)
LETTERS = " FBIW"
_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, eq=False)
class Actions:
    """The actions of all ranks, step by step: int32 `[ranks, steps]` each.

    A stage is counted through all repeats. Stage and microbatch are 0 where the kind is `IDLE`.

    Raises InputError unless every stage is on one rank, visits every microbatch once in each kind
    that occurs, and no action reads what another one gives in the same step or later.
    """

    kind: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray

    def __post_init__(self) -> None:
        if not self.count:
            raise InputError("the timetable has no action; write cells such as 0F0")
        self._check_numbers()
        self._check_places()
        self._check_order()
        idle = np.flatnonzero(~self.kind.any(axis=1))
        if len(idle):
            raise InputError(f"rank {idle[0]} has no action in any step; leave its line out")
        self._check_whole()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Actions) and all(map(np.array_equal, self._tables, other._tables))

    @property
    def ranks(self) -> int:
        return int(self.kind.shape[0])

    @property
    def steps(self) -> int:
        return int(self.kind.shape[1])

    @functools.cached_property
    def stages(self) -> int:
        return 1 + int(self.stage.max())

    @functools.cached_property
    def microbatches(self) -> int:
        return 1 + int(self.microbatch.max())

    @functools.cached_property
    def count(self) -> int:
        return int(np.count_nonzero(self.kind))

    @property
    def trains(self) -> bool:
        return bool((self.kind > FORWARD).any())

    @property
    def idle_share(self) -> float:
        return 1 - self.count / self.kind.size

    @functools.cached_property
    def when(self) -> np.ndarray:
        """The step of each action: int32 `[kinds, stages, microbatches]`, -1 if it is in none."""
        when = np.full((len(LETTERS), self.stages, self.microbatches), -1, np.int32)
        at = (self.kind * self.stages + self.stage) * self.microbatches + self.microbatch
        when.reshape(-1)[at] = np.arange(self.steps)
        when[IDLE] = -1
        return when

    @functools.cached_property
    def rank_of(self) -> np.ndarray:
        rank_of = np.zeros(self.stages, np.int32)
        for rank, (kind, stage) in enumerate(zip(self.kind, self.stage, strict=True)):
            rank_of[stage[kind > IDLE]] = rank
        return rank_of

    @property
    def kept(self) -> tuple[int, ...]:
        """The most visits whose residuals each rank stores, the visit in progress included."""
        begun = np.cumsum(self.kind == FORWARD, axis=1)
        ends = np.isin(self.kind, (BACKWARD, OF_WEIGHTS))
        live = begun - np.cumsum(ends, axis=1) + ends  # what ends now is still there
        return tuple(live.max(axis=1).tolist())

    def cells(self) -> list[list[str]]:
        rows = zip(*(table.tolist() for table in self._tables), strict=True)
        return [
            [text_of_action(*action) if action[0] else "" for action in zip(*row, strict=True)]
            for row in rows
        ]

    def to_json(self) -> dict[str, object]:
        return {
            "ranks": self.ranks,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "steps": self.steps,
            "idle_share": self.idle_share,
            "kept": list(self.kept),
            "actions": [[cell or None for cell in row] for row in self.cells()],
        }

    def to_csv(self) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.cells())
        return out.getvalue()

    @property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.kind, self.stage, self.microbatch

    def _check_numbers(self) -> None:
        if self.stages * self.microbatches <= self.count:
            return
        there = self.kind > IDLE
        stages, visits = np.unique(self.stage[there], return_counts=True)
        stage = _gap(stages)
        if stage == self.stages:
            stage = int(np.argmin(visits))
        self._refuse_part(stage, _gap(self.microbatch[there & (self.stage == stage)]), "")

    def _check_places(self) -> None:
        if np.count_nonzero(self.when >= 0) < self.count:
            rank, step = np.nonzero(self.kind)
            actions = np.stack([table[rank, step] for table in self._tables])
            order = np.lexsort((step, *actions))
            same = (actions[:, order[1:]] == actions[:, order[:-1]]).all(axis=0)
            first = int(np.argmax(same))
            before, after = step[order[[first, first + 1]]].tolist()
            name = text_of_action(*actions[:, order[first]].tolist())
            raise InputError(f"{name} is in the steps {before} and {after}; keep one")
        elsewhere = self.rank_of[self.stage] != np.arange(self.ranks)[:, None]
        wrong = np.argwhere(elsewhere & (self.kind > IDLE))
        if len(wrong):
            stage = self.stage[*wrong[0]]
            raise InputError(
                f"stage {stage} is on the ranks {wrong[0, 0]} and {self.rank_of[stage]}; keep each "
                "stage on one rank"
            )

    def _check_order(self) -> None:
        kinds = (BACKWARD, OF_INPUT)
        self._check_reads(FORWARD, FORWARD, 1)
        for kind in kinds:
            self._check_reads(kind, FORWARD, 0)
        self._check_reads(OF_WEIGHTS, OF_INPUT, 0)
        for kind in kinds:
            self._check_reads(kind, OF_INPUT, -1)

    def _check_reads(self, kind: int, read: int, distance: int) -> None:
        """Refuses an action that is not later than what it reads, `distance` stages before."""
        stages = np.arange(max(0, distance), self.stages + min(0, distance))
        step, before = self.when[kind, stages], self.when[read, stages - distance]
        name = np.full(before.shape, read)
        if distance == -1:
            name = np.where(before < 0, BACKWARD, read)
            before = np.where(before < 0, self.when[BACKWARD, stages - distance], before)
        wrong = (step >= 0) & ((before < 0) | (before >= step))
        if not wrong.any():
            return
        at, microbatch = (int(index[0]) for index in np.nonzero(wrong))
        stage = int(stages[at])
        reader = text_of_action(kind, stage, microbatch)
        needed = text_of_action(int(name[at, microbatch]), stage - distance, microbatch)
        where = f"{reader} in step {step[at, microbatch]} needs {needed}, which is in "
        if before[at, microbatch] < 0:
            raise InputError(f"{where}no step; add it")
        raise InputError(f"{where}step {before[at, microbatch]}; move it to an earlier step")

    def _check_whole(self) -> None:
        there = self.when >= 0
        whole, of_input, of_weights = (there[kind] for kind in (BACKWARD, OF_INPUT, OF_WEIGHTS))
        back = np.where(whole, ~of_input & ~of_weights, of_input & of_weights)
        lacking = np.argwhere(~(there[FORWARD] & (back | (not self.trains))))
        if len(lacking):
            stage, microbatch = lacking[0].tolist()
            letters = [LETTERS[kind] for kind in np.flatnonzero(there[:, stage, microbatch])]
            self._refuse_part(stage, microbatch, ", ".join(letters))

    def _refuse_part(self, stage: int, microbatch: int, visits: str) -> None:
        raise InputError(
            f"stage {stage} has {visits or 'nothing'} of microbatch {microbatch}; it must have "
            + ("F and B, or F, I and W" if self.trains else "F")
        )


def text_of_action(kind: int, stage: int, microbatch: int) -> str:
    """Such as `2F0`."""
    return f"{stage}{LETTERS[kind]}{microbatch}"


def _gap(numbers: np.ndarray) -> int:
    """The smallest number from 0 on that is not among these."""
    different = np.unique(numbers)
    besides = np.flatnonzero(different != np.arange(len(different)))
    return int(besides[0]) if len(besides) else len(different)


def actions_of(schedule: Schedule) -> Actions:
    """The actions of a schedule of this library, every visit in a step of its own."""
    # The backward visits of the circular schedule are those of JAX's derivative: the ticks in
    # reverse. A tick of 1F1B becomes two steps.
    if isinstance(schedule, CircularSchedule):
        forward = _actions(schedule.visits, FORWARD, schedule.stages)
        backward = _actions(schedule.visits, BACKWARD, schedule.stages)
        return Actions(*np.concatenate([forward, backward[..., ::-1]], axis=-1))
    pair = (
        _actions(schedule.forward, FORWARD, schedule.stages),
        _actions(schedule.backward, BACKWARD, schedule.stages),
    )
    table = np.stack(pair, axis=-1).reshape(3, schedule.stages, -1)
    return Actions(*table[..., table[0].any(axis=0)])


def _actions(visits: Visits, kind: int, stages: int) -> np.ndarray:
    """Kind, stage and microbatch of all visits: `[3, ranks, ticks]`."""
    stage = visits.repeat * stages + np.arange(stages)
    table = np.stack([np.full_like(stage, kind), stage, visits.microbatch])
    return np.swapaxes((table * visits.active).astype(np.int32), 1, 2)


def read_csv(text: str) -> Actions:
    """The actions of a CSV file with a line per rank; shorter lines end in idle steps."""
    try:
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise InputError(f"the timetable is not CSV: {error}; separate cells by commas") from error
    table = np.zeros((len(lines), max(map(len, lines), default=0), 3), np.int32)
    for rank, cells in enumerate(lines):
        if cells:
            table[rank, : len(cells)] = [_parsed(cell, rank + 1) for cell in cells]
    return Actions(*np.moveaxis(table, -1, 0))


def _parsed(cell: str, line: int) -> tuple[int, int, int]:
    cell = cell.strip()
    if not cell:
        return IDLE, 0, 0
    match = _CELL.fullmatch(cell)
    if match is None:
        raise InputError(
            f"line {line} of the timetable has the cell {cell!r}; write a stage, one of "
            f"{', '.join(LETTERS.strip())} and a microbatch, such as 2F0, or nothing; sends, "
            "receives and pairs of actions that overlap cannot be read (PyTorch leaves sends and "
            "receives out with format='compute_only')"
        )
    return LETTERS.index(match[2]), int(match[1]), int(match[3])
