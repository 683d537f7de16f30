"""Finds how often each branch of a conditional is taken. What chooses the branch often depends on
the trips of the loops around it alone, as where a scan reads a table of flags, or a loop counts. It
is then evaluated each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction

from nnx_pipeline.lab._hlo.integers import Scope
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import RUNS, plain
from nnx_pipeline.lab._hlo.trips import in_all_trips, loop_of, trip_count, trips_one_by_one

# For each conditional, by the names of its computation and of itself: the share of each branch, in
# the order of `Instruction.called`. The shares of one add up to 1; None where they are not known.
Shares = Mapping[tuple[str, str], tuple[Fraction, ...] | None]
MOST_TRIPS = 10_000  # that are gone through one by one; more would take seconds


def branch_shares(module: Module) -> Shares:
    """How often each branch is taken, of all the times that its conditional is reached.

    It is known where the choice follows each time from the trips of the loops around it, from
    constants, tables of one axis and arithmetic on integers. It is None where it depends on data or
    on the device, and for more than 10,000 times.
    """
    found: dict[tuple[str, str], tuple[Fraction, ...] | None] = {}

    def note(scope: Scope, instruction: Instruction, times: list[Scope]) -> list[list[Scope]]:
        """Notes a conditional; returns those of its times in which each branch is taken."""
        key = scope.computation.name, instruction.name
        branches = len(instruction.called())
        taken = _taken(instruction, times)
        shares = None
        if taken:
            counted = Counter(taken)
            shares = tuple(Fraction(counted[one], len(taken)) for one in range(branches))
        found[key] = shares if found.get(key, shares) == shares else None
        each: list[list[Scope]] = [[] for _ in range(branches)]
        for time, branch in zip(times, taken or (), strict=False):
            each[branch].append(time)
        return each

    def visit(scope: Scope, times: list[Scope]) -> None:
        """Visits a computation.

        - `scope`: the computation with what is the same each time that it runs.
        - `times`: the computation with all that is known, each time that it runs; empty if not
          known.
        """
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
    entry = Scope(module, module.computations[module.entry], lambda number, element: None)
    visit(entry, [entry])
    return found


def _trips(instruction: Instruction, times: list[Scope]) -> list[Scope]:
    """The body of a loop in all of its trips each time that it is reached; empty if not known."""
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
            choice = scope.integer(instruction.operands[0])
        except RecursionError:
            return None  # a longer chain of arithmetic than Python follows
        if choice is None:
            return None
        found.append(_branch(instruction, choice, len(instruction.called())))
    return found


def _branch(instruction: Instruction, choice: int, branches: int) -> int:
    # HLO takes the last branch for a choice out of range.
    if "true_computation" in instruction.attributes:
        return 0 if choice else 1
    return choice if 0 <= choice < branches else branches - 1


def _that_reach_conditionals(module: Module) -> set[str]:
    """The computations that hold a conditional, or call one that does."""
    found: set[str] = set()

    def holds(computation: Computation) -> bool:
        return any(
            instruction.opcode == "conditional" or not found.isdisjoint(_callees(instruction))
            for instruction in computation.instructions.values()
        )

    while new := {
        name
        for name, computation in module.computations.items()
        if name not in found and holds(computation)
    }:
        found |= new
    return found


def _callees(instruction: Instruction) -> Iterable[str]:
    return instruction.called() if plain(instruction.opcode) in ("while", *RUNS) else ()
