"""What the text of a compiled program says: every figure read from it, and what none could read."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_pipeline.lab.account import Assigned, assigned
from nnx_pipeline.lab.attribution import Attribution
from nnx_pipeline.lab.buffer_text import BufferText, has_allocations, read_buffers
from nnx_pipeline.lab.heap_profile import attribute
from nnx_pipeline.lab.hlo import parse
from nnx_pipeline.lab.hlo_cost import (
    COLLECTIVES,
    branch_notes,
    collective_counts,
    products_of,
    uncounted_transfers,
)
from nnx_pipeline.lab.hlo_loops import executions
from nnx_pipeline.lab.hlo_unread import Unread, merged, unknown_opcodes


@dataclass(frozen=True, kw_only=True)
class Program:
    """Figures of one program, per device and step; None where the text does not give them.

    flops: of all matrix products. known_flops: of those that can be read, which is `flops` unless
    that is None. attribution, assigned: what the heap holds, and what lies outside of it. unread:
    why a figure is None, or leaves something out. notes: what a figure holds beyond what runs.
    """

    flops: int | None = None
    known_flops: int | None = None
    collectives: dict[str, dict[str, int | None]]
    attribution: Attribution | None = None
    assigned: Assigned | None = None
    unread: tuple[Unread, ...] = ()
    notes: tuple[str, ...] = ()


def read_program(
    text: str, buffers: str | None, temp_bytes: int, one_line: frozenset[str] = frozenset()
) -> Program:
    """Reads a compiled program.

    text: `compiled.as_text()`. buffers: see `heap.compile_with_dump`. temp_bytes, one_line: see
    `heap_profile.attribute`. A text that cannot be read gives no figures, and its line is named:
    the memory that the compiler itself reports does not depend on it.
    """
    placed, unreadable = _buffers(buffers)
    beside = assigned(placed) if placed else None
    try:
        module = parse(text)
    except ValueError as error:
        nothing = {kind: dict.fromkeys(("ops", "executed", "bytes")) for kind in COLLECTIVES}
        unread = _text("the program", error, "flops", "collectives", "buffers")
        return Program(collectives=nothing, assigned=beside, unread=(unread, *unreadable))
    runs = executions(module)
    products = products_of(module, runs)
    found = [
        *products.unknown,
        *uncounted_transfers(module, runs),
        *unknown_opcodes(module, runs),
    ]
    return Program(
        flops=None if products.unknown else products.known,
        known_flops=products.known,
        collectives=collective_counts(module, runs),
        attribution=attribute(placed, module, temp_bytes, one_line) if placed else None,
        assigned=beside,
        unread=(*merged(found), *unreadable),
        notes=branch_notes(module, runs),
    )


def _buffers(text: str | None) -> tuple[BufferText | None, tuple[Unread, ...]]:
    """The buffer assignment, or why there is none; a compiler that wrote none is no fault."""
    if text is None or not has_allocations(text):
        return None, ()
    try:
        return read_buffers(text), ()
    except ValueError as error:
        return None, (_text("the buffer assignment", error, "buffers", "account"),)


def _text(what: str, error: ValueError, *figures: str) -> Unread:
    return Unread(name="", what=what, figures=figures, executed=None, reason=str(error))
