"""How often each part of a compiled program runs: the trip counts of its loops.

Where a compiler does not write a trip count down, the integers that a loop's end depends on are
followed through the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping

from nnx_pipeline.lab.hlo import Computation, Instruction, Module, Shape
from nnx_pipeline.lab.hlo_opcodes import APPLIES, RUNS, plain

_LONGEST_LOOP = 100_000  # trips; beyond it, counting them one by one would take seconds

# Reads an integer that a computation was given: (parameter number, tuple element) -> value, None
# where it is not known. The element is None for a parameter that is no tuple.
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
# Instructions whose result is their operand as far as its value goes.
PASSES_ON = ("copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier")


def integer(
    module: Module, computation: Computation, name: str, element: int | None, read: Reader
) -> int | None:
    """Value of one integer instruction (or one element of a tuple); None unless it is known."""
    instruction = computation.instructions[name]
    opcode = instruction.opcode

    def value(operand: str, element: int | None = None) -> int | None:
        return integer(module, computation, operand, element, read)

    if opcode == "parameter":
        return read(int(instruction.literal), element)
    if opcode == "get-tuple-element":
        nested = element is not None  # tuples in tuples are not followed
        return None if nested else value(instruction.operands[0], instruction.integers("index")[0])
    if opcode == "tuple":
        return None if element is None else value(instruction.operands[element])
    if opcode in PASSES_ON:
        return value(instruction.operands[0], element)
    if opcode in ("fusion", "call"):
        callee = module.computations[instruction.called()[0]]
        inner = arguments(module, computation, instruction, read)
        return integer(module, callee, callee.root, element, inner)
    if instruction.shapes[0].elements != 1 or instruction.shapes[0].dtype[0] not in "psu":
        return None  # only pred, signed and unsigned scalars steer a loop
    if opcode == "constant":
        return _literal(instruction.literal)
    return _calculated(instruction, [value(operand) for operand in instruction.operands])


def _calculated(instruction: Instruction, operands: list[int | None]) -> int | None:
    """Result of integer arithmetic, in the width of the result; None if it is something else."""
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
    """The value as an integer of that type holds it."""
    if shape.dtype == "pred":
        return int(value != 0)
    value %= 1 << shape.bits
    return value - (1 << shape.bits) if shape.dtype[0] == "s" and value >> shape.bits - 1 else value


def _literal(text: str) -> int | None:
    text = text.strip("{} \n\t")
    return {"true": 1, "false": 0}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)


def arguments(
    module: Module, computation: Computation, instruction: Instruction, read: Reader, first: int = 0
) -> Reader:
    """Reads what an instruction, from operand `first` on, hands to the computation that it runs."""

    def reader(number: int, element: int | None) -> int | None:
        return integer(module, computation, instruction.operands[first + number], element, read)

    return reader


def executions(module: Module) -> dict[str, int | None]:
    """How often each computation runs per step: the trip counts down the call graph multiplied.

    Every branch of a conditional counts once, as if all of them were taken. Computations that are
    applied element by element (the sum in a reduce, the order in a sort) and those that nothing
    calls are left out. None: a loop around it has no trip count that can be found, or what calls it
    is a library, or an opcode that is not known.
    """
    counts: dict[str, int | None] = {}

    def visit(computation: Computation, times: int | None, read: Reader) -> None:
        before = counts.get(computation.name, 0)
        counts[computation.name] = None if before is None or times is None else before + times
        for instruction in computation.instructions.values():
            for callee, trips, inner in _calls(module, computation, instruction, read):
                visit(callee, None if times is None or trips is None else times * trips, inner)

    visit(module.computations[module.entry], 1, _nothing)
    return counts


def _calls(
    module: Module, computation: Computation, instruction: Instruction, read: Reader
) -> Iterator[tuple[Computation, int | None, Reader]]:
    """Each computation that one instruction runs, how often, and what it is given."""
    callees = [module.computations[name] for name in instruction.called()]
    opcode = instruction.opcode
    if opcode.endswith(("-update", "-done")):
        return  # the start has run it
    if plain(opcode) in RUNS:
        yield callees[0], 1, arguments(module, computation, instruction, read)
    elif opcode == "conditional":
        for place, branch in enumerate(callees, start=1):
            yield branch, 1, arguments(module, computation, instruction, read, first=place)
    elif opcode == "while":
        trips = _trip_count(module, computation, instruction, read)
        condition, body, init = _loop(module, computation, instruction, read)

        def unchanged(number: int, element: int | None) -> int | None:
            same = element is not None and _is_unchanged(body, element)
            return init(number, element) if same else None

        yield condition, None if trips is None else trips + 1, unchanged
        yield body, trips, unchanged
    elif plain(opcode) not in APPLIES:
        yield from ((callee, None, _nothing) for callee in callees)
    for name in instruction.mentioned():
        if name in module.computations:
            yield module.computations[name], None, _nothing


def _nothing(number: int, element: int | None) -> int | None:
    """Reads arguments of which nothing is known."""
    return None


def _loop(
    module: Module, computation: Computation, instruction: Instruction, read: Reader
) -> tuple[Computation, Computation, Reader]:
    """Condition and body of a while, and a reader of the state it starts with."""
    (condition,) = instruction.called("condition")
    (body,) = instruction.called("body")
    start = arguments(module, computation, instruction, read)
    return module.computations[condition], module.computations[body], start


def _is_unchanged(body: Computation, element: int) -> bool:
    """Whether a loop body hands this element of its state on as it was."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    source = body.instructions[root.operands[element]]
    while source.opcode in PASSES_ON:
        source = body.instructions[source.operands[0]]
    if source.opcode != "get-tuple-element" or source.integers("index") != (element,):
        return False
    return body.instructions[source.operands[0]].opcode == "parameter"


def _trip_count(
    module: Module, computation: Computation, instruction: Instruction, read: Reader
) -> int | None:
    """How often the body of a while runs, None if that cannot be known.

    The NVIDIA and CPU compilers write it down. The TPU compiler does not: there the integers that
    the condition depends on are followed from trip to trip until the condition is false.
    """
    known = re.search(
        r"known_trip_count\W+n\W+(\d+)", instruction.attributes.get("backend_config", "")
    )
    if known:
        return int(known.group(1))
    condition, body, init = _loop(module, computation, instruction, read)
    counters = _counters(module, condition, body)
    state = {element: init(0, element) for element in counters}

    def current(number: int, element: int | None) -> int | None:
        return state.get(element)

    for trips in range(_LONGEST_LOOP + 1):
        goes_on = integer(module, condition, condition.root, None, current)
        if not goes_on:
            return None if goes_on is None else trips
        after = {
            element: integer(module, body, body.root, element, current) for element in counters
        }
        if after == state:
            return None  # nothing moves: it would go on for ever
        state = after
    return None


def _counters(module: Module, condition: Computation, body: Computation) -> set[int | None]:
    """The elements of a loop's state on which its condition depends, in this trip or a later one.

    A state that is no tuple is the element None.
    """
    found: set[int | None] = set()

    def note(number: int, element: int | None) -> int:
        found.add(element)
        return 0  # any number will do: only what is asked for matters

    integer(module, condition, condition.root, None, note)
    followed: set[int | None] = set()
    while found != followed:
        for element in found - followed:
            followed.add(element)
            integer(module, body, body.root, element, note)
    return found
