"""Runs the circular pipeline, or the plain one, on a stage function and its arrays."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, counted, of_type
from nnx_pipeline.pipeline import _entry as entry
from nnx_pipeline.pipeline.circular import _tick
from nnx_pipeline.pipeline.circular._accumulate import Accumulate
from nnx_pipeline.pipeline.circular._tick import CircularLoop, autodiff_tick
from nnx_pipeline.pipeline.metrics import guarded_values, over_ticks
from nnx_pipeline.pipeline.options import LoopOptions
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.pipeline.stage._checks import check_shapes, check_stacked, checked
from nnx_pipeline.pipeline.stage._sums import ReadWithSums
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.pipeline.stage.state import hold_state, parted
from nnx_pipeline.sharding._cast import reading_slices


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
      and shardings; metrics are a pytree, each wrapped in `Sum`, `Mean` or `Max`, which says how it
      is combined with others (see `metrics`). In a bubble it is applied to some microbatch and the
      result is discarded.
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
    left of it. Raises InputError when shapes do not fit the schedule, for arrays on other devices,
    and for a stage that changes its parameters or returns something that cannot be passed on.
    """
    of_type("the schedule of run_pipeline", schedule, CircularSchedule)
    of_type("options", options, LoopOptions)
    params, state = parted(params)
    check_shapes(params, microbatches, side_inputs, schedule)
    check_stacked(state, "the state", schedule)
    _check_options(schedule, options)
    stream = jax.tree.map(
        lambda leaf: leaf.reshape(schedule.stages, schedule.stream_slots, *leaf.shape[1:]),
        entry.place_microbatches(microbatches),
    )
    params, side = entry.place_stacked(params), entry.place_on_every_stage(side_inputs)
    states = hold_state(entry.place_stacked(state), schedule)
    reading = options.cast_at_use, options.sums_in_layers, options.depths
    loop = CircularLoop(schedule, options.shift_by, options.bubble_fill, *reading)
    stage = checked(apply_stage, has_state=state is not None)
    if options.cast_at_use and schedule.repeats > 1:
        stage = reading_slices()(stage)
    # It decides which residuals of each visit are saved for the backward pass.
    checkpoint = functools.partial(
        options.remat.checkpoint, also=options.saved_in_stage, in_scan=_tick.IN_SCAN
    )
    how = options.accumulate
    if how is None:
        split = repeats.split_to_read(params, cast_at_use=options.cast_at_use)
        start: PyTree = loop.start(stream), states
        if options.sums_in_layers:
            sums = repeats.float_sums(params)
            split, start = ReadWithSums.of(split, sums), (start, sums)
        tick = autodiff_tick(loop, checkpoint, stage, split, side)
        end, metrics = _tick.walk_ticks(schedule, tick, start, loop.plan)
        last, states = end[0] if options.sums_in_layers else end
        stream = last.stream
    else:
        run = Accumulate(loop, checkpoint, how)
        (stream, states), metrics = run(stage, params, (stream, states), side)
    outputs = jax.tree.map(lambda leaf: _in_order(leaf, schedule), stream)
    metrics = guarded_values(over_ticks(metrics, schedule.visits.active), outputs)
    if state is None:
        return outputs, metrics
    return outputs, metrics, states.as_stored(schedule.microbatches)


def _in_order(stream: Array, schedule: CircularSchedule) -> Array:
    """Turns the stream after the last tick into `[microbatches, …]`, in the order of inputs."""
    # Output m went into slot (first_output_tick + m) mod slots; it belongs into slot m mod slots.
    late = schedule.first_output_tick % schedule.stream_slots
    return jnp.roll(stream, -late, axis=1).reshape(schedule.microbatches, *stream.shape[2:])


def _check_options(schedule: CircularSchedule, options: LoopOptions) -> None:
    if options.shift_by == "pad" and schedule.is_ring:
        raise InputError(
            "shift='pad' sends nothing from the last stage to the first, but with "
            f"{counted(schedule.microbatches, 'microbatch')} the first stage takes its input "
            "directly from the last; choose more microbatches or 'slice'"
        )
