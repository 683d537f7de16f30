"""The largest value whose size is within a limit, with few sizes asked for: no compiler is known.

A curve through the sizes so far chooses the next value, and only the size of that value decides. So
the answer is right for any sizes: it fits, and the next value does not. Where sizes grow with the
value it is the largest that fits; where they do not, a larger one may fit too. So the value after
the next is tried as well, as long as few sizes were asked for, and the search goes on from there if
it fits.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

SPARE = 4  # values that the curve may choose in vain, beside those of a bisection
Point = tuple[float, float]  # a value, and its size


class Bracket(NamedTuple):
    """Two values next to each other, of which the first fits and the second does not.

    - `fits`: None where the lowest value does not fit.
    - `too_large`: None where the highest value fits.

    Between them are values without a size at most.
    """

    fits: int | None
    too_large: int | None


def most_sizes(values: range) -> int:
    """How many sizes are asked for at most, where each value has one."""
    return min(len(values), 1 + _bisections(len(values)) + SPARE)


def bracket(values: range, limit: float, size_of: Callable[[int], float | None]) -> Bracket:
    """The bracket in a range of values.

    - `values`: in rising order.
    - `limit`: the largest size that fits.
    - `size_of`: the size of a value, called once for each value that is tried: infinity for one
      that does not fit and whose size is not known, None for one of which nothing is known. It
      knows the size of the lowest value.
    """
    search = _Search([*values], limit, most_sizes(values), high=len(values))
    while (at := search.next()) is not None:
        search.take(at, size_of(search.values[at]))
    known = range(len(search.values))
    ends = (search.values[at] if at in known else None for at in (search.low, search.high))
    return Bracket(*ends)


def _bisections(gap: int) -> int:
    """How many sizes it takes to halve a bracket until its ends are next to each other."""
    return (gap - 1).bit_length()


@dataclass
class _Search:
    """A bracket that gets smaller.

    - `left`: how many sizes may still be asked for.
    - `low`, `high`: the indices of its ends: the last value that fits, and one that does not. They
      begin outside the range.
    """

    values: list[int]
    limit: float
    left: int
    high: int
    low: int = -1
    sizes: dict[int, float] = field(default_factory=dict)

    def take(self, at: int, size: float | None) -> None:
        if size is None:  # as if the value were not there
            del self.values[at]
            self.high -= at < self.high
            return
        self.left -= 1
        self.sizes[self.values[at]] = size
        if size <= self.limit:
            self.low, self.high = at, self._too_large_above(at)
        elif at == 0:  # nothing below it is left
            self.high = 0
        elif at < self.high:
            self.high = at

    def _too_large_above(self, at: int) -> int:
        """The index of the first value above one that is known not to fit; else the end."""
        above = [value for value in self.sizes if value > self.values[at]]
        return bisect.bisect_left(self.values, min(above)) if above else len(self.values)

    def next(self) -> int | None:
        """The index of the value to try next; None where nothing is left to try."""
        low, high = self.low, self.high
        if low < 0:
            return 0 if high else None
        if high - low == 1:
            return self._beyond()
        guess = self._guess() if self.left > _bisections(high - low) else None
        return (low + high) // 2 if guess is None else min(max(guess, low + 1), high - 1)

    def _beyond(self) -> int | None:
        """The value above the one that does not fit: sizes may fall there, as shapes are padded."""
        at = self.high + 1
        if at >= len(self.values) or self.values[at] in self.sizes:
            return None
        return at if self.left > _bisections(self._too_large_above(at) - at) else None

    def _guess(self) -> int | None:
        """The index of the last value within the limit, by a curve through the sizes of both ends
        and one near the limit, as far as they are known and rise; None where they do not. The last
        of all where three sizes are equal: it says whether they depend on the value."""
        known = [(float(x), y) for x, y in self.sizes.items() if y < math.inf]
        if len(known) > 2 and len({*self.sizes.values()}) == 1:
            return len(self.values) - 1
        inside = [self.values[at] for at in (self.low, self.high) if at < len(self.values)]
        near = sorted(known, key=lambda point: (point[0] not in inside, abs(point[1] - self.limit)))
        rising: list[Point] = []
        for point in near:
            if len(rising) < 3 and all((point[0] - x) * (point[1] - y) > 0 for x, y in rising):
                rising.append(point)
        if len(known) == 1:
            rising.append((0.0, 0.0))  # a size in proportion
        crossed = _crossing(sorted(rising), self.limit)
        if crossed is None:
            return None
        return bisect.bisect_right(self.values, crossed * (1 + 1e-12)) - 1


def _crossing(points: list[Point], limit: float) -> float | None:
    """Where a curve through two or three points that rise has a size: a parabola that bends up, or
    with sizes and values exchanged one that bends down, so that both rise."""
    if len(points) < 2 or points[0][0] >= points[1][0] or points[0][1] >= points[1][1]:
        return None
    (x0, y0), (x1, y1), *more = points
    slope = (y1 - y0) / (x1 - x0)
    if not more:
        return x0 + (limit - y0) / slope
    ((x2, y2),) = more
    bend = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    if bend <= 0.0:
        bend = ((x2 - x1) / (y2 - y1) - 1 / slope) / (y2 - y0)
        return x0 + (limit - y0) * (1 / slope + bend * (limit - y1))
    # y0 + (x - x0) (slope + bend (x - x1)) = limit, for the larger x
    half, rest = (slope - bend * (x0 + x1)) / (2 * bend), bend * x0 * x1 - slope * x0 + y0 - limit
    return math.sqrt(max(0.0, half**2 - rest / bend)) - half
