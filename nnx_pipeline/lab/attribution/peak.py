"""Reads what the heap holds at its peak from the compiler's buffer assignment and program."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from nnx_pipeline.lab.account import free_parts, in_outputs
from nnx_pipeline.lab.attribution import Attribution, Buffer
from nnx_pipeline.lab.buffer_text import BufferText, Placed
from nnx_pipeline.lab.dataflow import Flow, Value
from nnx_pipeline.lab.hlo import Module, shapes_of
from nnx_pipeline.lab.origins import Origin, Origins
from nnx_pipeline.lab.roles import Roles

MOST_POINTS = 2000  # of the timeline
_SPACES = {1: "on a TPU the on-chip memory", 2: "on a TPU semaphores"}
_HOST = 5  # its memory space; the compilers count it apart, as `host_temp_size_in_bytes`


def attribute(
    buffers: BufferText, module: Module, temp_bytes: int, one_line: frozenset[str] = frozenset()
) -> Attribution:
    """What the heap holds at its peak, by the compiler's buffer assignment and its program.

    temp_bytes: the compiler's `temp_size_in_bytes`. one_line: the jitted functions of
    `equations.called_from_one_line`.

    The heap is that of `heap.heap_bytes`. Its peak is the first position of the schedule at which
    the values that live there cover the most bytes of it. Bytes that several of them share (what
    is updated in place, the input and output of a loop) count once, for the value that lived there
    first. What a tiled layout adds to the numbers of an array is a row of the role `padding`, with
    the array's own line; what no living value covers is `fragmentation`: the heap is as large as
    its highest byte at any time needs, and has holes.

    `other` has a row for each further memory space of the device, at full size, and one for the
    rest of temp_bytes, which is negative where the compiler's temp is less than the sum: what a
    TPU's compiler counts as temp is not the size of its allocations (see `heap`). `constants` and
    `in_outputs` hold what of the account (see `account`) is neither argument nor result nor heap.
    """
    values = [_Slot(part.number, value) for part in buffers.heap for value in part.values]
    curve = _live_bytes(values)
    peak = max(curve, key=lambda position: (curve[position], -position), default=0)
    heap = sum(part.bytes for part in buffers.heap)
    reader = _Reader(buffers, module, one_line)
    rows = _rows(values, peak, reader)
    rows += _holes(values, heap - sum(row.bytes for row in rows), buffers)
    there = reader.origins.of((buffers.schedule.get(peak, ""), ()))
    return Attribution(
        heap_bytes=heap,
        temp_bytes=temp_bytes,
        peak_position=peak,
        buffers=_largest_first(rows),
        other=_largest_first(_beyond_the_heap(buffers, temp_bytes - heap)),
        timeline=_timeline(curve, peak),
        peak_operation=there.operation,
        peak_source=there.source,
        positions=len(buffers.schedule),
        constants=_largest_first(_constants(buffers, reader)),
        in_outputs=_largest_first(
            [reader.buffer(value, held) for _, value, held in in_outputs(buffers)]
        ),
    )


def _constants(buffers: BufferText, reader: _Reader) -> list[Buffer]:
    """What the program brings along in device memory."""
    parts = [part for part in buffers.allocations if part.is_constant and part.color == 0]
    return [
        dataclasses.replace(reader.buffer(part.values[0], part.bytes), role="constant")
        if part.values
        else _plain(f"constant of allocation {part.number}", part.bytes, "constant", buffers)
        for part in parts
        if part.bytes
    ]


@dataclass(frozen=True)
class _Slot:
    """A value in one of the allocations of the heap."""

    allocation: int
    value: Placed

    @property
    def end(self) -> int:
        return self.value.offset + self.value.bytes

    def lives_at(self, position: int) -> bool:
        return self.value.first <= position <= self.value.last


class _Reader:
    """Origin and role of placed values."""

    def __init__(self, buffers: BufferText, module: Module, one_line: frozenset[str]) -> None:
        self.flow = Flow(module)
        self.origins = Origins(self.flow, one_line)
        self.roles = Roles(self.flow, self.origins)
        self.schedule = buffers.schedule
        self.position = {name: position for position, name in buffers.schedule.items()}

    def value(self, placed: Placed) -> Value:
        """The value as the program's text has it.

        NVIDIA's text prints an asynchronous collective without the computation that it starts,
        whose instructions stand right before it in the schedule.
        """
        if placed.name in self.flow.instructions or placed.name not in self.position:
            return placed.name, placed.index
        here = self.position[placed.name]
        for position in range(here + 1, here + 3):
            name = self.schedule.get(position, "")
            if name in self.flow.instructions and "-start" in name:
                return name, (1, *placed.index)
        return placed.name, placed.index

    def buffer(self, placed: Placed, held: int) -> Buffer:
        value = self.value(placed)
        origin = self.origins.of(value)
        shape = None if placed.is_table else next(iter(shapes_of(placed.type)), None)
        return _buffer(placed, held, origin, self.roles.of(value, shape))


def _buffer(placed: Placed, held: int, origin: Origin, role: str) -> Buffer:
    index = ",".join(map(str, placed.index))
    return Buffer(
        name=f"{placed.name}{{{index}}}" if placed.index else placed.name,
        bytes=held,
        shape=placed.shape,
        operation=origin.operation,
        source=origin.source,
        role=role,
        first=placed.first,
        last=placed.last,
    )


def _live_bytes(slots: list[_Slot]) -> dict[int, int]:
    """Bytes that living values cover, at each position where that changes."""
    changes = {slot.value.first for slot in slots} | {slot.value.last + 1 for slot in slots}
    places = sorted(
        (slot.allocation, slot.value.offset, slot.end, slot.value.first, slot.value.last)
        for slot in slots
    )
    found = {}
    for position in sorted(changes):
        covered, top = 0, (0, 0)
        for allocation, start, end, first, last in places:
            if first <= position <= last and (allocation, end) > top:
                known = top[1] if allocation == top[0] else 0
                covered += end - max(start, known)
                top = (allocation, end)
        found[position] = covered
    return found


def _covered(slots: list[_Slot]) -> list[tuple[_Slot, int]]:
    """How many bytes each slot holds that none before it does."""
    groups: dict[int, list[_Slot]] = defaultdict(list)
    for slot in slots:
        groups[slot.allocation].append(slot)
    sizes = {
        number: iter(free_parts((slot.value.offset, slot.end) for slot in group))
        for number, group in groups.items()
    }
    return [(slot, next(sizes[slot.allocation])) for slot in slots]


def _rows(slots: list[_Slot], peak: int, reader: _Reader) -> list[Buffer]:
    living = sorted(
        (slot for slot in slots if slot.lives_at(peak)),
        key=lambda slot: (slot.value.first, -slot.value.bytes),
    )
    rows = []
    for slot, held in _covered(living):
        padding = max(0, held - slot.value.array_bytes)
        if not held:
            continue
        row = reader.buffer(slot.value, held - padding)
        rows.append(row)
        if padding:
            rows.append(
                dataclasses.replace(
                    row, name=f"padding of {row.name}", bytes=padding, shape="", role="padding"
                )
            )
    return rows


def _holes(slots: list[_Slot], free: int, buffers: BufferText) -> list[Buffer]:
    """Rows for the bytes that nothing covers at the peak.

    The tables of pointers of tuples have a place of their own above all arrays, on a TPU 16 KiB
    for each, whether they live or not.
    """
    arrays: dict[int, int] = {part.number: 0 for part in buffers.heap}
    for slot in slots:
        if not slot.value.is_table:
            arrays[slot.allocation] = max(arrays[slot.allocation], slot.end)
    above = sum(part.bytes - arrays[part.number] for part in buffers.heap)
    above = max(0, min(free, above))
    named = {"between the buffers": free - above, "places of tuples above all arrays": above}
    return [_plain(name, size, "fragmentation", buffers) for name, size in named.items() if size]


def _beyond_the_heap(buffers: BufferText, beyond: int) -> list[Buffer]:
    sizes: dict[int, int] = defaultdict(int)
    for part in buffers.allocations:
        if part.is_temp and part.color not in (0, _HOST):
            sizes[part.color] += part.bytes
    role = "other memory space"
    rows = [_plain(_space(color), size, role, buffers) for color, size in sizes.items() if size]
    if rest := beyond - sum(sizes.values()):
        name = "in temp, in no allocation" if rest > 0 else "in an allocation, not in temp"
        rows.append(_plain(name, rest, "other", buffers))
    return rows


def _space(color: int) -> str:
    known = f", {_SPACES[color]}" if color in _SPACES else ""
    return f"memory space {color}{known}"


def _plain(name: str, bytes: int, role: str, buffers: BufferText) -> Buffer:
    """A row that is no value."""
    last = max(buffers.schedule, default=0)
    return Buffer(
        name=name, bytes=bytes, shape="", operation="", source=None, role=role, first=0, last=last
    )


def _largest_first(rows: list[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(rows, key=lambda row: (-abs(row.bytes), row.first, row.name)))


def _timeline(curve: dict[int, int], peak: int) -> tuple[tuple[int, int], ...]:
    """The curve thinned to the highest point of each stretch of positions."""
    points = list(curve.items())
    stretch = -(-len(points) // MOST_POINTS)
    pieces = [points[start : start + stretch] for start in range(0, len(points), stretch or 1)]
    return tuple(
        max(piece, key=lambda point: (point[0] == peak, point[1], -point[0])) for piece in pieces
    )
