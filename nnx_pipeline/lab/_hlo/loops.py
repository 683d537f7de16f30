"""Finds how often each computation of a compiled program runs per step.

Where a compiler does not write a trip count down, the integers on which the end of a loop depends
are evaluated trip by trip. What chooses the branch of a conditional often depends on the trips of
the loops around it alone, as where a scan reads a table of flags: it is then evaluated each time.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TypeVar

from nnx_pipeline.lab._hlo.integers import Scope, Value, is_unchanged
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import APPLIES, RUNS, plain

T = TypeVar("T", int, int | None)

# How often each computation runs per step, None where that is not known.
Runs = Mapping[str, int | None]
# For each conditional, by the names of its computation and of itself: the share of each branch, in
# the order of `Instruction.called`. The shares of one add up to 1; None where they are not known.
Shares = Mapping[tuple[str, str], tuple[Fraction, ...] | None]
MOST_TRIPS = 10_000  # for branches, gone through one by one; more would take seconds
_LONGEST_LOOP = 100_000  # trips; beyond it, counting them one by one would take seconds


def executions(module: Module, shares: Shares | None = None) -> dict[str, int | None]:
    """How often each computation runs per step, by trip counts and shares down the call graph.

    Every branch of a conditional without known shares counts each time. What is applied element by
    element (the sum in a reduce) and what nothing calls is left out. None is for a loop around it
    of unknown trip count, and for what a library call or an unknown opcode calls.
    """
    counts: dict[str, Fraction | None] = {}
    known = branch_shares(module) if shares is None else shares

    def visit(scope: Scope, times: Fraction | None) -> None:
        name = scope.computation.name
        before = counts.get(name, Fraction(0))
        counts[name] = None if before is None or times is None else before + times
        for instruction in scope.computation.instructions.values():
            for callee, trips in _calls(scope, instruction, known):
                visit(callee, None if times is None or trips is None else times * trips)

    visit(Scope(module, module.computations[module.entry], _nothing), Fraction(1))
    return {name: None if times is None else int(times) for name, times in counts.items()}


def running(module: Module, runs: Mapping[str, T]) -> Iterator[tuple[Computation, Instruction, T]]:
    """Every instruction of `runs`, with what holds it and how often that runs."""
    for name, times in runs.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            yield computation, instruction, times


def loop_trips(module: Module) -> dict[tuple[str, str], int | None]:
    """How often the body of each loop runs each time that the loop is reached, by the names of its
    computation and of itself; None if that cannot be found, or is not the same each time."""
    found: dict[tuple[str, str], int | None] = {}

    def visit(scope: Scope) -> None:
        for instruction in scope.computation.instructions.values():
            if instruction.opcode == "while":
                key = scope.computation.name, instruction.name
                trips = trip_count(scope, instruction)
                found[key] = trips if found.get(key, trips) == trips else None
            for callee, _ in _calls(scope, instruction, {}):
                visit(callee)

    visit(Scope(module, module.computations[module.entry], _nothing))
    return found


def _calls(
    scope: Scope, instruction: Instruction, shares: Shares
) -> Iterator[tuple[Scope, Fraction | int | None]]:
    """Yields the scope of each computation that an instruction runs, and how often it runs."""
    callees, opcode = instruction.called(), instruction.opcode
    if opcode.endswith(("-update", "-done")):
        return  # the start has run it
    if plain(opcode) in RUNS:
        yield scope.called(instruction, callees[0]), 1
    elif opcode == "conditional":
        key = scope.computation.name, instruction.name
        taken = shares.get(key) or (Fraction(1),) * len(callees)
        for place, (branch, share) in enumerate(zip(callees, taken, strict=True), start=1):
            yield scope.called(instruction, branch, first=place), share
    elif opcode == "while":
        trips = trip_count(scope, instruction)
        condition, body = loop_of(scope, instruction)
        # The condition runs once more than the body, when it ends the loop.
        yield in_all_trips(condition, body), None if trips is None else trips + 1
        yield in_all_trips(body, body), trips
    elif plain(opcode) not in APPLIES:
        yield from ((scope.of(callee, _nothing), None) for callee in callees)
    for name in instruction.mentioned():
        if name in scope.module.computations:
            yield scope.of(name, _nothing), None


def _nothing(number: int, element: int | None) -> None:
    return None


def branch_shares(module: Module) -> Shares:
    """How often each branch is taken, of all the times that its conditional is reached: known where
    that follows from trips, constants, tables of one axis and arithmetic on integers; None where it
    depends on data or on the device, and for more than 10,000 times."""
    found: dict[tuple[str, str], tuple[Fraction, ...] | None] = {}

    def note(scope: Scope, instruction: Instruction, times: list[Scope]) -> list[list[Scope]]:
        """Notes a conditional; returns those of its times in which each branch is taken."""
        key = scope.computation.name, instruction.name
        branches = len(instruction.called())
        taken = _taken(instruction, times)
        shares = None
        if taken:
            shares = tuple(Fraction(taken.count(one), len(taken)) for one in range(branches))
        found[key] = shares if found.get(key, shares) == shares else None
        each: list[list[Scope]] = [[] for _ in range(branches)]
        for time, branch in zip(times, taken or (), strict=False):
            each[branch].append(time)
        return each

    def visit(scope: Scope, times: list[Scope]) -> None:
        """Visits a computation, with what is the same each time that it runs, and with all that is
        known at each of these times; empty if that is not known."""
        if scope.computation.name not in with_conditionals:
            return
        for instruction in scope.computation.instructions.values():
            callees = instruction.called()
            if instruction.opcode.endswith(("-update", "-done")):
                continue  # the start has run what it calls
            if instruction.opcode == "while":
                body = loop_of(scope, instruction)[1]
                each = _trips(instruction, times) or _trips(instruction, [scope])
                visit(in_all_trips(body, body), each)
            elif plain(instruction.opcode) in RUNS:
                inside = [one.called(instruction, callees[0]) for one in times]
                visit(scope.called(instruction, callees[0]), inside)
            elif instruction.opcode == "conditional":
                taken = note(scope, instruction, times)
                for place, (branch, of_branch) in enumerate(zip(callees, taken, strict=True), 1):
                    inside = [one.called(instruction, branch, first=place) for one in of_branch]
                    visit(scope.called(instruction, branch, first=place), inside)

    with_conditionals = _that_reach_conditionals(module)
    entry = Scope(module, module.computations[module.entry], _nothing)
    visit(entry, [entry])
    return found


def _trips(instruction: Instruction, times: list[Scope]) -> list[Scope]:
    """The body of a loop in all trips each time that it is reached; empty if not known."""
    found: list[Scope] = []
    for scope in times:
        count = trip_count(scope, instruction)
        if count is None or len(found) + count > MOST_TRIPS:
            return []
        found += trips_one_by_one(loop_of(scope, instruction)[1], count)
    return found


def _taken(instruction: Instruction, times: list[Scope]) -> list[int] | None:
    """Which branch of a conditional is taken each time; None if one of them is not known."""
    found = []
    for scope in times:
        try:
            choice = scope.value(instruction.operands[0])
        except RecursionError:
            return None  # a longer chain of arithmetic than Python follows
        if not isinstance(choice, int):
            return None
        found.append(_branch(instruction, choice, len(instruction.called())))
    return found


def _branch(instruction: Instruction, choice: int, branches: int) -> int:
    # HLO takes the last branch for a choice out of range.
    if "true_computation" in instruction.attributes:
        return 0 if choice else 1
    return choice if 0 <= choice < branches else branches - 1


def _that_reach_conditionals(module: Module) -> set[str]:
    found: set[str] = set()

    def reaches(instruction: Instruction) -> bool:
        calls = plain(instruction.opcode) in ("while", *RUNS)
        return instruction.opcode == "conditional" or (
            calls and not found.isdisjoint(instruction.called())
        )

    while new := {
        name
        for name, computation in module.computations.items()
        if name not in found and any(map(reaches, computation.instructions.values()))
    }:
        found |= new
    return found


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
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", instruction.config):
        return int(known[1])
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
