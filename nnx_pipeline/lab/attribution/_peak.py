"""Finds what the heap of a compiled program holds at its peak, from its buffer assignment."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nnx_pipeline.lab._hlo.buffers import BufferText, BufferValue
from nnx_pipeline.lab._hlo.dataflow import Flow, Value
from nnx_pipeline.lab._hlo.module import Module, shapes_of
from nnx_pipeline.lab._tracing.installed import Frame
from nnx_pipeline.lab.attribution._origins import Origins
from nnx_pipeline.lab.attribution._result import Attribution, Buffer, Call, History
from nnx_pipeline.lab.attribution._roles import Roles
from nnx_pipeline.lab.attribution.account import HOST, free_parts, in_outputs

MOST_POINTS = 2000  # in a timeline
_CALLERS = 3  # lines in the path of a buffer; the table of calls has all
MOST_POSITIONS, MOST_LARGEST = 300, 5  # in a history: positions, and kinds of buffers at each
_SPACES = {
    1: ", on a TPU the on-chip memory",
    2: ", on a TPU semaphores",
    6: ", on a TPU the memory of scalars",
}


def attribute(
    buffers: BufferText,
    module: Module,
    temp_bytes: int | None,
    one_line: frozenset[str] = frozenset(),
) -> Attribution:
    """Finds what the heap of a program holds at its peak, with a source line and role for each row.

    The peak is the first position in the schedule at which the live values cover the most bytes of
    the heap. Bytes that several live values share (as in an in-place update) count once, for the
    value that was live first. Bytes that a tiled layout adds are `padding`, those that no live
    value covers are `fragmentation`. `other` has each other memory space of the device and the rest
    of `temp_bytes`, which is negative where temp is less than the sum (see `_compiler`).
    """
    values = slots_of(buffers)
    curve = live_bytes(values)
    # The first of the positions with the most bytes.
    peak = max(curve, key=lambda position: (curve[position], -position), default=0)
    heap = sum(part.bytes for part in buffers.heap)
    reader = _Reader(buffers, module, one_line)
    rows = _rows(values, peak, reader)
    rows += _holes(values, heap - sum(row.bytes for row in rows), buffers)
    there = reader.origins.of((buffers.schedule.get(peak, ""), ()))
    outside = {
        "constants": _largest_first(_constants(buffers, reader)),
        "in_outputs": _largest_first([reader.buffer(*found) for found in in_outputs(buffers)]),
    }
    outside |= {
        "arguments": _largest_first(_arguments(buffers, reader)),
        "outputs": _largest_first(_own_outputs(buffers, reader)),
    }
    history = _history(values, [at for at, _ in _thinned(curve, peak, MOST_POSITIONS)], reader)
    return Attribution(
        heap_bytes=heap,
        temp_bytes=temp_bytes,
        peak_position=peak,
        buffers=_largest_first(rows),
        other=_largest_first(_beyond_the_heap(buffers, heap, temp_bytes)),
        timeline=_thinned(curve, peak, MOST_POINTS),
        peak_operation=there.operation,
        peak_source=there.source,
        positions=len(buffers.schedule),
        history=history if values else None,
        calls=reader.calls.table(),
        **outside,
    )


def _constants(buffers: BufferText, reader: "_Reader") -> list[Buffer]:
    parts = [part for part in buffers.allocations if part.is_constant and part.color == 0]
    return [
        replace(reader.buffer(part.values[0], part.bytes), role="constant")
        if part.values
        else _plain(f"constant of allocation {part.number}", part.bytes, "constant", buffers)
        for part in parts
        if part.bytes
    ]


def _arguments(buffers: BufferText, reader: "_Reader") -> list[Buffer]:
    parts = [part for part in buffers.allocations if part.is_argument and part.color == 0]
    return [
        replace(reader.buffer(part.values[0], part.bytes), role="argument")
        for part in parts
        if part.values and part.bytes
    ]


def _own_outputs(buffers: BufferText, reader: "_Reader") -> list[Buffer]:
    """The outputs that take no argument's memory: what lives there after the last instruction."""
    end = max(buffers.schedule, default=-1)
    return [
        replace(reader.buffer(value, part.bytes), role="output")
        for part in buffers.allocations
        if part.is_output and not part.is_argument and part.color == 0 and part.bytes
        for value in [one for one in part.values if one.last > end][:1]
    ]


