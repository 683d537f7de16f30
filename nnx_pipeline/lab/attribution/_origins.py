"""Finds the source line and the JAX operation that a value of a compiled program comes from.

The frame taken from an instruction's stack is the innermost one of the program's own code
(`_tracing.installed`) outside of `sharding/layout.py`, whose helpers only place arrays. Where
several stacks lead to one line, as with a helper, the caller beside it is the nearest frame in
which they differ. Many instructions that own memory have no line, or only that of the loop around
them: copies, tuples, the state of loops, fusions, conversions that a compiler inserts. Their line
is searched for in this order:

1. Backwards, along `Flow.sources`, to the first instruction with a line of its own. Two kinds of
line are not an instruction's own: that of the loop in which it runs (the slicing and stacking of
`lax.scan` carries the line of the scan), and that of the first call of a jitted function such as
`jnp.where`, since all calls from other lines carry it too.

2. Forwards, along `Flow.readers`, nearest first: an array that no line makes, such as a copy of an
argument or a buffer not yet written to, takes the line of the first instruction that reads it.

3. The value's own line, whatever it is, or else that of the loop.

Where a value is copied into a larger array, the line that makes this array says what the value is
for: forwards, through what passes it on, converts it or writes a part of it in place, to the
nearest concatenation, padding or update that it is put into.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nnx_pipeline.lab._hlo.dataflow import MOVES, Flow, Value
from nnx_pipeline.lab._hlo.module import Instruction
from nnx_pipeline.lab._tracing.installed import Frame

MOST_STEPS = 4000  # of a search in one direction; after that, the next rule applies

_HELPERS = str(Path(__file__).parents[2] / "sharding" / "layout.py")
_KEPT_WHOLE = {"bitcast-convert", "convert", "dynamic-update-slice", "reshape", "transpose"}
# What a program puts arrays into a larger one by; compilers also pad the operands of products.
_PUTS = ("concatenate", "dynamic_update_slice", "pad", "scatter", "stack")
_JITTED = re.compile(r"(?:^|[/(])jit\(([^()]*)\)")
# The line of these is that of a whole loop or call, or says nothing about the values they pass on.
_CARRIERS = ("while", "fusion", "call", "conditional", "parameter", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class ValueOrigin:
    instruction: Instruction | None  # the one whose metadata is taken
    operation: str  # its op_name, or the copied argument's name; "" for neither
    source: str | None  # as `file.py:12`
    caller: str | None = None  # of the function of that line, where several lead to it
    speaker: Instruction | None = None  # the one whose line it is


def source_of(instruction: Instruction) -> str | None:
    """The line of the program's own code in an instruction's metadata, as `file.py:12`."""
    stack = _stack_of(instruction)
    return _line(stack[0]) if stack else None


def _line(frame: Frame) -> str:
    return f"{frame[0]}:{frame[1]}"


def _stack_of(instruction: Instruction) -> tuple[Frame, ...]:
    frames = instruction.frames
    helpers = (at for at, frame in enumerate(frames) if frame[0] != _HELPERS)
    return frames[next(helpers, 0) :]


def _is_update(reader: Instruction, value: Value) -> bool:
    return reader.opcode == "dynamic-update-slice" and value[0] == reader.operands[1]


def _inner_jits(instruction: Instruction) -> list[str]:
    return _JITTED.findall(instruction.op_name.partition("/")[2])


def _stack_in_call(instruction: Instruction) -> tuple[Frame, ...]:
    """The frames from that of its line outwards that are right whatever called the function. JAX
    traces a jitted function, its own included, once for all its calls, which then all carry the
    frames of the first call: only the frames inside the function are right."""
    stack, inner = _stack_of(instruction), _inner_jits(instruction)
    if not inner:
        return stack
    names = [frame[2].rpartition(".")[2] for frame in stack]
    return stack[: len(names) - names[::-1].index(inner[-1])] if inner[-1] in names else ()


def _stack_key(instruction: Instruction) -> tuple[int, str]:
    # The frames of all instructions of one stack are one object.
    return id(instruction.frames), "".join(_inner_jits(instruction)[-1:])


class Callers:
    """Tells apart the stacks that lead to one line, as with a helper."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        # Every stack by the frame of its line; a loop in a loop has the frames around it twice.
        self._stacks: dict[Frame, set[tuple[Frame, ...]]] = defaultdict(set)
        self._found: dict[tuple[int, str], str | None] = {}
        known = {_stack_key(item): item for item in instructions}
        for item in known.values():
            if stack := tuple(dict.fromkeys(_stack_in_call(item))):
                self._stacks[stack[0]].add(stack)

    def of(self, instruction: Instruction) -> str | None:
        """The nearest frame by which a stack differs from the others that lead to its line."""
        key = _stack_key(instruction)
        if key not in self._found:
            self._found[key] = self._search(tuple(dict.fromkeys(_stack_in_call(instruction))))
        return self._found[key]

    def _search(self, stack: tuple[Frame, ...]) -> str | None:
        alike = self._stacks[stack[0]] if stack else set()
        for depth, frame in enumerate(stack):
            there = [other for other in alike if len(other) > depth]
            alike = {other for other in there if other[depth] == frame}
            if len(alike) < len(there):
                return _line(frame)
        return None


