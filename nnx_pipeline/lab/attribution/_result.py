"""Describes what the device-memory heap holds at its peak, and how that differs in two programs."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

ROLES = (
    *("activation", "saved residual", "scan carry", "logits", "gathered weight", "parameter cast"),
    *("parameter copy", "gradient accumulator", "gradient", "optimizer update"),
    *("collective buffer", "partial sums", "library workspace", "constant", "other", "padding"),
    *("fragmentation", "other memory space"),
)

# What makes buffers of a role smaller, in any program.
ADVICE = {
    "saved residual": "jax.checkpoint, so that the backward pass computes values again",
    "activation": "fewer rows at a time, such as gradients of one microbatch after the other",
    "logits": "the loss computed for a part of the sequence at a time",
    "gathered weight": "weights gathered one layer at a time, in a jax.lax.scan over layers",
    "gradient accumulator": "gradients sharded as their parameters are",
    "arguments": "more devices along the mesh axis that the parameters are split over",
}

_FUNCTION = re.compile(r"^jit\([^)]*\)/")


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One row of what the device-memory heap holds at its peak, in bytes per device."""

    name: str
    bytes: int
    shape: str  # such as "f32[8,512,1024]", "" for a row that is no value
    operation: str  # the op_name of JAX, "" where there is none
    source: str | None  # such as "path/file.py:123", None where there is none
    role: str  # one of ROLES
    first: int  # the positions in the schedule between which the value is live
    last: int
    caller: str | None = None  # of the function of that line; None unless there are several
    call: int | None = None  # of that line, in `Attribution.calls`
    path: tuple[str, ...] = ()  # the lines from which that line was called, the nearest first
    into: str | None = None  # the line of the larger array that it is copied into, another one


@dataclass(frozen=True, kw_only=True)
class Call:
    """A line of the program's own code that runs in a call stack."""

    file: str
    line: int
    function: str  # "" where the program does not say it
    caller: int | None  # what called that function, in the same table


@dataclass(frozen=True, kw_only=True)
class History:
    """What lives in the heap at some positions of the schedule, and at the peak among them."""

    positions: tuple[int, ...]
    roles: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]  # at each position, of each role
    buffers: tuple[Buffer, ...]  # one of each kind of those that are largest somewhere
    largest: tuple[tuple[tuple[int, int], ...], ...]  # at each position: which of them, and bytes

    def totals(self) -> list[int]:
        """The live bytes at each position."""
        return [sum(sizes) for sizes in self.bytes]


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """What a program holds in the heap at its peak, and outside of it; rows are largest first."""

    heap_bytes: int
    temp_bytes: int | None  # the compiler's `temp_size_in_bytes`
    peak_position: int  # in the schedule
    buffers: tuple[Buffer, ...]  # they sum to `heap_bytes`, padding and fragmentation included
    other: tuple[Buffer, ...]  # other memory spaces, and the rest of `temp_bytes`
    timeline: tuple[tuple[int, int], ...]  # position and live bytes; at most 2000
    peak_operation: str = ""  # the op_name of what runs at the peak
    peak_source: str | None = None
    positions: int = 0  # how many the schedule has
    constants: tuple[Buffer, ...] = ()  # of the program itself, not in the heap
    in_outputs: tuple[Buffer, ...] = ()  # temporaries in the memory of outputs, each byte once
    arguments: tuple[Buffer, ...] = ()  # each with the line that reads it first
    outputs: tuple[Buffer, ...] = ()  # with memory of their own
    calls: tuple[Call, ...] = ()  # the call stacks of all lines
    history: History | None = None  # None where nothing says what the values are

    def stack(self, call: int | None) -> list[Call]:
        """The call stack of a buffer's line, innermost call first; empty where there is none."""
        found = []
        while call is not None:
            found.append(self.calls[call])
            call = found[-1].caller
        return found

    def by_role(self) -> dict[str, int]:
        """The bytes of each role, largest first; they sum to `heap_bytes`."""
        totals: dict[str, int] = defaultdict(int)
        for buffer in self.buffers:
            totals[buffer.role] += buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "by_role": self.by_role()}


