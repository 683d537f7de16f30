"""Finds how often each computation of a compiled program runs per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from nnx_pipeline.lab._hlo.branches import Shares, branch_shares
from nnx_pipeline.lab._hlo.integers import Scope
from nnx_pipeline.lab._hlo.module import Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import APPLIES, RUNS, plain
from nnx_pipeline.lab._hlo.trips import in_all_trips, loop_of, trip_count

# How often each computation runs per step, None where that is not known.
Runs = Mapping[str, int | None]


def executions(module: Module, shares: Shares | None = None) -> dict[str, int | None]:
    """How often each computation runs per step: trip counts and shares multiplied down the call
    graph.

    Every branch of a conditional without known shares counts each time. Computations that are
    applied element by element (the sum in a reduce) and those that nothing calls are left out. The
    count is None where the trip count of a loop around the computation cannot be found, or where a
    library call or an unknown opcode calls it.
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