class Slot(NamedTuple):
    """A value in one allocation of the heap."""

    allocation: int
    value: BufferValue


class _Calls:
    """The call stacks of a program as one table, in which a call has the number of its caller."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Frame, int | None], int] = {}

    def of(self, stack: Sequence[Frame]) -> int | None:
        """The number of the innermost call of a stack, which is its first; None for no stack."""
        caller: int | None = None
        for frame in reversed(stack):
            caller = self._numbers.setdefault((frame, caller), len(self._numbers))
        return caller

    def table(self) -> tuple[Call, ...]:
        return tuple(
            Call(file=file, line=line, function=function, caller=caller)
            for (file, line, function), caller in self._numbers
        )


class _Reader:
    def __init__(self, buffers: BufferText, module: Module, one_line: frozenset[str]) -> None:
        self.flow = Flow(module)
        self.origins = Origins(self.flow, one_line)
        self.roles = Roles(self.flow, self.origins)
        self.calls = _Calls()
        self._known: dict[tuple[BufferValue, int], Buffer] = {}
        self.schedule = buffers.schedule
        self.position = {name: position for position, name in buffers.schedule.items()}

    def value(self, placed: BufferValue) -> Value:
        """The value under the name that it has in the program's text. The NVIDIA compiler prints an
        asynchronous collective without the computation that it starts. In the schedule its
        instructions stand just before the start, and are element 1 of its result."""
        if placed.name in self.flow.instructions or placed.name not in self.position:
            return placed.name, placed.index
        here = self.position[placed.name]
        for position in range(here + 1, here + 3):
            name = self.schedule.get(position, "")
            if name in self.flow.instructions and "-start" in name:
                return name, (1, *placed.index)
        return placed.name, placed.index

    def buffer(self, placed: BufferValue, size: int) -> Buffer:
        key = placed, size
        if key not in self._known:
            self._known[key] = self._described(placed, size)
        return self._known[key]

    def _described(self, placed: BufferValue, size: int) -> Buffer:
        value = self.value(placed)
        origin = self.origins.of(value)
        shape = None if placed.is_table else next(iter(shapes_of(placed.type)), None)
        index = ",".join(map(str, placed.index))
        stack = self.origins.stack_of(origin)
        lines = [f"{file}:{line}" for file, line, _ in stack]
        into = self.origins.into(value)
        return Buffer(
            name=f"{placed.name}{{{index}}}" if placed.index else placed.name,
            bytes=size,
            shape=placed.shape,
            operation=origin.operation,
            source=origin.source,
            caller=origin.caller,
            role=self.roles.of(value, shape),
            first=placed.first,
            last=placed.last,
            call=self.calls.of(stack),
            path=tuple(lines[1 : 1 + _CALLERS]),
            into=None if into in (origin.source, *lines) else into,
        )


def slots_of(buffers: BufferText) -> list[Slot]:
    return [Slot(part.number, value) for part in buffers.heap for value in part.values]


def live_bytes(slots: list[Slot]) -> dict[int, int]:
    """The bytes that live values cover, at each position where a value begins or ceases to live."""
    changes = {slot.value.first for slot in slots} | {slot.value.last + 1 for slot in slots}
    places = sorted(
        (allocation, value.offset, value.end, value.first, value.last)
        for allocation, value in slots
    )
    found = {}
    for position in sorted(changes):
        covered, top = 0, (0, 0)
        for allocation, start, end, first, last in places:
            # Values come in the order of their offsets: only bytes above the highest end are new.
            if first <= position <= last and (allocation, end) > top:
                known = top[1] if allocation == top[0] else 0
                covered += end - max(start, known)
                top = (allocation, end)
        found[position] = covered
    return found


def _covered(slots: list[Slot]) -> list[tuple[BufferValue, int]]:
    """The values, each with the number of its bytes that no earlier one covers."""
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for allocation, value in slots:
        pieces[allocation].append((value.offset, value.end))
    sizes = {allocation: iter(free_parts(inside)) for allocation, inside in pieces.items()}
    return [(value, next(sizes[allocation])) for allocation, value in slots]


def _rows(slots: list[Slot], peak: int, reader: _Reader) -> list[Buffer]:
    """Rows for the values that are live at the peak, and for the padding of their layouts."""
    # Bytes that several values share count for the one that was live first.
    living = [slot for slot in slots if slot.value.first <= peak <= slot.value.last]
    living.sort(key=lambda slot: (slot.value.first, -slot.value.bytes))
    rows = []
    for value, size in _covered(living):
        padding = max(0, size - value.array_bytes)
        if not size:
            continue
        row = reader.buffer(value, size - padding)
        rows.append(row)
        if padding:
            name = f"padding of {row.name}"
            rows.append(replace(row, name=name, bytes=padding, shape="", role="padding"))
    return rows


def _holes(slots: list[Slot], free: int, buffers: BufferText) -> list[Buffer]:
    """Rows for the bytes that no live value covers at the peak, `free` in all. The tables of
    pointers of tuples are above all arrays, live or not; on a TPU each takes 16 KiB."""
    arrays: dict[int, int] = {part.number: 0 for part in buffers.heap}
    for slot in slots:
        if not slot.value.is_table:
            arrays[slot.allocation] = max(arrays[slot.allocation], slot.value.end)
    above = sum(part.bytes - arrays[part.number] for part in buffers.heap)
    above = max(0, min(free, above))
    named = {"between the buffers": free - above, "tables of tuples, above all arrays": above}
    return [_plain(name, size, "fragmentation", buffers) for name, size in named.items() if size]


def _beyond_the_heap(buffers: BufferText, heap: int, temp: int | None) -> list[Buffer]:
    """Rows for the bytes by which temp exceeds the heap: other memory spaces, and the rest."""
    sizes: dict[int, int] = defaultdict(int)
    for part in buffers.allocations:
        if part.is_temp and part.color not in (0, HOST):
            sizes[part.color] += part.bytes
    rows = [
        _plain(f"memory space {color}{_SPACES.get(color, '')}", size, "other memory space", buffers)
        for color, size in sizes.items()
        if size
    ]
    if temp is not None and (rest := temp - heap - sum(sizes.values())):
        name = "in temp, in no allocation" if rest > 0 else "in an allocation, not in temp"
        rows.append(_plain(name, rest, "other", buffers))
    return rows


def _plain(name: str, bytes: int, role: str, buffers: BufferText) -> Buffer:
    last = max(buffers.schedule, default=0)
    return Buffer(
        name=name, bytes=bytes, shape="", operation="", source=None, role=role, first=0, last=last
    )


def _largest_first(rows: list[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(rows, key=lambda row: (-abs(row.bytes), row.first, row.name)))


def _history(slots: list[Slot], positions: list[int], reader: _Reader) -> History:
    kinds: dict[tuple[str | None, ...], tuple[int, Buffer]] = {}
    of_roles: list[Counter[str]] = []
    largest = []
    for position in positions:
        of_kinds, of_role = Counter[int](), Counter[str]()
        for row in _rows(slots, position, reader):
            kind = row.role, row.shape, row.operation, row.source, row.caller
            of_kinds[kinds.setdefault(kind, (len(kinds), row))[0]] += row.bytes
            of_role[row.role] += row.bytes
        of_roles.append(of_role)
        largest.append(of_kinds.most_common(MOST_LARGEST))
    # Only what is shown is kept, under new numbers.
    rows = [row for _, row in kinds.values()]
    shown = list(dict.fromkeys(number for at_one in largest for number, _ in at_one))
    numbers = {old: new for new, old in enumerate(shown)}
    roles = tuple(sum(of_roles, Counter[str]()))
    return History(
        positions=tuple(positions),
        roles=roles,
        bytes=tuple(tuple(of_role[role] for role in roles) for of_role in of_roles),
        buffers=tuple(rows[number] for number in shown),
        largest=tuple(
            tuple((numbers[number], size) for number, size in at_one) for at_one in largest
        ),
    )


def _thinned(curve: dict[int, int], peak: int, most: int) -> tuple[tuple[int, int], ...]:
    """At most so many points of a curve: the highest of each stretch of it."""
    points = list(curve.items())
    stretch = -(-len(points) // most)
    pieces = [points[start : start + stretch] for start in range(0, len(points), stretch or 1)]
    # The peak itself is kept even where another position of its stretch is as high.
    return tuple(
        max(piece, key=lambda point: (point[0] == peak, point[1], -point[0])) for piece in pieces
    )