class Origins:
    """Finds the origins of the values of one program; for `one_line` see `called_from_one_line`."""

    def __init__(self, flow: Flow, one_line: frozenset[str] = frozenset()) -> None:
        self.flow = flow
        self.one_line = one_line
        self._found: dict[Value, ValueOrigin] = {}

    def of(self, value: Value) -> ValueOrigin:
        if value not in self._found:
            self._found[value] = self._search(value)
        return self._found[value]

    def stack_of(self, origin: ValueOrigin) -> tuple[Frame, ...]:
        """The frames from an origin's line outwards, as far as they are right for this value."""
        speaker = origin.speaker
        if speaker is None:
            return ()
        whole = self.one_line.issuperset(_inner_jits(speaker))
        frames = _stack_of(speaker) if whole else _stack_in_call(speaker)
        # A loop in a loop has the frames around it twice.
        return tuple(dict.fromkeys(frames or _stack_of(speaker)[:1]))

    def into(self, value: Value) -> str | None:
        """The line of the larger array that a value is copied into, None where it is into none."""
        # With whether it is in the larger array already, which may be made of many updates.
        pending, reached = deque([(value, False)]), {value}
        while pending and len(reached) < MOST_STEPS:
            here, is_part = pending.popleft()
            for reader, passed_on in self.flow.readers(here):
                puts = reader.opcode in ("concatenate", "pad") or _is_update(reader, here)
                is_kept = puts or reader.opcode in _KEPT_WHOLE
                if (puts or is_part) and is_kept and self._puts_on_purpose(reader):
                    return source_of(reader)
                following = passed_on or (reader.name, ())
                is_passed = is_kept or reader.opcode in (*MOVES, "fusion", "parameter")
                if is_passed and following not in reached:
                    reached.add(following)
                    pending.append((following, is_part or puts))
        return None

    def _puts_on_purpose(self, instruction: Instruction) -> bool:
        operation = instruction.op_name.rpartition("/")[2]
        return operation in _PUTS and self.has_own_line(instruction)

    def of_work(self, instruction: Instruction) -> tuple[str | None, str | None]:
        """The line of an instruction and its caller; of one without a line that of its value."""
        if self._is_of_its_line(instruction):
            return source_of(instruction), self._callers.of(instruction)
        origin = self.of((instruction.name, ()))
        return origin.source, origin.caller

    def _search(self, value: Value) -> ValueOrigin:
        seen: set[Value] = set()
        argument, here = self._argument_name(value), self.flow.at(value)
        found = self._backward(value, seen) or self._forward(value, seen)
        if speaker := found:
            operation = argument or found.op_name
        elif here:
            loop = here if here.opcode == "while" else self.flow.loop_of(here.name)
            speaker = next((item for item in (here, loop) if item and source_of(item)), here)
            operation = argument or here.op_name or speaker.op_name
        else:
            return ValueOrigin(None, "", None)
        caller = self._callers.of(speaker)
        return ValueOrigin(found or here, operation, source_of(speaker), caller, speaker)

    @cached_property
    def _callers(self) -> Callers:
        return Callers(self.flow.instructions.values())

    def has_own_line(self, instruction: Instruction) -> bool:
        if not self._is_of_its_line(instruction) or instruction.opcode in _CARRIERS:
            return False
        if instruction.op_name.endswith(("/while", "/shard_map")):
            return False  # a copy that was made for a loop or a call, under its name
        loop = self.flow.loop_of(instruction.name)
        return loop is None or source_of(loop) != source_of(instruction)

    def _is_of_its_line(self, instruction: Instruction) -> bool:
        """Whether there is a line, and not only that of the first call of a jitted function."""
        inner = _inner_jits(instruction)
        is_right = self.one_line.issuperset(inner) or bool(_stack_in_call(instruction))
        return is_right and source_of(instruction) is not None

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

    def _argument_name(self, value: Value) -> str:
        lineage = self.flow.lineage(value)
        if not lineage or lineage[-1].opcode != "parameter":
            return ""
        is_argument = self.flow.home[lineage[-1].name] == self.flow.module.entry
        return lineage[-1].op_name if is_argument else ""
