"""Rules about loops: parameters carried or stacked, and gradients kept for each microbatch."""

import math
from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from nnx_pipeline.lab._tracing.jaxpr import is_transposed
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.lint._facts import (
    FACTORS,
    PRODUCTS,
    SAME,
    SUMS,
    LintedProgram,
    Waste,
    array_text,
    made_from,
    squeezed,
)
from nnx_pipeline.lab.lint._walk import JaxprLoop, JaxprScope, Value, as_loop, calls_of, stacks_of


def parameters_in_loops(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds parameters that a loop carries without changing them, or stacks once per iteration.

    JAX itself takes a carried array out of the loop if the body returns the very same array; after
    a cast, a sharding constraint or a barrier it cannot.
    """
    for scope, equation in program.scope.equations():
        loop = as_loop(scope, equation)
        if loop is None:
            continue
        for before, begin, end in loop.carried:
            size, is_same = program.device_bytes(before), made_from(end, SAME) == begin
            if size.bytes >= limit and is_same and program.is_parameter(before):
                yield Waste(
                    scope.locate(equation),
                    size,
                    f"{array_text(before)}, a parameter, is carried by {_name(loop)} that does "
                    "not change it",
                    "close over it, or pass it in outside the carry; as a carry its gradient is "
                    "one, too, and the backward pass may keep it once per iteration",
                )
        for whole, entry in loop.stacked:
            size = program.device_bytes(whole)
            if whole.aval.shape[0] < 2:
                continue  # a loop of one iteration keeps no more than the entry
            if size.bytes >= limit and program.is_parameter(entry):
                # The line in the body that makes the entry says more than the line of the loop.
                made, _ = entry.scope.made.get(entry.variable, (None, 0))
                yield Waste(
                    entry.scope.locate(made) if made else scope.locate(equation),
                    size,
                    f"{array_text(entry)}, a parameter or a part of one, is kept once per "
                    f"iteration of {_name(loop)}",
                    "do not return it from the body; if the backward pass keeps it, index and "
                    "cast the weight inside the jax.checkpoint of the body",
                )


def gradients_per_microbatch(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds gradients of a parameter that are stored per microbatch until they are summed.

    They are stacked by a loop, or made under `vmap` by a matrix product with a batch axis.
    """
    inputs = program.traced.jaxpr.invars
    shapes = [squeezed(inputs[number].aval.shape) for number in program.parameters]
    # Without its leading axes, too: a loop over stacked layers makes the gradient of one layer.
    tails = {squeezed(shape[k:]) for shape in shapes for k in range(len(shape))}
    for scope, equation in program.scope.equations():
        for value, axis in _side_by_side(scope, equation):
            shape = value.aval.shape
            size = program.device_bytes(value)
            # An array that has the shape of a parameter itself is one gradient, not several.
            if size.bytes < limit or squeezed(shape) in tails or not program.is_gradient(value):
                continue
            if any(
                squeezed(total.aval.shape) in tails and not _is_multiplied_again(total)
                for total in _sums(value, axis)
            ):
                yield Waste(
                    scope.locate(equation),
                    size,
                    f"{array_text(value)} holds {shape[axis]} gradients of a parameter side "
                    "by side until they are added up",
                    "add them up as they come, in the carry of a jax.lax.scan over the "
                    "microbatches, or take the gradient of the sum of the losses",
                )


def _side_by_side(scope: JaxprScope, equation: JaxprEqn) -> Iterator[tuple[Value, int]]:
    """Arrays that an equation makes of independent entries, with the axis they lie along."""
    loop = as_loop(scope, equation)
    if loop is not None:
        candidates = [(whole, 0) for whole, _ in loop.stacked]
    elif equation.primitive.name == "dot_general":
        _, (batch, _) = equation.params["dimension_numbers"]
        # The batch axes of a product are the first axes of its result.
        candidates = [(scope.value(equation.outvars[0]), axis) for axis in range(len(batch))]
    else:
        return
    for value, axis in candidates:
        if value.aval.shape[axis] > 1:
            yield value, axis


def _sums(value: Value, axis: int) -> Iterator[Value]:
    """The sums of a value, or of a multiple of it, over this axis alone.

    On the way the value may become a part of a larger array, such as the gradient of one layer of
    that of the stack. An array that is summed over other axes too is not the gradient of a
    parameter, though it may have the shape of one.
    """
    waiting = [(value, axis)]
    for value, axis in each_once(waiting):
        shape = value.aval.shape
        for equation in value.scope.readers.get(value.variable, []):
            if equation.primitive.name != "reduce_sum":
                waiting += _passed_on(equation, value, axis)
                continue
            others = [other for other in equation.params["axes"] if other != axis]
            if any(shape[other] > 1 for other in others):
                continue
            result = value.scope.value(equation.outvars[0])
            if axis in equation.params["axes"]:
                yield result
                continue
            # Only axes of size 1 were summed; those before the axis move it forward.
            waiting.append((result, axis - sum(other < axis for other in others)))
        waiting += [(same, axis) for same in calls_of(value)]
        # A loop that stacks the value puts the axis of its iterations in front.
        waiting += [(whole, axis + 1) for whole in stacks_of(value)]


def _is_multiplied_again(total: Value) -> bool:
    """Whether the backward pass multiplies a sum again: then it is a cotangent."""
    waiting = [total]
    for value in each_once(waiting):
        calls = [*value.scope.calls()]
        for equation in value.scope.readers.get(value.variable, []):
            if equation.primitive.name in PRODUCTS and is_transposed([equation, *calls]):
                return True
            waiting += [value.scope.value(variable) for variable in equation.outvars]
        waiting += calls_of(value)
    return False


def _passed_on(equation: JaxprEqn, value: Value, axis: int) -> Iterator[tuple[Value, int]]:
    """The result that holds an operand, with the place of its axis; nothing if it is cut there."""
    if not equation.outvars:
        return  # it prints, or calls back
    name, params = equation.primitive.name, equation.params
    result = value.scope.value(equation.outvars[0])
    before, after = value.aval.shape, getattr(result.aval, "shape", ())
    if name == "transpose":
        yield result, params["permutation"].index(axis)
    elif name == "broadcast_in_dim":
        place = params["broadcast_dimensions"][axis]
        if after[place] == before[axis]:
            yield result, place
    elif name in ("reshape", "squeeze"):
        ahead = math.prod(before[:axis])
        for place, size in enumerate(after):
            if size == before[axis] and math.prod(after[:place]) == ahead:
                yield result, place
                return
    elif name in SAME | SUMS | FACTORS and after[axis : axis + 1] == before[axis : axis + 1]:
        yield result, axis


def _name(loop: JaxprLoop) -> str:
    length = loop.equation.params.get("length")
    return f"a scan of {counted(length, 'iteration')}" if length else "a while loop"
