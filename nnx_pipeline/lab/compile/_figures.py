"""Reads figures from the text of a compiled program, and records what could not be read."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from nnx_pipeline.lab._hlo import cost
from nnx_pipeline.lab._hlo.buffers import BufferText, has_allocations, read_buffers
from nnx_pipeline.lab._hlo.loops import branch_shares, executions
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab._timing.estimate import Estimate
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab._tracing.constraints import Cast, Constraint, casts_of, constraints_of
from nnx_pipeline.lab._tracing.jaxpr import called_from_one_line
from nnx_pipeline.lab.attribution._constraints import at_casts, at_constraints
from nnx_pipeline.lab.attribution._peak import attribute
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.attribution.account import Assigned, assigned
from nnx_pipeline.lab.errors import counted


@dataclass(frozen=True, kw_only=True)
class ProgramFigures:
    """Figures of one program, per device and step; None where the text does not give them."""

    flops: int | None = None
    known_flops: int | None = None  # of the products that can be read
    collectives: dict[str, dict[str, int | None]]
    attribution: Attribution | None = None
    assigned: Assigned | None = None
    time: Time | None = None
    unread: tuple[cost.Unread, ...] = ()  # why a figure is None, or what it leaves out
    notes: tuple[str, ...] = ()  # on what counts beyond what runs, and on constraints


class TracedLines(NamedTuple):
    """What the traced program tells of lines that the compiled one does not have."""

    one_line: frozenset[str] = frozenset()  # `called_from_one_line`
    constraints: tuple[Constraint, ...] = ()
    casts: tuple[Cast, ...] = ()

    @classmethod
    def of(cls, program: ClosedJaxpr) -> "TracedLines":
        return cls(called_from_one_line(program), constraints_of(program), casts_of(program))


def read_program(
    text: str,
    buffers: str | None,
    temp_bytes: int | None,
    lines: TracedLines = TracedLines(),
    links: Links | None = None,
) -> ProgramFigures:
    """Reads every figure that the text of a program and its buffer assignment give; the time where
    `links` are known. A text that cannot be read gives none, and an entry of `unread` names the
    line: the memory that the compiler itself reports does not depend on it."""
    placed, unreadable = _buffers(buffers)
    outside_heap = assigned(placed) if placed else None
    try:
        module = parse(text)
    except ValueError as error:
        nothing = {kind: dict.fromkeys(("ops", "executed", "bytes")) for kind in cost.COLLECTIVES}
        why = _text("the program", error, "flops", "collectives", "buffers", "time")
        unread = (why, *unreadable)
        return ProgramFigures(collectives=nothing, assigned=outside_heap, unread=unread)
    module, whole = at_constraints(at_casts(module, lines.casts), lines.constraints)
    shares = branch_shares(module)
    runs = executions(module, shares)
    products = cost.products_of(module, runs)
    estimate = Estimate(module, runs, links, shares, lines.one_line) if links else None
    found = [
        *products.unknown,
        *cost.uncounted_transfers(module, runs),
        *cost.unknown_opcodes(module, runs),
    ]
    notes = [*whole, *cost.branch_notes(module, runs, shares)]
    by_rule: tuple[cost.Unread, ...] = ()
    if estimate:
        by_rule = *estimate.bounds, *estimate.assumed
        found += estimate.unread
        notes += estimate.notes
    return ProgramFigures(
        flops=None if products.unknown else products.known,
        known_flops=products.known,
        collectives=cost.collective_counts(module, runs),
        attribution=attribute(placed, module, temp_bytes, lines.one_line) if placed else None,
        assigned=outside_heap,
        time=estimate.time if estimate else None,
        unread=(*cost.merged(found), *by_rule, *unreadable),
        notes=tuple(notes),
    )


def _buffers(text: str | None) -> tuple[BufferText | None, tuple[cost.Unread, ...]]:
    """The buffer assignment, or why it cannot be read; both empty if the compiler wrote none."""
    if text is None or not has_allocations(text):
        return None, ()
    try:
        return read_buffers(text), ()
    except ValueError as error:
        return None, (_text("the buffer assignment", error, "buffers", "account"),)


def _text(what: str, error: ValueError, *figures: str) -> cost.Unread:
    return cost.Unread(name="", what=what, figures=figures, executed=None, reason=str(error))


def dropped_arguments(compiled: jax.stages.Compiled) -> list[str]:
    """A note on arguments that nothing reads: JAX drops them, but the caller still holds them."""
    dropped = [one for one, is_read in _arguments(compiled) if not is_read]
    if not dropped:
        return []
    text = f"{_bytes(dropped):,} bytes before sharding, which the caller still holds"
    return [f"{in_no_figure(len(dropped))}: {text}"]


def _arguments(compiled: jax.stages.Compiled) -> list[tuple[Any, bool]]:
    """The arguments, each with whether the program reads it."""
    tree: object
    arguments, tree = jax.tree.flatten(compiled.args_info)
    places = tree.flatten_up_to(compiled.input_shardings)
    return [(one, place is not None) for one, place in zip(arguments, places, strict=True)]


def _bytes(arguments: Iterable[Any]) -> int:
    return sum(math.prod(one.shape) * getattr(one.dtype, "itemsize", 0) for one in arguments)


def in_no_figure(count: int) -> str:
    which, them = (f"{count} arguments are", "them") if count > 1 else ("1 argument is", "it")
    return f"{which} in no figure, since the program does not read {them}"


def lost_donations(compiled: jax.stages.Compiled, hlo: str) -> list[str]:
    """A note on donated arguments whose memory no result of the compiled program takes."""
    read = [one for one, is_read in _arguments(compiled) if is_read]
    aliases = re.search(r"input_output_alias=\{(.*?\)) \}", hlo.partition("\n")[0])
    # An entry is `{output}: (parameter, {place in it}, kind)`; many parameters become one tuple.
    entries = re.findall(r": \((\d+), \{(\d*)", aliases[1]) if aliases else []
    taken = {int(inside or number) for number, inside in entries}
    lost = [one for at, one in enumerate(read) if one.donated and at not in taken]
    if not lost:
        return []
    kinds = dict.fromkeys(f"{one.dtype}[{','.join(map(str, one.shape))}]" for one in lost)
    more = ", …" if len(kinds) > 3 else ""
    return [
        f"donated without effect: {counted(len(lost), 'argument')} ({', '.join([*kinds][:3])}{more}"
        f"; {_bytes(lost):,} bytes before sharding). A result takes the memory of an argument of "
        "its own dtype, shape and sharding"
    ]


def scratch_at_run_time(hlo: str) -> list[str]:
    """A note on NVIDIA's libraries that allocate device memory when they are called."""
    found = re.findall(r'custom_call_target="(cu(?:solver|sparse)_\w+)"| (fft)\(', hlo)
    calls = Counter(target or fft for target, fft in found)
    if not calls:
        return []
    names = ", ".join(f"{name} ({counted(count, 'call')})" for name, count in calls.items())
    return [f"in no figure is the scratch that libraries allocate while they run: {names}"]
