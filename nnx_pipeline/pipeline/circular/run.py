"""Runs the circular pipeline, or the plain one, on a stage function and its arrays."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, counted, of_type
from nnx_pipeline.ops.cast import of_slices
from nnx_pipeline.pipeline import entry
from nnx_pipeline.pipeline.circular.accumulate import Accumulate
from nnx_pipeline.pipeline.circular.plan import Plan
from nnx_pipeline.pipeline.circular.tick import Loop, hold_weights, stage_side, stage_weights
from nnx_pipeline.pipeline.exchange.buffers import merge, split
from nnx_pipeline.pipeline.metrics import given_out, over_ticks
from nnx_pipeline.pipeline.options import LoopOptions
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage.apply import ApplyMoving, ApplyStage, Moving
from nnx_pipeline.pipeline.stage.checks import check_arrays, check_stacked, checked
from nnx_pipeline.pipeline.stage.state import hold_state, parted


def run_pipeline(
    apply_stage: ApplyStage,
    params: PyTree,
    microbatches: PyTree,
    side_inputs: PyTree = None,
    *,
    schedule: CircularSchedule,
    options: LoopOptions = LoopOptions(),
) -> tuple[PyTree, ...]:
    """Sends every microbatch through all stages, which work at the same time.

    It computes the following, with the stages spread over the mesh axis `stage`:

        for m in range(microbatches):
            for r in range(repeats):
                for s in range(stages):
                    x[m], metrics = apply_stage(params[r, s], x[m], side_inputs[m])
                    totals = totals combined with metrics

    - `apply_stage`: (params, x, side) to (x, metrics). It returns x with the same shapes, dtypes
      and shardings; metrics are a pytree, each wrapped in `Sum`, `Mean` or `Max`, which says how
      it is combined with others (see `metrics`). In a bubble it is applied to some microbatch and
      the result is discarded.
    - `params`: any pytree of `[repeats, stages, …]`, the second axis sharded over `stage`, or
      `WithState(params, state)`. Then `apply_stage` is (params, x, side, state) to (x, metrics,
      state), and each visit reads what the same stage left in the same repeat a microbatch before.
      State has no gradient.
    - `microbatches`: any pytree of floating `[microbatches, …]`, the first axis sharded over
      `stage`, so that each stage holds microbatches / stages of them.
    - `side_inputs`: any pytree of `[microbatches, …]`, whole on every stage, such as positions.
    - `schedule`: which stage works on what at each tick.
    - `options`: how the loop is run.

    Arrays that are placed elsewhere on the mesh, and numpy arrays, are moved to where the loop
    reads them. What the stage function closes over is whole on every stage, and has a gradient.

    Returns outputs, in the order of `microbatches` and sharded as those are in the loop, and the
    metrics of all visits, each one array in float32 or wider; with a state also what all visits
    left of it. Raises InputError when shapes do not
    fit the schedule, for arrays on other devices, and for a stage that changes its parameters or
    returns something that cannot be passed on.
    """
    of_type("the schedule of run_pipeline", schedule, CircularSchedule)
    of_type("options", options, LoopOptions)
    params, state = parted(params)
    check_arrays(params, microbatches, side_inputs, schedule)
    check_stacked(state, "the state", schedule)
    _check_options(schedule, options)
    stream = jax.tree.map(lambda leaf: split(leaf, schedule), entry.spread(microbatches))
    params, side = entry.stacked(params), entry.on_every_stage(side_inputs)
    kept = hold_state(entry.stacked(state), schedule)
    how = options.bubble_fill, options.parts, options.cast_at_use
    loop = Loop(schedule, options.shift_by, *how)
    run = make_ticks(loop, options)
    stage = checked(apply_stage, has_state=state is not None)
    if options.cast_at_use and schedule.repeats > 1:
        stage = of_slices(stage)
    moving, metrics = run(stage, params, (stream, kept), side)
    outputs = jax.tree.map(lambda leaf: _in_order(leaf, schedule), moving[0])
    metrics = given_out(over_ticks(metrics, schedule.visits.active), outputs)
    if state is None:
        return outputs, metrics
    return outputs, metrics, moving[1].given_out(schedule.microbatches)


class AllTicks(Protocol):
    """All ticks, differentiated by JAX (`Autodiff`) or by a hand-written rule (`Accumulate`)."""

    def __call__(
        self, apply_stage: ApplyMoving, params: PyTree, moving: Moving, side: PyTree
    ) -> tuple[Moving, PyTree]:
        """Stream and state after the last tick, and the metrics of all, `[ticks, stages, …]`.

        - `apply_stage`: as `checked` makes it.
        - `params`: `[repeats, stages, …]`.
        - `moving`: the stream of microbatches, `[stages, slots, …]`, and the state of the layers,
          `[repeats, stages, …]`.
        - `side`: the side inputs, `[microbatches, …]`.
        """
        ...


def make_ticks(loop: Loop, options: LoopOptions) -> AllTicks:
    """All ticks of a loop, with the kind of derivative that the options choose.

    - `loop`: what every tick does.
    - `options`: `accumulate` chooses the derivative; `remat` and `saved_in_stage` decide what is
      kept of each visit for the backward pass.
    """
    checkpoint = functools.partial(
        options.remat.checkpoint, also=options.saved_in_stage, in_scan=loop.parts.is_scan
    )
    if options.accumulate is None:
        return Autodiff(loop, checkpoint)
    how = options.accumulate
    return Accumulate(loop, checkpoint, how.grad_dtype, how.weights)


@dataclass(frozen=True)
class Autodiff:
    """All ticks, differentiated by JAX.

    - `loop`: what every tick does.
    - `checkpoint`: is put around the visit of all stages.

    The weights of a visit are selected inside its checkpoint, or every tick would keep them. The
    rest of a tick is linear. Its checkpoints keep the conditions of each `where` as they are,
    while JAX alone would keep them broadcast to the shape of the activations.
    """

    loop: Loop
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __call__(
        self, apply_stage: ApplyMoving, params: PyTree, moving: Moving, side: PyTree
    ) -> tuple[Moving, PyTree]:
        parts = self.loop.parts
        apply = parts.map_stages(apply_stage)
        linear = functools.partial(jax.checkpoint, prevent_cse=not parts.is_scan)

        @self.checkpoint
        def select_and_visit(held: PyTree, now: Plan, x: Moving) -> tuple[Moving, PyTree]:
            return apply(stage_weights(parts, held, now), x, stage_side(side, now))

        visit = functools.partial(select_and_visit, hold_weights(self.loop, params))
        tick = self.loop.tick(visit, linear=linear)
        stream, state = moving
        (end, state), metrics = self.loop.run(tick, (self.loop.start(stream), state))
        return (end.stream, state), metrics


def _in_order(stream: Array, schedule: CircularSchedule) -> Array:
    """Turns the stream after the last tick into `[microbatches, …]`, in the order of the inputs.

    Output m went into slot (first_output_tick + m) mod slots; it belongs into slot m mod slots.
    """
    turn = schedule.first_output_tick % schedule.stream_slots
    return merge(jnp.roll(stream, -turn, axis=1))


def _check_options(schedule: CircularSchedule, options: LoopOptions) -> None:
    if options.shift_by == "pad" and schedule.is_ring:
        raise InputError(
            "shift='pad' sends nothing from the last stage to the first, but with "
            f"{counted(schedule.microbatches, 'microbatch')} the first stage takes its input "
            "directly from the last; choose more microbatches or 'slice'"
        )
