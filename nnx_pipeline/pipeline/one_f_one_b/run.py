"""Runs 1F1B: forward, loss and backward in the same ticks, so that few visits are kept."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, of_type
from nnx_pipeline.ops.cast import of_slices
from nnx_pipeline.ops.gradients import (
    asked_of,
    is_symbolic_zero,
    no_gradient_to,
    or_zeros,
    refuse_perturbed,
    scaled,
    values_of,
)
from nnx_pipeline.pipeline import entry
from nnx_pipeline.pipeline.closed import hoist
from nnx_pipeline.pipeline.one_f_one_b.loop import Loop
from nnx_pipeline.pipeline.one_f_one_b.state import (
    Enter,
    Held,
    Inputs,
    Leave,
    ModelFunctions,
    Weights,
)
from nnx_pipeline.pipeline.one_f_one_b.tick import Functions, Tick
from nnx_pipeline.pipeline.options import Accumulation, LoopOptions
from nnx_pipeline.pipeline.parts import LoopParts
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.pipeline.stage.checks import (
    check_arrays,
    check_stacked,
    checked,
    checked_enter,
    checked_leave,
)
from nnx_pipeline.pipeline.stage.state import Kept, hold_state, parted, type_of
from nnx_pipeline.pipeline.stage.vjp import as_cotangents, no_gradient

# the loss, and its two parts: the loss of `leave`, and the metrics
Total = tuple[Array, tuple[Array, PyTree]]


def run_one_f_one_b(
    functions: ModelFunctions,
    weights: Weights,
    inputs: Inputs,
    *,
    schedule: OneForwardOneBackward,
    options: LoopOptions = LoopOptions(),
) -> Any:
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
    visit of another at each tick, and a microbatch starts its backward visits in the tick in which
    the last stage gives its loss. So a stage keeps the residuals of about stages · (repeats + 1)
    visits at most (`OneForwardOneBackward.ring_slots`), however many microbatches there are, and
    one gradient buffer per parameter. `enter` and `leave` run on all devices.

    There are microbatches · repeats + stages · (repeats + 1) - 2 ticks. The first
    stages · repeats - 1 have no backward part, and as many at the end have no forward part. So a
    stage makes as many forward and backward visits as in the circular schedule, and as there it
    idles, or computes and discards, for the time of stages - 1 visits in each direction. With remat
    every stage is computed once more, also as in the circular schedule.

    - `functions`: of what comes before the stages, of all stages, and of what comes after them.
    - `weights`: those of the three functions. Those whose gradient is not asked for, such as the
      frozen ones beside LoRA, have no gradient buffer. The stages' are `[repeats, stages, …]`, or
      such parameters `WithState`, as for `run_pipeline`, which the forward visits read and write.
    - `inputs`: those of the three functions, `[microbatches, …]`. Their gradients cost memory only
      where they are asked for, as by an encoder that makes what the layers of a decoder read; each
      stage then holds those of all microbatches' side inputs.
    - `schedule`: which stage works on what at each tick.
    - `options`: how the loop is run. Gradients always add up in the loop.

    As for `run_pipeline`, arrays may be placed elsewhere, and the functions may close over arrays.

    The loop computes gradients for a cotangent of 1, and scales them afterwards, in float32. For
    float16 it is therefore `leave` that multiplies the loss by a scale, and what is returned is
    divided by it; `metric_weights` are multiplied too.

    Returns the loss, and its two parts, which have no gradient; with a state a pair, of these two
    and of what all visits left of the state. Raises InputError for shapes that do not fit the
    schedule, for a stage or arrays that `run_pipeline` would refuse, for a weight on a `Max`, and
    when a gradient of the parts is asked for.
    """
    of_type("the schedule of run_one_f_one_b", schedule, OneForwardOneBackward)
    check_bundles(functions, weights, inputs, options)
    how = options.accumulate or Accumulation()
    _check_options(schedule, options, how)
    enter, apply_stage, leave = _one_for_all_stages(functions)
    if options.cast_at_use and schedule.repeats > 1:
        apply_stage = of_slices(apply_stage)
    stages, state = parted(weights.stages)
    weights = weights._replace(stages=stages)
    weights, inputs, layers = _at_entry(weights, inputs, state, schedule)
    metric_weights = jax.tree.map(metric_weight, functions.metric_weights)

    def make_loop(*functions: Callable[..., Any]) -> Loop:
        tick = Tick(
            Functions(*functions),
            schedule,
            metric_weights,
            options.shift_by,
            options.parts.map_stages,
            dataclasses.replace(how.weights, ahead=False),  # refused above with several repeats
        )
        return Loop(tick, how, options.bubble_fill, options.cast_at_use)

    checkpoint = functools.partial(
        options.remat.checkpoint, also=options.saved_in_stage, in_scan=True
    )
    own = (
        checked_enter(enter),
        checked(apply_stage, has_state=state is not None),
        checked_leave(leave),
    )
    total, layers = by_loop(*_hoisted(make_loop, checkpoint, own, (weights, inputs, layers)))
    return total if state is None else (total, layers.given_out(schedule.microbatches))


