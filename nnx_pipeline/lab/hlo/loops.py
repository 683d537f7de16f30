"""Finds how often each computation of a compiled program runs, from the trip counts of its loops.

Where a compiler does not write a trip count down, the integers on which the end of a loop depends
are evaluated from the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from nnx_pipeline.lab.hlo.module import Computation, Instruction, Module, Shape
from nnx_pipeline.lab.hlo.opcodes import APPLIES, RUNS, plain

_LONGEST_LOOP = 100_000  # trips; beyond it, counting them one by one would take seconds

# Gives an integer argument of a computation: (parameter number, tuple element) -> value, None where
# it is not known. The element is None for a parameter that is no tuple.
Reader = Callable[[int, int | None], int | None]
# How often each computation runs per step, None where that is not known.
Runs = Mapping[str, int | None]

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    direction: getattr(operator, direction.lower())
    for direction in ("LT", "LE", "GT", "GE", "EQ", "NE")
}
# Instructions whose result has the same value as their operand.
PASSES_ON = ("copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier")


@dataclass(frozen=True)
class Scope:
    """A computation together with its arguments, as far as these are known integers.

    - `module`: the program.
    - `computation`: the one whose instructions are evaluated.
    - `read`: gives the arguments of the computation.
    """

    module: Module
    computation: Computation
    read: Reader

    def integer(self, name: str, element: int | None = None) -> int | None:
        """The value of an integer instruction, or of one element of a tuple; None if not known.

        - `name`: of an instruction of this computation.
        - `element`: which element of its result to evaluate, None for a result that is no tuple.
        """
        instruction = self.computation.instructions[name]
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.read(int(instruction.literal), element)
        if opcode == "get-tuple-element":
            if element is not None:
                return None  # tuples in tuples are not followed
            return self.integer(instruction.operands[0], instruction.integers("index")[0])
        if opcode == "tuple":
            return None if element is None else self.integer(instruction.operands[element])
        if opcode in PASSES_ON:
            return self.integer(instruction.operands[0], element)
        if opcode in ("fusion", "call"):
            return self.called(instruction, instruction.called()[0]).root(element)
        if instruction.shapes[0].elements != 1 or instruction.shapes[0].dtype[0] not in "psu":
            return None  # only pred, signed and unsigned scalars steer a loop
        if opcode == "constant":
            return _literal(instruction.literal)
        return _calculated(instruction, list(map(self.integer, instruction.operands)))

    def root(self, element: int | None = None) -> int | None:
        """The result of the computation, or one element of it; None if it is not known."""
        return self.integer(self.computation.root, element)

    def called(self, instruction: Instruction, name: str, first: int = 0) -> Scope:
        """The scope of a computation that an instruction of this one runs.

        - `name`: of the computation that is run.
        - `first`: the operand that becomes parameter 0.
        """

        def read(number: int, element: int | None) -> int | None:
            return self.integer(instruction.operands[first + number], element)

        return self.of(name, read)

    def of(self, name: str, read: Reader) -> Scope:
        """The scope of another computation of the program, with the arguments that `read` gives."""
        return Scope(self.module, self.module.computations[name], read)


def _calculated(instruction: Instruction, operands: list[int | None]) -> int | None:
    """The result of integer arithmetic in the width of its type; None if it is not known."""
    values = [operand for operand in operands if operand is not None]
    opcode = instruction.opcode
    result: int | None = None
    if len(values) < len(operands):
        return None
    if opcode in _ARITHMETIC:
        result = _ARITHMETIC[opcode](*values)
    elif opcode == "compare":
        compare = _COMPARE.get(instruction.attributes["direction"])
        return None if compare is None else int(compare(*values))
    elif opcode == "select":
        result = values[1] if values[0] else values[2]
    elif opcode == "convert":
        result = values[0]
    elif opcode == "negate":
        result = -values[0]
    elif opcode == "not" and instruction.shapes[0].dtype == "pred":
        result = 1 - values[0]
    return None if result is None else _wrapped(result, instruction.shapes[0])


def _wrapped(value: int, shape: Shape) -> int:
    """The value wrapped around to the range of an integer type."""
    if shape.dtype == "pred":
        return int(value != 0)
    value %= 1 << shape.bits
    return value - (1 << shape.bits) if shape.dtype[0] == "s" and value >> shape.bits - 1 else value


def _literal(text: str) -> int | None:
    text = text.strip("{} \n\t")
    return {"true": 1, "false": 0}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)


def executions(module: Module) -> dict[str, int | None]:
    """How often each computation runs per step: the trip counts multiplied down the call graph.

    Every branch of a conditional counts once, as if all of them were taken. Computations that are
    applied element by element (the sum in a reduce, the order in a sort) and those that nothing
    calls are left out. The count is None where the trip count of a loop around the computation
    cannot be found, or where a library call or an unknown opcode calls it.
    """
    counts: dict[str, int | None] = {}

    def visit(scope: Scope, times: int | None) -> None:
        name = scope.computation.name
        before = counts.get(name, 0)
        counts[name] = None if before is None or times is None else before + times
        for instruction in scope.computation.instructions.values():
            for callee, trips in _calls(scope, instruction):
                visit(callee, None if times is None or trips is None else times * trips)

    visit(Scope(module, module.computations[module.entry], _nothing), 1)
    return counts


def loop_trips(module: Module) -> dict[tuple[str, str], int | None]:
    """How often the body of each loop runs each time that the loop is reached.

    The result has an entry for each while instruction that runs, by the names of its computation
    and of itself. None stands for a trip count that cannot be found, and for one that is not the
    same each time.
    """
    found: dict[tuple[str, str], int | None] = {}

    def visit(scope: Scope) -> None:
        for instruction in scope.computation.instructions.values():
            if instruction.opcode == "while":
                key = scope.computation.name, instruction.name
                trips = _trip_count(scope, instruction)
                found[key] = trips if found.get(key, trips) == trips else None
            for callee, _ in _calls(scope, instruction):
                visit(callee)

    visit(Scope(module, module.computations[module.entry], _nothing))
    return found


def _calls(scope: Scope, instruction: Instruction) -> Iterator[tuple[Scope, int | None]]:
    """Yields the scope of each computation that an instruction runs, and how often it runs."""
    callees, opcode = instruction.called(), instruction.opcode
    if opcode.endswith(("-update", "-done")):
        return  # the start has run it
    if plain(opcode) in RUNS:
        yield scope.called(instruction, callees[0]), 1
    elif opcode == "conditional":
        for place, branch in enumerate(callees, start=1):
            yield scope.called(instruction, branch, first=place), 1
    elif opcode == "while":
        trips = _trip_count(scope, instruction)
        condition, body = _loop(scope, instruction)

        def unchanged(number: int, element: int | None) -> int | None:
            # Only what the body never changes has one value in all iterations.
            same = element is not None and _is_unchanged(body.computation, element)
            return body.read(number, element) if same else None

        # The condition runs once more than the body, when it ends the loop.
        yield replace(condition, read=unchanged), None if trips is None else trips + 1
        yield replace(body, read=unchanged), trips
    elif plain(opcode) not in APPLIES:
        yield from ((scope.of(callee, _nothing), None) for callee in callees)
    for name in instruction.mentioned():
        if name in scope.module.computations:
            yield scope.of(name, _nothing), None


def _nothing(number: int, element: int | None) -> int | None:
    """A reader of arguments of which nothing is known."""
    return None


def _loop(scope: Scope, instruction: Instruction) -> tuple[Scope, Scope]:
    """The condition and body of a while loop, both with the initial state as their argument."""
    (condition,) = instruction.called("condition")
    (body,) = instruction.called("body")
    return scope.called(instruction, condition), scope.called(instruction, body)


def _is_unchanged(body: Computation, element: int) -> bool:
    """Whether a loop's body passes this element of the state on unchanged."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    source = body.instructions[root.operands[element]]
    while source.opcode in PASSES_ON:
        source = body.instructions[source.operands[0]]
    if source.opcode != "get-tuple-element" or source.integers("index") != (element,):
        return False
    return body.instructions[source.operands[0]].opcode == "parameter"


