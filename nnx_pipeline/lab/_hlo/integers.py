"""Evaluates the integers that steer a program: what loops count, and what chooses a branch."""

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module, Shape
from nnx_pipeline.lab._hlo.opcodes import RUNS, plain

# An integer, or the integers of an array in their order, the last axis fastest.
Value = int | tuple[int, ...]
# Gives an argument of a computation: (parameter number, tuple element) -> value, None where it is
# not known. The element is None for a parameter that is no tuple.
Reader = Callable[[int, int | None], Value | None]

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
_OF_ONE: dict[str, Callable[[int], int]] = {
    "abs": abs,
    "convert": lambda value: value,
    "negate": operator.neg,
    "not": operator.invert,
    "sign": lambda value: (value > 0) - (value < 0),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    direction: getattr(operator, direction.lower())
    for direction in ("LT", "LE", "GT", "GE", "EQ", "NE")
}
_SHIFTS = ("shift-left", "shift-right-arithmetic", "shift-right-logical")
_OTHERS = ("clamp", "compare", "divide", "remainder", "select")
_OF_ARRAYS = ("broadcast", "dynamic-slice", "iota", "reverse", "slice")
_EVALUATED = frozenset({*_ARITHMETIC, *_OF_ONE, *_SHIFTS, *_OTHERS, *_OF_ARRAYS})
MOST_ENTRIES = 10_000  # of an array that is calculated; tables have no limit
# Instructions whose result has the same value as their operand; of a bitcast see `passes_on`.
PASSES_ON = ("copy", "bitcast", "reshape", "copy-start", "copy-done", "opt-barrier")


@dataclass(frozen=True)
class Scope:
    """A computation together with its arguments, as far as these are known integers."""

    module: Module
    computation: Computation
    read: Reader
    _known: dict[tuple[str, int | None], Value | None] = field(default_factory=dict, repr=False)

    def value(self, name: str, element: int | None = None) -> Value | None:
        """The value of an instruction, or of one element of a tuple; None if it is not known."""
        key = name, element
        if key not in self._known:
            self._known[key] = self._evaluated(self.computation.instructions[name], element)
        return self._known[key]

    def _evaluated(self, instruction: Instruction, element: int | None) -> Value | None:
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.read(int(instruction.literal), element)
        if opcode == "get-tuple-element":
            if element is not None:
                return None  # tuples in tuples are not followed
            return self.value(instruction.operands[0], instruction.integers("index")[0])
        if opcode == "tuple":
            return None if element is None else self.value(instruction.operands[element])
        if opcode == "while":
            body = self.module.computations[instruction.called("body")[0]]
            same = element is not None and is_unchanged(body, element)
            return self.value(instruction.operands[0], element) if same else None
        if opcode in PASSES_ON:
            passes = passes_on(self.computation, instruction)
            return self.value(instruction.operands[0], element) if passes else None
        if plain(opcode) in RUNS:
            return self._of_called(instruction, element)
        shape = instruction.shapes[0]
        if shape.dtype[0] not in "psu":
            return None  # only pred, signed and unsigned integers steer a program
        if opcode == "constant":
            return _literal(instruction.literal, shape.elements)
        if opcode not in _EVALUATED or shape.elements > MOST_ENTRIES:
            return None
        operands: list[Value] = []
        for operand in instruction.operands:
            value = self.value(operand)
            if value is None:
                return None
            operands.append(value)
        return _calculated(instruction, operands)

    def _of_called(self, instruction: Instruction, element: int | None) -> Value | None:
        """The result of what a fusion or a call runs, or of the start that this is the end of."""
        while instruction.opcode.endswith(("-update", "-done")):
            instruction = self.computation.instructions[instruction.operands[0]]
        return self.called(instruction, instruction.called()[0]).root(element)

    def root(self, element: int | None = None) -> Value | None:
        return self.value(self.computation.root, element)

    def called(self, instruction: Instruction, name: str, first: int = 0) -> "Scope":
        """The scope of what an instruction runs; operand `first` becomes its parameter 0."""

        def read(number: int, element: int | None) -> Value | None:
            return self.value(instruction.operands[first + number], element)

        return self.of(name, read)

    def of(self, name: str, read: Reader) -> "Scope":
        return Scope(self.module, self.module.computations[name], read)


def passes_on(computation: Computation, instruction: Instruction) -> bool:
    """Whether the result of an instruction has the values of its operand, in their order. A bitcast
    reads the same bytes in another way, so that it may be a transpose or turn unsigned integers
    into signed ones. It passes on arrays of one type with a single axis longer than 1."""
    if instruction.opcode not in PASSES_ON:
        return False
    if instruction.opcode != "bitcast":
        return True
    before, after = computation.operand_shapes(instruction)[0][0], instruction.shapes[0]
    is_long = [sum(size > 1 for size in shape.dims) > 1 for shape in (before, after)]
    return before.dtype == after.dtype and not any(is_long)


