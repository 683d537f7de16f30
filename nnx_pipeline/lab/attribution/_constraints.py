"""Names the collectives that a sharding constraint forces by the line of the constraint.

The partitioner gives them the name and line of the operation that has to give what the constraint
asks for, or of the one before, which the traced program tells (`_tracing.constraints`). A cast gets
its own line in the same way, in the place of that of the operation that moves its numbers. Of an
elementwise operation with one operand they move that or the result, of others the result: these may
need their operands elsewhere for themselves. A collective that adds is the operation's own.
"""

import dataclasses
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from nnx_pipeline.lab._hlo.dataflow import Flow, collective
from nnx_pipeline.lab._hlo.module import Instruction, Module, Shape
from nnx_pipeline.lab._tracing.constraints import Cast, Constraint
from nnx_pipeline.lab._tracing.installed import Frame
from nnx_pipeline.lab._tracing.jaxpr import Location
from nnx_pipeline.lab.attribution._origins import source_of

# The line and the name of what moves the numbers of a cast, and their bits after and before it.
_Key = tuple[str | None, str, int, int]
_ADDING = (None, "all-reduce", "reduce-scatter")


def at_constraints(
    module: Module, constraints: Iterable[Constraint]
) -> tuple[Module, tuple[str, ...]]:
    """The module with the lines of constraints, and a note for each array that one makes whole."""
    made: dict[tuple[str, str], list[Constraint]] = defaultdict(list)
    for constraint in constraints:
        place = f"{constraint.made.file}:{constraint.made.line}"
        made[place, constraint.operation].append(constraint)
    if not made:
        return module, ()
    flow = Flow(module)
    lines: dict[str, tuple[Frame, ...]] = {}
    notes: dict[str, None] = {}
    for instruction in flow.instructions.values():
        if collective(instruction) in _ADDING:
            continue
        operation = instruction.op_name.rpartition("/")[2]
        known = made.get((source_of(instruction) or "", operation), [])
        maker = _maker(flow, instruction)
        own = maker.op_name == instruction.op_name
        candidates = [one for one in _candidates(known, maker, instruction) if own or one.operands]
        if not candidates:
            continue
        certain = len({_place(one.at) for one in candidates}) == 1 and all(
            one.certain and (own or one.operands == 1) for one in candidates
        )
        if certain:
            lines[instruction.name] = frames_of([one.at for one in candidates])
        for shape in instruction.shapes:
            whole = [one for one in candidates if _is_whole(shape, one)]
            if whole and not instruction.opcode.endswith("-done"):
                notes[_note(whole, maker.shapes[0], shape, certain=certain)] = None
    return renamed(module, lines), tuple(notes)


def _candidates(
    known: Iterable[Constraint], maker: Instruction, moved: Instruction
) -> list[Constraint]:
    """The constraints that what a collective moves may be for: its parts are not yet as asked."""
    sizes = [shape.elements for shape in moved.shapes if shape.elements]
    return [
        one
        for one in known
        if any(math.prod(one.shape) % size == 0 for size in sizes)
        and not any(_sizes(shape.dims) == _sizes(one.part) for shape in maker.shapes)
    ]


def _maker(flow: Flow, instruction: Instruction) -> Instruction:
    # It may be behind other collectives.
    while collective(instruction):
        instruction = flow.lineage((instruction.operands[0], ()))[-1]
    return instruction


def _is_whole(shape: Shape, constraint: Constraint) -> bool:
    return _sizes(shape.dims) == _sizes(constraint.shape) != _sizes(constraint.part)


def _sizes(dims: Sequence[int]) -> list[int]:
    return [size for size in dims if size > 1]


def _note(constraints: Sequence[Constraint], part: Shape, whole: Shape, *, certain: bool) -> str:
    places = " or ".join(
        dict.fromkeys(f"{_place(one.at)}, which asks for {one.spec}" for one in constraints)
    )
    first = constraints[0]
    made = "" if first.made == first.at else f" made at {_place(first.made)}"
    text = f"{_text(whole)}{made}"
    cause = f"for the constraint at {places}" + (
        "" if certain else " or for another operation beside it, which the program does not tell"
    )
    return (
        f"{text} is whole on every device ({whole.bytes:,} bytes) {cause}: from parts of "
        f"{_text(part)} the compiler found no other way. A constraint before it to a sharding "
        "between the two, which shares an axis with each, or another order of axes avoids that"
    )


def frames_of(lines: Sequence[Location]) -> tuple[Frame, ...]:
    at, callers = lines[0], {line.caller for line in lines}
    around = re.fullmatch(r"(.+):(\d+) \((.+)\)", at.caller) if len(callers) == 1 else None
    outer = ((around[1], int(around[2]), around[3]),) if around else ()
    return ((at.file, at.line, at.function), *outer)


def _place(location: Location) -> str:
    return f"{os.path.relpath(location.file)}:{location.line}"


def _text(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def renamed(module: Module, lines: dict[str, tuple[Frame, ...]]) -> Module:
    if not lines:
        return module
    computations = {}
    for name, computation in module.computations.items():
        instructions = {
            key: dataclasses.replace(item, frames=lines[key]) if key in lines else item
            for key, item in computation.instructions.items()
        }
        computations[name] = dataclasses.replace(computation, instructions=instructions)
    return dataclasses.replace(module, computations=computations)


def at_casts(module: Module, casts: Iterable[Cast]) -> Module:
    """The module with the lines of casts in the place of those of what moves the result, where the
    traced program has one such line."""
    known: dict[_Key, set[Location]] = defaultdict(set)
    for cast in casts:
        place = f"{cast.moved.file}:{cast.moved.line}"
        known[place, cast.operation, cast.bits, cast.old_bits].add(cast.at)
    if not known:
        return module
    lines: dict[str, tuple[Frame, ...]] = {}
    for computation, instruction in module.instructions():
        if instruction.opcode != "convert":
            continue
        operand = computation.instructions[instruction.operands[0]]
        found = known.get(_key(instruction, operand), set())
        if len(found) == 1:
            lines[instruction.name] = frames_of([*found])
    return renamed(module, lines)


def _key(cast: Instruction, operand: Instruction) -> _Key:
    operation = cast.op_name.rpartition("/")[2]
    return source_of(cast), operation, cast.shapes[0].bits, operand.shapes[0].bits
