"""Finds the source line and the JAX operation that a value of a compiled program comes from.

The metadata of an instruction names them, with a stack of Python frames. The frame taken is the
innermost one that belongs neither to a framework nor to a file called `sharding.py`, which by its
name holds helpers that only place arrays. Many instructions that own memory have no line, or only
that of the loop around them: copies, bitcasts, tuples, the state of loops, the buffers in which a
loop stacks its results, fusions, and conversions that a compiler inserts. Their line is searched
for in this order:

1. Backwards, along `Flow.sources`: through moves, into the result of a fusion or a call, from a
   loop's state to what its body puts there, from an in-place update to what it writes, from an
   instruction without a line to its operands, the largest first. The first instruction with a line
   of its own counts. Two kinds of line are not an instruction's own: that of the loop in which it
   runs (the slicing and stacking of `lax.scan` carries the line of the scan), and that of the first
   call of a jitted function such as `jnp.where`, since all calls from other lines carry it too.
2. Forwards, along `Flow.readers`, nearest first: an array that no line makes, such as a copy of an
   argument or a buffer not yet written to, takes the line of the first instruction that reads it.
3. The value's own line, whatever it is, or else that of the loop.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from nnx_pipeline.lab.hlo.dataflow import Flow, Value
from nnx_pipeline.lab.hlo.frames import Frame
from nnx_pipeline.lab.hlo.module import Instruction

MOST_STEPS = 4000  # of a search in one direction; after that, the next rule applies

_FRAMEWORKS = re.compile(r"[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|optax|chex)[/\\]")
_HELPERS = re.compile(r"[/\\]sharding\.py$")
_JITTED = re.compile(r"(?:^|[/(])jit\(([^()]*)\)")
# The line of these is that of a whole loop or call, or says nothing about the values they pass on.
_CARRIERS = ("while", "fusion", "call", "conditional", "parameter", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class Origin:
    """The instruction, JAX operation and source line that a value comes from.

    - `instruction`: the one whose metadata is taken, None where none was found.
    - `operation`: its op_name, or the name of the program's argument that the value is a copy of;
      "" where neither is known.
    - `source`: the line as `file.py:12`, None where it is not known.
    """

    instruction: Instruction | None
    operation: str
    source: str | None


def source_of(instruction: Instruction) -> str | None:
    """The innermost frame of the user's code in an instruction's metadata, as `file.py:12`."""
    frame = _frame_of(instruction)
    return f"{frame[0]}:{frame[1]}" if frame else None


def _frame_of(instruction: Instruction) -> Frame | None:
    """The innermost frame outside frameworks and helpers, else outside frameworks, else any."""
    named = [frame for frame in instruction.frames if not frame[0].startswith("<")]
    own = [frame for frame in named if not _FRAMEWORKS.search(frame[0])]
    asked = [frame for frame in own if not _HELPERS.search(frame[0])]
    return next(iter(asked or own or named), None)


def _is_of_another_call(instruction: Instruction, one_line: frozenset[str]) -> bool:
    """Whether an instruction's line may be that of another call of a jitted function.

    JAX traces a jitted function once for all its calls, which then all carry the frames of the
    first call. That includes functions of JAX itself such as `jnp.where`. Only the frames inside
    the function are right, or all frames where a single line calls it.
    """
    # The first part of the path is the whole program, which is called once.
    inner = _JITTED.findall((instruction.op_name or "").partition("/")[2])
    if not inner or one_line.issuperset(inner):
        return False
    names = [frame[2].rpartition(".")[2] for frame in instruction.frames]
    chosen = _frame_of(instruction)
    last = len(names) - 1 - names[::-1].index(inner[-1]) if inner[-1] in names else -1
    return chosen is None or instruction.frames.index(chosen) > last


class Origins:
    """Finds the origins of the values of one program.

    - `one_line`: the names of jitted functions that a single source line calls, from
      `tracing.jaxpr.called_from_one_line`.
    """

    def __init__(self, flow: Flow, one_line: frozenset[str] = frozenset()) -> None:
        self.flow = flow
        self.one_line = one_line
        self._found: dict[Value, Origin] = {}

    def of(self, value: Value) -> Origin:
        """The origin of a value, by the rules at the head of this file."""
        if value not in self._found:
            self._found[value] = self._search(value)
        return self._found[value]

    def _search(self, value: Value) -> Origin:
        """Applies the rules at the head of this file in their order."""
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
        """Whether an instruction has a line of its own, and not that of a loop or another call."""
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
        """Rule 1, depth first; `seen` are the values that were visited already."""
        pending = [value]
        while pending and len(seen) < MOST_STEPS:
            here = pending.pop()
            instruction = self.flow.at(here)
            if here in seen or instruction is None:
                continue
            seen.add(here)
            if self.has_own_line(instruction):
                return instruction
            # The most informative source is put last, and so taken next.
            pending.extend(reversed(self.flow.sources(here)))
        return None

    def _forward(self, value: Value, seen: set[Value]) -> Instruction | None:
        """Rule 2, breadth first, so that the nearest reader comes first."""
        pending, reached = deque([value]), {value}
        while pending and len(reached) < MOST_STEPS:
            for reader, passed_on in self.flow.readers(pending.popleft()):
                if self.has_own_line(reader):
                    return reader
                following = passed_on or (reader.name, ())
                if following in reached:
                    continue
                reached.add(following)
                pending.append(following)
                # The value passed on may have other sources too, as the state of a loop has.
                if passed_on and (found := self._backward(passed_on, seen)):
                    return found
        return None

    def _argument_name(self, value: Value) -> str | None:
        """The name of the program's argument that a value is a copy of, or None."""
        lineage = self.flow.lineage(value)
        if not lineage or lineage[-1].opcode != "parameter":
            return None
        is_argument = self.flow.home[lineage[-1].name] == self.flow.module.entry
        return lineage[-1].op_name if is_argument else None
