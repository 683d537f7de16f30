"""The fastest choice of what is kept under a limit of memory, and the frontier around it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError, described
from nnx_pipeline.lab.search.cheapest import Point, Search
from nnx_pipeline.lab.search.choices import Choice, Space, short
from nnx_pipeline.lab.search.effort import Effort
from nnx_pipeline.lab.search.largest import check_arguments
from nnx_pipeline.lab.search.over import MemoryLimit


@dataclass
class Kept:
    """What came of each choice that was compiled.

    - `space`, `limit`, `platform`: what was searched.
    - `paste`: what to write to have a choice.
    - `search`: the points so far.
    - `results`: the measurements of those that compiled.
    """

    space: Space
    limit: MemoryLimit
    platform: str
    paste: Callable[[Choice], str]
    search: Search = field(init=False)
    results: dict[Choice, Measurement] = field(default_factory=dict)

    @property
    def fastest(self) -> Point | None:
        return self.search.fastest(self.limit.bytes)

    def said(self, choice: Choice) -> str:
        """A choice in words; what is not named is computed again."""
        if choice == self.space.everything:
            return "everything kept, without checkpoints"
        loops = [f"all of {short(line)}" for line in self.space.lines(choice, "keep")]
        parts = {
            "keep": [*loops, *self.space.names(choice, "keep")],
            "offload": self.space.names(choice, "offload"),
        }
        words = [f"{word} {', '.join(names)}" for word, names in parts.items() if names]
        return "; ".join(words) or "everything computed again"

    def to_json(self) -> dict[str, Any]:
        """What `fit --over remat --json` writes."""
        fastest, frontier = self.fastest, self.search.frontier()
        return {
            "schema": 1,
            "platform": self.platform,
            "limit": self.limit.to_json(),
            "choices": self.space.size(),
            "compiles": sum(not one.measured for one in self.results.values())
            + sum(bool(one.error) for one in self.search.points),
            "ended": self.search.ended,
            "fastest": fastest and self._row(fastest),
            "frontier": [self._row(point) for point in frontier],
            "compiled": [self._row(point) for point in self.search.points],
        }

    def _row(self, point: Point) -> dict[str, Any]:
        fates = {kind.name: fate for kind, fate in zip(self.space.kinds, point.choice, strict=True)}
        return {
            "fates": fates,
            "account_bytes": point.account,
            "step_seconds": point.step,
            "fits": point.fits(self.limit.bytes),
            "error": point.error or None,
            "paste": self.paste(point.choice),
        }


def find_fastest(
    kept: Kept,
    make: Callable[[Choice], Measurement],
    effort: Effort,
    seen: Callable[[], None] = lambda: None,
) -> None:
    """Fills a `Kept`: compiles the choices that are worth it, as `Search` says.

    - `make`: measures the program of a choice.
    - `effort`: counts the compiles, and says how many may come.
    - `seen`: called after each compile.

    Raises InputError where the first choice does, and for a limit below the arguments.
    """

    def compiled(choice: Choice) -> Point:
        try:
            result = effort.measure(kept.said(choice), lambda: make(choice))
        except InputError:
            raise
        except Exception as error:  # a program may break any compiler in any way
            return Point(choice, error=described(error, most=200))
        if not kept.results:
            check_arguments(result, kept.limit, "every choice")
        kept.results[choice] = result
        step = result.time.step_seconds if result.time and not result.is_refused else None
        return Point(choice, result.needed_bytes, step)

    kept.search = Search(kept.space, compiled, seen=seen)
    effort.most = kept.space.most_compiles()
    effort.begin()
    kept.search.run([kept.limit.bytes])