@dataclass(frozen=True, kw_only=True)
class Side:
    """What the buffers of one of two programs are; the fields are as in `Buffer`."""

    operation: str
    source: str | None
    role: str
    caller: str | None = None

    @property
    def places(self) -> list[str]:
        """The line and that of its caller, as far as they are known."""
        return [place for place in (self.source, self.caller) if place]


@dataclass(frozen=True, kw_only=True)
class BufferDifference(Side):
    """The bytes that two programs hold in buffers that correspond to each other (`difference`).
    What they are is said of the larger side, or of b where both are equal."""

    a_bytes: int  # summed over the buffers of a, per device
    b_bytes: int
    shape: str
    smaller: Side | None = None  # the other side; None where it holds nothing

    @property
    def sides(self) -> tuple[Side, Side]:
        """What the buffers of a and of b are; the same where one of them holds nothing."""
        other = self.smaller or self
        return (self, other) if self.a_bytes > self.b_bytes else (other, self)

    @property
    def change(self) -> int:
        return self.b_bytes - self.a_bytes


def difference(a: Attribution, b: Attribution) -> tuple[BufferDifference, ...]:
    """How the heap of b differs from the heap of a at its peak, the largest change first; all
    changes sum to the difference between the heaps.

    Buffers are summed by source line, operation (without the name of the jitted function) and
    shape. What only one program has is paired with what only the other has: first by line and shape
    (another path of operations, as with recomputation), then by role, last operation and shape
    (another line).
    """
    rows = _paired(_sums(a, of_b=False) + _sums(b, of_b=True), _exact)
    for alike in (_same_line, _same_work):
        rows = _paired(rows, alike)
    changed = [row for row in rows if row.change]
    return tuple(sorted(changed, key=lambda row: (-abs(row.change), row.operation, row.shape)))


def _sums(attribution: Attribution, *, of_b: bool) -> list[BufferDifference]:
    sums: dict[tuple[Side, str], int] = defaultdict(int)
    for one in attribution.buffers:
        side = Side(operation=one.operation, source=one.source, role=one.role, caller=one.caller)
        sums[side, one.shape] += one.bytes
    return [
        BufferDifference(
            a_bytes=0 if of_b else size, b_bytes=size if of_b else 0, shape=shape, **vars(side)
        )
        for (side, shape), size in sums.items()
    ]


def _exact(row: BufferDifference) -> Hashable:
    return row.source, row.caller, _FUNCTION.sub("", row.operation), row.shape, row.role


def _same_line(row: BufferDifference) -> Hashable:
    # Of rows that are no value only those of one role are alike.
    return row.source, row.caller, row.shape, "" if row.shape else row.role


def _same_work(row: BufferDifference) -> Hashable:
    return row.role, row.operation.rpartition("/")[2], row.shape


def _paired(
    rows: list[BufferDifference], alike: Callable[[BufferDifference], Hashable]
) -> list[BufferDifference]:
    """Joins rows that one program alone has with rows that are alike in the other, in order."""
    done = [row for row in rows if row.a_bytes and row.b_bytes]
    sides: dict[Hashable, tuple[list[BufferDifference], list[BufferDifference]]] = {}
    for row in rows:
        if not (row.a_bytes and row.b_bytes):
            sides.setdefault(alike(row), ([], []))[1 if row.b_bytes else 0].append(row)
    for ours, theirs in sides.values():
        for one, other in zip(ours, theirs, strict=False):
            done.append(_joined(one, other))
        both = min(len(ours), len(theirs))
        done += ours[both:] + theirs[both:]
    return done


def _joined(a: BufferDifference, b: BufferDifference) -> BufferDifference:
    larger, smaller = (a, b) if a.a_bytes > b.b_bytes else (b, a)
    fields = {field.name: getattr(smaller, field.name) for field in dataclasses.fields(Side)}
    return dataclasses.replace(larger, a_bytes=a.a_bytes, b_bytes=b.b_bytes, smaller=Side(**fields))
