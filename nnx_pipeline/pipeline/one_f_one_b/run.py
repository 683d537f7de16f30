"""Runs 1F1B: forward, loss and backward in the same ticks, so that few residuals are stored."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array, PyTree

from nnx_pipeline.lab._tracing.jaxpr import equations_of
from nnx_pipeline.lab.errors import InputError, of_type
from nnx_pipeline.pipeline import _entry as entry
from nnx_pipeline.pipeline.contract import Inputs, ModelFunctions, Weights
from nnx_pipeline.pipeline.metrics import counts
from nnx_pipeline.pipeline.one_f_one_b._loop import OneForwardOneBackwardLoop
from nnx_pipeline.pipeline.one_f_one_b._state import LoopWeights
from nnx_pipeline.pipeline.one_f_one_b._tick import HoistedFunctions, OneForwardOneBackwardTick
from nnx_pipeline.pipeline.options import Accumulation, LoopOptions
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.stage import _checks as checks
from nnx_pipeline.pipeline.stage._hoist import Function, hoist
from nnx_pipeline.pipeline.stage._vjp import as_cotangents, no_gradient
from nnx_pipeline.pipeline.stage.state import hold_state, parted, type_of
from nnx_pipeline.sharding import _gradients as grads
from nnx_pipeline.sharding._cast import reading_slices

# the loss, and its two parts: the loss of `leave`, and the metrics
Total = tuple[Array, tuple[Array, PyTree]]
Lift = float | Array | None


def run_one_f_one_b(
    functions: ModelFunctions,
    weights: Weights,
    inputs: Inputs,
    *,
    schedule: OneForwardOneBackward,
    options: LoopOptions = LoopOptions(),
) -> PyTree:
    """The loss of a pipelined model; its gradients are computed in the same loop.

    It computes the following, with the stages spread over the mesh axis `stage`:

        for m in range(microbatches):
            x = enter(weights.enter, inputs.enter[m])
            for r in range(repeats):
                for s in range(stages):
                    x, metrics = apply_stage(weights.stages[r, s], x, inputs.side[m])
                    totals = totals combined with metrics
            loss += leave(weights.leave, x, inputs.leave[m])
        return loss + sum(metric_weights * totals), (loss, totals)

    When gradients are asked for, each stage makes a forward visit of one microbatch and a backward
    visit of another at each tick. So a stage stores the residuals of about stages · (repeats + 1)
    visits at most (`OneForwardOneBackward.ring_slots`), however many microbatches there are, and
    one gradient buffer per parameter. `enter` and `leave` run on all devices. With remat every
    stage is computed once more, as in the circular schedule.

    - `functions`: of what comes before the stages, of all stages, and of what comes after them.
    - `weights`: of the three functions. Those whose gradient is not asked for, such as the frozen
      ones next to LoRA, have no gradient buffer. The stages' are `[repeats, stages, …]`, or such
      parameters `WithState`, as for `run_pipeline`, which the forward visits read and write.
    - `inputs`: of the three functions, `[microbatches, …]`. Their gradients cost memory only where
      they are asked for, as by an encoder that makes what the layers of a decoder read; each stage
      then holds those of all microbatches' side inputs.
    - `schedule`: which stage works on what at each tick.
    - `options`: how the loop is run. Gradients always add up in the loop.

    As for `run_pipeline`, arrays may be placed elsewhere, and the functions may close over arrays.
    The loop computes gradients for a cotangent of `functions.lift`, or of 1, and scales them
    afterwards, in float32. Gradients of functions that compute in float16 need that lift.

    Returns the loss, and its two parts, which have no gradient; with a state a pair, of these two
    and of what all visits left of the state. Raises InputError for shapes that do not fit the
    schedule, for a stage or arrays that `run_pipeline` would refuse, for a weight on a `Max`, when
    a gradient of the parts is asked for, and for one in float16 without a lift.
    """
    of_type("the schedule of run_one_f_one_b", schedule, OneForwardOneBackward)
    check_bundles(functions, weights, inputs, options)
    how = options.accumulate or Accumulation()
    _check_options(schedule, options, how)
    apply_stage = functions.apply_stage
    if options.cast_at_use and schedule.repeats > 1:
        apply_stage = reading_slices()(apply_stage)
    stages, state = parted(weights.stages)
    checks.check_shapes(stages, None, inputs, schedule)
    checks.check_stacked(state, "the state", schedule)
    weights = weights._replace(stages=stages).placed()
    inputs = entry.place_on_every_stage(inputs)
    layers = hold_state(entry.place_stacked(state), schedule)
    lift = checked_lift(functions.lift)
    metric_weights = metric_weights_of(functions, lift)

    def make_loop(*functions: Function) -> OneForwardOneBackwardLoop:
        tick = OneForwardOneBackwardTick(
            HoistedFunctions(*functions),
            schedule,
            metric_weights,
            options.shift_by,
            how,
            sums_in_layers=options.sums_in_layers,
        )
        return OneForwardOneBackwardLoop(tick, options.bubble_fill, options.cast_at_use)

    checkpoint = functools.partial(
        options.remat.checkpoint, also=options.saved_in_stage, in_scan=True
    )

    def call(*looks: Function) -> None:
        make_loop(*looks).visit_once(weights, inputs, layers)

    # What the functions close over becomes an input of the loop: JAX does not differentiate a
    # `custom_vjp` function with respect to arrays that it closes over.
    stage = checks.checked(apply_stage, has_state=state is not None)
    last = lifted(checks.checked_exit(functions.leave), lift)
    hoisted, captured, traced = hoist((checks.checked_entry(functions.enter), stage, last), call)
    loop = dataclasses.replace(
        make_loop(hoisted[0], checkpoint(hoisted[1]), hoisted[2]),
        unlifted=lift is None and any(map(computes_in_float16, traced)),
    )
    total, layers = by_loop(loop, LoopWeights.of(weights, *captured), inputs, layers)
    total = without_lift(total, lift)
    return total if state is None else (total, layers.as_stored(schedule.microbatches))


def check_bundles(functions: object, weights: object, inputs: object, options: object) -> None:
    of_type("functions", functions, ModelFunctions)
    of_type("weights", weights, Weights)
    of_type("inputs", inputs, Inputs)
    of_type("options", options, LoopOptions)
    for name in ("enter", "apply_stage", "leave"):
        if not callable(getattr(functions, name)):
            raise InputError(
                f"`{name}` is of type {type(getattr(functions, name)).__name__}; give a function, "
                "see ModelFunctions"
            )


def metric_weights_of(functions: ModelFunctions, lift: Lift) -> PyTree:
    return lifted_weights(jax.tree.map(_metric_weight, functions.metric_weights), lift)


def _metric_weight(weight: float | Array) -> float | Array:
    """A metric weight that may be traced; a gradient with respect to it raises InputError."""
    is_number = isinstance(weight, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(weight, bool) or not _is_real(weight):
        text = type_of(weight) if is_number else repr(weight)
        raise InputError(
            f"metric_weights have {text} among them; give each metric a real number, such as 0.01"
        )
    if not isinstance(weight, jax.core.Tracer):
        return weight
    checked: float | Array = grads.no_gradient_to(
        "the 1F1B schedule was asked for the gradient with respect to metric_weights, which it "
        "does not give; use jax.lax.stop_gradient on them",
        weight,
    )
    return checked


def _is_real(weight: float | Array) -> bool:
    kind = jnp.result_type(weight)
    return jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)


def _check_options(
    schedule: OneForwardOneBackward, options: LoopOptions, how: Accumulation
) -> None:
    if schedule.repeats > 1 and options.shift_by == "pad":
        raise InputError(
            "shift_by='pad' sends nothing from the last stage to the first, but with "
            f"repeats={schedule.repeats} of the 1F1B schedule the first stage takes its input "
            "directly from the last; use 'ppermute' or 'slice'"
        )
    if schedule.repeats > 1 and how.fsdp_gather.prefetch:
        raise InputError(
            "FsdpGather(prefetch=True) has the weights of two consecutive repeats only, but in the "
            f"1F1B schedule with repeats={schedule.repeats} the forward and the backward visit of "
            "a stage may be in any two repeats; set prefetch=False, which has those of all"
        )


class AnyLoop(Protocol):
    """A loop over ticks of forward and backward visits."""

    unlifted: bool  # whether its functions compute in float16 and it has no lift

    def run(
        self, weights: LoopWeights, inputs: Inputs, layers: PyTree, *, differentiate: bool
    ) -> PyTree:
        """The state after the last tick, with `gradients` and `layers`."""

    def total(self, state: PyTree) -> Total:
        """The loss and its two parts."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_loop(
    loop: AnyLoop, weights: LoopWeights, inputs: Inputs, layers: PyTree
) -> tuple[Total, PyTree]:
    """The loss with its parts, and the state; gradients are computed in the same ticks."""
    state = loop.run(weights, inputs, layers, differentiate=False)
    return loop.total(state), state.layers


