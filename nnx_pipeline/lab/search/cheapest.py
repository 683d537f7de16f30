"""Finds the fastest program under a limit of memory among choices of what is kept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int

from nnx_pipeline.lab.search._surrogate import Predicted, Surrogate
from nnx_pipeline.lab.search.choices import Choice, Fate, Space
from nnx_pipeline.lab.search.effort import Spent

# A search ends when no choice is expected to save more than this share of the fastest step.
WORTH = 3e-4
_LEAST_CHANCE = 0.02  # that some choice fits, below which none is looked for
_FATES = get_args(Fate)
Ended = Literal["done", "spent"]  # no choice is worth a compile, or no compile is left


@dataclass(frozen=True)
class Point:
    """A choice that was compiled.

    - `account`: bytes per device; None where the choice did not compile.
    - `step`: seconds by estimate; None for a program that the compiler refused as too large.
    - `error`: why it did not compile.
    """

    choice: Choice
    account: int | None = None
    step: float | None = None
    error: str = ""

    def fits(self, limit: float) -> bool:
        return self.account is not None and self.step is not None and self.account <= limit


@dataclass
class Search:
    """Compiles choices, those first that a model of all known figures expects most of.

    - `space`: what there is to choose.
    - `compiled`: compiles a choice; raises Spent where no compile is left.
    - `points`: what is known, in the order in which it was compiled.
    - `seen`: called after each of them.
    - `ended`: why it ended, as `Ended` says; None as long as it goes on.
    """

    space: Space
    compiled: Callable[[Choice], Point]
    points: list[Point] = field(default_factory=list)
    seen: Callable[[], None] = lambda: None
    ended: Ended | None = None

    def run(self, limits: Sequence[float]) -> None:
        """Looks for the fastest choice under each limit, in bytes, until none is worth a compile
        or no compile is left."""
        try:
            for choice in self.space.first():
                self._compile(choice)
            for limit in limits:
                while (worth := self._next(limit)) is not None:
                    self._compile(worth)
        except Spent:
            self.ended = "spent"
        else:
            self.ended = "done"

    def fastest(self, limit: float) -> Point | None:
        """The fastest known choice under a limit, the smaller one of equals; None for none."""
        fitting = [point for point in self.points if point.fits(limit)]
        return min(fitting, key=lambda one: (one.step, one.account), default=None)

    def smallest(self) -> Point | None:
        """The known choice that needs the least memory."""
        known = [point for point in self.points if point.account is not None]
        return min(known, key=lambda one: (one.account, one.step or math.inf), default=None)

    def frontier(self) -> list[Point]:
        """The known choices than which none is both smaller and faster, the smallest first."""
        return frontier_of(self.points)

    def _compile(self, choice: Choice) -> None:
        if all(point.choice != choice for point in self.points):
            self.points.append(self.compiled(choice))
            self.seen()

    def _next(self, limit: float) -> Choice | None:
        """The choice that is worth the next compile; None where none is."""
        # What holds everything is far from all others, and says nothing of them.
        others = [point for point in self.points if point.choice != self.space.everything]
        known = [point for point in others if point.account is not None]
        timed = [point for point in known if point.step is not None]
        if not timed:
            return None
        tried = {point.choice for point in self.points}
        near = (point.choice for point in self.frontier())
        choices = [one for one in self.space.listed(near) if one not in tried]
        if not choices:
            return None
        rows = self._rows(choices)
        account = self._surrogate(known, "account").predict(rows)
        chance = _below(limit, account)
        best = self.fastest(limit)
        if best is None or best.step is None:
            return choices[int(np.argmax(chance))] if np.max(chance) > _LEAST_CHANCE else None
        saved = _expected_below(best.step, self._surrogate(timed, "step").predict(rows)) * chance
        at = int(np.argmax(saved))
        return choices[at] if saved[at] > WORTH * best.step else None

    def _surrogate(self, points: Sequence[Point], figure: str) -> Surrogate:
        figures = np.array([getattr(point, figure) for point in points], float)
        return Surrogate(self._rows([point.choice for point in points]), figures)

    def _rows(self, choices: Sequence[Choice]) -> Int[np.ndarray, "choices kinds"]:
        return np.array([[_FATES.index(fate) for fate in choice] for choice in choices])


def frontier_of(points: Sequence[Point]) -> list[Point]:
    known = [point for point in points if point.fits(math.inf)]
    found: list[Point] = []
    for point in sorted(known, key=lambda one: (one.account, one.step)):
        if not found or (point.step or 0.0) < (found[-1].step or 0.0):
            found.append(point)
    return found


def _below(limit: float, predicted: Predicted) -> np.ndarray:
    """How likely a figure is at most a limit."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = (limit - predicted.mean) / predicted.deviation
    return _normal(np.where(predicted.deviation > 0, distance, np.sign(limit - predicted.mean) * 9))


def _expected_below(best: float, predicted: Predicted) -> np.ndarray:
    """By how much a figure is expected to be below the best one, counted as 0 where it is above."""
    deviation = np.maximum(predicted.deviation, 1e-12 * abs(best))
    distance = (best - predicted.mean) / deviation
    density = np.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
    result: np.ndarray = deviation * (distance * _normal(distance) + density)
    return result


def _normal(distance: np.ndarray) -> np.ndarray:
    """The cumulative normal distribution."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in distance])
