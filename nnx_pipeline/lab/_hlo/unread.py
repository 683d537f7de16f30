"""Lists the instructions that figures leave out, so that nothing is left out silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx_pipeline.lab._hlo.loops import Runs
from nnx_pipeline.lab._hlo.module import Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import is_known


@dataclass(frozen=True, kw_only=True)
class Unread:
    """An instruction, or a whole text, that figures leave out."""

    name: str  # of the instruction, "" for a text
    what: str  # its opcode, or the target of a custom call; or which text
    figures: tuple[str, ...]
    executed: int | None  # per step, None where that is not known
    reason: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Unread:
        return cls(**{**value, "figures": tuple(value["figures"])})


def unread(instruction: Instruction, figure: str, executed: int | None, reason: str) -> Unread:
    """The entry for an instruction that one figure leaves out."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return Unread(
        name=instruction.name,
        what=target or instruction.opcode,
        figures=(figure,),
        executed=executed,
        reason=reason,
    )


def unknown_opcodes(module: Module, runs: Runs) -> tuple[Unread, ...]:
    """Instructions with an unknown opcode, through which no buffer's line and role can be traced,
    also in computations that `runs` leaves out."""
    return tuple(
        unread(instruction, "buffers", runs.get(name), "an opcode that is not known")
        for name, computation in module.computations.items()
        for instruction in computation.instructions.values()
        if not is_known(instruction.opcode)
    )


def merged(found: Iterable[Unread]) -> tuple[Unread, ...]:
    """Each instruction once, with all the figures that leave it out."""
    by_name: dict[str, Unread] = {}
    for item in found:
        other = by_name.setdefault(item.name, item)
        if other is not item:
            figures = tuple(dict.fromkeys((*other.figures, *item.figures)))
            by_name[item.name] = dataclasses.replace(other, figures=figures)
    return tuple(by_name.values())
