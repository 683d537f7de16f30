"""The 1F1B loop: forward, loss and backward in the same ticks, so that little is kept between."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, one_of
from nnx_pipeline.ops.gradients import (
    is_symbolic_zero,
    no_gradient_to,
    or_zeros,
    refuse_perturbed,
    values_of,
)
from nnx_pipeline.pipeline import entry
from nnx_pipeline.pipeline.checks import check_arrays, checked
from nnx_pipeline.pipeline.closed import hoist
from nnx_pipeline.pipeline.lend import AS_STORED, Lending
from nnx_pipeline.pipeline.one_f_one_b_loop import Loop
from nnx_pipeline.pipeline.one_f_one_b_state import Enter, Held, Inputs, Leave, Weights
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.shift import SHIFTS, ShiftName
from nnx_pipeline.pipeline.stage_vjp import as_cotangents, is_float
from nnx_pipeline.pipeline.stages import ApplyStage, OverStages, over_stages
from nnx_pipeline.remat import FULL, Remat


def run_one_f_one_b(
    enter: Enter,
    apply_stage: ApplyStage,
    leave: Leave,
    weights: Weights,
    inputs: Inputs,
    *,
    schedule: OneForwardOneBackward,
    metric_weights: PyTree = None,
    shift_by: ShiftName = "ppermute",
    remat: Remat = FULL,
    saved_in_stage: tuple[str, ...] = (),
    grad_dtype: jax.typing.DTypeLike | None = None,
    lending: Lending = AS_STORED,
    over: OverStages = over_stages,
    bubble_fill: float = 0.0,
) -> tuple[Array, tuple[Array, PyTree]]:
    """The loss of a pipelined model, whose derivative is computed on the way.

    The same as this, with the stages spread over the mesh axis `stage`:

        for m in range(microbatches):
            x = enter(weights.enter, inputs.enter[m])
            for r in range(repeats):
                for s in range(stages):
                    x, metrics = apply_stage(weights.stages[r, s], x, inputs.side[m])
                    totals = metrics put to totals
            loss += leave(weights.leave, x, inputs.leave[m])
        return loss + sum(metric_weights * totals), (loss, totals)

    Where the derivative is asked for, each stage forwards a microbatch and takes another one back
    at each tick, and the last stage's loss turns a microbatch round in the tick that brings it: a
    stage keeps what a visit saves for at most 2 · stages · repeats - 1 visits, however many
    microbatches there are, and one gradient buffer per parameter. `enter` and `leave` run on all
    devices.

    Ticks: microbatches · repeats + stages · (repeats + 1) - 2, of which the first stages · repeats
    - 1 have no backward part and as many of the last no forward part. So a stage makes as many
    forward and backward visits, and waits as long, as in the circular schedule: stages - 1 visits
    in vain. With remat every stage is computed once more, as there.

    enter: (its weights, inputs of a microbatch) to activations, not spread over `stage`.
    apply_stage: as for `run_pipeline`. leave: (its weights, activations of the last stage, inputs
    of a microbatch) to a float32 scalar. metric_weights: what each metric counts in the loss: a
    number for all, or numbers in a pytree like theirs; a metric with None or 0 is not
    differentiated. grad_dtype: dtype in which gradients add up, None for that of the weights; they
    come back in the weights' dtype. lending: how the stages' weights are held while the ticks go
    by, as for `run_pipeline`. over: how a function of one stage is spread over the stages.
    bubble_fill: what the buffers hold before anything arrives; results never depend on it. Arrays
    may lie elsewhere, and the functions close over others, as for `run_pipeline`.

    Returns the loss, and its two parts, which have no gradient. Raises InputError for shapes that
    do not fit the schedule, for a `remat` that offloads, for a stage or arrays as `run_pipeline`
    does, for a weight on a `Max`, and when a gradient with respect to `inputs` or of the parts is
    asked for.
    """
    _check_options(schedule, shift_by, remat, lending)
    weights, inputs = _at_entry(weights, inputs, schedule)
    make_loop = functools.partial(
        Loop,
        schedule=schedule,
        metric_weights=jax.tree.map(_without_gradient, metric_weights),
        shift_by=shift_by,
        grad_dtype=grad_dtype,
        lending=lending,
        over=over,
        bubble_fill=bubble_fill,
    )
    checkpoint = functools.partial(remat.checkpoint, also=saved_in_stage, in_scan=True)
    return _run(*_hoisted(make_loop, checkpoint, (enter, apply_stage, leave), weights, inputs))


def _hoisted(
    make_loop: Callable[..., Loop],
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]],
    functions: tuple[Callable[..., Any], ...],
    weights: Weights,
    inputs: Inputs,
) -> tuple[Loop, Held, Inputs]:
    """The loop, the weights with what its functions close over beside them, and the inputs.

    functions: `enter`, `apply_stage` and `leave`. JAX finds no way to a gradient through a function
    that it is given a derivative for.
    """
    functions = (functions[0], checked(functions[1]), functions[2])

    def call(*looks: Callable[..., Any]) -> None:
        enter, apply_stage, leave = map(_with_nothing_closed, looks)
        loop = make_loop(enter=enter, apply_stage=apply_stage, leave=leave)
        loop.visit_once(weights, inputs)

    (enter, apply_stage, leave), (of_enter, of_stages, of_leave) = hoist(functions, call)
    loop = make_loop(enter=enter, apply_stage=checkpoint(apply_stage), leave=leave)
    ends = (weights.enter, of_enter), (weights.leave, of_leave)
    return loop, Held(ends[0], weights.stages, ends[1], closed=of_stages), inputs


def _at_entry(
    weights: Weights, inputs: Inputs, schedule: OneForwardOneBackward
) -> tuple[Weights, Inputs]:
    """Both where the loop reads them; InputError where their shapes do not fit."""
    check_arrays(weights.stages, None, inputs, schedule)
    placed = Weights(
        enter=entry.as_arrays(weights.enter),
        stages=entry.stacked(weights.stages),
        leave=entry.as_arrays(weights.leave),
    )
    return placed, entry.on_every_stage(inputs)


def _with_nothing_closed(look: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a loop, whose first argument is what it closes over."""
    return lambda closed, *given: look(*given)


