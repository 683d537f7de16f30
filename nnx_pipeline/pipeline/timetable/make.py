"""Timetables of the field, made by one rule: each rank takes the most urgent action it can do.

A rank prefers a backward visit (or the gradient of an input), which frees what the forward visit
kept. If none is ready it makes a forward visit, as long as it keeps fewer visits than its limit,
and otherwise the gradient of some weights. The limits and the placement of the stages make the
schedule.
"""

import heapq
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
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

    def actions(self) -> Actions:
        ranks = [
            _Rank(limit, urgency)
            for limit, urgency in zip(self.limits, self._orders(), strict=True)
        ]
        for microbatch in range(self.microbatches):
            self._offer(ranks, Action(0, "F", microbatch))
        done: set[Action] = set()
        left = sum(len(rank.urgency) for rank in ranks)
        columns = []
        while left:
            column = [rank.take() for rank in ranks]
            found = [action for action in column if action is not None]
            assert found, "a limit that lets no action through"
            left -= len(found)
            # What a step gives is there for the next one.
            done.update(found)
            for action in found:
                for freed in self._freed_by(action, done):
                    self._offer(ranks, freed)
            columns.append(column)
        return Actions(tuple(zip(*columns, strict=True)))

    def _orders(self) -> list[dict[Action, int]]:
        """For each rank the place of each of its actions, the most urgent first."""
        everything = map(self._all_of, range(len(self.limits)))
        return [{action: place for place, action in enumerate(own)} for own in everything]

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
        first = [Action(stage, self._turned, number) for stage, number in backward]
        last = [Action(stage, "W", number) for stage, number in backward] if self.split else []
        return [*first, *(Action(stage, "F", number) for stage, number in forward), *last]

    def _offer(self, ranks: list["_Rank"], action: Action) -> None:
        rank = self.rank_of[action.stage]
        # Room is left for the visits that a microbatch still makes on the rank before it can turn
        # back, or none could.
        later = self.rank_of[action.stage + 1 :].count(rank) if action.kind == "F" else 0
        ranks[rank].offer(action, later)

    @property
    def _turned(self) -> str:
        return "I" if self.split else "B"

    def _freed_by(self, action: Action, done: set[Action]) -> Iterator[Action]:
        """The actions that read what this one gives, and that now have all that they read.

        - `done`: the actions until now, with this one.
        """
        stage, kind, microbatch = action
        last = len(self.rank_of) - 1
        if kind == "F":
            if stage < last:
                yield Action(stage + 1, "F", microbatch)
            if stage == last or Action(stage + 1, self._turned, microbatch) in done:
                yield Action(stage, self._turned, microbatch)
        elif kind != "W":
            if self.split:
                yield Action(stage, "W", microbatch)
            if stage:  # whose own forward visit came long before
                yield Action(stage - 1, kind, microbatch)


@dataclass
class _Rank:
    """The actions of a rank that have all that they read, the most urgent first.

    - `limit`: how many visits it may keep.
    - `urgency`: the place of each of its actions, the most urgent first.
    """

    limit: int
    urgency: dict[Action, int]
    kept: int = 0
    ready: dict[tuple[bool, int], list[tuple[int, Action]]] = field(default_factory=dict)

    def offer(self, action: Action, later: int) -> None:
        """Adds an action.

        - `later`: how many visits it must leave room for.
        """
        queue = self.ready.setdefault((action.kind == "F", later), [])
        heapq.heappush(queue, (self.urgency[action], action))

    def take(self) -> Action | None:
        """Takes the most urgent action that there is room for."""
        room = self.limit - self.kept
        queues = [
            queue
            for (is_forward, later), queue in self.ready.items()
            if queue and (not is_forward or room > later)
        ]
        if not queues:
            return None
        _, action = heapq.heappop(min(queues))
        self.kept += (action.kind == "F") - (action.kind in "BW")
        return action
