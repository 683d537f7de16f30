"""What the device-memory heap of a compiled program holds at its peak, buffer by buffer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

ROLES = (
    "scan carry",
    "saved residual",
    "gathered weight",
    "gradient accumulator",
    "collective buffer",
    "logits",
    "parameter copy",
    "parameter cast",
    "activation",
    "other",
    "padding",
    "fragmentation",
    "other memory space",
)


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
    memory spaces, and whatever else explains temp_bytes. timeline: (position in the schedule, live
    bytes of the heap), at most 2000 points, the peak among them.
    """

    heap_bytes: int
    temp_bytes: int
    peak_position: int
    buffers: tuple[Buffer, ...]
    other: tuple[Buffer, ...]
    timeline: tuple[tuple[int, int], ...]

    def by_role(self) -> dict[str, int]:
        """Bytes of each role, largest first; they sum to heap_bytes."""
        totals: dict[str, int] = defaultdict(int)
        for buffer in self.buffers:
            totals[buffer.role] += buffer.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Every field, and the totals by role."""
        return {**dataclasses.asdict(self), "by_role": self.by_role()}


@dataclass(frozen=True, kw_only=True)
class BufferDifference:
    """Buffers of two programs that share operation, shape and source line, summed."""

    a_bytes: int
    b_bytes: int
    shape: str
    operation: str
    source: str | None
    role: str


def difference(a: Attribution, b: Attribution) -> tuple[BufferDifference, ...]:
    """Buffer by buffer what changed from a to b, largest absolute change first.

    Rows are summed by source line, operation and shape; b_bytes - a_bytes of all rows is the
    difference of the heaps.
    """
    sums: dict[tuple[str | None, str, str], list[int]] = defaultdict(lambda: [0, 0])
    roles: dict[tuple[str | None, str, str], str] = {}
    for side, attribution in enumerate((a, b)):
        for buffer in attribution.buffers:
            key = (buffer.source, buffer.operation, buffer.shape)
            sums[key][side] += buffer.bytes
            roles.setdefault(key, buffer.role)
    rows = [
        BufferDifference(
            a_bytes=a_bytes,
            b_bytes=b_bytes,
            shape=shape,
            operation=operation,
            source=source,
            role=roles[source, operation, shape],
        )
        for (source, operation, shape), (a_bytes, b_bytes) in sums.items()
        if a_bytes != b_bytes
    ]
    return tuple(sorted(rows, key=lambda row: (-abs(row.b_bytes - row.a_bytes), row.operation)))
