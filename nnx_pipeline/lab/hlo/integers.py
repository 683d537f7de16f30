"""Evaluates the integers of a compiled program that steer it: those that loops count, and those
that choose a branch."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from nnx_pipeline.lab.hlo.module import Computation, Instruction, Module, Shape
from nnx_pipeline.lab.hlo.opcodes import RUNS, plain

# An integer, or a table of integers: an array of one axis.
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

    def value(self, name: str, element: int | None = None) -> Value | None:
        """The value of an instruction, or of one element of a tuple; None if it is not known.

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
            return self.value(instruction.operands[0], instruction.integers("index")[0])
        if opcode == "tuple":
            return None if element is None else self.value(instruction.operands[element])
        if opcode in PASSES_ON:
            return self.value(instruction.operands[0], element)
        if opcode in RUNS:
            return self.called(instruction, instruction.called()[0]).root(element)
        if opcode.endswith(("-update", "-done")) and plain(opcode) in RUNS:
            (start,) = instruction.operands
            runs = self.computation.instructions[start]
            if runs.opcode.endswith("-update"):
                return self.value(start, element)
            return self.called(runs, runs.called()[0]).root(element)
        shape = instruction.shapes[0]
        if shape.dtype[0] not in "psu":
            return None  # only pred, signed and unsigned integers steer a program
        if opcode == "constant":
            return _literal(instruction.literal, shape)
        if shape.elements != 1:
            return None
        return _calculated(instruction, list(map(self.value, instruction.operands)))

    def integer(self, name: str) -> int | None:
        """The value of an instruction if it is one integer, else None."""
        value = self.value(name)
        return value if isinstance(value, int) else None

    def root(self, element: int | None = None) -> Value | None:
        """The result of the computation, or one element of it; None if it is not known."""
        return self.value(self.computation.root, element)

    def called(self, instruction: Instruction, name: str, first: int = 0) -> Scope:
        """The scope of a computation that an instruction of this one runs.

        - `name`: of the computation that is run.
        - `first`: the operand that becomes parameter 0.
        """

        def read(number: int, element: int | None) -> Value | None:
            return self.value(instruction.operands[first + number], element)

        return self.of(name, read)

    def of(self, name: str, read: Reader) -> Scope:
        """The scope of another computation of the program, with the arguments that `read` gives."""
        return Scope(self.module, self.module.computations[name], read)


def _calculated(instruction: Instruction, operands: list[Value | None]) -> int | None:
    """The one integer that an instruction computes; None if it is not known."""
    opcode = instruction.opcode
    if opcode == "dynamic-slice" and len(operands) == 2:
        return _entry(*operands)
    values = [operand for operand in operands if isinstance(operand, int)]
    result: int | None = None
    if len(values) < len(operands):
        return None
    if opcode in _ARITHMETIC:
        result = _ARITHMETIC[opcode](*values)
    elif opcode in ("divide", "remainder"):
        result = _divided(opcode, *values)
    elif opcode == "compare":
        compare = _COMPARE.get(instruction.attributes["direction"])
        return None if compare is None else int(compare(*values))
    elif opcode == "select":
        result = values[1] if values[0] else values[2]
    elif opcode == "clamp":
        result = min(max(values[0], values[1]), values[2])
    elif opcode == "convert":
        result = values[0]
    elif opcode == "negate":
        result = -values[0]
    elif opcode == "not" and instruction.shapes[0].dtype == "pred":
        result = 1 - values[0]
    return None if result is None else _wrapped(result, instruction.shapes[0])


def _entry(table: Value | None, index: Value | None) -> int | None:
    """The entry of a table at an index, which HLO moves to the nearest one that there is."""
    if not isinstance(index, int) or table is None:
        return None
    entries = table if isinstance(table, tuple) else (table,)
    return entries[min(max(index, 0), len(entries) - 1)]


def _divided(opcode: str, value: int, by: int) -> int | None:
    """The quotient, which HLO rounds towards zero, or what then remains."""
    if not by:
        return None
    quotient = abs(value) // abs(by) * (1 if (value < 0) == (by < 0) else -1)
    return quotient if opcode == "divide" else value - quotient * by


def _wrapped(value: int, shape: Shape) -> int:
    """The value wrapped around to the range of an integer type."""
    if shape.dtype == "pred":
        return int(value != 0)
    value %= 1 << shape.bits
    return value - (1 << shape.bits) if shape.dtype[0] == "s" and value >> shape.bits - 1 else value


def _literal(text: str, shape: Shape) -> Value | None:
    """What a constant holds; None for an array of several axes and one that is not written out."""
    known = {"true": 1, "false": 0}
    found = re.findall(r"true|false|-?\d+", text)
    if len(found) != shape.elements or not found or len(shape.dims) > 1:
        return None
    values = tuple(known[entry] if entry in known else int(entry) for entry in found)
    return values if len(values) > 1 else values[0]
