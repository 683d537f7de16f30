"""The pipeline loop: one scan over ticks for the plain and the circular schedule."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, one_of
from nnx_pipeline.ops.gradients import is_symbolic_zero, or_zeros, values_of
from nnx_pipeline.pipeline import accumulate, entry, prefetch
from nnx_pipeline.pipeline.accumulate import Beside, Ticks, visit_once
from nnx_pipeline.pipeline.buffers import merge, split
from nnx_pipeline.pipeline.checks import check_arrays, checked
from nnx_pipeline.pipeline.closed import hoist
from nnx_pipeline.pipeline.lend import AS_STORED, Lending
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.metrics import given_out, over_ticks
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import SHIFTS, ShiftName
from nnx_pipeline.pipeline.stage_vjp import as_cotangents
from nnx_pipeline.pipeline.stages import ApplyStage, OverStages, over_stages
from nnx_pipeline.pipeline.ticks import (
    Carry,
    Plan,
    active_at,
    hand_on,
    make_plan,
    name_input,
    needed_at,
    start,
)
from nnx_pipeline.remat import FULL, Remat

BackwardName = Literal["autodiff", "accumulate"]


def run_pipeline(
    apply_stage: ApplyStage,
    params: PyTree,
    microbatches: PyTree,
    side_inputs: PyTree = None,
    *,
    schedule: CircularSchedule,
    shift_by: ShiftName = "ppermute",
    remat: Remat = FULL,
    saved_in_stage: tuple[str, ...] = (),
    backward: BackwardName = "autodiff",
    grad_dtype: jax.typing.DTypeLike | None = None,
    lending: Lending = AS_STORED,
    over: OverStages = over_stages,
    parts: LoopParts = DEFAULT_PARTS,
    bubble_fill: float = 0.0,
) -> tuple[PyTree, PyTree]:
    """Sends every microbatch through all stages, all stages at work at once.

    The same as this, with the stages spread over the mesh axis `stage`:

        for m in range(microbatches):
            for r in range(repeats):
                for s in range(stages):
                    x[m], metrics = apply_stage(params[r, s], x[m], side_inputs[m])
                    total = metrics put to total

    apply_stage: (params, x, side) to (x of the same shapes, dtypes and shardings; a pytree of
        metrics, each wrapped in `Sum`, `Mean` or `Max`, which says how it is put to others; see
        `metrics`). In a bubble it is applied to some microbatch and the result is dropped.
    params: any pytree of `[repeats, stages, …]`, the stages over the mesh axis `stage`.
    microbatches: any pytree of floating `[microbatches, …]`, the first axis over `stage`: stage s
        holds microbatches / stages of them.
    side_inputs: any pytree of `[microbatches, …]`, whole on every stage, such as positions.
    remat: what to keep for the backward pass beside the input of each stage at each tick.
    saved_in_stage: names that only this checkpoint keeps, such as the inputs of a stage's layers.
    backward: the derivative of the ticks by JAX's own transposition of the scan, or written by hand
        (`accumulate`): visit by visit, with one gradient buffer per parameter that is added to in
        place. Both keep the same for the backward pass. grad_dtype: dtype in which `accumulate`
        adds up, None for that of the parameters; gradients come back in the parameters' dtype.
    lending: how `accumulate` holds the weights; where it gathers them once for all ticks, the stage
        function and the microbatches have an axis of copies after the stages (see `Lending`).
    over: how the stage function is spread over the stages. parts: other pieces of the loop. Others
        than the defaults are arms of experiments.
    bubble_fill: what the buffers hold before anything arrives; results never depend on it.

    Arrays that lie elsewhere on the mesh, and those of numpy, are moved to where the loop reads
    them. What the stage function closes over is whole on every stage, and has a gradient.

    Returns outputs, ordered as `microbatches` and laid out as those are in the loop, and the
    metrics of all visits, each one array in float32 or wider. Raises InputError when shapes do not
    fit the schedule, for arrays of other devices, and for a stage that changes its parameters or
    gives something that cannot be handed on.
    """
    check_arrays(params, microbatches, side_inputs, schedule)
    _check_options(schedule, shift_by, backward, grad_dtype, lending)
    stream = jax.tree.map(lambda leaf: split(leaf, schedule), entry.spread(microbatches))
    arrays = (entry.stacked(params), stream, entry.on_every_stage(side_inputs))
    apply = checked(apply_stage)
    checkpoint = functools.partial(remat.checkpoint, also=saved_in_stage, in_scan=parts.is_scan)
    if backward == "accumulate":
        how = (schedule, shift_by, bubble_fill, grad_dtype, lending, parts)
        stream, metrics = _by_hand(lambda f: Ticks(checkpoint(f), *how), apply, over, *arrays)
    else:
        stream, metrics = _by_autodiff(
            over(apply), checkpoint, *arrays, schedule, shift_by, bubble_fill, parts
        )
    outputs = jax.tree.map(lambda leaf: _in_order(leaf, schedule), stream)
    return outputs, given_out(over_ticks(metrics, active_at(schedule)), outputs)


def _in_order(stream: Array, schedule: CircularSchedule) -> Array:
    """The stream after the last tick as `[microbatches, …]`.

    Output m went into slot (first_output_tick + m) mod slots; its place is m mod slots.
    """
    turn = schedule.first_output_tick % schedule.stream_slots
    return merge(jnp.roll(stream, -turn, axis=1))


def _by_autodiff(
    visit: ApplyStage,
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]],
    params: PyTree,
    stream: PyTree,
    side: PyTree,
    schedule: CircularSchedule,
    shift_by: ShiftName,
    bubble_fill: float,
    parts: LoopParts,
) -> tuple[PyTree, PyTree]:
    """The stream after the last tick and the metrics of all visits, differentiated by JAX.

    What a visit needs is selected inside its checkpoint, or every tick would keep the weights. The
    rest of a tick is linear: its checkpoints keep the conditions of its choices as they are, where
    JAX alone would keep them spread out to the shape of the activations.
    """
    linear = functools.partial(jax.checkpoint, prevent_cse=not parts.is_scan)
    take = linear(functools.partial(parts.receive, schedule, shift_by))
    give = linear(functools.partial(hand_on, schedule, shift_by))

    @checkpoint
    def select_and_visit(params: PyTree, now: Plan, x: PyTree) -> tuple[PyTree, PyTree]:
        of_stages, beside = needed_at(params, side, now, parts.select)
        return visit(of_stages, x, beside)

    def tick(carry: Carry, now: Plan) -> tuple[Carry, PyTree]:
        rest, x = take(now, carry)
        y, metrics = select_and_visit(params, now, name_input(x))
        return give(now, rest, y), metrics

    begin = start(stream, schedule, bubble_fill)
    end, metrics = parts.walk(schedule, tick, begin, make_plan(schedule))
    return end.stream, metrics


def _by_hand(
    make_ticks: Callable[[Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]], Ticks],
    apply: ApplyStage,
    over: OverStages,
    params: PyTree,
    stream: PyTree,
    side: PyTree,
) -> tuple[PyTree, PyTree]:
    """The same as `_by_autodiff`, with the derivative of `accumulate`.

    What the stage function closes over becomes an input of the loop: JAX finds no way to a
    gradient through a function that it is given a derivative for.
    """

    def ticks_with(apply: Callable[..., tuple[PyTree, PyTree]]) -> Ticks:
        def visit(needed: tuple[PyTree, PyTree, Any], x: PyTree) -> tuple[PyTree, PyTree]:
            of_stages, beside, closed = needed
            return over(functools.partial(apply, closed))(of_stages, x, beside)

        return make_ticks(visit)

    def call(look: ApplyStage) -> None:
        visit_once(ticks_with(lambda _, *given: look(*given)), params, stream, side)

    (with_closed,), (closed,) = hoist((apply,), call)
    return _accumulating(ticks_with(with_closed), params, stream, Beside(side, closed))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _accumulating(
    ticks: Ticks, params: PyTree, stream: PyTree, beside: Beside
) -> tuple[PyTree, PyTree]:
    """The same as `_by_autodiff`, differentiated tick by tick.

    What the derivative keeps is what the checkpoint of a visit keeps, one entry per tick: the input
    of each stage and the names that are saved. It walks the ticks backward, differentiates one
    visit at a time, and adds the gradient of a stage's weights to its repeat in place: there is one
    gradient buffer per parameter, and nothing the size of all parameters beside it.
    """
    end, metrics, _ = _through(ticks).forward_through(ticks, params, stream, beside, keep=False)
    return end.stream, metrics


def _accumulating_forward(
    ticks: Ticks, params: Any, stream: Any, beside: Any
) -> tuple[tuple[PyTree, PyTree], Any]:
    params, stream, beside = values_of((params, stream, beside))
    end, metrics, saved = _through(ticks).forward_through(ticks, params, stream, beside, keep=True)
    return (end.stream, metrics), (params, beside, saved)


def _accumulating_backward(
    ticks: Ticks, saved: Any, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree, Beside]:
    params, beside, saved = saved
    of_stream, of_metrics = cotangents
    of_stream = jax.tree.map(or_zeros, of_stream, is_leaf=is_symbolic_zero)
    # A metric that nobody asks about has no derivative: 0 times an infinite one would be no number.
    of_metrics = jax.tree.map(
        lambda leaf: None if is_symbolic_zero(leaf) else leaf, of_metrics, is_leaf=is_symbolic_zero
    )
    last = ticks.nothing(of_stream, beside)
    of_params, first = _through(ticks).backward_through(
        ticks, params, beside, (saved, of_metrics), last
    )
    of_beside = as_cotangents(first.beside, beside)
    return as_cotangents(of_params, params), first.carry.stream, of_beside


_accumulating.defvjp(_accumulating_forward, _accumulating_backward, symbolic_zeros=True)


def _through(ticks: Ticks) -> Any:
    """The module that walks the ticks with all weights at hand, or with a window of two repeats."""
    return prefetch if ticks.lending.ahead and ticks.schedule.repeats > 1 else accumulate


def _check_options(
    schedule: CircularSchedule,
    shift_by: str,
    backward: str,
    grad_dtype: jax.typing.DTypeLike | None,
    lending: Lending,
) -> None:
    one_of("shift_by", shift_by, SHIFTS)
    one_of("backward", backward, ("autodiff", "accumulate"))
    if backward == "autodiff" and (grad_dtype is not None or lending != AS_STORED):
        raise InputError(
            f"grad_dtype={grad_dtype} and lending={lending} say how the loop adds gradients up, "
            "which it leaves to JAX with backward='autodiff'; set backward='accumulate'"
        )
    if shift_by == "pad" and schedule.is_ring:
        raise InputError(
            f"shift='pad' loses what leaves the last stage, and with {schedule.microbatches} "
            f"microbatches the first stage takes it at once; choose more microbatches or 'slice'"
        )
