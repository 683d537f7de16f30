"""Timetables of the field, most of them made by one rule: a rank takes what is most urgent.

A rank makes a forward visit while it may, then a backward visit (or the gradient of an input), and
gradients of weights where it would idle, or once as many wait as there are ranks. The limits and
the placement of the stages make the schedule. No order with the same limits is shorter, as far as
an exhaustive search can tell. Only interleaved has a fixed order of its own (`interleaved.py`).
"""

from dataclasses import dataclass

import numpy as np

from nnx_pipeline.experiments.timetables._interleaved import interleaved
from nnx_pipeline.lab.errors import InputError, divides, one_of
from nnx_pipeline.pipeline._timetable.actions import (
    BACKWARD,
    FORWARD,
    IDLE,
    OF_INPUT,
    OF_WEIGHTS,
    Actions,
)

TIMETABLES = ("1f1b", "zb-h1", "interleaved", "zb-v")


def make_timetable(name: str, *, ranks: int, microbatches: int, repeats: int = 1) -> Actions:
    """The timetable called `name`, in which every action takes one step.

    - `name`: one of `TIMETABLES`:
      - `1f1b`: rank r keeps at most ranks - r visits (PipeDream-flush, Narayanan et al., 2021);
      - `zb-h1`: the same with B split into I and W, and with at most as many visits kept until W
        as there are ranks: 3 · microbatches + ranks - 1 steps where there are at least as many
        microbatches as ranks (Zero Bubble, Qi et al., 2023);
      - `interleaved`: 1F1B with `repeats` stages per rank, stage g on rank g mod ranks (Narayanan
        et al., 2021). A rank idles for 2 · (ranks - 1) steps, however many microbatches there are,
        and rank r keeps at most 2 · (ranks - 1 - r) + (repeats - 1) · ranks + 1 visits;
      - `zb-v`: two stages per rank, the second ones in reverse, B split, and at most 2 · ranks
        visits kept: 6 · microbatches + ranks - 1 steps (Qi et al., 2024).
    - `ranks`: how many ranks there are.
    - `microbatches`: their number; for `interleaved` a multiple of the ranks.
    - `repeats`: stages per rank, which only `interleaved` chooses. With 1 it idles like `1f1b` and
      keeps more.

    Raises InputError for a name or numbers that do not fit.
    """
    one_of("timetable", name, TIMETABLES)
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{what}={value!r} is not a whole number of 1 or more")
    if name != "interleaved" and repeats != 1:
        raise InputError(
            f"repeats={repeats} is for the timetable interleaved; leave it out for {name}"
        )
    if name == "interleaved":
        rule = f"{microbatches} microbatches do not split over {ranks} ranks"
        divides(ranks, microbatches, rule=rule)
        return interleaved(ranks, microbatches, repeats)
    rank, split = np.arange(ranks), name != "1f1b"
    if name == "zb-v":
        stages = np.stack([rank, 2 * ranks - 1 - rank])
        return _Making(stages, np.full(ranks, 2 * ranks), microbatches, split).actions()
    return _Making(rank[None], ranks - rank, microbatches, split).actions()


_TURNED, _FORWARD, _WEIGHTS = range(3)  # the turned back visits are B, or I where B is split


@dataclass(frozen=True)
class _Making:
    """A timetable in the making: all ranks at once, one step after the other.

    Microbatches go through each kind of action of a stage in order, so that a number says which
    ones wait for it.

    - `stages`: the stage of each chunk of each rank, `[chunks, ranks]`.
    - `limits`: how many visits of each rank may wait for their way back, `[ranks]`. With W a rank
      keeps at most as many visits as it has chunks times ranks.
    - `microbatches`: their number.
    - `split`: whether B is split into I and W.
    """

    stages: np.ndarray
    limits: np.ndarray
    microbatches: int
    split: bool

    def actions(self) -> Actions:
        """The timetable."""
        kind, chunk, number = np.stack(self._run(), axis=-1)  # `[ranks, steps]` each
        names = np.array([OF_INPUT if self.split else BACKWARD, FORWARD, OF_WEIGHTS, IDLE])[kind]
        stage = self.stages[chunk, np.arange(len(self.limits))[:, None]]
        tables = (names, np.where(names, stage, 0), np.where(names, number, 0))
        return Actions(*(np.ascontiguousarray(table, np.int32) for table in tables))

    def _run(self) -> list[np.ndarray]:
        """Kind, chunk and microbatch of what each rank does, `[3, ranks]` for each step."""
        chunks, ranks = self.stages.shape
        rank, latest_first = np.arange(ranks), range(chunks)[::-1]
        urgent = (_FORWARD, _WEIGHTS, _TURNED, _WEIGHTS)  # weights first where too many wait
        kinds, of_chunks = np.array([(kind, chunk) for kind in urgent for chunk in latest_first]).T
        waiting, done = np.zeros((2, 3, chunks, ranks), int)
        position = self.stages.reshape(-1).argsort()  # of each stage
        waiting[_FORWARD, self.stages == 0] = self.microbatches
        left = self.stages.size * self.microbatches * (3 if self.split else 2)
        steps = []
        while left:
            may = waiting[kinds, of_chunks] > 0
            may[:chunks] &= self._room(done)
            may[chunks : 2 * chunks] &= np.subtract(*done[[_TURNED, _WEIGHTS]].sum(axis=1)) >= ranks
            row = may.argmax(axis=0)  # the first that may, and the first of all where none may
            acts = may[row, rank]
            assert acts.any(), "a limit that lets no action through"
            kind, chunk = kinds[row], of_chunks[row]
            steps.append(np.stack([np.where(acts, kind, 3), chunk, done[kind, chunk, rank]]))
            cell = kind[acts], chunk[acts], rank[acts]
            done[cell] += 1
            waiting[cell] -= 1
            # What a step gives is there for the next one.
            kind, stage = self._next_actions(cell[0], self.stages[cell[1:]])
            waiting.reshape(3, -1)[kind, position[stage]] += 1
            left -= len(cell[0])
        return steps

    def _room(self, done: np.ndarray) -> np.ndarray:
        """Whether each chunk of a rank, the latest first, may make a forward visit.

        Room is left for the visits that the microbatch still makes on the rank before it can turn
        back, or none could.
        """
        chunks, ranks = self.stages.shape
        turned, forward, weights = done.sum(axis=1)
        room = self.limits - (forward - turned)
        if self.split:
            room = np.minimum(room, chunks * ranks - (forward - weights))
        there: np.ndarray = room > np.arange(chunks)[:, None]
        return there

    def _next_actions(self, kind: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Kinds and stages of the actions that can go on after these, once each."""
        forward, back, last = kind == _FORWARD, kind == _TURNED, self.stages.size - 1
        turns = forward & (stage == last)
        onward, further, weights = forward & ~turns, back & (stage > 0), back & self.split
        kinds = (_FORWARD, _TURNED, _TURNED, _WEIGHTS)
        stages = (stage[onward] + 1, stage[turns], stage[further] - 1, stage[weights])
        return np.repeat(kinds, list(map(len, stages))), np.concatenate(stages)
