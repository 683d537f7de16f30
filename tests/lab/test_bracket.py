"""The search for the largest value that fits, beside all values of a range, without a compiler."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline.lab.search.bracket import SPARE, Bracket, bracket, most_sizes

RANGES = st.builds(
    lambda low, count, step: range(low, low + count * step, step),
    st.integers(0, 50),
    st.integers(1, 400),
    st.integers(1, 16),
)
SIZE = st.one_of(st.just(math.inf), st.floats(0, 1e12))
Sizes = dict[int, float | None]


def searched(
    values: range, limit: float, size_of: Callable[[int], float | None]
) -> tuple[Bracket, Sizes]:
    """The bracket, and the sizes that were asked for."""
    asked: Sizes = {}

    def ask(value: int) -> float | None:
        assert value in values
        assert value not in asked, "no value is compiled twice"
        asked[value] = size_of(value)
        return asked[value]

    return bracket(values, limit, ask), asked


def largest(values: range, limit: float, size_of: Callable[[int], float | None]) -> int | None:
    """By a look at every value."""
    sizes = {value: size_of(value) for value in values}
    return max((v for v, size in sizes.items() if size is not None and size <= limit), default=None)


def rising(parts: tuple[float, float, float, float, int]) -> Callable[[int], float]:
    constant, linear, quadratic, noise, tile = parts

    def size_of(value: int) -> float:
        padded = -(-value // tile) * tile
        wobble = noise * (0.5 + 0.5 * math.sin(value * 12.9898))  # less than one step of the line
        return constant + (linear + 0.01) * padded + quadratic * value**2 + wobble

    return size_of


RISING = st.builds(
    rising,
    st.tuples(
        *(st.floats(0, 1e10), st.floats(0, 1e8), st.floats(0, 1e6), st.just(0.0)),
        st.sampled_from([1, 8, 128]),
    ),
)


@given(RANGES, RISING, st.floats(0, 1.2))
def test_it_is_the_largest_of_all_where_sizes_rise(
    values: range, size_of: Callable[[int], float], share: float
) -> None:
    limit = share * size_of(values[-1])
    found, sizes = searched(values, limit, size_of)
    assert found.fits == largest(values, limit, size_of)
    assert len(sizes) <= most_sizes(values)


@given(RANGES, st.data())
def test_the_bracket_holds_whatever_the_sizes_are(values: range, data: st.DataObject) -> None:
    limit = data.draw(st.floats(0, 1e12))
    found, sizes = searched(values, limit, lambda value: data.draw(SIZE))
    assert len(sizes) <= most_sizes(values)
    if found.fits is None:
        assert found.too_large == values[0]
    else:
        assert sizes[found.fits] <= limit
        following = found.fits + values.step
        assert found.too_large == (following if following in values else None)
    if found.too_large is not None:
        assert sizes[found.too_large] > limit


@given(RANGES, RISING, st.floats(0, 1), st.integers(2, 5))
def test_values_without_a_size_are_passed_over(
    values: range, size_of: Callable[[int], float], share: float, period: int
) -> None:
    def some(value: int) -> float | None:
        is_known = value == values[0] or value % period
        return size_of(value) if is_known else None

    limit = share * size_of(values[-1])
    found, sizes = searched(values, limit, some)
    assert found.fits == largest(values, limit, some)
    known = [size for size in sizes.values() if size is not None]
    assert len(known) <= most_sizes(values)
    if found.too_large is not None:
        assert sizes[found.too_large] > limit
        between = range((found.fits or values[0]) + values.step, found.too_large, values.step)
        assert all(sizes[value] is None for value in between)


@given(RANGES, RISING, st.floats(0, 1), st.floats(0, 0.02))
def test_sizes_that_nearly_rise_still_close_the_bracket(
    values: range, size_of: Callable[[int], float], share: float, noise: float
) -> None:
    """A value above may fit as well; what is found fits, and the next one does not."""

    def uneven(value: int) -> float:
        return size_of(value) * (1 + noise * math.sin(value * 12.9898))

    limit = share * size_of(values[-1])
    found, sizes = searched(values, limit, uneven)
    if found.fits is not None:
        assert uneven(found.fits) <= limit
    if found.too_large is not None:
        assert uneven(found.too_large) > limit
    assert len(sizes) <= most_sizes(values)


@pytest.mark.parametrize(
    ("size_of", "most"),
    [
        (lambda n: 100.0 * n, 4),  # in proportion: the first, both ends, and one beyond
        (lambda n: 5e3 + 70.0 * n, 5),  # and one for the slope
        (lambda n: 5e3 + 70.0 * n + 0.9 * n**2, 6),
        (lambda n: 5e3 + 70.0 * n * math.log2(n + 1), 10),
        (lambda n: 2e3 * n**0.5, 10),
    ],
)
def test_smooth_sizes_take_few_compiles(size_of: Callable[[int], float], most: int) -> None:
    values = range(1, 1025)
    for limit in range(6_000, 60_000, 500):
        found, sizes = searched(values, limit, size_of)
        assert found.fits == largest(values, limit, size_of)
        assert len(sizes) <= most, (limit, sizes)


def test_one_value_that_is_too_large_is_no_end() -> None:
    """As the value after it is tried too, and the search goes on above it."""

    def bumped(value: int) -> float:
        return 6_500.0 if value == 5 else 1_000.0 + 100.0 * value

    values, limit = range(1, 513), 6_150.0  # the first guess is 5, by proportion
    found, sizes = searched(values, limit, bumped)
    assert found == (51, 52)
    assert {4, 5, 6} <= set(sizes)
    assert len(sizes) <= most_sizes(values)
    assert searched(range(1, 6), limit, bumped)[0] == (4, 5), "nothing is above it"


def test_equal_sizes_take_few() -> None:
    found, sizes = searched(range(1, 641), 12.0, lambda n: 5.0)
    assert (found, [*sizes]) == ((640, None), [1, 2, 321, 640])
    found, sizes = searched(range(1, 641), 12.0, lambda n: 5.0 if n < 50 else 20.0)
    assert found == (49, 50)


def test_sizes_in_tiles_take_fewer_than_a_bisection() -> None:
    values = range(1, 1025)
    counts = []
    for limit in range(6_000, 70_000, 500):
        found, sizes = searched(values, limit, lambda n: 5e3 + 70.0 * 8 * -(-n // 8))
        assert found.fits == largest(values, limit, lambda n: 5e3 + 70.0 * 8 * -(-n // 8))
        counts.append(len(sizes))
    assert sum(counts) / len(counts) < math.log2(1024)


def test_a_tenth_of_all_values_from_128_on() -> None:
    for count in range(128, 2000):
        assert 10 * most_sizes(range(count)) <= count + 9
    assert most_sizes(range(512)) == 1 + 9 + SPARE
    assert most_sizes(range(3)) == 3
