"""Timetables of the field, made by one rule: each rank takes the most urgent action it can do.

A rank prefers a backward visit (or the gradient of an input), which frees what the forward visit
kept. If none is ready it makes a forward visit, as long as it keeps fewer visits than its limit,
and otherwise the gradient of some weights. The limits and the placement of the stages make the
schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nnx_pipeline.errors import InputError, divides, one_of
from nnx_pipeline.pipeline.timetable.actions import Action, Actions

TIMETABLES = ("1f1b", "zb-h1", "interleaved", "zb-v")


def make_timetable(name: str, *, ranks: int, microbatches: int, repeats: int = 1) -> Actions:
    """The timetable called `name`, in which every action takes one step.

    - `name`: one of `TIMETABLES`:
      - `1f1b`: rank r keeps at most ranks - r visits (PipeDream-flush, Narayanan et al., 2021);
      - `zb-h1`: the same with B split into I and W, and with as many visits kept until W (Zero
        Bubble, Qi et al., 2023);
      - `interleaved`: 1F1B with `repeats` stages per rank, stage g on rank g mod ranks (Narayanan
        et al., 2021);
      - `zb-v`: two stages per rank, the second ones in reverse, B split (Qi et al., 2024).
    - `ranks`: how many ranks there are.
    - `microbatches`: their number; for `interleaved` a multiple of the ranks.
    - `repeats`: stages per rank, which only `interleaved` chooses.

    Raises InputError for a name or numbers that do not fit.
    """
    one_of("timetable", name, TIMETABLES)
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("repeats", repeats)):
        if value < 1:
            raise InputError(f"{what}={value} is not a whole number of 1 or more")
    if name != "interleaved" and repeats != 1:
        raise InputError(
            f"repeats={repeats} is for the timetable interleaved; leave it out for {name}"
        )
    backwards = list(reversed(range(ranks)))
    if name == "interleaved":
        rule = f"{microbatches} microbatches do not split over {ranks} ranks"
        divides(ranks, microbatches, rule=rule)
        limits = [2 * (ranks - 1 - rank) + (repeats - 1) * ranks + 1 for rank in range(ranks)]
        rank_of = list(range(ranks)) * repeats
    elif name == "zb-v":
        limits = [2 * ranks] * ranks
        rank_of = [*range(ranks), *backwards]
    else:
        limits = [ranks - (rank if name == "1f1b" else 0) for rank in range(ranks)]
        rank_of = list(range(ranks))
    return _Making(rank_of, limits, microbatches, split=name.startswith("zb")).actions()


@dataclass
class _Making:
    """A timetable in the making.

    - `rank_of`: the rank of each stage.
    - `limits`: how many visits each rank may keep.
    - `microbatches`: their number.
    - `split`: whether B is split into I and W.
    """

    rank_of: Sequence[int]
    limits: Sequence[int]
    microbatches: int
    split: bool
    done: set[Action] = field(default_factory=set)

    def actions(self) -> Actions:
        ranks, kept = len(self.limits), [0] * len(self.limits)
        waiting = [self._all_of(rank) for rank in range(ranks)]
        columns = []
        while any(waiting):
            column = [
                self._chosen(waiting[rank], self.limits[rank] - kept[rank]) for rank in range(ranks)
            ]
            assert any(column), "a limit that lets no action through"
            for rank, action in enumerate(column):
                if action is not None:
                    waiting[rank].remove(action)
                    self.done.add(action)
                    kept[rank] += (action.kind == "F") - (action.kind in "BW")
            columns.append(column)
        return Actions(tuple(zip(*columns, strict=True)))

    def _all_of(self, rank: int) -> list[Action]:
        """The actions of a rank, the most urgent first."""
        group = len(self.limits)
        stages = [stage for stage, own in enumerate(self.rank_of) if own == rank]
        visits = [(stage, number) for number in range(self.microbatches) for stage in stages]
        # Forward, a group of microbatches passes a stage before it enters the rank's next one, and
        # in a V each goes on as soon as it can. Backward the stages go from the last to the first.
        forward = sorted(visits, key=lambda visit: (visit[1] // group, visit))
        if self.rank_of[-1] == 0 and len(stages) > 1:
            forward = sorted(visits, key=lambda visit: (-visit[0], visit[1]))
        backward = sorted(visits, key=lambda visit: (visit[1] // group, -visit[0], visit[1]))
        first = [Action(stage, "I" if self.split else "B", number) for stage, number in backward]
        last = [Action(stage, "W", number) for stage, number in backward] if self.split else []
        return [*first, *(Action(stage, "F", number) for stage, number in forward), *last]

    def _chosen(self, waiting: list[Action], room: int) -> Action | None:
        for action in waiting:
            # Room is left for the visits that a microbatch still makes on the rank before it can
            # turn back, or none could.
            later = self.rank_of[action.stage + 1 :].count(self.rank_of[action.stage])
            if self._is_ready(action) and (action.kind != "F" or room > later):
                return action
        return None

    def _is_ready(self, action: Action) -> bool:
        stage, kind, microbatch = action
        last = len(self.rank_of) - 1
        if kind == "F":
            return not stage or Action(stage - 1, "F", microbatch) in self.done
        if kind == "W":
            return Action(stage, "I", microbatch) in self.done
        ready = Action(stage, "F", microbatch) in self.done
        return ready and (stage == last or Action(stage + 1, kind, microbatch) in self.done)