def is_unchanged(body: Computation, element: int) -> bool:
    """Whether a loop's body passes this element of the state on unchanged."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    source = body.instructions[root.operands[element]]
    while passes_on(body, source):
        source = body.instructions[source.operands[0]]
    if source.opcode != "get-tuple-element" or source.integers("index") != (element,):
        return False
    return body.instructions[source.operands[0]].opcode == "parameter"


def _calculated(instruction: Instruction, operands: list[Value]) -> Value | None:
    """What an instruction computes of integers; None if it is not known."""
    opcode, shape = instruction.opcode, instruction.shapes[0]
    if opcode in ("slice", "dynamic-slice"):
        return _part(instruction, operands)
    if opcode == "iota":
        counted = tuple(_wrapped(entry, shape) for entry in range(shape.elements))
        return _of(counted) if len(shape.dims) == 1 else None
    if opcode == "reverse":
        (table,) = operands
        one_axis = isinstance(table, int) or len(shape.dims) == 1
        return _of(_entries(table)[::-1]) if one_axis else None
    if opcode == "broadcast":
        (table,) = operands
        if isinstance(table, int):
            return _of((table,) * shape.elements)
        return table if len(table) == shape.elements else None
    return _by_entry(opcode, instruction.attributes.get("direction"), shape, tuple(operands))


@functools.lru_cache(maxsize=256)  # the arrays that a loop reads are the same in all of its trips
def _by_entry(
    opcode: str, direction: str | None, shape: Shape, operands: tuple[Value, ...]
) -> Value | None:
    """What is computed at each place of arrays of one size, or of scalars; None if unknown."""
    if any(isinstance(one, tuple) and len(one) != shape.elements for one in operands):
        return None
    columns = [one if isinstance(one, tuple) else (one,) * shape.elements for one in operands]
    found: list[int] = []
    for values in zip(*columns, strict=True):
        result = _of_integers(opcode, direction, shape, values)
        if result is None:
            return None
        found.append(_wrapped(result, shape))
    return _of(tuple(found))


def _of_integers(
    opcode: str, direction: str | None, shape: Shape, values: tuple[int, ...]
) -> int | None:
    """The same of one place, not yet wrapped around to the range of its type."""
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*values)
    if opcode in _OF_ONE:
        is_not = shape.dtype == "pred" and opcode == "not"
        return 1 - values[0] if is_not else _OF_ONE[opcode](*values)
    if opcode in _SHIFTS:
        return _shifted(opcode, values[0], values[1], shape.bits)
    if opcode in ("divide", "remainder"):
        return _divided(opcode, *values)
    if opcode == "compare":
        compare = _COMPARE.get(direction or "")
        return None if compare is None else int(compare(*values))
    if opcode == "select":
        return values[1] if values[0] else values[2]
    return min(max(values[0], values[1]), values[2])  # clamp


def _part(instruction: Instruction, operands: list[Value]) -> Value | None:
    """A part of an array of one axis; None of others, and where it is not a part without gaps."""
    table, *starts = operands
    entries, shape = _entries(table), instruction.shapes[0]
    if len(shape.dims) != 1 or shape.elements > len(entries):
        return None
    if instruction.opcode == "dynamic-slice":
        start = starts[0]
        if len(starts) != 1 or not isinstance(start, int):
            return None
        # HLO moves a start out of range to the nearest one that there is.
        start = min(max(start, 0), len(entries) - shape.elements)
    else:
        bounds = re.fullmatch(r"\{\[(\d+):(\d+)(?::1)?\]\}", instruction.attributes["slice"])
        if bounds is None:
            return None
        start = int(bounds.group(1))
    return _of(entries[start : start + shape.elements])


def _entries(value: Value) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of(entries: tuple[int, ...]) -> Value:
    return entries if len(entries) != 1 else entries[0]


def _divided(opcode: str, value: int, by: int) -> int | None:
    # HLO rounds towards zero.
    if not by:
        return None
    quotient = abs(value) // abs(by) * (1 if (value < 0) == (by < 0) else -1)
    return quotient if opcode == "divide" else value - quotient * by


def _shifted(opcode: str, value: int, by: int, bits: int) -> int | None:
    if not 0 <= by < bits:
        return None
    if opcode == "shift-left":
        return value << by
    return (value if opcode == "shift-right-arithmetic" else value % (1 << bits)) >> by


def _wrapped(value: int, shape: Shape) -> int:
    if shape.dtype == "pred":
        return int(value != 0)
    value %= 1 << shape.bits
    return value - (1 << shape.bits) if shape.dtype[0] == "s" and value >> shape.bits - 1 else value


@functools.lru_cache(maxsize=256)  # a table is read in every trip of a loop
def _literal(text: str, elements: int) -> Value | None:
    known = {"true": 1, "false": 0}
    found = re.findall(r"true|false|-?\d+", text)
    if len(found) != elements or "..." in text:
        return None
    return _of(tuple(known[entry] if entry in known else int(entry) for entry in found))
