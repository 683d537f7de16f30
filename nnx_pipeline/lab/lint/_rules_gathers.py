"""Rules about sharded arrays: what is gathered whole, or twice, or is not sharded at all."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab._tracing.jaxpr import Location, is_recomputed, is_transposed
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import ArraySize, LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import (
    JaxprScope,
    Value,
    as_loop,
    calls_of,
    loops_around,
    step_back,
)
from nnx_pipeline.lab.mesh import spec_axes

# A gather before two loops is made once for all iterations of the outer one: from so many limits.
_FOR_ALL = 32
_GATHERS = {"sharding_constraint", "reshard", "all_gather", "all_gather_invariant", "device_put"}


class Gather(NamedTuple):
    """An equation that makes an array larger on each device, and what it gathers."""

    scope: JaxprScope
    equation: JaxprEqn
    source: Value
    result: Value
    size: ArraySize

    @property
    def location(self) -> Location:
        return self.scope.locate(self.equation)


def gathers_of(program: LintedProgram) -> Iterator[Gather]:
    """The gathers of a program but those of its backward pass."""
    for scope, equation in program.scope.equations():
        if equation.primitive.name not in _GATHERS or not equation.outvars:
            continue
        if any(map(is_recomputed, [equation, *scope.calls()])):
            continue
        if is_transposed([equation, *scope.calls()]):
            continue
        source, result = scope.value(equation.invars[0]), scope.value(equation.outvars[0])
        if equation.primitive.name.startswith("all_gather"):
            yield Gather(scope, equation, source, result, program.device_bytes(result))
            continue
        before, after = program.parts(source), program.parts(result)
        if before is not None and after is not None and after < before:
            yield Gather(scope, equation, source, result, program.device_bytes(result))


def stacks_gathered(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds stacked layers that are gathered together, before a loop takes them one by one.

    Where that loop is inside another one, the gather may be meant for all iterations of that: it
    then is reported from a larger size, and the cure says what it costs.
    """
    for one in gathers_of(program):
        if one.size.bytes < limit or getattr(one.result.aval, "ndim", 0) < 2:
            continue
        count, again = _taken_one_by_one(one)
        if count < 2 or (again and one.size.bytes < _FOR_ALL * limit):
            continue
        yield Waste(
            one.location,
            one.size,
            f"{facts.array_text(one.result)} is gathered whole, and is then used one entry at a "
            f"time, {count} of them",
            "gather one entry where it is used: in the body of the loop, with "
            "jax.lax.with_sharding_constraint (or reshard, all_gather) on the layer's own weight, "
            "inside the jax.checkpoint if there is one"
            + again
            * "; it is then gathered again in each iteration of the loop around that",
        )


def _taken_one_by_one(gather: Gather) -> tuple[int, bool]:
    """How many entries of a gathered stack are used, each by itself, 0 if it is used whole; and
    whether that happens more than once."""
    around, waiting = len(loops_around(gather.scope)), [gather.result]
    pieces = 0
    for one in each_once(waiting):
        scope = one.scope
        for equation in scope.readers.get(one.variable, []):
            loop = as_loop(scope, equation)
            if loop and any(whole == one for whole, _ in loop.sliced):
                return int(one.aval.shape[0]), len(loops_around(scope)) > around
            elif equation.primitive.name in facts.SAME:
                waiting += [scope.value(result) for result in equation.outvars]
            elif _cuts_one_entry(equation):
                pieces += _turns(scope, around)
        waiting += calls_of(one)
    # A loop that takes one entry more often than there are entries is one over something else.
    return (pieces if pieces <= gather.result.aval.shape[0] else 0), False


def _turns(scope: JaxprScope, around: int) -> int:
    """How often what is inside a loop runs, if that is one more loop than around the gather."""
    loops = loops_around(scope)
    if len(loops) == around:
        return 1
    return int(loops[0].params.get("length", 0)) if len(loops) == around + 1 else 0


def _cuts_one_entry(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in ("slice", "dynamic_slice"):
        return False
    whole, piece = (getattr(v.aval, "shape", ()) for v in (equation.invars[0], equation.outvars[0]))
    return bool(piece == (1, *whole[1:]))


def gathered_twice(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds arrays that one pass gathers twice, with casts or without."""
    first: dict[object, Gather] = {}
    for one in gathers_of(program):
        source = facts.made_from(one.source, facts.SAME)
        loops = tuple(map(id, loops_around(one.scope)))
        key = (source, loops, one.result.aval.shape, str(program.spec_of(one.result)))
        before = first.setdefault(key, one)
        if before is not one and one.size.bytes >= limit and step_back(source).way != "constant":
            at = before.location
            yield Waste(
                one.location,
                one.size,
                f"{facts.array_text(one.result)} is gathered here, and was gathered at "
                f"{at.file.rpartition('/')[2]}:{at.line} already",
                "keep the gathered array in a variable, and use it in both places",
            )


def replicated_parameters(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds large arrays whole on each device, where others like them are split over a mesh axis.

    Like them are the parameters of the same argument, and parameters of the same shape. A stack
    that is split over its first axis, by layer or by expert, is no example for an array without.
    """
    if program.devices == 1:
        return
    examples = [number for number in sorted(program.parameters) if _split_inside(program, number)]
    largest = max((program.input(number).aval.size for number in examples), default=0)
    for number, one in enumerate(program.inputs):
        value = program.input(number)
        if not facts.is_float(value) or not _is_whole(program, number):
            continue
        alike = [
            other
            for other in examples
            if program.inputs[other].argument == one.argument
            or program.input(other).aval.shape == value.aval.shape
        ]
        size = program.device_bytes(value)
        axes = {axis for other in alike for axis in _split_inside(program, other)}
        spec = _divided(program, value, axes)
        if size.bytes >= limit and value.aval.size * 64 >= largest and spec is not None:
            yield Waste(
                facts.first_use(value) or program.function,
                ArraySize(size.bytes, True),
                f"{one.name}, {facts.array_text(value)}, is whole on each device, and "
                f"{program.inputs[alike[0]].name} is split over {', '.join(sorted(axes))}",
                f"give {one.name} a sharding, such as NamedSharding(mesh, {spec})",
            )


def _split_inside(program: LintedProgram, number: int) -> list[str]:
    """The mesh axes that split an input, without that of a stack along its first axis."""
    spec, value = program.spec_of(program.input(number)), program.input(number)
    if spec is None:
        return []
    return [*spec_axes(P(*spec[1:]) if value.aval.ndim > 2 else spec)]


def _is_whole(program: LintedProgram, number: int) -> bool:
    spec = program.spec_of(program.input(number))
    return spec is None or facts.spreads_nothing(spec)


def _divided(program: LintedProgram, value: Value, axes: set[str]) -> P | None:
    """A spec that splits the largest possible axis of an array over one of these mesh axes."""
    for place in sorted(range(value.aval.ndim), key=lambda at: -value.aval.shape[at]):
        for axis in sorted(axes):
            if value.aval.shape[place] % program.mesh[axis] == 0:
                return P(*[None] * place, axis)
    return None
