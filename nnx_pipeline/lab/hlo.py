"""Reads the optimized HLO text that a compiler gives back (`compiled.as_text()`).

One module is computations, one computation is instructions in the order in which they run. Only
what the figures in `hlo_cost` and a memory report need is taken apart; every other attribute is
kept as the text it was printed with. The TPU, NVIDIA and CPU compilers print the same language:
layouts `{1,0:T(8,128)(2,1)S(1)}`, tuples, comments `/*index=5*/` and quoted strings that contain
brackets are what a reader has to step over with care.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]')
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.$-]+)\s+(?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s}]+)')
_TABLE_ROW = re.compile(r'(\d+) (".*"|\{.*\})$')
_CALLED = ("calls", "to_apply", "condition", "body", "true_computation", "false_computation")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


Frame = tuple[str, int, str]


@dataclass(frozen=True)
class Shape:
    """One array: element type as HLO spells it, and its dimensions (upper bounds if dynamic)."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers the array holds."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of one element; 0 for tokens and opaque values, which hold none."""
        if self.dtype == "pred":
            return 8
        digits = re.match(r"[a-z]+(\d+)", self.dtype)  # bf16, s4, c64, f8e4m3fn
        return int(digits.group(1)) if digits else 0

    @property
    def bytes(self) -> int:
        """Bytes of the array without the padding that a tiled layout adds."""
        return (self.elements * self.bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `shapes` are the arrays of the result, tuples flattened in order. `operands` are names in the
    same computation. `literal` is what stands between the parentheses of a constant or parameter.
    `source_file` and `source_line` are the innermost Python frame, None if the text has none;
    `frames` are all frames that the text has, the innermost first: file, line and function.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: Mapping[str, str]
    op_name: str | None = None
    source_file: str | None = None
    source_line: int | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def result_bytes(self) -> int:
        """Bytes of the result per device, all tuple elements together."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def window(self) -> Mapping[str, str]:
        """The fields of `window={size=3x3 stride=2x2}` by name; empty without a window."""
        return dict(_FIELD.findall(self.attributes.get("window", "")))

    def integers(self, attribute: str) -> tuple[int, ...]:
        """An attribute like `lhs_contracting_dims={1,2}` as numbers; empty if it is not there."""
        return tuple(
            int(digits) for digits in re.findall(r"\d+", self.attributes.get(attribute, ""))
        )

    def called(self, attribute: str | None = None) -> tuple[str, ...]:
        """Names of the computations it refers to, in all attributes or in the one named."""
        names = (attribute,) if attribute else (*_CALLED, "branch_computations")
        texts = [self.attributes[name] for name in names if name in self.attributes]
        return tuple(part for text in texts for part in re.findall(r"[\w.$-]+", text))


@dataclass(frozen=True)
class Computation:
    """A function of the module: instructions by name, in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """The arrays of each operand, from the computation's own symbol table."""
        return [self.instructions[name].shapes for name in instruction.operands]

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction, those that read it."""
        readers: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                readers[operand].append(instruction)
        return readers


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the name of the one it starts with."""

    name: str
    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The module that a compiler printed.

    Raises ValueError for text that has no ENTRY computation, which is then not an HLO module.
    """
    frames = _Frames(text)
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, name, lines in _computation_lines(text):
        computations[name] = _computation(name, lines, frames)
        entry = name if is_entry else entry
    if not entry:
        start = text[:60].replace("\n", " ")
        raise ValueError(
            f"no ENTRY computation in text that begins with {start!r}; pass compiled.as_text()"
        )
    header = re.match(r"HloModule\s+([^\s,]+)", text)
    return Module(header.group(1) if header else "", computations, entry)


def fingerprint(text: str) -> str:
    """Equal for two texts that differ only in where in the source their instructions come from.

    That is a hash of the computations alone: neither their metadata nor the tables before them.
    """
    bare = re.sub(r",? ?(stack_frame_id=\d+|metadata=\{[^{}]*\})", "", text)
    lines = (line for line in bare.splitlines() if re.match(r" *(%|ROOT|ENTRY|\})", line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def split_at_commas(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket, quotation or comment, stripped."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif mark == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _closing(text: str, start: int) -> int:
    """Position just behind the bracket that closes the one at `start`."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if depth == 0:
            return token.end()
    raise ValueError(f"unbalanced brackets in HLO text: {text[start : start + 120]!r}")


