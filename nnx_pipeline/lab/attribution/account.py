"""Everything that a program holds in the memory of a device: what decides whether it fits.

Where each compiler counts what, measured on small programs whose every byte is known (JAX 0.10.2,
libtpu 0.0.42.1, H100 target, CPU):

* Arguments, outputs and aliased bytes of `memory_analysis()` are to the byte the allocations of the
  buffer assignment. The table of pointers of several outputs is one of the outputs.
* A captured array is an allocation of its own, `constant`, on every compiler. It is in none of
  arguments, outputs, temp and heap. The peak counts it, and on a TPU the program code does too. A
  TPU's compiler may keep it in bfloat16, at half the bytes. With
  `JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS` JAX makes an argument of it, and it is counted there.
* Temporaries may lie where a result will be. They are in no heap and need no memory of their own.
* The peak of a TPU counts its on-chip memory, which no account does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nnx_pipeline.lab.buffer_text import Allocation, BufferText, Placed

ROWS = {
    "kept_argument_bytes": "arguments that are kept",
    "donated_argument_bytes": "arguments that are donated to outputs",
    "output_bytes": "outputs with a place of their own",
    "constant_bytes": "constants",
    "heap_bytes": "heap",
}
_ON_CHIP = 1  # the memory space of a TPU's vector memory


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device, as the compiler reports them; None where it does not.

    argument_bytes, output_bytes, alias_bytes: alias_bytes are in both of the others. temp_bytes:
    `temp_size_in_bytes`. heap_bytes: the device-memory heap of the buffer assignment; on a TPU they
    are not the same, as temp counts other memory spaces too. constant_bytes: what the program
    brings along in device memory, such as captured arrays. peak_bytes: constants are in it, and on
    a TPU its on-chip memory. generated_code_bytes: on a TPU the constants are in it. host_…: in the
    memory of the host, and in no other figure.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    heap_bytes: int | None
    constant_bytes: int | None
    peak_bytes: int | None
    generated_code_bytes: int | None
    host_temp_bytes: int
    host_argument_bytes: int = 0
    host_output_bytes: int = 0

    @property
    def account_bytes(self) -> int | None:
        """Arguments, outputs that alias none of them, constants and heap: what must fit."""
        if self.constant_bytes is None or self.heap_bytes is None:
            return None
        own = self.argument_bytes + self.output_bytes - self.alias_bytes
        return own + self.constant_bytes + self.heap_bytes

    def to_json(self) -> dict[str, int | None]:
        """Every field, and the account."""
        return {**dataclasses.asdict(self), "account_bytes": self.account_bytes}


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """What the buffer assignment puts in device memory outside the heap, in bytes per device.

    scratch_bytes: of the outputs that alias no argument, what holds temporaries before the result.
    on_chip_bytes: temporaries in a TPU's on-chip memory; None where the text has no such memory.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    constant_bytes: int
    scratch_bytes: int
    on_chip_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Account:
    """The rows that add up to `Memory.account_bytes`, and what stands beside them.

    output_bytes: those that alias no argument. scratch_bytes, on_chip_bytes: see `Assigned`; the
    first are bytes of the outputs, the second are in no row. notes: where the buffer assignment has
    other bytes than the compiler's analysis.
    """

    kept_argument_bytes: int
    donated_argument_bytes: int
    output_bytes: int
    constant_bytes: int | None
    heap_bytes: int | None
    total_bytes: int | None
    scratch_bytes: int | None
    on_chip_bytes: int | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, memory: Memory, buffers: Assigned | None) -> Account:
        """buffers: None without a buffer assignment."""
        return cls(
            kept_argument_bytes=memory.argument_bytes - memory.alias_bytes,
            donated_argument_bytes=memory.alias_bytes,
            output_bytes=memory.output_bytes - memory.alias_bytes,
            constant_bytes=memory.constant_bytes,
            heap_bytes=memory.heap_bytes,
            total_bytes=memory.account_bytes,
            scratch_bytes=buffers.scratch_bytes if buffers else None,
            on_chip_bytes=buffers.on_chip_bytes if buffers else None,
            notes=tuple(_differences(memory, buffers)) if buffers else (),
        )

    def rows(self) -> dict[str, int | None]:
        """The bytes of each part, by its name in words."""
        return {words: getattr(self, name) for name, words in ROWS.items()}

    def to_json(self) -> dict[str, Any]:
        """`rows`, their sum, and what stands beside them."""
        return {
            "rows": {name: getattr(self, name) for name in ROWS},
            "account_bytes": self.total_bytes,
            "scratch_bytes": self.scratch_bytes,
            "on_chip_bytes": self.on_chip_bytes,
            "notes": list(self.notes),
        }


def _differences(memory: Memory, buffers: Assigned) -> Iterator[str]:
    for words, name in (
        ("arguments", "argument_bytes"),
        ("outputs", "output_bytes"),
        ("outputs in the place of arguments", "alias_bytes"),
    ):
        placed, reported = getattr(buffers, name), getattr(memory, name)
        if placed != reported:
            yield (
                f"{words}: {placed:,} bytes in the buffer assignment, {reported:,} by the "
                "compiler's analysis"
            )


def assigned(buffers: BufferText) -> Assigned:
    """Adds up the allocations of device memory."""
    there = [part for part in buffers.allocations if part.color == 0]
    on_chip = [part for part in buffers.allocations if part.color == _ON_CHIP]
    return Assigned(
        argument_bytes=sum(part.bytes for part in there if part.is_argument),
        output_bytes=sum(part.bytes for part in there if part.is_output),
        alias_bytes=sum(part.bytes for part in there if part.is_argument and part.is_output),
        constant_bytes=sum(part.bytes for part in there if part.is_constant),
        scratch_bytes=sum(held for *_, held in in_outputs(buffers)),
        on_chip_bytes=sum(part.bytes for part in on_chip if part.is_temp) if on_chip else None,
    )


def in_outputs(buffers: BufferText) -> list[tuple[Allocation, Placed, int]]:
    """Temporaries in the place of outputs that alias no argument, and the bytes of each.

    Bytes in which several lie one after the other count for the first of them.
    """
    last = max(buffers.schedule, default=-1)
    found = []
    for part in buffers.allocations:
        if part.color or part.is_argument or not part.is_output:
            continue
        # A result lives past the last instruction; what has no live range is inside a fusion.
        before = [value for value in part.values if value.first <= value.last <= last]
        before.sort(key=lambda value: (value.first, -value.bytes))
        places = ((value.offset, value.offset + value.bytes) for value in before)
        held = free_parts(places)
        found += [(part, *pair) for pair in zip(before, held, strict=True) if pair[1]]
    return found


def free_parts(pieces: Iterable[tuple[int, int]]) -> list[int]:
    """Of each piece from start to end, how many bytes lie in none of the pieces before it."""
    taken: list[tuple[int, int]] = []  # what the pieces so far cover; no two of them touch
    sizes = []
    for start, end in pieces:
        apart = [part for part in taken if part[1] < start or end < part[0]]
        met = [part for part in taken if part not in apart]
        shared = (min(high, end) - max(low, start) for low, high in met)
        sizes.append(end - start - sum(shared))
        low = min([start, *(part[0] for part in met)])
        high = max([end, *(part[1] for part in met)])
        taken = [*apart, (low, high)]
    return sizes
