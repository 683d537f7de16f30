"""The largest number with which a program fits, with the compiles that prove it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nnx_pipeline.lab.compile._compiler import bytes_needed, is_too_large
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError, described
from nnx_pipeline.lab.search.bracket import Bracket, bracket, most_sizes
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.over import MemoryLimit, Over

MOST_PASSED_OVER = 3  # values that do not compile, before a search gives up


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of one value.

    - `result`: what was measured; None where the compiler gave nothing.
    - `fits`: whether it is within the limit; None for a value that did not compile.
    - `needed_bytes`: what must fit: the account, or what the compiler named when it refused the
      program; None where it named nothing.
    - `error`: why there is no result; `raised`: what said so.
    """

    value: int
    fits: bool | None
    needed_bytes: int | None = None
    result: Measurement | None = None
    error: str = ""
    raised: Exception | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "error": self.error or None,
            "measured": self.result and self.result.measured,
            "result": self.result and self.result.to_json(),
        }


class NotUsable(Exception):
    """A value with which the search cannot go on; `value` and why."""

    def __init__(self, value: int, why: str):
        super().__init__(why)
        self.value = value


@dataclass
class Largest:
    """The largest value that fits, and the next one, which does not: both were compiled.

    - `over`: the number and its values; `limit`: the bytes that count; `platform`: what was
      compiled for.
    - `tried`: what came of each value that was compiled.
    - `bracket`: the answer; None as long as the search goes on.
    """

    over: Over
    limit: MemoryLimit
    platform: str
    tried: dict[int, Tried] = field(default_factory=dict)
    bracket: Bracket | None = None

    @property
    def value(self) -> int | None:
        """The largest value that is known to fit; None where none is."""
        return max((one.value for one in self.tried.values() if one.fits), default=None)

    @property
    def too_large(self) -> int | None:
        """The next value, which does not fit; None where the highest fits."""
        return self.bracket.too_large if self.bracket else None

    @property
    def rows(self) -> list[Tried]:
        """In the order of the values."""
        return [self.tried[value] for value in sorted(self.tried)]

    @property
    def passed_over(self) -> list[Tried]:
        return [one for one in self.rows if one.fits is None]

    def to_json(self) -> dict[str, Any]:
        """What `fit --json` writes."""
        values = self.over.values
        return {
            "schema": 1,
            "platform": self.platform,
            "over": {
                "name": self.over.name,
                "low": values[0],
                "high": values[-1],
                "step": values.step,
            },
            "limit": self.limit.to_json(),
            "largest": self.value,
            "too_large": self.too_large,
            "ended": "done" if self.bracket else None,
            "compiles": sum(not (one.result and one.result.measured) for one in self.rows),
            "tried": [one.to_json() for one in self.rows],
        }


def find_largest(
    found: Largest,
    make: Callable[[int], Measurement],
    effort: Effort,
    seen: Callable[[], None] = lambda: None,
) -> None:
    """Fills a `Largest`: compiles what decides it, the values chosen by a curve through the others.

    - `make`: measures the program of a value.
    - `effort`: counts the compiles, and says how many may come.
    - `seen`: called after each value.

    Raises InputError for a limit below the arguments of the lowest value, and NotUsable for a value
    that does not compile, or of which `make` raises, once the lowest or too many do.
    """
    over, limit = found.over, found.limit
    effort.most = most_sizes(over.values)
    effort.begin()

    def size_of(value: int) -> float | None:
        one = found.tried[value] = _tried(value, limit, make, effort, over)
        if value == over.values[0] and one.result:
            check_arguments(one.result, limit, over.at(value))
        seen()
        if one.fits is None:
            if value == over.values[0] or len(found.passed_over) > MOST_PASSED_OVER:
                raise NotUsable(value, one.error) from one.raised
            effort.say(f"{over.at(value)} is passed over: {one.error}")
            effort.most += 1
            return None
        size = math.inf if one.needed_bytes is None else float(one.needed_bytes)
        return size if one.fits else max(size, math.nextafter(limit.bytes, math.inf))

    found.bracket = bracket(over.values, limit.bytes, size_of)


def _tried(
    value: int,
    limit: MemoryLimit,
    make: Callable[[int], Measurement],
    effort: Effort,
    over: Over,
) -> Tried:
    try:
        result = effort.measure(over.at(value), lambda: make(value))
    except Exception as error:  # a program may break any compiler in any way
        fits = False if is_too_large(error) else None
        why = str(error) if isinstance(error, InputError) else described(error)
        needed_bytes = bytes_needed(error)
        return Tried(value=value, fits=fits, needed_bytes=needed_bytes, error=why, raised=error)
    needed = result.needed_bytes
    is_within = needed <= limit.bytes and not result.is_refused
    return Tried(value=value, fits=is_within, needed_bytes=needed, result=result)


def check_arguments(first: Measurement, limit: MemoryLimit, what: str) -> None:
    """Raises InputError for a limit that no other program can be within: the arguments of the first
    one, which is `what`, are above it."""
    arguments = first.memory.argument_bytes
    if arguments > limit.bytes:
        raise InputError(
            f"the limit of {limit.bytes / 1e6:,.5g} MB is below the arguments, "
            f"{arguments / 1e6:,.5g} MB with {what}; give a higher limit, or "
            "divide them over more devices"
        )
