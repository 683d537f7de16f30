"""Rules about loops: parameters that go round, and gradients kept apart."""

from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from nnx_pipeline.lint.facts import (
    FACTORS,
    SAME,
    SUMS,
    Program,
    shape_of,
    source_of,
    squeezed,
)
from nnx_pipeline.lint.finding import Finding, Limits
from nnx_pipeline.lint.walk import Loop, Scope, Value, calls_of, loop_of, stacks_of

PARAMETER_IN_LOOP, GRADIENT_PER_MICROBATCH = "parameter-in-loop", "gradient-per-microbatch"


def parameters_in_loops(program: Program, limits: Limits) -> Iterator[Finding]:
    """Parameters carried through a loop that does not change them, or stacked by one.

    JAX takes a carried array out of the loop by itself if the body gives back the very same one;
    after a cast, a constraint or a barrier it cannot.
    """
    for scope, equation in program.scope.equations():
        loop = loop_of(scope, equation)
        if loop is None:
            continue
        for before, begin, end in loop.carried:
            if source_of(end, SAME) == begin and program.is_parameter(before):
                yield from _carried(program, limits, loop, before)
        for whole, entry in loop.stacked:
            if program.is_parameter(entry):
                yield from _stacked(program, limits, loop, whole, entry)


def _carried(program: Program, limits: Limits, loop: Loop, value: Value) -> Iterator[Finding]:
    size, per_device = program.device_bytes(value)
    if size >= limits.large:
        yield Finding(
            rule=PARAMETER_IN_LOOP,
            severity="warning",
            location=loop.scope.locate(loop.equation),
            bytes=size,
            per_device=per_device,
            what=f"{shape_of(value)}, a parameter, goes from turn to turn of {_name(loop)} that "
            "does not change it",
            cure="close over it, or hand it in beside the carry; as a carry its gradient is one, "
            "too, and the backward pass may keep it once per turn",
        )


def _stacked(
    program: Program, limits: Limits, loop: Loop, whole: Value, entry: Value
) -> Iterator[Finding]:
    size, per_device = program.device_bytes(whole)
    if size >= limits.large:
        made, _ = entry.scope.made.get(entry.variable, (None, 0))
        place = entry.scope.locate(made) if made else loop.scope.locate(loop.equation)
        yield Finding(
            rule=PARAMETER_IN_LOOP,
            severity="warning",
            location=place,
            bytes=size,
            per_device=per_device,
            what=f"{shape_of(entry)}, a parameter or a part of one, is kept once for each turn of "
            f"{_name(loop)}",
            cure="do not return it from the body; if the backward pass keeps it, choose and cast "
            "the weight within the jax.checkpoint of the body",
        )


def gradients_per_microbatch(program: Program, limits: Limits) -> Iterator[Finding]:
    """Gradients of a parameter that stand side by side, one per microbatch, to be added up.

    They are stacked by a loop, or made by a product under `vmap` with a batch axis.
    """
    shapes = program.parameter_shapes()
    tails = {shape[k:] for shape in shapes for k in range(len(shape))}
    for scope, equation in program.scope.equations():
        for value, axis in _side_by_side(scope, equation):
            shape = value.aval.shape
            size, per_device = program.device_bytes(value)
            is_like = squeezed(shape[:axis] + shape[axis + 1 :]) in tails
            if not is_like or squeezed(shape) in tails or size < limits.large:
                continue
            if program.is_gradient(value) and _is_summed(value, axis):
                yield Finding(
                    rule=GRADIENT_PER_MICROBATCH,
                    severity="warning",
                    location=scope.locate(equation),
                    bytes=size,
                    per_device=per_device,
                    what=f"{shape_of(value)} holds {shape[axis]} gradients of a parameter side by "
                    "side until they are added up",
                    cure="add them up as they come, in the carry of a jax.lax.scan over the "
                    "microbatches, or take the gradient of the sum of the losses",
                )


def _side_by_side(scope: Scope, equation: JaxprEqn) -> Iterator[tuple[Value, int]]:
    """Arrays that an equation makes of independent entries, and the axis of these."""
    loop = loop_of(scope, equation)
    if loop is not None:
        candidates = [(whole, 0) for whole, _ in loop.stacked]
    elif equation.primitive.name == "dot_general":
        _, (batch, _) = equation.params["dimension_numbers"]
        candidates = [(scope.value(equation.outvars[0]), axis) for axis in range(len(batch))]
    else:
        return
    for value, axis in candidates:
        if value.aval.shape[axis] > 1:
            yield value, axis


def _is_summed(value: Value, axis: int) -> bool:
    """Whether a sum over this axis alone is taken, of the value itself or of multiples of it.

    What is summed over other axes too is no parameter's gradient, though it may have such a shape.
    """
    seen, waiting = set(), [(value, axis)]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        value, axis = one
        for equation in value.scope.readers.get(value.variable, []):
            name, params = equation.primitive.name, equation.params
            result = value.scope.value(equation.outvars[0])
            if name == "reduce_sum":
                others = [other for other in params["axes"] if other != axis]
                if any(value.aval.shape[other] > 1 for other in others):
                    continue
                if axis in params["axes"]:
                    return True
                waiting.append((result, axis - sum(other < axis for other in others)))
            elif name == "transpose":
                waiting.append((result, params["permutation"].index(axis)))
            elif name in SAME | SUMS | FACTORS and result.aval.shape == value.aval.shape:
                waiting.append((result, axis))
        waiting += [(same, axis) for same in calls_of(value)]
        waiting += [(whole, axis + 1) for whole in stacks_of(value)]
    return False


def _name(loop: Loop) -> str:
    length = loop.equation.params.get("length")
    return f"a scan of {length} turns" if length else "a while loop"