def _without_gradient(weight: Any) -> Any:
    """A weight of a metric: it may be traced, but the loop does not differentiate by it."""
    if not isinstance(weight, jax.core.Tracer):
        return weight
    return no_gradient_to(
        "the 1F1B schedule was asked for the gradient with respect to metric_weights, which it "
        "does not give; use jax.lax.stop_gradient on them",
        weight,
    )


def _check_options(
    schedule: OneForwardOneBackward, shift_by: str, remat: Remat, lending: Lending
) -> None:
    one_of("shift_by", shift_by, SHIFTS)
    if remat.offloaded:
        raise InputError(
            f"remat sends {remat.offloaded} to the host, and the ring of the 1F1B schedule is in "
            "device memory; save those names or leave them out"
        )
    if schedule.repeats > 1 and shift_by == "pad":
        raise InputError(
            "shift_by='pad' loses what leaves the last stage, and with "
            f"repeats={schedule.repeats} of the 1F1B schedule the first stage takes it at once; "
            "use 'ppermute' or 'slice'"
        )
    if schedule.repeats > 1 and lending.ahead:
        raise InputError(
            "lending ahead holds the weights of two repeats that follow each other, and with "
            f"repeats={schedule.repeats} of the 1F1B schedule stages are in other repeats forward "
            "and backward; lend them for all ticks"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(loop: Loop, weights: Held, inputs: Inputs) -> tuple[Array, tuple[Array, PyTree]]:
    return loop.total(loop.run(weights, inputs, differentiate=False))


def _run_forward(
    loop: Loop, weights: Held, inputs: Inputs
) -> tuple[tuple[Array, tuple[Array, PyTree]], Any]:
    inputs = refuse_perturbed(
        "the 1F1B schedule was asked for the gradient with respect to an input of its "
        "microbatches; it gives those of the weights alone: use jax.lax.stop_gradient on the "
        "inputs, or the circular schedule",
        inputs,
    )
    weights = values_of(weights)
    state = loop.run(weights, inputs, differentiate=True)
    return loop.total(state), (weights, inputs, state.gradients)


def _run_backward(loop: Loop, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Held, Inputs]:
    weights, inputs, gradients = saved
    of_loss, of_parts = cotangents
    if not all(map(is_symbolic_zero, jax.tree.leaves(of_parts, is_leaf=is_symbolic_zero))):
        raise InputError(
            "the 1F1B schedule was asked for the gradient of a part of its loss; it gives that of "
            "the loss as a whole: say by metric_weights what the metrics count in it, or use the "
            "circular schedule"
        )
    of_loss = or_zeros(of_loss)
    scaled = jax.tree.map(lambda leaf: leaf * of_loss.astype(leaf.dtype), gradients)
    return as_cotangents(scaled, weights), jax.tree.map(_no_cotangent, inputs)


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


def _no_cotangent(leaf: Array) -> Array | np.ndarray:
    return jnp.zeros_like(leaf) if is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