def _computation_lines(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Whether it is the entry, its name and its lines, for each computation of the module."""
    lines: list[str] = []
    header: re.Match[str] | None = None
    for line in text.splitlines():
        if header is None:
            header = None if line.startswith("HloModule") else _COMPUTATION.match(line)
        elif line.startswith("}"):
            yield bool(header.group(1)), header.group(2), lines
            header, lines = None, []
        else:
            lines.append(line)


def _computation(name: str, lines: list[str], frames: _Frames) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found:
            instruction = _instruction(found.group(2), found.group(3), frames)
            instructions[instruction.name] = instruction
            root = instruction.name if found.group(1) else root
    # The last one is the result where no line is marked ROOT.
    return Computation(name, instructions, root or next(reversed(instructions), ""))


def _instruction(name: str, text: str, frames: _Frames) -> Instruction:
    """`text` is what follows the equals sign: result type, opcode(operands), attributes."""
    end_of_type = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end_of_type)
    if opcode is None:
        raise ValueError(f"no opcode in the HLO instruction {name!r}: {text[:120]!r}")
    end_of_operands = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : end_of_operands - 1]
    takes_literal = opcode.group(1) in ("constant", "parameter", "iota")
    pairs = (part.partition("=") for part in split_at_commas(text[end_of_operands:]))
    attributes = {key: value for key, equals, value in pairs if equals}
    return Instruction(
        name,
        opcode.group(1),
        shapes_of(text[:end_of_type]),
        () if takes_literal else tuple(map(_operand_name, split_at_commas(inside))),
        inside.strip() if takes_literal else "",
        attributes,
        *frames.describe(attributes.get("metadata", "")),
    )


def shapes_of(text: str) -> tuple[Shape, ...]:
    """The arrays of a type, tuples flattened: `(f32[2]{0}, /*index=1*/s32[])`."""
    return tuple(
        Shape(dtype, tuple(int(size.strip().lstrip("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text))
    )


def _operand_name(text: str) -> str:
    """`%x`, `x` or `f32[2]{0} %x` gives `x`."""
    return _COMMENT.sub("", text).split()[-1].lstrip("%")


class _Frames:
    """The tables of Python frames at the head of the text, which metadata refers to by number."""

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
        self._found: dict[str, tuple[Frame, ...]] = {"0": (), "-1": ()}
        rows: dict[str, str] = {}
        for line in text.splitlines():
            if line in self._tables:
                rows = self._tables[line]
            elif row := _TABLE_ROW.match(line):
                rows[row.group(1)] = row.group(2)
            elif line and not line.startswith("HloModule"):
                break

    def describe(
        self, metadata: str
    ) -> tuple[str | None, str | None, int | None, tuple[Frame, ...]]:
        """op_name, source file, line and all frames of `{op_name="..." stack_frame_id=6}`."""
        fields = dict(_FIELD.findall(metadata))
        file, line = _unquoted(fields.get("source_file")), fields.get("source_line")
        frames: tuple[Frame, ...] = ((file, int(line), ""),) if file and line else ()
        if "stack_frame_id" in fields:
            frames = self._frames(fields["stack_frame_id"]) or frames
        if frames:
            file, line = frames[0][0], str(frames[0][1])
        return _unquoted(fields.get("op_name")), file, int(line) if line else None, frames

    def _frames(self, number: str) -> tuple[Frame, ...]:
        """A frame and those that called it."""
        if number not in self._found:
            frame = dict(_FIELD.findall(self._row("StackFrames", number)))
            place = dict(_FIELD.findall(self._row("FileLocations", frame.get("file_location_id"))))
            file = _unquoted(self._row("FileNames", place.get("file_name_id")))
            name = _unquoted(self._row("FunctionNames", place.get("function_name_id"))) or ""
            here = ((file, int(place["line"]), name),) if file and "line" in place else ()
            # Printed is the caller's number plus one, and 1 where there is none: a frame is never
            # its own caller, yet the first one says so.
            caller = str(int(frame.get("parent_frame_id", 1)) - 1)
            self._found[number] = here + (self._frames(caller) if caller != number else ())
        return self._found[number]

    def _row(self, table: str, number: str | None) -> str:
        return self._tables[table].get(number or "", "")


def _unquoted(text: str | None) -> str | None:
    """The string between double quotes, escapes resolved; None for no text."""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text else None