def check_bundles(functions: Any, weights: Any, inputs: Any, options: Any) -> None:
    """Raises InputError unless the arguments of a loop over a whole model have their types."""
    of_type("functions", functions, ModelFunctions)
    of_type("weights", weights, Weights)
    of_type("inputs", inputs, Inputs)
    of_type("options", options, LoopOptions)


def _one_for_all_stages(functions: ModelFunctions) -> tuple[Enter, ApplyStage, Leave]:
    if not callable(functions.apply_stage):
        raise InputError(
            f"apply_stage is a {type(functions.apply_stage).__name__}, but all stages of the 1F1B "
            "schedule run one function; give that, or use run_timetable"
        )
    for name in ("enter", "leave"):
        if not callable(getattr(functions, name)):
            raise InputError(
                f"`{name}` is of type {type(getattr(functions, name)).__name__}; give a function, "
                "see ModelFunctions"
            )
    return functions.enter, functions.apply_stage, functions.leave


def _hoisted(
    make_loop: Callable[..., Loop],
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]],
    functions: tuple[Callable[..., Any], ...],
    given: tuple[Weights, Inputs, PyTree],
) -> tuple[Loop, Held, Inputs, PyTree]:
    """The loop, and what it is given: the weights together with what the functions close over.

    - `make_loop`: makes the loop from its three functions.
    - `checkpoint`: is put around `apply_stage`.
    - `functions`: `enter`, `apply_stage` and `leave`, with their checks.
    - `given`: weights, inputs and the state of the layers.

    What the functions close over becomes an input of the loop, because JAX does not differentiate a
    `custom_vjp` function with respect to arrays that it closes over.
    """
    weights, inputs, layers = given

    def call(*looks: Callable[..., Any]) -> None:
        make_loop(*map(_with_nothing_closed, looks)).visit_once(weights, inputs, layers)

    (enter, apply_stage, leave), (enter_closed, stage_closed, leave_closed) = hoist(functions, call)
    loop = make_loop(enter, checkpoint(apply_stage), leave)
    ends = (weights.enter, enter_closed), (weights.leave, leave_closed)
    return loop, Held(ends[0], weights.stages, ends[1], closed=stage_closed), inputs, layers


def _at_entry(
    weights: Weights, inputs: Inputs, state: PyTree, schedule: OneForwardOneBackward
) -> tuple[Weights, Inputs, Kept]:
    """Moves all to where the loop reads them; raises InputError if their shapes do not fit."""
    check_arrays(weights.stages, None, inputs, schedule)
    check_stacked(state, "the state", schedule)
    placed = Weights(
        enter=entry.as_arrays(weights.enter),
        stages=entry.stacked(weights.stages),
        leave=entry.as_arrays(weights.leave),
    )
    return placed, entry.on_every_stage(inputs), hold_state(entry.stacked(state), schedule)


