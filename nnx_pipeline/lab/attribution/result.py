"""What the device-memory heap of a compiled program holds at its peak, and what changed in it.

`heap_profile.attribute` reads it from what a compiler wrote; here is what it says.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = (
    "activation",
    "saved residual",
    "scan carry",
    "logits",
    "gathered weight",
    "parameter cast",
    "parameter copy",
    "gradient accumulator",
    "gradient",
    "optimizer update",
    "collective buffer",
    "library workspace",
    "constant",
    "other",
    "padding",
    "fragmentation",
    "other memory space",
)

_FUNCTION = re.compile(r"^jit\([^)]*\)/")


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One row at the peak of the device-memory heap; bytes are per device.

    name: the HLO value. shape: as in "f32[8,512,1024]", "" for a row that is no value. operation:
    JAX's op_name, "" without one. source: "path/file.py:123", None where the compiler gives none.
    role: one of ROLES. first, last: the positions in the program's schedule between which it lives.
    """

    name: str
    bytes: int
    shape: str
    operation: str
    source: str | None
    role: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The rows at the peak, largest first, and what of temp lies beyond the heap.

    buffers sum to heap_bytes, rows for padding and fragmentation included. other: rows of other
    memory spaces, and whatever else explains temp_bytes. constants: what the program brings along
    in device memory. in_outputs: temporaries where a result will be, at any time and each byte
    once; neither is in the heap. timeline: (position in the schedule, live
    bytes of the heap), at most 2000 points, the peak among them. peak_operation, peak_source: what
    runs at the peak. positions: how many the schedule has.
    """

    heap_bytes: int
    temp_bytes: int
    peak_position: int
    buffers: tuple[Buffer, ...]
    other: tuple[Buffer, ...]
    timeline: tuple[tuple[int, int], ...]
    peak_operation: str = ""
    peak_source: str | None = None
    positions: int = 0
    constants: tuple[Buffer, ...] = ()
    in_outputs: tuple[Buffer, ...] = ()

    def by_role(self) -> dict[str, int]:
        """Bytes of each role, largest first; they sum to heap_bytes."""
        totals: dict[str, int] = defaultdict(int)
        for buffer in self.buffers:
            totals[buffer.role] += buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Every field, and the totals by role."""
        return {**dataclasses.asdict(self), "by_role": self.by_role()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Attribution:
        """The inverse of `to_json`; KeyError or TypeError for what that has not written."""
        fields = {name: item for name, item in value.items() if name != "by_role"}
        for name in ("buffers", "other", "constants", "in_outputs"):
            fields[name] = tuple(Buffer(**row) for row in fields[name])
        fields["timeline"] = tuple((position, size) for position, size in fields["timeline"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class BufferDifference:
    """Buffers of two programs that are the same line, operation and shape, summed."""

    a_bytes: int
    b_bytes: int
    shape: str
    operation: str
    source: str | None
    role: str

    @property
    def change(self) -> int:
        """Bytes that b holds more than a."""
        return self.b_bytes - self.a_bytes


def difference(a: Attribution, b: Attribution) -> tuple[BufferDifference, ...]:
    """What the peak of b holds more or less than that of a, the largest change first.

    Buffers are summed by source line, operation (without the name of the jitted function) and
    shape. What only one of the programs has is then paired with what only the other one has: first
    by line and shape (another path of operations to the same line, as with recomputation), then by
    role, last operation and shape (the same code on another line). Operation, line and role of a
    pair are those of the larger side, at equal size those of b. Rows without a change are left out;
    the changes of the others sum to the difference of the heaps.
    """
    rows = _paired(_sums(a, 0) + _sums(b, 1), _exact)
    for alike in (_same_line, _same_work):
        rows = _paired(rows, alike)
    changed = [row for row in rows if row.change]
    return tuple(sorted(changed, key=lambda row: (-abs(row.change), row.operation, row.shape)))


def _sums(attribution: Attribution, side: int) -> list[BufferDifference]:
    """The buffers of one program, those that are the same in line, operation and shape as one."""
    groups: dict[Hashable, list[Buffer]] = defaultdict(list)
    for buffer in attribution.buffers:
        key = (buffer.source, buffer.operation, buffer.shape, buffer.shape == "" and buffer.role)
        groups[key].append(buffer)
    return [
        BufferDifference(
            a_bytes=0 if side else sum(buffer.bytes for buffer in group),
            b_bytes=sum(buffer.bytes for buffer in group) if side else 0,
            shape=group[0].shape,
            operation=group[0].operation,
            source=group[0].source,
            role=group[0].role,
        )
        for group in groups.values()
    ]


def _exact(row: BufferDifference) -> Hashable:
    return row.source, _FUNCTION.sub("", row.operation), row.shape, _kind(row)


def _same_line(row: BufferDifference) -> Hashable:
    return row.source, row.shape, _kind(row)


def _same_work(row: BufferDifference) -> Hashable:
    return row.role, row.operation.rpartition("/")[2], row.shape


def _kind(row: BufferDifference) -> str:
    """Rows that are no value are alike only if they have the same role."""
    return "" if row.shape else row.role


def _paired(
    rows: list[BufferDifference], alike: Callable[[BufferDifference], Hashable]
) -> list[BufferDifference]:
    """Rows of one side alone, joined with rows of the other side that are alike, in order."""
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
    larger = a if a.a_bytes > b.b_bytes else b
    return BufferDifference(
        a_bytes=a.a_bytes,
        b_bytes=b.b_bytes,
        shape=larger.shape,
        operation=larger.operation,
        source=larger.source,
        role=larger.role,
    )
