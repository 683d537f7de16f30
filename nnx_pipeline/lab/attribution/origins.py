"""Which line of source, and which operation of JAX, asked for a value of a compiled program.

An instruction says so itself in its metadata, as a stack of Python frames; the innermost frame that
belongs neither to a framework nor to a helper that only places arrays is taken. Many instructions
that own memory have no line, or only the one of the loop around them: copies, bitcasts, tuples, the
state of loops, the buffers that a loop stacks its results in, fusions, what a compiler converts on
its own. Their line is looked for in this order:

1. Backwards, along `Flow.sources`: through moves, into what a fusion or a call gives back, from a
   loop's state to what its body puts there, from an in-place update to what it writes, from an
   instruction without a line to its operands, the largest first. The first instruction with a line
   of its own counts. Not its own is the line of the loop in which it runs (what `lax.scan` does to
   slice and stack carries the line of the scan), and the line of whoever first called a jitted
   function, such as `jnp.where`, which all its calls from other lines carry too.
2. Forwards, along `Flow.readers`, nearest first: an array that no line makes, such as a copy of an
   argument or a buffer without a value yet, takes the line of the first instruction that reads it.
3. Its own line, whatever it is, or that of the loop.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from nnx_pipeline.lab.dataflow import Flow, Value
from nnx_pipeline.lab.hlo import Instruction
from nnx_pipeline.lab.hlo_frames import Frame

MOST_STEPS = 4000  # of a search for one value; beyond that it has no line

_FRAMEWORKS = re.compile(r"[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|optax|chex)[/\\]")
_HELPERS = re.compile(r"[/\\]nnx_pipeline[/\\]sharding\.py$")
_JITTED = re.compile(r"(?:^|[/(])jit\(([^()]*)\)")
# Their own line is that of a whole loop or call, or says nothing about what they hand on.
_CARRIERS = ("while", "fusion", "call", "conditional", "parameter", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class Origin:
    """The instruction whose metadata speaks for a value; `source` is None where nothing does."""

    instruction: Instruction | None
    operation: str
    source: str | None


def source_of(instruction: Instruction) -> str | None:
    """`file.py:12` of an instruction's own metadata: the innermost frame of the user's code."""
    frame = _frame_of(instruction)
    return f"{frame[0]}:{frame[1]}" if frame else None


def _frame_of(instruction: Instruction) -> Frame | None:
    named = [frame for frame in instruction.frames if not frame[0].startswith("<")]
    own = [frame for frame in named if not _FRAMEWORKS.search(frame[0])]
    asked = [frame for frame in own if not _HELPERS.search(frame[0])]
    return next(iter(asked or own or named), None)


def _is_of_another_call(instruction: Instruction, one_line: frozenset[str]) -> bool:
    """Whether the line may be that of another call of a jitted function.

    JAX traces a jitted function, also one of its own such as `jnp.where`, once for all its calls,
    which then all carry the frames of the first. Only frames inside of the function are right, or
    all of them where one line alone calls it.
    """
    inner = _JITTED.findall((instruction.op_name or "").partition("/")[2])
    if not inner or one_line.issuperset(inner):
        return False
    names = [frame[2].rpartition(".")[2] for frame in instruction.frames]
    chosen = _frame_of(instruction)
    last = len(names) - 1 - names[::-1].index(inner[-1]) if inner[-1] in names else -1
    return chosen is None or instruction.frames.index(chosen) > last


class Origins:
    """Looks up origins in one program.

    one_line: see `equations.called_from_one_line`.
    """

    def __init__(self, flow: Flow, one_line: frozenset[str] = frozenset()) -> None:
        self.flow = flow
        self.one_line = one_line
        self._found: dict[Value, Origin] = {}

    def of(self, value: Value) -> Origin:
        """The origin of a value, as the head of this file says."""
        if value not in self._found:
            self._found[value] = self._search(value)
        return self._found[value]

    def _search(self, value: Value) -> Origin:
        seen: set[Value] = set()
        found = self._backward(value, seen) or self._forward(value, seen)
        here = self.flow.at(value)
        named = self._argument_name(value) or (here.op_name if here else None)
        if found is None and here is not None:
            loop = here if here.opcode == "while" else self.flow.loop_of(here.name)
            speaker = next((item for item in (here, loop) if item and source_of(item)), here)
            return Origin(here, named or speaker.op_name or "", source_of(speaker))
        if found is None:
            return Origin(None, named or "", None)
        return Origin(found, self._argument_name(value) or found.op_name or "", source_of(found))

    def has_own_line(self, instruction: Instruction) -> bool:
        """Whether it has a line, another one than the loop in which it runs."""
        source = source_of(instruction)
        if source is None or instruction.opcode in _CARRIERS:
            return False
        if (instruction.op_name or "").endswith("/while"):
            return False  # a copy that was made for a loop, under the loop's name
        if _is_of_another_call(instruction, self.one_line):
            return False
        loop = self.flow.loop_of(instruction.name)
        return loop is None or source_of(loop) != source

    def _backward(self, value: Value, seen: set[Value]) -> Instruction | None:
        pending = [value]
        while pending and len(seen) < MOST_STEPS:
            here = pending.pop()
            instruction = self.flow.at(here)
            if here in seen or instruction is None:
                continue
            seen.add(here)
            if self.has_own_line(instruction):
                return instruction
            pending.extend(reversed(self.flow.sources(here)))
        return None

    def _forward(self, value: Value, seen: set[Value]) -> Instruction | None:
        pending, reached = deque([value]), {value}
        while pending and len(reached) < MOST_STEPS:
            for reader, handed in self.flow.readers(pending.popleft()):
                if self.has_own_line(reader):
                    return reader
                following = handed or (reader.name, ())
                if following in reached:
                    continue
                reached.add(following)
                pending.append(following)
                if handed and (found := self._backward(handed, seen)):
                    return found
        return None

    def _argument_name(self, value: Value) -> str | None:
        """The name of the program's argument that a value is a copy of."""
        lineage = self.flow.lineage(value)
        if not lineage or lineage[-1].opcode != "parameter":
            return None
        is_argument = self.flow.home[lineage[-1].name] == self.flow.module.entry
        return lineage[-1].op_name if is_argument else None
