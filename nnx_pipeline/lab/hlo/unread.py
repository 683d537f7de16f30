"""What of a program's text is in no figure, by name: nothing is left out without a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx_pipeline.lab.hlo import Instruction, Module
from nnx_pipeline.lab.hlo_loops import Runs
from nnx_pipeline.lab.hlo_opcodes import is_known


@dataclass(frozen=True, kw_only=True)
class Unread:
    """An instruction, or a whole text, that figures leave out.

    name: of the instruction, "" for a text. what: its opcode, or the target of a custom call.
    figures: those it is missing in, `flops`, `collectives` or `buffers` (their roles and lines),
    `account`.
    executed: how often it runs per step, None where that is not known.
    """

    name: str
    what: str
    figures: tuple[str, ...]
    executed: int | None
    reason: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Unread:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**value, "figures": tuple(value["figures"])})


def unread(instruction: Instruction, figure: str, executed: int | None, reason: str) -> Unread:
    """An instruction that one figure leaves out."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    return Unread(
        name=instruction.name,
        what=target or instruction.opcode,
        figures=(figure,),
        executed=executed,
        reason=reason,
    )


def unknown_opcodes(module: Module, runs: Runs) -> tuple[Unread, ...]:
    """Instructions whose opcode is not known: a buffer's line and role are not followed into them.

    Those in computations that nothing is seen to run are among them. runs: `executions(module)`.
    """
    return tuple(
        unread(instruction, "buffers", runs.get(name), "an opcode that is not known")
        for name, computation in module.computations.items()
        for instruction in computation.instructions.values()
        if not is_known(instruction.opcode)
    )


def merged(found: Iterable[Unread]) -> tuple[Unread, ...]:
    """Each instruction once, with all figures that leave it out."""
    by_name: dict[str, Unread] = {}
    for item in found:
        other = by_name.setdefault(item.name, item)
        if other is not item:
            figures = tuple(dict.fromkeys((*other.figures, *item.figures)))
            by_name[item.name] = dataclasses.replace(other, figures=figures)
    return tuple(by_name.values())
