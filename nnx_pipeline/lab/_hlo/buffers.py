"""Reads the compiler's buffer assignment: where each value lies in memory, and when it is live.

The text (see `compile_with_dump`) has the same format on TPU, NVIDIA and CPU. Its sequence lists
the whole program in one order, loop bodies included; a live range is a pair of positions in it:

    allocation 403: size 273236160, preallocated-temp:
     value: <4771 wide.param.19{15} (phi) @1> (size=4194304,offset=33554432): bf16[2,512]{1,0}
    HloLiveRange (max 1499):
      InstructionSequence:
        0:constant.1543
      BufferLiveRange:
        lt.180{}:420-421
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nnx_pipeline.lab._hlo.module import Shape, shapes_of

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*):$")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_POSITION = re.compile(r"    (\d+):(\S+)$")
_RANGE = re.compile(r"    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")
_COLOR = re.compile(r", color (\d+)")
_SECTION = re.compile(r" {0,2}\S")
_SECTIONS = {"  InstructionSequence:": _POSITION, "  BufferLiveRange:": _RANGE}
_SHAPE = re.compile(r"shape (is )?\|[^|]*\|")
_NEVER = (0, -1)

Index = tuple[int, ...]


@dataclass(frozen=True)
class BufferValue:
    name: str  # of the instruction that defines it
    index: Index  # which element of its result; empty for the result itself
    bytes: int  # with the padding of a tiled layout
    offset: int  # in the allocation, in bytes
    type: str  # with its layout, such as `bf16[2,512]{1,0}`
    first: int  # the positions in the schedule between which it is live, both inclusive
    last: int  # below `first` where the text gives no live range

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    @property
    def is_table(self) -> bool:
        # Else it is an array.
        return self.type.startswith("(")

    @property
    def shape(self) -> str:
        """The type without its layout: `f32[8,512]`, or `tuple of 3` for a table of pointers."""
        if self.is_table:
            return f"tuple of {len(shapes_of(self.type))}"
        return self.type.partition("{")[0]

    @property
    def array_bytes(self) -> int:
        """Bytes without the padding of a tiled layout; all `bytes` of a value that is no array."""
        shapes: tuple[Shape, ...] = () if self.is_table else shapes_of(self.type)
        return sum(shape.bytes for shape in shapes) or self.bytes


@dataclass(frozen=True)
class Allocation:
    """A block of one memory space. Values in it whose lives do not overlap may share bytes. An
    argument that an output aliases is both argument and output."""

    number: int
    bytes: int
    color: int  # 0: device memory; on a TPU 1: on-chip memory
    is_temp: bool  # a heap, which holds temporaries
    is_argument: bool
    is_output: bool
    is_constant: bool
    values: tuple[BufferValue, ...]


@dataclass(frozen=True)
class BufferText:
    allocations: tuple[Allocation, ...]
    schedule: Mapping[int, str]  # the names of the instructions by position

    @property
    def heap(self) -> tuple[Allocation, ...]:
        """The temporaries in device memory: the allocations that `heap_bytes` counts."""
        return tuple(part for part in self.allocations if part.is_temp and part.color == 0)


def read_buffers(text: str) -> BufferText:
    """Parses the buffer assignment that a compiler wrote. Raises ValueError for a text without
    allocations, and for a line that cannot be parsed."""
    blocks: list[tuple[re.Match[str], list[re.Match[str]]]] = []  # allocations, and their values
    schedule: dict[int, str] = {}
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    section: re.Pattern[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        # A line indented by at most two spaces begins a section, whose own lines have four.
        if _SECTION.match(line):
            section = _SECTIONS.get(line)
        pattern = section if line.startswith("    ") else None
        if line.startswith("allocation "):
            pattern = _ALLOCATION
        elif line.startswith(" value:"):
            pattern = _VALUE
        if pattern and not pattern.match(line):
            raise ValueError(f"line {number} of the buffer assignment: not understood: {line!r}")
        if found := _ALLOCATION.match(line):
            blocks.append((found, []))
        elif blocks and (found := _VALUE.match(line)):
            blocks[-1][1].append(found)
        elif found := _POSITION.match(line):
            schedule[int(found[1])] = found[2]
        elif found := _RANGE.match(line):
            ranges[found[1], found[2]] = int(found[3]), int(found[4])
    if not blocks:
        raise ValueError(f"no allocation in a text that begins with {text[:60]!r}")
    allocations = [
        _allocation(head, [_value(found, ranges) for found in values]) for head, values in blocks
    ]
    return BufferText(tuple(allocations), schedule)


def has_allocations(text: str) -> bool:
    return re.search(r"^allocation ", text, re.MULTILINE) is not None


def _value(found: re.Match[str], ranges: Mapping[tuple[str, str], tuple[int, int]]) -> BufferValue:
    name, index = found[1], (found[2] or "{}")[1:-1]
    first, last = ranges.get((name, index), _NEVER)
    path = tuple(map(int, filter(None, index.split(","))))
    return BufferValue(name, path, int(found[4]), int(found[5]), found[6], first, last)


def _allocation(head: re.Match[str], values: list[BufferValue]) -> Allocation:
    # A shape is printed between bars and may hold any word, such as that of a kind.
    kinds = set(_SHAPE.sub("", head[3]).removesuffix(",").split(", "))
    color = _COLOR.search(head[3])
    return Allocation(
        number=int(head[1]),
        bytes=int(head[2]),
        color=int(color[1]) if color else 0,
        is_temp="preallocated-temp" in kinds,
        is_argument=any(kind.startswith("parameter ") for kind in kinds),
        is_output="maybe-live-out" in kinds,
        is_constant="constant" in kinds,
        values=tuple(values),
    )
