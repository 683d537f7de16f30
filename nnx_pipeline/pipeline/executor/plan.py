"""What each rank does, reads and writes at each tick of a timetable, in numpy.

A rank has two kinds of buffers. What arrives from other ranks waits in the slots of an inbox: the
input of a forward visit until that visit, and the cotangent of its output until the last action
that reads it. What a forward visit keeps for its backward visit waits in the slots of a ring. Slots
are given out by how long each array is needed, so that there are as few as the timetable allows.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.timetable.actions import Action, Actions

# Who runs `enter` and `leave`: all devices together, or the ranks of the first and the last stage.
EndsOn = Literal["all", "own"]


class Branch(NamedTuple):
    """One of the things that a rank may do in a tick.

    What differs between ranks in arrays alone is no other branch: compilers compile each.
    """

    kind: str  # F, B, I or W
    function: int  # which of the stage functions
    enters: bool  # whether the rank itself runs `enter` before a visit, or its derivative after
    leaves: bool  # whether the rank itself runs `leave` after a visit


class Rows(NamedTuple):
    """Integers `[ticks, ranks]`; what an action does not use is 0.

    In the loop they are arrays of JAX, of one tick and one rank.
    """

    branch: Any  # 0 when idle, else 1 + its place in `Plan.branches`
    chunk: Any  # which of the rank's stages
    microbatch: np.ndarray
    take: Any  # the slot of the inbox that the action reads
    keep: Any  # the slot of the ring that it writes or reads
    enters: Any  # 1 for a forward visit of the first stage, which takes what enters
    own: Any  # the slot of the inbox for what the action itself gives
    before: Any  # the slot for what the rank before sends
    after: Any  # the slot for what the rank after sends
    loss: Any  # the slot for the cotangent of the loss of the tick before


class Passage(NamedTuple):
    """When microbatches pass one end of the model, `[ticks]` each."""

    due: Any  # bool, whether one passes in this tick
    microbatch: Any  # its number, or 0


class Passages(NamedTuple):
    """When microbatches enter, leave, and when their cotangents are back at the first stage."""

    enter: Passage
    leave: Passage
    back: Passage


@dataclass(frozen=True)
class Plan:
    """A timetable as arrays that a loop over ticks reads.

    - `rows`: one row per tick and rank.
    - `passages`: what all ranks know of both ends of the model.
    - `ends`: the ranks of the first and of the last stage.
    - `branches`: the different things that ranks do.
    - `inbox`: how many slots an inbox has; one more, the last, takes what nobody needs.
    - `rings`: how many slots a ring has, for each stage function.
    - `stages`: the stages of each rank, in order: `[ranks][chunks]`.
    """

    rows: Rows
    passages: Passages
    ends: tuple[int, int]
    branches: tuple[Branch, ...]
    inbox: int
    rings: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


def make_plan(actions: Actions, functions: Sequence[int], ends_on: EndsOn = "all") -> Plan:
    """The plan of a timetable.

    - `actions`: the timetable.
    - `functions`: for each stage the number of its stage function.
    - `ends_on`: who runs both ends of the model.

    Raises InputError where ranks have different numbers of stages, and where what a stage gives is
    needed by a rank that is neither the same nor a neighbour.
    """
    return _Planning(actions, functions, ends_on).plan()


def forward_only(actions: Actions) -> Actions:
    """The forward visits of a timetable, without steps in which no rank has any."""
    rows = [[a if a and a.kind == "F" else None for a in row] for row in actions.rows]
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    return Actions(tuple(zip(*columns, strict=True)))


class _Wait(NamedTuple):
    """An array that waits in a slot."""

    start: int  # the tick in which it is written
    end: int  # the last tick in which it is read
    reads: tuple[Action, ...]


class _Planning:
    def __init__(self, actions: Actions, functions: Sequence[int], ends_on: EndsOn) -> None:
        self.actions, self.functions, self.own_ends = actions, functions, ends_on == "own"
        self.step = {action: step for _, step, action in actions}
        self.rank = {action.stage: rank for rank, _, action in actions}
        self.ranks, self.last = len(actions.rows), actions.stages - 1
        if len(functions) != actions.stages:
            raise InputError(
                f"the timetable has {actions.stages} stages, and {len(functions)} stage functions "
                "are given; give one for each stage, or one for all"
            )
        self.trains = any(action.kind != "F" for action in self.step)
        self.stages = tuple(
            tuple(stage for stage in sorted(self.rank) if self.rank[stage] == rank)
            for rank in range(self.ranks)
        )
        if len({len(own) for own in self.stages}) > 1:
            raise InputError(
                f"the ranks have the stages {[*map(list, self.stages)]}; each must have as many, "
                "because their weights are one array"
            )

    def plan(self) -> Plan:
        shape = (self.actions.steps, self.ranks)
        rows = Rows(*(np.zeros(shape, np.int32) for _ in Rows._fields))
        inbox = self._give_inbox(rows)
        rings = self._give_rings(rows)
        branches: dict[Branch, int] = {}
        for rank, step, action in self.actions:
            branch = self._branch(action)
            rows.branch[step, rank] = 1 + branches.setdefault(branch, len(branches))
            rows.enters[step, rank] = action.kind == "F" and action.stage == 0
            rows.chunk[step, rank] = self.stages[rank].index(action.stage)
            rows.microbatch[step, rank] = action.microbatch
        passages = Passages(
            self._passage("F", 0), self._passage("F", self.last), self._passage("BI", 0)
        )
        ends = self.rank[0], self.rank[self.last]
        return Plan(rows, passages, ends, tuple(branches), inbox, rings, self.stages)

    def _branch(self, action: Action) -> Branch:
        stage, kind, _ = action
        enters = self.own_ends and stage == 0 and kind in "FBI"
        leaves = self.own_ends and stage == self.last and kind == "F"
        return Branch(kind, self.functions[stage], enters, leaves)

    def _passage(self, kinds: str, stage: int) -> Passage:
        due = np.zeros(self.actions.steps, bool)
        microbatch = np.zeros(self.actions.steps, np.int32)
        for action, step in self.step.items():
            if action.stage == stage and action.kind in kinds:
                due[step], microbatch[step] = True, action.microbatch
        return Passage(due, microbatch)

    def _give_inbox(self, rows: Rows) -> int:
        """Fills in where arrays arrive and are read; returns the number of slots."""
        waits = [(by, self._wait_for(by)) for by in self.step if self._gives(by)]
        of_ranks: list[list[tuple[Action, _Wait]]] = [[] for _ in range(self.ranks)]
        for by, wait in waits:
            of_ranks[self.rank[wait.reads[0].stage]].append((by, wait))
        slots: dict[Action, int] = {}
        count = 0
        for mine in of_ranks:
            found, most = _slots([wait for _, wait in mine])
            slots |= dict(zip((by for by, _ in mine), found, strict=True))
            count = max(count, most)
        for column in (rows.own, rows.before, rows.after, rows.loss):
            column[:] = count  # where what nobody needs goes
        for by, wait in waits:
            to, sender = self.rank[wait.reads[0].stage], self.rank[by.stage]
            self._column(rows, sender, to, by)[wait.start, to] = slots[by]
            for action in wait.reads:
                rows.take[self.step[action], to] = slots[by]
            if by.kind == "F" and by.stage == self.last:
                rows.loss[wait.start + 1, to] = slots[by]
        return count

    def _column(self, rows: Rows, sender: int, to: int, by: Action) -> np.ndarray:
        """The column of what arrives from a sender."""
        if sender == to:
            return rows.own
        if (sender + 1) % self.ranks == to:
            return rows.before
        if (sender - 1) % self.ranks == to:
            return rows.after
        raise InputError(
            f"{by} on rank {sender} gives something to rank {to}, and ranks send to their "
            "neighbours only; place consecutive stages on the same rank or on neighbours"
        )

    def _gives(self, action: Action) -> bool:
        """Whether something waits for what an action gives: activations, or a cotangent."""
        if action.kind == "F":
            return action.stage != self.last or self.trains
        return action.kind in "BI" and action.stage > 0

    def _wait_for(self, by: Action) -> _Wait:
        """How long what an action gives waits, and for which actions."""
        stage, kind, microbatch = by
        if kind == "F" and stage != self.last:
            reads = [Action(stage + 1, "F", microbatch)]
        else:  # the last forward visit gives the cotangent of the loss to its own stage
            to = stage if kind == "F" else stage - 1
            reads = [Action(to, k, microbatch) for k in "BIW"]
        there = tuple(action for action in reads if action in self.step)
        return _Wait(self.step[by], max(self.step[action] for action in there), there)

    def _give_rings(self, rows: Rows) -> tuple[int, ...]:
        """Fills in where forward visits keep what the others read; returns the numbers of slots."""
        counts = [0] * (1 + max(self.functions))
        of_rings: dict[tuple[int, int], list[Action]] = {}
        for action in self.step if self.trains else ():
            if action.kind == "F":
                ring = self.rank[action.stage], self.functions[action.stage]
                of_rings.setdefault(ring, []).append(action)
        for (rank, function), visits in of_rings.items():
            waits = [self._kept(action) for action in visits]
            found, most = _slots(waits)
            counts[function] = max(counts[function], most)
            for action, wait, slot in zip(visits, waits, found, strict=True):
                for each in (action, *wait.reads):
                    rows.keep[self.step[each], rank] = slot
        return tuple(counts)

    def _kept(self, visit: Action) -> _Wait:
        reads = [visit._replace(kind=kind) for kind in "BIW"]
        there = tuple(action for action in reads if action in self.step)
        return _Wait(self.step[visit], max(self.step[action] for action in there), there)


def _slots(waits: Iterable[_Wait]) -> tuple[list[int], int]:
    """A slot for each array, and how many there are.

    A slot is free again in the tick in which it is read last: a tick reads before it writes.
    """
    waits = list(waits)
    order = sorted(range(len(waits)), key=lambda at: waits[at].start)
    found, count = [0] * len(waits), 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for at in order:
        while busy and busy[0][0] <= waits[at].start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        found[at] = heapq.heappop(free)
        heapq.heappush(busy, (waits[at].end, found[at]))
    return found, count
