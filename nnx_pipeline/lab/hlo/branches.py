"""Finds how often each branch of a conditional is taken.

What chooses the branch often depends on nothing but the trip of the loop around it, as where a
scan reads a table of flags or counts. It is then evaluated in every trip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction

from nnx_pipeline.lab.hlo.integers import Scope
from nnx_pipeline.lab.hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab.hlo.opcodes import RUNS, plain
from nnx_pipeline.lab.hlo.trips import in_all_trips, loop_of, trip_count, trips_one_by_one

# For each conditional, by the names of its computation and of itself: the share of each branch, in
# the order of `Instruction.called`. The shares of one add up to 1; None where they are not known.
Shares = Mapping[tuple[str, str], tuple[Fraction, ...] | None]


def branch_shares(module: Module) -> dict[tuple[str, str], tuple[Fraction, ...] | None]:
    """How often each branch is taken, of all the times that its conditional is reached.

    - `module`: the compiled program.

    It is known where the choice can be evaluated in each trip of the loop around the conditional,
    or outside all loops, and None where it depends on data, on the device or on a loop farther out.
    """
    found: dict[tuple[str, str], tuple[Fraction, ...] | None] = {}

    def note(scope: Scope, instruction: Instruction, trips: list[Scope]) -> None:
        key = scope.computation.name, instruction.name
        shares = _shares(instruction, trips)
        found[key] = shares if found.get(key, shares) == shares else None

    def visit(scope: Scope, trips: list[Scope]) -> None:
        """Visits a computation, of which `trips` has one scope for each trip of the loop."""
        if scope.computation.name not in with_conditionals:
            return
        for instruction in scope.computation.instructions.values():
            callees = instruction.called()
            if instruction.opcode.endswith(("-update", "-done")):
                continue  # the start has run what it calls
            if instruction.opcode == "while":
                body = loop_of(scope, instruction)[1]
                count = trip_count(scope, instruction)
                visit(in_all_trips(body, body), trips_one_by_one(body, count or 0))
            elif plain(instruction.opcode) in RUNS:
                inside = [trip.called(instruction, callees[0]) for trip in trips]
                visit(scope.called(instruction, callees[0]), inside)
            elif instruction.opcode == "conditional":
                note(scope, instruction, trips)
                for place, branch in enumerate(callees, start=1):
                    # In which trips this branch is taken is not followed further.
                    visit(scope.called(instruction, branch, first=place), [])

    with_conditionals = _that_reach_conditionals(module)
    entry = Scope(module, module.computations[module.entry], lambda number, element: None)
    visit(entry, [entry])
    return found


def _shares(instruction: Instruction, trips: list[Scope]) -> tuple[Fraction, ...] | None:
    """The shares of the branches of one conditional; None if one choice is not known."""
    branches = len(instruction.called())
    chosen = [trip.integer(instruction.operands[0]) for trip in trips]
    known = [choice for choice in chosen if choice is not None]
    if not known or len(known) < len(chosen):
        return None
    times = Counter(_branch(instruction, choice, branches) for choice in known)
    return tuple(Fraction(times[branch], len(known)) for branch in range(branches))


def _branch(instruction: Instruction, choice: int, branches: int) -> int:
    """The place of the branch that is taken: HLO takes the last one for a choice out of range."""
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