def _trip_count(scope: Scope, instruction: Instruction) -> int | None:
    """How often the body of a while loop runs; None if that cannot be found.

    The NVIDIA and CPU compilers write it down. The TPU compiler does not: for its programs, the
    integers that the condition depends on are evaluated trip by trip until the condition is false.
    """
    known = re.search(
        r"known_trip_count\W+n\W+(\d+)", instruction.attributes.get("backend_config", "")
    )
    if known:
        return int(known.group(1))
    condition, body = _loop(scope, instruction)
    counters = _counters(condition, body)
    state = {element: body.read(0, element) for element in counters}

    def current(number: int, element: int | None) -> int | None:
        return state.get(element)

    condition, body = replace(condition, read=current), replace(body, read=current)
    for trips in range(_LONGEST_LOOP + 1):
        goes_on = condition.root()
        if not goes_on:
            return None if goes_on is None else trips
        after = {element: body.root(element) for element in counters}
        if after == state:
            return None  # no counter changes, so the condition would stay true for ever
        state = after
    return None


def _counters(condition: Scope, body: Scope) -> set[int | None]:
    """The elements of a loop's state on which its condition depends, in this trip or a later one.

    A state that is no tuple counts as the element None.
    """
    found: set[int | None] = set()

    def note(number: int, element: int | None) -> int:
        found.add(element)
        return 0  # any number will do: only which elements are read matters

    replace(condition, read=note).root()
    followed: set[int | None] = set()
    # What the next value of a counter depends on is a counter as well.
    while found != followed:
        for element in found - followed:
            followed.add(element)
            replace(body, read=note).root(element)
    return found