def _run_forward(
    loop: AnyLoop, weights: LoopWeights, inputs: Inputs, layers: PyTree
) -> tuple[tuple[Total, PyTree], PyTree]:
    if loop.unlifted:
        refuse_unlifted()
    if isinstance(loop, OneForwardOneBackwardLoop):
        needed = grads.perturbed(inputs)
        loop = dataclasses.replace(
            loop,
            needed=needed if any(jax.tree.leaves(needed)) else None,
            tick=dataclasses.replace(loop.tick, needed=grads.perturbed(weights)),
        )
        inputs = grads.values_of(inputs)
    else:
        inputs = grads.refuse_perturbed(
            "a timetable was asked for the gradient with respect to an input of its microbatches; "
            "it gives those of the weights alone: use jax.lax.stop_gradient on the inputs, or "
            "run_one_f_one_b",
            inputs,
        )
    weights, layers = grads.values_of((weights, layers))
    state = loop.run(weights, inputs, layers, differentiate=True)
    d_inputs = (
        state.of_inputs if isinstance(loop, OneForwardOneBackwardLoop) and loop.needed else None
    )
    saved = weights, inputs, layers, (state.gradients, d_inputs)
    return (loop.total(state), state.layers), saved


def _run_backward(
    loop: AnyLoop, saved: PyTree, cotangents: PyTree
) -> tuple[LoopWeights, Inputs, PyTree]:
    weights, inputs, layers, gradients = saved
    (d_loss, d_parts), _ = cotangents  # the state of the layers has no gradient
    leaves = jax.tree.leaves(d_parts, is_leaf=grads.is_symbolic_zero)
    if not all(map(grads.is_symbolic_zero, leaves)):
        raise InputError(
            "the 1F1B schedule was asked for the gradient of a part of its loss, but it computes "
            "the gradient of the whole loss only; differentiate that, with metric_weights for the "
            "share of each metric in it, or use the circular schedule"
        )
    d_loss = grads.or_zeros(d_loss)
    d_weights, d_needed = jax.tree.map(lambda leaf: grads.scaled(leaf, d_loss), gradients)
    d_inputs = no_gradient(inputs) if d_needed is None else as_cotangents(d_needed, inputs)
    return as_cotangents(d_weights, weights), d_inputs, no_gradient(layers)


