"""Rules about loops: parameters that go round, and gradients kept apart."""

from collections.abc import Iterator

from nnx_pipeline.lint.facts import (
    FACTORS,
    PRODUCTS,
    SAME,
    SUMS,
    Program,
    shape_of,
    source_of,
    squeezed,
)
from nnx_pipeline.lint.finding import Finding, Limits
from nnx_pipeline.lint.walk import Loop, Value, calls_of, loop_of

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
    """Gradients of a parameter that stand side by side, one per microbatch, to be added up."""
    shapes = program.parameter_shapes()
    tails = {shape[k:] for shape in shapes for k in range(len(shape))}
    for scope, equation in program.scope.equations():
        loop = loop_of(scope, equation)
        if loop is None and equation.primitive.name not in PRODUCTS:
            continue
        for value in [v for v, _ in loop.stacked] if loop else [scope.value(equation.outvars[0])]:
            size, per_device = program.device_bytes(value)
            if size < limits.large or squeezed(value.aval.shape) in tails:
                continue
            axis = next(_summed_axes(value, tails), None)
            if axis is not None and program.is_gradient(value):
                yield Finding(
                    rule=GRADIENT_PER_MICROBATCH,
                    severity="warning",
                    location=scope.locate(equation),
                    bytes=size,
                    per_device=per_device,
                    what=f"{shape_of(value)} holds {value.aval.shape[axis]} gradients of a "
                    "parameter side by side until they are added up",
                    cure="add them up as they come, in the carry of a jax.lax.scan over the "
                    "microbatches, or take the gradient of the sum of the losses",
                )


def _summed_axes(value: Value, tails: set[tuple[int, ...]]) -> Iterator[int]:
    """Axes without which the array has the shape of parameters, and that are summed over later."""
    shape = value.aval.shape
    for axis, size in enumerate(shape):
        rest = squeezed(shape[:axis] + shape[axis + 1 :])
        if size > 1 and rest in tails and _is_summed(value, axis):
            yield axis


def _is_summed(value: Value, axis: int) -> bool:
    """Whether a sum over this axis is taken, of the value itself or of multiples of it."""
    seen, waiting = set(), [(value, axis)]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        scope, variable, axis = one[0].scope, one[0].variable, one[1]
        for equation in scope.readers.get(variable, []):
            name, params = equation.primitive.name, equation.params
            result = scope.value(equation.outvars[0])
            if name == "reduce_sum":
                if axis in params["axes"]:
                    return True
                waiting.append((result, axis - sum(a < axis for a in params["axes"])))
            elif name == "transpose":
                waiting.append((result, params["permutation"].index(axis)))
            elif name in SAME | SUMS | FACTORS and result.aval.shape == variable.aval.shape:
                waiting.append((result, axis))
        waiting += [(neighbour, axis) for neighbour in calls_of(scope.value(variable))]
    return False


def _name(loop: Loop) -> str:
    length = loop.equation.params.get("length")
    return f"a scan of {length} turns" if length else "a while loop"
