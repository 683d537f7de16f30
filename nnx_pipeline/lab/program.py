"""What the text of a compiled program says: every figure read from it, and what none could read."""

from __future__ import annotations

from dataclasses import dataclass

from nnx_pipeline.lab.attribution import Attribution
from nnx_pipeline.lab.heap_profile import attribute
from nnx_pipeline.lab.hlo import Module, parse
from nnx_pipeline.lab.hlo_cost import (
    COLLECTIVES,
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
    that is None. unread: why a figure is None, or leaves something out.
    """

    flops: int | None = None
    known_flops: int | None = None
    collectives: dict[str, dict[str, int | None]]
    attribution: Attribution | None = None
    unread: tuple[Unread, ...] = ()


def read_program(
    text: str, buffers: str | None, temp_bytes: int, one_line: frozenset[str] = frozenset()
) -> Program:
    """Reads a compiled program.

    text: `compiled.as_text()`. buffers, temp_bytes, one_line: see `heap_profile.attribute`. A text
    that cannot be read gives no figures, and its line is named: the memory that the compiler itself
    reports does not depend on it.
    """
    try:
        module = parse(text)
    except ValueError as error:
        nothing = {kind: dict.fromkeys(("ops", "executed", "bytes")) for kind in COLLECTIVES}
        return Program(
            collectives=nothing,
            unread=(_text("the program", error, "flops", "collectives", "buffers"),),
        )
    runs = executions(module)
    products = products_of(module, runs)
    found = [
        *products.unknown,
        *uncounted_transfers(module, runs),
        *unknown_opcodes(module, runs),
    ]
    rows, unreadable = _attribution(buffers, module, temp_bytes, one_line)
    return Program(
        flops=None if products.unknown else products.known,
        known_flops=products.known,
        collectives=collective_counts(module, runs),
        attribution=rows,
        unread=(*merged(found), *unreadable),
    )


def _attribution(
    buffers: str | None, module: Module, temp_bytes: int, one_line: frozenset[str]
) -> tuple[Attribution | None, tuple[Unread, ...]]:
    try:
        return attribute(buffers, module, temp_bytes, one_line), ()
    except ValueError as error:
        return None, (_text("the buffer assignment", error, "buffers"),)


def _text(what: str, error: ValueError, *figures: str) -> Unread:
    return Unread(name="", what=what, figures=figures, executed=None, reason=str(error))