by_loop.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


# A loop that computes gradients along with the loss does so before a loss scale multiplies it. By
# then gradients in float16 have vanished, unless the loss was multiplied by a lift.


def checked_lift(lift: Lift) -> Lift:
    """The lift, of which there is no derivative; raises InputError unless it is above 0."""
    is_number = isinstance(lift, int | float | np.number | np.ndarray | jax.Array)
    if lift is not None and (not is_number or isinstance(lift, bool) or jnp.shape(lift)):
        raise InputError(f"lift={lift!r} is not a number; give a power of two, such as 2.0**12")
    if isinstance(lift, jax.core.Tracer):
        return jax.lax.stop_gradient(lift)
    if lift is not None and not 0 < float(np.asarray(lift)) < math.inf:
        raise InputError(f"lift={lift} is not above 0 and finite; give one such as 2.0**12")
    return lift


def lifted(leave: Callable[..., Array], lift: Lift) -> Callable[..., Array]:
    if lift is None:
        return leave
    return functools.wraps(leave)(lambda *args: leave(*args) * lift)


def lifted_weights(metric_weights: PyTree, lift: Lift) -> PyTree:
    if lift is None:
        return metric_weights
    return jax.tree.map(lambda weight: weight * lift if counts(weight) else weight, metric_weights)


def without_lift(total: Total, lift: Lift) -> Total:
    if lift is None:
        return total
    loss, (part, metrics) = total
    return loss / lift, (part / lift, metrics)


def computes_in_float16(program: ClosedJaxpr) -> bool:
    """Whether a program reads arrays in float16, or makes them of others, at any depth."""
    read = [*program.jaxpr.invars, *program.jaxpr.constvars]
    made = [
        variable
        for equation in equations_of(program)
        if not all(isinstance(operand, Literal) for operand in equation.invars)  # else a constant
        for variable in equation.outvars
    ]
    return any(getattr(each.aval, "dtype", None) == jnp.float16 for each in (*read, *made))


def refuse_unlifted() -> None:
    raise InputError(
        "a gradient was asked for of functions that compute in float16; the loop computes it "
        "before it is known by what the loss is multiplied, so that small gradients vanish and a "
        "loss scale comes too late; set `lift` of ModelEnds or ModelFunctions, such as 2.0**12 "
        "(1.0 where `leave` scales its loss), or compute in bfloat16 or float32"
    )
