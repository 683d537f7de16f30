"""Timetables of the field, most of them made by one rule: a rank takes what is most urgent.

A rank prefers a backward visit (or the gradient of an input), which frees what the forward visit
kept. If none is ready it makes a forward visit, as long as it keeps fewer visits than its limit,
and otherwise the gradient of some weights. The limits and the placement of the stages make the
schedule. Only interleaved has a fixed order of its own (`interleaved.py`).
"""

from dataclasses import dataclass

import numpy as np

from nnx_pipeline.errors import InputError, divides, one_of
from nnx_pipeline.pipeline.timetable.actions import (
    BACKWARD,
    FORWARD,
    IDLE,
    OF_INPUT,
    OF_WEIGHTS,
    Actions,
)
from nnx_pipeline.pipeline.timetable.interleaved import interleaved

TIMETABLES = ("1f1b", "zb-h1", "interleaved", "zb-v")


def make_timetable(name: str, *, ranks: int, microbatches: int, repeats: int = 1) -> Actions:
    """The timetable called `name`, in which every action takes one step.

    - `name`: one of `TIMETABLES`:
      - `1f1b`: rank r keeps at most ranks - r visits (PipeDream-flush, Narayanan et al., 2021);
      - `zb-h1`: the same with B split into I and W, and with as many visits kept until W (Zero
        Bubble, Qi et al., 2023);
      - `interleaved`: 1F1B with `repeats` stages per rank, stage g on rank g mod ranks (Narayanan
        et al., 2021). A rank idles for 2 · (ranks - 1) steps, however many microbatches there are,
        and rank r keeps at most 2 · (ranks - 1 - r) + (repeats - 1) · ranks + 1 visits;
      - `zb-v`: two stages per rank, the second ones in reverse, B split (Qi et al., 2024).
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
    rank = np.arange(ranks)
    stages, limits = rank[None], np.full(ranks, ranks)
    if name == "1f1b":
        limits = ranks - rank
    elif name == "zb-v":
        limits = np.full(ranks, 2 * ranks)
        stages = np.stack([rank, 2 * ranks - 1 - rank])
    return _Making(stages, limits, microbatches, split=name.startswith("zb")).actions()


_KINDS = 3  # of the rows of a rank: turned back (B or I), F and W
_NEVER = 1 << 62


@dataclass(frozen=True)
class _Making:
    """A timetable in the making: all ranks at once, one step after the other.

    A rank has a row for being idle, and then one for each kind of action and each of its stages,
    the chunks. Microbatches pass a row in order, so that a number says which ones wait in it. A
    cell is a row of a rank, counted as row · ranks + rank.

    - `stages`: the stage of each chunk of each rank, `[chunks, ranks]`.
    - `limits`: how many visits each rank may keep, `[ranks]`.
    - `microbatches`: their number.
    - `split`: whether B is split into I and W.
    """

    stages: np.ndarray
    limits: np.ndarray
    microbatches: int
    split: bool

    def actions(self) -> Actions:
        """The timetable."""
        (rows, number), rank = self._run(), np.arange(len(self.limits))
        kinds = (OF_INPUT if self.split else BACKWARD, FORWARD, OF_WEIGHTS)
        kind = np.array([IDLE, *np.repeat(kinds, len(self.stages))])[rows]
        stage = np.concatenate([0 * self.stages[:1], *[self.stages] * _KINDS])[rows, rank]
        tables = (kind, stage, np.where(rows, number, 0))
        return Actions(*(np.ascontiguousarray(table.T, np.int32) for table in tables))

    def _run(self) -> tuple[np.ndarray, np.ndarray]:
        """The row that each rank takes in each step, and how often it has before.

        `[steps, ranks]` both; as microbatches pass a row in order, the latter is their number.
        """
        chunks, ranks = self.stages.shape
        rank, kept = np.arange(ranks), np.zeros(ranks, int)
        waiting = np.zeros((1 + _KINDS * chunks, ranks), int)
        done, (urgency, grows) = np.zeros(waiting.size, int), self._urgency()
        room, change, (next_visit, weights) = self._room(), self._change(), self._freed()
        waiting[1 + chunks, self.stages[0] == 0] = self.microbatches
        left = self.stages.size * self.microbatches * (3 if self.split else 2)
        taken, numbers = [], []
        while left:
            may = (waiting > 0) & (kept < room)
            row = np.where(may, urgency, _NEVER).argmin(axis=0)  # the first row where none may
            found = int(np.count_nonzero(row))
            assert found, "a limit that lets no action through"
            left -= found
            kept += change[row]
            cell = row * ranks + rank
            number = done[cell]
            taken.append(row)
            numbers.append(number)
            done[cell] = number + 1
            waiting.reshape(-1)[cell] -= 1
            # What a step gives is there for the next one.
            waiting.reshape(-1)[next_visit[cell]] += 1
            if self.split:
                waiting.reshape(-1)[weights[cell]] += 1
            if chunks > 1:
                urgency.reshape(-1)[cell] += grows[row] * ((number + 1) % ranks == 0)
        return np.stack(taken), np.stack(numbers)

    def _urgency(self) -> tuple[np.ndarray, np.ndarray]:
        """How urgent the next action of each cell is, the smallest most.

        Returns the numbers before the first step, `[rows, ranks]`, and by how much each row's
        number grows after as many microbatches as there are ranks.
        """
        chunks, ranks = self.stages.shape
        # In a V a rank's later stage goes first: always in forward visits, which so turn back
        # soonest, and otherwise among as many microbatches as there are ranks.
        order = np.arange(chunks)[::-1]
        most = chunks * (self.microbatches // ranks + 1)
        of_rows = np.array([_NEVER, *(order + most * np.arange(_KINDS)[:, None]).flat])
        grows = np.repeat([0, chunks, 0, chunks], [1, *[chunks] * _KINDS])
        return np.repeat(of_rows[:, None], ranks, axis=1), grows

    def _room(self) -> np.ndarray:
        """How many visits a rank may keep before an action, `[rows, ranks]`.

        Before a forward visit room is left for the visits that the microbatch still makes on the
        rank before it can turn back, or none could.
        """
        chunks, ranks = self.stages.shape
        room = np.full((1 + _KINDS * chunks, ranks), _NEVER)
        room[1 + chunks : 1 + 2 * chunks] = self.limits - np.arange(chunks)[::-1, None]
        return room

    def _change(self) -> np.ndarray:
        """By how much the number of visits kept changes with an action of each row."""
        turned = 0 if self.split else -1
        return np.repeat([0, turned, 1, -1], [1, *[len(self.stages)] * _KINDS])

    def _freed(self) -> tuple[np.ndarray, np.ndarray]:
        """The cells that an action of a cell lets go on: a visit, and the gradient of weights.

        Where there is none it is cell 0, in which waiting means nothing.
        """
        cells = np.arange((1 + _KINDS * len(self.stages)) * len(self.limits))
        of_stages = np.zeros((_KINDS, self.stages.size), int)
        of_stages[:, self.stages] = cells[len(self.limits) :].reshape(_KINDS, *self.stages.shape)
        turned, forward, later = of_stages
        visit, weights = 0 * cells, 0 * cells
        visit[forward] = [*forward[1:], turned[-1]]
        visit[turned[1:]] = turned[:-1]
        weights[turned] = later
        return visit, weights
