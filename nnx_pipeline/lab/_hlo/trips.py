"""Finds how often the body of a loop runs, and the integers of its state in each trip."""

from __future__ import annotations

import re

from nnx_pipeline.lab._hlo.integers import Scope, Value, is_unchanged
from nnx_pipeline.lab._hlo.module import Instruction

_LONGEST_LOOP = 100_000  # trips; beyond it, counting them one by one would take seconds


def loop_of(scope: Scope, instruction: Instruction) -> tuple[Scope, Scope]:
    """The condition and body of a while loop, both with the initial state as their argument."""
    (condition,) = instruction.called("condition")
    (body,) = instruction.called("body")
    return scope.called(instruction, condition), scope.called(instruction, body)


def in_all_trips(part: Scope, body: Scope) -> Scope:
    """The condition or the body with what has one value in all trips: what no trip changes."""

    def unchanged(number: int, element: int | None) -> Value | None:
        same = element is not None and is_unchanged(body.computation, element)
        return body.read(number, element) if same else None

    return part.of(part.computation.name, unchanged)


def trips_one_by_one(body: Scope, trips: int) -> list[Scope]:
    """The body in each of its trips, with the state before that trip; to be read in that order. An
    element of the state is evaluated when it is read: few steer the program."""
    scopes: list[Scope] = []

    def at(trip: int) -> Scope:
        def read(number: int, element: int | None) -> Value | None:
            same = element is not None and is_unchanged(body.computation, element)
            if trip == 0 or same:
                return body.read(number, element)
            return scopes[trip - 1].root(element)

        return body.of(body.computation.name, read)

    scopes.extend(map(at, range(trips)))
    return scopes


def trip_count(scope: Scope, instruction: Instruction) -> int | None:
    """How often the body of a while loop runs; None if that cannot be found. The NVIDIA and CPU
    compilers write it down. For TPU programs the integers that the condition depends on are
    evaluated trip by trip until the condition is false."""
    known = re.search(
        r"known_trip_count\W+n\W+(\d+)", instruction.attributes.get("backend_config", "")
    )
    if known:
        return int(known.group(1))
    try:
        return _counted(*loop_of(scope, instruction))
    except RecursionError:
        return None  # a longer chain of arithmetic than Python follows


def _counted(condition: Scope, body: Scope) -> int | None:
    counters = _counters(condition, body)
    state = {element: body.read(0, element) for element in counters}

    def current(number: int, element: int | None) -> Value | None:
        return state.get(element)

    for trips in range(_LONGEST_LOOP + 1):
        goes_on = condition.of(condition.computation.name, current).root()
        if not goes_on:
            return None if goes_on is None else trips
        trip = body.of(body.computation.name, current)
        after = {element: trip.root(element) for element in counters}
        if after == state:
            return None  # no counter changes, so the condition would stay true for ever
        state = after
    return None


def _counters(condition: Scope, body: Scope) -> set[int | None]:
    """The elements of a loop's state on which its condition depends, in this trip or a later one. A
    state that is no tuple counts as the element None."""
    found: set[int | None] = set()

    def note(number: int, element: int | None) -> int:
        found.add(element)
        return 1  # any number but 0, by which nothing is divided: what is read is what matters

    condition.of(condition.computation.name, note).root()
    followed: set[int | None] = set()
    # What the next value of a counter depends on is a counter as well.
    while found != followed:
        for element in found - followed:
            followed.add(element)
            body.of(body.computation.name, note).root(element)
    return found
