"""Reads figures from the text of a compiled program, and records what could not be read."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_pipeline.lab._hlo.branches import branch_shares
from nnx_pipeline.lab._hlo.buffers import BufferText, has_allocations, read_buffers
from nnx_pipeline.lab._hlo.cost import (
    COLLECTIVES,
    branch_notes,
    collective_counts,
    products_of,
    uncounted_transfers,
)
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab._hlo.unread import Unread, merged, unknown_opcodes
from nnx_pipeline.lab._timing.estimate import Estimate
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab._tracing.constraints import Constraint
from nnx_pipeline.lab.attribution._constraints import at_constraints
from nnx_pipeline.lab.attribution._peak import attribute
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.attribution.account import Assigned, assigned


@dataclass(frozen=True, kw_only=True)
class ProgramFigures:
    """Figures of one program, per device and step; None where the text does not give them."""

    flops: int | None = None
    known_flops: int | None = None  # of the products that can be read
    collectives: dict[str, dict[str, int | None]]
    attribution: Attribution | None = None
    assigned: Assigned | None = None
    time: Time | None = None
    unread: tuple[Unread, ...] = ()  # why a figure is None, or what it leaves out
    notes: tuple[str, ...] = ()  # on what counts beyond what runs, and on constraints


def read_program(
    text: str,
    buffers: str | None,
    temp_bytes: int | None,
    one_line: frozenset[str] = frozenset(),
    links: Links | None = None,
    constraints: tuple[Constraint, ...] = (),
) -> ProgramFigures:
    """Reads every figure that the text of a compiled program gives.

    - `buffers`, `temp_bytes`: the buffer assignment of `compile_with_dump`; `temp_size_in_bytes`.
    - `links`: the devices that it runs on, for the estimate of its time; None for no estimate.

    A text that cannot be read gives no figures, and an entry of `unread` names the line. This does
    not raise, because the memory that the compiler itself reports does not depend on the text.
    """
    placed, unreadable = _buffers(buffers)
    outside_heap = assigned(placed) if placed else None
    try:
        module = parse(text)
    except ValueError as error:
        nothing = {kind: dict.fromkeys(("ops", "executed", "bytes")) for kind in COLLECTIVES}
        unread = _text("the program", error, "flops", "collectives", "buffers", "time")
        return ProgramFigures(
            collectives=nothing, assigned=outside_heap, unread=(unread, *unreadable)
        )
    module, whole = at_constraints(module, constraints)
    shares = branch_shares(module)
    runs = executions(module, shares)
    products = products_of(module, runs)
    estimate = Estimate(module, runs, links, shares) if links else None
    found = [
        *products.unknown,
        *uncounted_transfers(module, runs),
        *unknown_opcodes(module, runs),
        *(estimate.unread if estimate else ()),
    ]
    return ProgramFigures(
        flops=None if products.unknown else products.known,
        known_flops=products.known,
        collectives=collective_counts(module, runs),
        attribution=attribute(placed, module, temp_bytes, one_line) if placed else None,
        assigned=outside_heap,
        time=estimate.time if estimate else None,
        unread=(*merged(found), *(estimate.bounds if estimate else ()), *unreadable),
        notes=(
            *whole,
            *branch_notes(module, runs, shares),
            *(estimate.notes if estimate else ()),
        ),
    )


def _buffers(text: str | None) -> tuple[BufferText | None, tuple[Unread, ...]]:
    """The buffer assignment, or why it cannot be read; both empty if the compiler wrote none."""
    if text is None or not has_allocations(text):
        return None, ()
    try:
        return read_buffers(text), ()
    except ValueError as error:
        return None, (_text("the buffer assignment", error, "buffers", "account"),)


def _text(what: str, error: ValueError, *figures: str) -> Unread:
    return Unread(name="", what=what, figures=figures, executed=None, reason=str(error))
