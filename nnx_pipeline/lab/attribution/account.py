"""Adds up all that a program holds in the memory of a device, which decides whether it fits.

What the figures of each compiler include, measured on small programs of which every byte is known
(JAX 0.10.2, libtpu 0.0.42.1, H100 target, CPU):

* The argument, output and alias bytes of `memory_analysis()` equal the allocations of the buffer
  assignment to the byte. The table of pointers of several outputs counts as an output.
* A captured array is an allocation of its own, `constant`, with every compiler. The bytes of
  arguments, outputs, temp and heap do not include it. The peak does, and on a TPU so do the bytes
  of the generated code. The TPU compiler may keep it in bfloat16, at half the bytes. With
  `JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS` JAX makes it an argument, and it counts as one.
* Temporaries may use the memory of an output before the output is written. They belong to no heap
  and need no memory of their own.
* The peak of a TPU includes its on-chip memory, which an account never does.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nnx_pipeline.lab._hlo.buffers import BufferText, BufferValue

ROWS = {
    "kept_argument_bytes": "arguments that are kept",
    "donated_argument_bytes": "arguments that are donated to outputs",
    "output_bytes": "outputs with memory of their own",
    "constant_bytes": "constants",
    "heap_bytes": "heap",
}
_ON_CHIP = 1  # the memory space of a TPU's vector memory
HOST = 5  # the memory of the host, which the compilers count separately


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device as the compiler reports them; None for what it does not report.

    - `argument_bytes`, `output_bytes`: both include `alias_bytes`.
    - `alias_bytes`: the arguments whose memory an output takes over.
    - `temp_bytes`: the compiler's `temp_size_in_bytes`; None for a program that it refused.
    - `heap_bytes`: the device-memory heap of the buffer assignment. On a TPU it differs from
      `temp_bytes`, which counts other memory spaces too.
    - `constant_bytes`: what the program itself holds in device memory, such as captured arrays.
    - `peak_bytes`: includes the constants, and on a TPU the on-chip memory.
    - `generated_code_bytes`: on a TPU, includes the constants.
    - `host_temp_bytes`, `host_argument_bytes`, `host_output_bytes`: in the memory of the host, and
      in no other figure.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int | None
    heap_bytes: int | None
    constant_bytes: int | None
    peak_bytes: int | None
    generated_code_bytes: int | None
    host_temp_bytes: int
    host_argument_bytes: int = 0
    host_output_bytes: int = 0

    @property
    def account_bytes(self) -> int | None:
        """What must fit: arguments, outputs that alias no argument, constants and heap; None where
        the constants or the heap are not known."""
        if self.constant_bytes is None or self.heap_bytes is None:
            return None
        own = self.argument_bytes + self.output_bytes - self.alias_bytes
        return own + self.constant_bytes + self.heap_bytes

    def to_json(self) -> dict[str, int | None]:
        """Every field by its name, and `account_bytes`."""
        return {**dataclasses.asdict(self), "account_bytes": self.account_bytes}


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """What the buffer assignment places outside the heap, in bytes per device."""

    argument_bytes: int  # as the next, includes `alias_bytes`
    output_bytes: int
    alias_bytes: int
    constant_bytes: int
    scratch_bytes: int  # of outputs, in which temporaries lie before the result
    on_chip_bytes: int | None  # temporaries; None where there is no such memory
    host_temp_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0

    def memory(self, heap: int) -> Memory:
        """The memory of a program about which the compiler itself reports nothing."""
        shared = dataclasses.asdict(self)
        del shared["scratch_bytes"], shared["on_chip_bytes"]
        return Memory(
            temp_bytes=None, heap_bytes=heap, peak_bytes=None, generated_code_bytes=None, **shared
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """The rows that add up to `Memory.account_bytes`, and further figures."""

    kept_argument_bytes: int  # that no output aliases
    donated_argument_bytes: int
    output_bytes: int  # that alias no argument
    constant_bytes: int | None
    heap_bytes: int | None
    total_bytes: int | None  # None where a row is not known
    scratch_bytes: int | None  # part of the outputs
    on_chip_bytes: int | None  # in no row
    notes: tuple[str, ...]  # where the buffer assignment and the compiler's analysis differ

    @classmethod
    def of(cls, memory: Memory, buffers: Assigned | None) -> "Account":
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
        return {words: getattr(self, name) for name, words in ROWS.items()}

    def to_json(self) -> dict[str, Any]:
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
        ("outputs in the memory of arguments", "alias_bytes"),
    ):
        placed, reported = getattr(buffers, name), getattr(memory, name)
        if placed != reported:
            yield (
                f"{words}: {placed:,} bytes in the buffer assignment, {reported:,} by the "
                "compiler's analysis"
            )


def assigned(buffers: BufferText) -> Assigned:
    there = [part for part in buffers.allocations if part.color == 0]
    on_chip = [part for part in buffers.allocations if part.color == _ON_CHIP]
    on_host = [part for part in buffers.allocations if part.color == HOST]
    return Assigned(
        argument_bytes=sum(part.bytes for part in there if part.is_argument),
        output_bytes=sum(part.bytes for part in there if part.is_output),
        alias_bytes=sum(part.bytes for part in there if part.is_argument and part.is_output),
        constant_bytes=sum(part.bytes for part in there if part.is_constant),
        scratch_bytes=sum(temporary.bytes for temporary in in_outputs(buffers)),
        on_chip_bytes=sum(part.bytes for part in on_chip if part.is_temp) if on_chip else None,
        host_temp_bytes=sum(part.bytes for part in on_host if part.is_temp),
        host_argument_bytes=sum(part.bytes for part in on_host if part.is_argument),
        host_output_bytes=sum(part.bytes for part in on_host if part.is_output),
    )


class InOutput(NamedTuple):
    """A temporary value in the memory of an output, and the bytes that it alone is counted for."""

    value: BufferValue
    bytes: int


def in_outputs(buffers: BufferText) -> list[InOutput]:
    """Temporaries in the memory of outputs that alias no argument. Bytes that several temporaries
    use one after the other count for the first of them."""
    last = max(buffers.schedule, default=-1)
    found = []
    for part in buffers.allocations:
        if part.color or part.is_argument or not part.is_output:
            continue
        # A value that lives past the last instruction is a result, and no temporary. One without a
        # live range (last < first) is inside a fusion.
        before = [value for value in part.values if value.first <= value.last <= last]
        before.sort(key=lambda value: (value.first, -value.bytes))
        sizes = free_parts((value.offset, value.end) for value in before)
        found += [InOutput(*pair) for pair in zip(before, sizes, strict=True) if pair[1]]
    return found


def free_parts(pieces: Iterable[tuple[int, int]]) -> list[int]:
    """For each piece (start and exclusive end), the bytes of it that no earlier one covers."""
    taken: list[tuple[int, int]] = []  # what the pieces so far cover; no two of them touch
    sizes = []
    for start, end in pieces:
        separate = [part for part in taken if part[1] < start or end < part[0]]
        met = [part for part in taken if part not in separate]
        shared = (min(high, end) - max(low, start) for low, high in met)
        sizes.append(end - start - sum(shared))
        low = min([start, *(part[0] for part in met)])
        high = max([end, *(part[1] for part in met)])
        taken = [*separate, (low, high)]
    return sizes