def _with_nothing_closed(look: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an ignored first argument in the place of what it closes over."""
    return lambda closed, *given: look(*given)


def metric_weight(weight: Any) -> Any:
    """A metric weight that may be traced; a gradient with respect to it raises InputError.

    Raises InputError unless it is a real number, or an array of them.
    """
    is_number = isinstance(weight, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(weight, bool) or not _is_real(weight):
        found = type_of(weight) if is_number else repr(weight)
        raise InputError(
            f"metric_weights have {found} among them; give each metric a real number, such as 0.01"
        )
    if not isinstance(weight, jax.core.Tracer):
        return weight
    return no_gradient_to(
        "the 1F1B schedule was asked for the gradient with respect to metric_weights, which it "
        "does not give; use jax.lax.stop_gradient on them",
        weight,
    )


def _is_real(weight: Any) -> bool:
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
    if schedule.repeats > 1 and how.weights.ahead:
        raise InputError(
            "WeightGathering(ahead=True) holds the weights of two consecutive repeats only, but in "
            f"the 1F1B schedule with repeats={schedule.repeats} the forward and the backward visit "
            "of a stage may be in any two repeats; set ahead=False to hold the weights of all"
        )
    if options.parts != LoopParts(map_stages=options.parts.map_stages):
        raise InputError(
            "parts replace pieces of the circular loop, which the 1F1B schedule does not run; "
            "leave all of them but map_stages as they are"
        )


class AnyLoop(Protocol):
    """A loop over ticks of forward and backward visits."""

    def run(self, weights: Held, inputs: Inputs, layers: PyTree, *, differentiate: bool) -> Any:
        """The state after the last tick, with `gradients` and `layers`."""

    def total(self, state: Any) -> Total:
        """The loss and its two parts."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_loop(loop: AnyLoop, weights: Held, inputs: Inputs, layers: PyTree) -> tuple[Total, PyTree]:
    """The loss by a loop that computes its gradients in the same ticks, if they are asked for.

    - `loop`: what goes through the ticks.
    - `weights`, `inputs`, `layers`: as for `one_f_one_b.loop.Loop.run`.

    Returns the loss with its parts, and the state of the layers. Raises InputError when a gradient
    of a part is asked for, or by another loop than that of 1F1B one with respect to `inputs`.
    """
    state = loop.run(weights, inputs, layers, differentiate=False)
    return loop.total(state), state.layers


def _run_forward(
    loop: AnyLoop, weights: Held, inputs: Inputs, layers: PyTree
) -> tuple[tuple[Total, PyTree], Any]:
    if isinstance(loop, Loop):
        asked = asked_of(inputs)
        loop = dataclasses.replace(
            loop,
            asked=asked if any(jax.tree.leaves(asked)) else None,
            tick=dataclasses.replace(loop.tick, asked=asked_of(weights)),
        )
        inputs = values_of(inputs)
    else:
        inputs = refuse_perturbed(
            "a timetable was asked for the gradient with respect to an input of its microbatches; "
            "it gives those of the weights alone: use jax.lax.stop_gradient on the inputs, or "
            "run_one_f_one_b",
            inputs,
        )
    weights, layers = values_of((weights, layers))
    state = loop.run(weights, inputs, layers, differentiate=True)
    d_inputs = state.of_inputs if isinstance(loop, Loop) and loop.asked else None
    saved = weights, inputs, layers, (state.gradients, d_inputs)
    return (loop.total(state), state.layers), saved


def _run_backward(loop: AnyLoop, saved: Any, cotangents: Any) -> tuple[Held, Inputs, PyTree]:
    weights, inputs, layers, gradients = saved
    (d_loss, d_parts), _ = cotangents  # the state of the layers has no gradient
    if not all(map(is_symbolic_zero, jax.tree.leaves(d_parts, is_leaf=is_symbolic_zero))):
        raise InputError(
            "the 1F1B schedule was asked for the gradient of a part of its loss, but it computes "
            "the gradient of the whole loss only; differentiate that, with metric_weights for the "
            "share of each metric in it, or use the circular schedule"
        )
    d_loss = or_zeros(d_loss)
    d_weights, d_asked = jax.tree.map(lambda leaf: scaled(leaf, d_loss), gradients)
    d_inputs = no_gradient(inputs)
    if d_asked is not None:
        d_inputs = jax.tree.map(
            lambda new, none: none if new is None else new,
            d_asked,
            d_inputs,
            is_leaf=lambda leaf: leaf is None,
        )
    return as_cotangents(d_weights, weights), d_inputs, no_gradient(layers)


by_loop.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
