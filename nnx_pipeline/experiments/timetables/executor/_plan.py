"""What each rank does, reads and writes at each tick of a timetable, in numpy.

A rank has two kinds of buffers. Messages of other ranks wait in slots: the input of a forward visit
until that visit, and the cotangent of its output until the last action that reads it. The residuals
of a forward visit wait in the slots of a ring for its backward visit. A slot is free again when its
array is no longer needed, so that there are as few as the timetable allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from nnx_pipeline.experiments.timetables.executor._slots import share_slots
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.pipeline._timetable.actions import (
    BACKWARD,
    FORWARD,
    LETTERS,
    OF_INPUT,
    OF_WEIGHTS,
    Actions,
    text_of_action,
)

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


class TimetableRows(NamedTuple):
    """Integers `[ticks, ranks]`; what an action does not use is 0.

    In the loop they are arrays of JAX, of one tick and one rank.
    """

    branch: np.ndarray  # 0 when idle, else 1 + its place in `Plan.branches`
    chunk: np.ndarray  # which of the rank's stages
    microbatch: np.ndarray
    take: np.ndarray  # the message slot that the action reads
    keep: np.ndarray  # the slot of the ring that it writes or reads
    enters: np.ndarray  # 1 for a forward visit of the first stage, which takes what enters
    same: np.ndarray  # the message slot for what the action itself gives
    before: np.ndarray  # the slot for what the rank before sends
    after: np.ndarray  # the slot for what the rank after sends
    loss: np.ndarray  # the slot for the cotangent of the loss of the tick before


class EndTicks(NamedTuple):
    """When microbatches pass one end of the model, `[ticks]` each."""

    due: np.ndarray  # bool, whether one passes in this tick
    microbatch: np.ndarray  # its number, or 0


class OuterTicks(NamedTuple):
    """When microbatches enter, leave, and when their cotangents are back at the first stage."""

    entry: EndTicks
    exit: EndTicks
    back: EndTicks


@dataclass(frozen=True)
class TimetablePlan:
    """A timetable as arrays that a loop over ticks reads.

    - `rows`: one row per tick and rank.
    - `outer_ticks`: when microbatches pass `enter` and `leave`.
    - `edges`: the ranks of the first and of the last stage.
    - `branches`: the different things that ranks do.
    - `messages`: how many message slots a rank has; one more, the last, takes what nobody needs.
    - `rings`: how many slots a ring has, for each stage function.
    - `stages`: the stages of each rank, in order: `[ranks][chunks]`.
    """

    rows: TimetableRows
    outer_ticks: OuterTicks
    edges: tuple[int, int]
    branches: tuple[Branch, ...]
    messages: int
    rings: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


def make_timetable_plan(
    actions: Actions, functions: Sequence[int], ends_on: EndsOn = "all"
) -> TimetablePlan:
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
    there = actions.kind == FORWARD
    steps = there.any(axis=0)
    tables = (actions.kind, actions.stage, actions.microbatch)
    return Actions(*((table * there)[:, steps] for table in tables))


class _Waits(NamedTuple):
    """Arrays that wait in message buffers, one for each of some stages and each microbatch."""

    sender: np.ndarray  # the stages that give them, [n]
    to: np.ndarray  # the stages that read them, [n]
    start: np.ndarray  # the ticks in which they are written, [n, microbatches]
    end: np.ndarray  # the last ticks in which they are read, [n, microbatches]


class _Planning:
    def __init__(self, actions: Actions, functions: Sequence[int], ends_on: EndsOn) -> None:
        self.actions, self.functions, self.outer_on_ranks = actions, functions, ends_on == "own"
        self.when, self.rank_of, self.last = actions.when, actions.rank_of, actions.stages - 1
        if len(functions) != actions.stages:
            raise InputError(
                f"the timetable has {counted(actions.stages, 'stage')}, and was given "
                f"{counted(len(functions), 'stage function')}; give one for each stage, "
                "or one for all"
            )
        self.stages = tuple(
            tuple(np.flatnonzero(self.rank_of == rank).tolist()) for rank in range(actions.ranks)
        )
        if len({len(of_rank) for of_rank in self.stages}) > 1:
            raise InputError(
                f"the ranks have the stages {[*map(list, self.stages)]}; each must have as many, "
                "because their weights are one array"
            )
        # By stage and microbatch: when the cotangent of the input is there, and when no action
        # needs the visit any more; -1 in a timetable of forward visits.
        self.back = np.maximum(self.when[BACKWARD], self.when[OF_INPUT])
        self.over = np.maximum(self.back, self.when[OF_WEIGHTS])

    def plan(self) -> TimetablePlan:
        actions, branches = self.actions, self._branches()
        kind, stage = actions.kind.T, actions.stage.T
        numbers = {branch: 1 + at for at, branch in enumerate(dict.fromkeys(branches.values()))}
        branch_of = np.zeros((len(LETTERS), actions.stages), np.int32)
        for cell, branch in branches.items():
            branch_of[cell] = numbers[branch]
        chunk_of = np.zeros(actions.stages, np.int32)
        for stages in self.stages:
            chunk_of[[*stages]] = range(len(stages))
        empty = {name: np.zeros(kind.shape, np.int32) for name in TimetableRows._fields}
        rows = TimetableRows(**empty)._replace(
            branch=branch_of[kind, stage],
            chunk=chunk_of[stage],
            microbatch=actions.microbatch.T,
            enters=((kind == FORWARD) & (stage == 0)).astype(np.int32),
        )
        messages, rings = self._give_messages(rows), self._give_rings(rows)
        forward = self.when[FORWARD]
        outer_ticks = OuterTicks(*map(self._end_ticks, (forward[0], forward[-1], self.back[0])))
        edges = int(self.rank_of[0]), int(self.rank_of[-1])
        return TimetablePlan(rows, outer_ticks, edges, tuple(numbers), messages, rings, self.stages)

    def _branches(self) -> dict[tuple[int, int], Branch]:
        first = np.where(self.when < 0, self.actions.steps, self.when).min(axis=-1)
        there = np.argwhere(first < self.actions.steps).tolist()

        def branch(kind: int, stage: int) -> Branch:
            enters = self.outer_on_ranks and stage == 0 and kind != OF_WEIGHTS
            leaves = self.outer_on_ranks and stage == self.last and kind == FORWARD
            return Branch(LETTERS[kind], self.functions[stage], enters, leaves)

        there.sort(key=lambda action: (self.rank_of[action[1]], first[*action]))
        return {(kind, stage): branch(kind, stage) for kind, stage in there}

    def _end_ticks(self, step: np.ndarray) -> EndTicks:
        """When microbatches pass; -1 for one that does not."""
        due = np.zeros(self.actions.steps, bool)
        microbatch = np.zeros(self.actions.steps, np.int32)
        (there,) = np.nonzero(step >= 0)
        due[step[there]], microbatch[step[there]] = True, there
        return EndTicks(due, microbatch)

    def _give_messages(self, rows: TimetableRows) -> int:
        """Fills in where arrays arrive and are read; returns the number of slots."""
        waits = self._waits()
        shape = waits.start.shape
        to = np.broadcast_to(self.rank_of[waits.to][:, None], shape)
        slot, counts = share_slots(to, waits.start, waits.end, owners=self.actions.ranks)
        count = int(counts.max())
        for column in (rows.same, rows.before, rows.after, rows.loss):
            column[:] = count  # where what nobody needs goes
        for column, sent in self._columns(rows, waits):
            column[waits.start[sent], to[sent]] = slot[sent]
        activations = self.last  # of all stages but the first
        self._fill(rows.take, (FORWARD,), waits.to[:activations], slot[:activations])
        if self.actions.trains:
            kinds = (BACKWARD, OF_INPUT, OF_WEIGHTS)
            self._fill(rows.take, kinds, waits.to[activations:], slot[activations:])
            rows.loss[self.when[FORWARD, -1] + 1, self.rank_of[-1]] = slot[-1]
        return count

    def _waits(self) -> _Waits:
        """The activations that wait for stages 1 and on, then the cotangents for all stages."""
        stages, forward = np.arange(self.last + 1), self.when[FORWARD]
        parts = [_Waits(stages[:-1], stages[1:], forward[:-1], forward[1:])]
        if self.actions.trains:
            # The last forward visit gives the cotangent of the loss to its own stage.
            start = np.concatenate([self.back[1:], forward[-1:]])
            parts.append(_Waits(np.minimum(stages + 1, self.last), stages, start, self.over))
        return _Waits(*map(np.concatenate, zip(*parts, strict=True)))

    def _columns(self, rows: TimetableRows, waits: _Waits) -> list[tuple[np.ndarray, np.ndarray]]:
        """The columns of what arrives from each sender, and which of the waits those are."""
        ranks = self.actions.ranks
        sender, to = self.rank_of[waits.sender], self.rank_of[waits.to]
        same, before, after = sender == to, (sender + 1) % ranks == to, (sender - 1) % ranks == to
        for at in np.flatnonzero(~(same | before | after)).tolist():
            stage = int(waits.sender[at])
            split = self.when[OF_INPUT, stage, 0] >= 0
            kind = FORWARD if at < self.last else OF_INPUT if split else BACKWARD
            raise InputError(
                f"{text_of_action(kind, stage, 0)} on rank {sender[at]} gives something to rank "
                f"{to[at]}, and ranks send to their neighbours only; place consecutive stages on "
                "the same rank or on neighbours"
            )
        return [
            (rows.same, same),
            (rows.before, before & ~same),
            (rows.after, after & ~before & ~same),  # of two ranks each is both before and after
        ]

    def _fill(
        self, column: np.ndarray, kinds: Sequence[int], stages: np.ndarray, slot: np.ndarray
    ) -> None:
        rank = np.broadcast_to(self.rank_of[stages][:, None], slot.shape)
        for kind in kinds:
            step = self.when[kind, stages]
            there = step >= 0
            column[step[there], rank[there]] = slot[there]

    def _give_rings(self, rows: TimetableRows) -> tuple[int, ...]:
        """Fills in where forward visits keep what the others read; returns the numbers of slots."""
        ranks, functions = self.actions.ranks, 1 + max(self.functions)
        if not self.actions.trains:
            return (0,) * functions
        ring = np.asarray(self.functions) + functions * self.rank_of
        owner = np.broadcast_to(ring[:, None], self.over.shape)
        slot, counts = share_slots(owner, self.when[FORWARD], self.over, owners=ranks * functions)
        kinds = (FORWARD, BACKWARD, OF_INPUT, OF_WEIGHTS)
        self._fill(rows.keep, kinds, np.arange(self.last + 1), slot)
        return tuple(counts.reshape(ranks, functions).max(axis=0).tolist())
