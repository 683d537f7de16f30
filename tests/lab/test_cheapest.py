"""The search over what is kept, against all choices of synthetic programs; no compiler runs."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from nnx_pipeline.lab.search.cheapest import Point, Search, frontier_of
from nnx_pipeline.lab.search.choices import Choice, Fate, Kind, Space
from nnx_pipeline.lab.search.effort import Spent

Figures = Callable[[Choice], Point]
THREE: tuple[Fate, ...] = ("recompute", "offload", "keep")
TWO: tuple[Fate, ...] = ("recompute", "keep")
SHARES = (0.15, 0.4, 0.7)  # of the way from the smallest program to the largest


def product(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(some, others, strict=True))


def space_of(number: int, fates: tuple[Fate, ...]) -> Space:
    return Space(tuple(Kind(f"value {at}", fates) for at in range(number)))


def program(seed: int, space: Space, how: str) -> Figures:
    """What each choice needs: sums over the kinds, and what `how` adds to them.

    - `pairs`: two kept kinds need up to a third more or less than their sum, in bytes and seconds.
    - `peaks`: the account is the larger one of two sums.
    - `noise`: 1 % of the bytes and half a percent of the seconds follow no rule.
    """
    chance = random.Random(seed)
    number = len(space.kinds)
    sizes = [math.exp(chance.gauss(2, 1)) for _ in range(number)]
    gains = [math.exp(chance.gauss(0, 1)) for _ in range(number)]
    others = [size * chance.random() for size in sizes]
    pairs = {pair: chance.gauss(0, 0.3) for pair in itertools.combinations(range(number), 2)}

    def figures(choice: Choice) -> Point:
        kept = [fate in ("keep", "everything") for fate in choice]
        sent = [fate == "offload" for fate in choice]
        size = product(sizes, kept) + 0.1 * product(sizes, sent)
        seconds = 10 + sum(gains) - product(gains, kept)
        seconds -= sum((0.7 * gains[at] - 0.03 * sizes[at]) * sent[at] for at in range(number))
        for (one, other), share in pairs.items():
            if how == "pairs" and kept[one] and kept[other]:
                size += share * min(sizes[one], sizes[other])
                seconds += share * min(gains[one], gains[other])
        if how == "peaks":
            size = max(size, 15 + product(others, kept))
        if how == "noise":
            rough = random.Random(str((seed, choice)))
            size, seconds = size * (1 + rough.gauss(0, 0.01)), seconds * rough.gauss(1, 0.005)
        return Point(choice, round(1e6 * (100 + size)), seconds / 1e3)

    return figures


def limited(figures: Figures, most: int) -> Figures:
    left = [most]

    def compiled(choice: Choice) -> Point:
        if not left[0]:
            raise Spent("no compile is left")
        left[0] -= 1
        return figures(choice)

    return compiled


@pytest.mark.parametrize("how", ["sums", "pairs", "peaks", "noise"])
def test_against_all_choices(how: str) -> None:
    """In sum a tenth of the compiles; exact for sums, and within 3 % of the best but for noise."""
    compiles, all_choices, gaps = 0, 0, []
    for seed, (number, fates) in itertools.product(range(3), ((5, THREE), (6, THREE), (8, TWO))):
        space = space_of(number, fates)
        figures = program(seed, space, how)
        every = [figures(choice) for choice in space.listed()]
        sizes = [point.account or 0 for point in every]
        for share in SHARES:
            limit = min(sizes) + share * (max(sizes) - min(sizes))
            search = Search(space, limited(figures, space.most_compiles()))
            search.run([limit])
            found, best = search.fastest(limit), Search(space, figures, every).fastest(limit)
            assert found is not None
            assert best is not None
            assert found.account <= limit
            gaps.append((found.step or 0) / (best.step or 1) - 1)
            compiles, all_choices = compiles + len(search.points), all_choices + len(every)
    assert compiles <= all_choices / 10
    assert max(gaps) <= (0.0 if how == "sums" else 0.06 if how == "noise" else 0.03)
    assert sum(gaps) / len(gaps) <= 0.01


def test_the_frontier_has_no_point_that_another_beats() -> None:
    space = space_of(4, THREE)
    every = [program(0, space, "pairs")(choice) for choice in space.listed()]
    found = frontier_of(every)
    for point in every:
        assert any(
            (one.account or 0) <= (point.account or 0) and (one.step or 0) <= (point.step or 0)
            for one in found
        )
    for one, other in itertools.pairwise(found):
        assert (one.account or 0) < (other.account or 0)
        assert (one.step or 0) > (other.step or 0)


def test_a_limit_below_all_choices_ends_early_with_the_smallest_one() -> None:
    space = space_of(6, THREE)
    search = Search(space, program(1, space, "sums"))
    search.run([1.0])
    assert search.fastest(1.0) is None
    smallest = search.smallest()
    assert smallest is not None
    assert smallest.choice == space.least
    assert len(search.points) <= space.most_compiles()


def test_no_compile_beyond_those_that_are_left() -> None:
    space = space_of(6, THREE)
    search = Search(space, limited(program(1, space, "sums"), 4))
    search.run([1.5e8])
    assert len(search.points) == 4


def test_what_watches_sees_each_point() -> None:
    """So that a command that is interrupted shows all that was compiled."""
    space, seen = space_of(4, TWO), list[int]()
    search = Search(space, limited(program(1, space, "sums"), 5))
    search.seen = lambda: seen.append(len(search.points))
    search.run([1.5e8])
    assert seen == [1, 2, 3, 4, 5]


def test_choices_that_fail_are_passed_over() -> None:
    """Those that offload the first kind do not compile, and those that are large have no time."""
    space = space_of(5, THREE)
    figures = program(2, space, "sums")

    def compiled(choice: Choice) -> Point:
        point = figures(choice)
        if choice[0] == "offload":
            return Point(choice, error="no such copy")
        return point if point.account < 1.4e8 else Point(choice, point.account)

    every = [compiled(choice) for choice in space.listed()]
    search = Search(space, compiled)
    search.run([1.6e8])
    found, best = search.fastest(1.6e8), Search(space, compiled, every).fastest(1.6e8)
    assert found is not None
    assert best is not None
    assert (found.step or 1) <= 1.03 * (best.step or 1)
    assert [point.choice for point in search.points] == [
        *dict.fromkeys(point.choice for point in search.points)
    ], "a choice is compiled once"


def test_equal_programs_are_one_choice() -> None:
    """Without `jax.checkpoint`, names count only in loops that are recomputed."""
    loop = Kind("own.py:7", TWO, is_loop=True)
    space = Space((loop, Kind("a", TWO), Kind("b", TWO)), has_checkpoint=False)
    assert len(space.listed()) == 1 + 4
    assert space.everything in space.listed()


def test_a_large_space_is_not_listed_whole() -> None:
    space = space_of(14, THREE)
    figures = program(3, space, "sums")
    assert len(space.listed()) < 30_000
    search = Search(space, limited(figures, space.most_compiles()))
    limit = 1e6 * 160
    search.run([limit])
    found = search.fastest(limit)
    assert found is not None
    singles = [figures(choice) for choice in space.first()]
    best = Search(space, figures, singles).fastest(limit)
    assert best is not None
    assert (found.step or 1) < (best.step or 1), "better than what is compiled at first"
