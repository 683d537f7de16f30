"""Parses the optimized HLO text of a compiled program (`compiled.as_text()`), which all compilers
print in the same language: a module of computations, and these of instructions in the order in
which they run. Text that cannot be parsed raises ValueError with the line."""

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nnx_pipeline.lab._hlo.text import COMMENT, Frames, Scanner, split_at_commas
from nnx_pipeline.lab._tracing.installed import Frame

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{[^{}]*?S\((\d+)\)[^{}]*\})?")
_MODULE = re.compile(r"\s*HloModule\s+([^\s,]+)")
_TABLE = re.compile(r"([A-Za-z]+)[ \t]*(?=\n)")
_ROW = re.compile(r"\s*(\d+)\s+(?=[\"{])")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.$-]+)\s*(?=[({])")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([^\s=(){},]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_ELEMENT = re.compile(r"(.+)#(\d+)")
_FIELD = re.compile(r"(\w+)=\s*([^\s}]+)")
_METADATA = re.compile(
    r",?\s*(?<!\w)(?:stack_frame_id=\d+|metadata=\{"
    r'(?:[^{}"]|"[^"\\]*(?:\\.[^"\\]*)*"|\{[^{}]*\})*\})',
    re.DOTALL,
)
# The attributes that an instruction of this opcode, or its start, must have.
_NEEDED = {
    "async": ("calls",),
    "call": ("to_apply",),
    "compare": ("direction",),
    "convolution": ("dim_labels",),
    "conditional": ("true_computation", "false_computation"),
    "custom-call": ("custom_call_target",),
    "fusion": ("calls",),
    "get-tuple-element": ("index",),
    "while": ("condition", "body"),
}
_CALLED = (
    *("calls", "to_apply", "condition", "body", "true_computation", "false_computation"),
    *("branch_computations", "called_computations"),
)
_HOST_MEMORY = "S(5)"  # a layout's memory space
# Attributes of a module that say which arguments it may put its results into.
_DONATED = ("input_output_alias", "buffer_donor")
# Attributes that name instructions, or computations that are applied to each element.
_NOT_CALLED = ("control-predecessors", "select", "scatter")


@dataclass(frozen=True)
class Shape:
    """The dtype and dimensions of one array."""

    dtype: str  # as HLO spells it, such as `bf16`
    dims: tuple[int, ...]  # upper bounds of dynamic sizes
    space: int = field(default=0, compare=False)  # of memory; on a TPU 1 is the chip

    @property
    def elements(self) -> int:
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
    """One instruction of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, tuples flattened in order
    operands: tuple[str, ...]  # names of instructions of the same computation
    literal: str  # text in the parentheses of a constant, parameter or iota
    attributes: Mapping[str, str]
    op_name: str = ""  # the path of JAX operations that it comes from
    frames: tuple[Frame, ...] = ()  # of the program's own code, innermost first
    in_host_memory: bool = False  # whether any part of the result is

    @property
    def result_bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def config(self) -> str:
        """What the compiler itself writes of the instruction; "" for nothing."""
        return self.attributes.get("backend_config", "")

    @property
    def target(self) -> str:
        """What a custom call calls; "" for any other instruction."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def window(self) -> Mapping[str, str]:
        """The fields of `window={size=3x3 stride=2x2}` by name; empty without that attribute."""
        return dict(_FIELD.findall(self.attributes.get("window", "")))

    def integers(self, attribute: str) -> tuple[int, ...]:
        """An attribute like `lhs_contracting_dims={1,2}` as numbers; empty if it is not there."""
        return tuple(map(int, re.findall(r"\d+", self.attributes.get(attribute, ""))))

    def called(self, attribute: str | None = None) -> tuple[str, ...]:
        """Names of the computations that it calls, by all of its attributes or by the one given."""
        names = (attribute,) if attribute else _CALLED
        texts = [self.attributes[name] for name in names if name in self.attributes]
        return tuple(
            part for text in texts for part in re.findall(r"[\w.$-]+", COMMENT.sub("", text))
        )

    def mentioned(self) -> tuple[str, ...]:
        """Names after a percent sign in all other attributes: what it may call as well."""
        return tuple(
            name
            for key, value in self.attributes.items()
            if value.startswith(("%", "{%")) and key not in (*_CALLED, *_NOT_CALLED)
            for name in re.findall(r"%([\w.$-]+)", value)
        )


@dataclass(frozen=True)
class Computation:
    """A function of the module."""

    name: str
    instructions: Mapping[str, Instruction]  # by name, in the order in which they run
    root: str  # the instruction whose result it returns

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        return [self.instructions[name].shapes for name in instruction.operands]

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        readers: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                readers[operand].append(instruction)
        return readers


@dataclass(frozen=True)
class Module:
    name: str
    computations: Mapping[str, Computation]
    entry: str

    def instructions(
        self, computations: Iterable[str] | None = None
    ) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of these computations, or of all, each with what holds it."""
        for name in self.computations if computations is None else computations:
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                yield computation, instruction


def parse(text: str) -> Module:
    """Parses the module that a compiler printed; raises ValueError, with the line, for other
    text."""
    scanner = Scanner(text)
    name, frames, _, at = _head(scanner)
    computations: dict[str, Computation] = {}
    entry = ""
    while (at := scanner.space(at)) < len(text):
        start = at
        is_entry, computation, at = _computation(scanner, at, frames)
        if computation.name in computations:
            scanner.fail(start, f"a second computation of the name {computation.name}")
        computations[computation.name] = computation
        entry = computation.name if is_entry else entry
    if not entry:
        raise ValueError(_no_module(text))
    module = Module(name, computations, entry)
    _check_calls(scanner, module)
    return module


def _no_module(text: str) -> str:
    start = text[:60].replace("\n", " ")
    return f"no ENTRY computation in text that begins with {start!r}; pass compiled.as_text()"


def fingerprint(text: str) -> str:
    """A hash that is equal for programs that differ only in their places in the source. It covers
    the computations and which arguments the program may put its results into."""
    donated = {}
    try:
        *_, attributes, at = _head(Scanner(text))
        donated = {key: value for key, value in attributes.items() if key in _DONATED}
    except ValueError:
        at = 0  # a text that cannot be parsed is hashed whole, so that it is still equal to itself
    bare = f"{sorted(donated.items())}{_METADATA.sub('', text[at:]).strip()}"
    return hashlib.sha256(bare.encode()).hexdigest()


def _head(scanner: Scanner) -> tuple[str, Frames, dict[str, str], int]:
    header = _MODULE.match(scanner.text)
    if header is None:
        raise ValueError(_no_module(scanner.text))
    attributes, at = scanner.attributes(header.end())
    tables: dict[str, dict[str, str]] = {}
    while title := _TABLE.match(scanner.text, scanner.space(at)):
        rows = tables[title[1]] = {}
        at = title.end()
        while row := _ROW.match(scanner.text, at):
            at = scanner.quotation_or_group(row.end())
            rows[row[1]] = scanner.text[row.end() : at]
    return header[1], Frames(tables, header[1]), attributes, at


def _computation(scanner: Scanner, at: int, frames: Frames) -> tuple[bool, Computation, int]:
    """Also whether it is the entry, and where it ends."""
    text, start = scanner.text, at
    header = _COMPUTATION.match(text, at)
    if header is None:
        scanner.fail(at, "not the beginning of a computation")
    at = header.end()
    if text[at] == "(":
        at = scanner.space(scanner.closing(at))
        if not text.startswith("->", at):
            scanner.fail(at, "no result type of a computation")
        at = scanner.space(scanner.type(scanner.space(at + 2)))
    if not text.startswith("{", at):
        scanner.fail(at, "no beginning of the instructions of a computation")
    instructions: dict[str, Instruction] = {}
    types: dict[str, str] = {}
    root = ""
    at = scanner.space(at + 1)
    while not text.startswith("}", at):
        if at >= len(text):
            scanner.fail(start, f"computation {header[2]} never ends")
        is_root, instruction, types[instruction.name], behind = _instruction(scanner, at, frames)
        if instruction.name in instructions:
            scanner.fail(at, f"a second instruction of the name {instruction.name}")
        instructions |= _elements(instruction.operands, types, instructions)
        instructions[instruction.name] = instruction
        root = instruction.name if is_root else root
        at = scanner.space(behind)
    if not instructions:
        scanner.fail(start, f"computation {header[2]} has no instruction")
    _, at = scanner.attributes(at + 1)  # such as the thread that runs it
    # The last one is the result where no instruction is marked ROOT.
    found = Computation(header[2], instructions, root or next(reversed(instructions)))
    return bool(header[1]), found, at


def _elements(
    operands: tuple[str, ...], types: Mapping[str, str], known: Mapping[str, Instruction]
) -> dict[str, Instruction]:
    """A get-tuple-element for each operand such as `x#2`, which is element 2 of the tuple x. libtpu
    0.0.50 prints this form while it compiles: of a program that it refuses there is no other text.

    - `types`: the printed type of each instruction above it in the computation.
    """
    made: dict[str, Instruction] = {}
    for operand in dict.fromkeys(operands):
        found = _ELEMENT.fullmatch(operand)
        printed = types.get(found[1], "") if found else ""
        if found is None or operand in known or not printed.startswith("("):
            continue  # `_check_calls` says what is not there
        elements = split_at_commas(printed[1:-1])
        if (index := int(found[2])) < len(elements):
            shapes, on_host = shapes_of(elements[index]), _HOST_MEMORY in elements[index]
            made[operand] = Instruction(
                *(operand, "get-tuple-element", shapes, (found[1],), "", {"index": found[2]}),
                in_host_memory=on_host,
            )
    return made


def _instruction(
    scanner: Scanner, start: int, frames: Frames
) -> tuple[bool, Instruction, str, int]:
    """Also whether it is the root, its printed type, and where it ends."""
    text = scanner.text
    named = _INSTRUCTION.match(text, start)
    if named is None:
        scanner.fail(start, "neither an instruction nor the end of a computation")
    end_of_type = scanner.type(named.end())
    opcode = _OPCODE.match(text, end_of_type)
    if opcode is None:
        scanner.fail(end_of_type, f"no opcode in the instruction {named[2]}")
    end_of_operands = scanner.closing(opcode.end() - 1)
    inside = text[opcode.end() : end_of_operands - 1]
    attributes, end = scanner.attributes(end_of_operands)
    # A conditional has either `branch_computations` or one computation each for true and false.
    needed = _NEEDED.get(opcode[1].removesuffix("-start"), ())
    needed = () if "branch_computations" in attributes else needed
    if lacking := [key for key in needed if key not in attributes]:
        scanner.fail(start, f"the {opcode[1]} {named[2]} has no {' and no '.join(lacking)}")
    takes_literal = opcode[1] in ("constant", "parameter", "iota")
    if opcode[1] == "parameter" and not inside.strip().isdecimal():
        scanner.fail(start, f"the parameter {named[2]} has no number")
    if opcode[1] == "get-tuple-element" and not attributes["index"].isdecimal():
        scanner.fail(start, f"the index of {named[2]} is no number")
    printed = text[named.end() : end_of_type]
    try:
        shapes = shapes_of(printed)
    except ValueError:
        scanner.fail(start, f"the instruction {named[2]} has no size that is a number")
    instruction = Instruction(
        named[2],
        opcode[1],
        shapes,
        () if takes_literal else tuple(map(_operand_name, split_at_commas(inside))),
        inside.strip() if takes_literal else "",
        attributes,
        *frames.describe(attributes.get("metadata", "")),
        _HOST_MEMORY in printed,
    )
    return bool(named[1]), instruction, printed, end


def _check_calls(scanner: Scanner, module: Module) -> None:
    for computation, item in module.instructions():
        unknown = [name for name in item.operands if name not in computation.instructions]
        unknown += [name for name in item.called() if name not in module.computations]
        if unknown:
            at = re.search(rf"[\s%]{re.escape(item.name)}\s*=", scanner.text)
            what = f"{item.name} reads or calls {unknown[0]!r}, not there"
            scanner.fail(at.end() if at else 0, what)


@functools.lru_cache(maxsize=4096)
def shapes_of(text: str) -> tuple[Shape, ...]:
    """The arrays of a printed type such as `(f32[2]{0}, /*index=1*/s32[])`, tuples flattened."""
    return tuple(
        Shape(
            dtype,
            tuple(int(size.strip().lstrip("<=")) for size in dims.split(",") if size),
            int(space or 0),
        )
        for dtype, dims, space in _ARRAY.findall(COMMENT.sub("", text))
    )


def _operand_name(text: str) -> str:
    """The name of a printed operand: `x` for `%x`, `x` and `f32[2]{0} %x`."""
    return text.split()[-1].lstrip("%")
