"""The pipeline loop: one scan over ticks for the plain and the circular schedule."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.buffers import (
    mark_stage,
    merge,
    over_stage,
    push,
    rows,
    slot,
    split,
    where,
)
from nnx_pipeline.pipeline.schedule import CircularSchedule, Work
from nnx_pipeline.pipeline.shift import ShiftName, shift
from nnx_pipeline.pipeline.stages import ApplyStage, over_stages, select_repeat
from nnx_pipeline.remat import FULL, ITERATION_INPUT, Remat, named
from nnx_pipeline.sharding import mesh_sizes

OverStages = Callable[[ApplyStage], Callable[..., Any]]
# (repeat and microbatch of each stage, activations of each stage) to (activations, metrics)
Visit = Callable[[Array, Array, PyTree], tuple[PyTree, PyTree]]


class Plan(NamedTuple):
    """The schedule as arrays that the scan walks through, one row per tick."""

    microbatch: Array  # int32 [ticks, stages]
    repeat: Array  # int32 [ticks, stages]
    active: Array  # bool [ticks, stages], False in a bubble
    from_stream: Array  # bool [ticks], whether stage 0 takes a new microbatch
    stream_slot: Array  # int32 [ticks]
    queue_slot: Array  # int32 [ticks]


class Carry(NamedTuple):
    """What lives from tick to tick; every leaf begins with the axis of stages."""

    stream: PyTree  # [stages, stream slots, …]: inputs not yet taken, then outputs
    queue: PyTree  # [stages, queue slots, …]: microbatches between two repeats, or None
    given: tuple[PyTree, ...]  # [stages, …]: what every stage gave, one tick ago, two ticks ago …
    arrived: PyTree  # [stages, …]: what was sent a tick ago, with a delay of 2; else None
    metrics: PyTree  # [stages]: sums over the ticks that were not a bubble


def make_plan(schedule: CircularSchedule) -> Plan:
    """Writes the schedule out; bubbles read microbatch 0 and repeat 0, and are not active."""
    ticks = list(schedule.rows())
    tick = np.arange(schedule.ticks, dtype=np.int32)

    def table(read: Callable[[Work], int]) -> np.ndarray:
        return np.array([[read(work) if work else 0 for work in row] for row in ticks], np.int32)

    return Plan(
        microbatch=jnp.asarray(table(lambda work: work.microbatch)),
        repeat=jnp.asarray(table(lambda work: work.repeat)),
        active=jnp.asarray(table(lambda work: 1).astype(bool)),
        from_stream=jnp.asarray(tick < schedule.microbatches),
        stream_slot=jnp.asarray(tick % schedule.stream_slots),
        queue_slot=jnp.asarray(tick % max(schedule.queue_slots, 1)),
    )


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
    over: OverStages = over_stages,
    bubble_fill: float = 0.0,
) -> tuple[PyTree, PyTree]:
    """Sends every microbatch through all stages, all stages at work at once.

    The same as this, with the stages spread over the mesh axis `stage`:

        for m in range(microbatches):
            for r in range(repeats):
                for s in range(stages):
                    x[m], metrics = apply_stage(params[r, s], x[m], side_inputs[m])
                    total += metrics

    apply_stage: (params, x, side) to (x of the same shapes, dtypes and shardings; scalar metrics).
        In a bubble it is applied to some microbatch again and the result is dropped.
    params: any pytree of `[repeats, stages, …]`, the stages over the mesh axis `stage`.
    microbatches: any pytree of floating `[microbatches, …]`, the first axis over `stage`: stage s
        holds microbatches / stages of them.
    side_inputs: any pytree of `[microbatches, …]`, whole on every stage: what a stage reads beside
        the activations (positions, segment ids).
    remat: what to keep for the backward pass beside the input of each stage at each tick.
    saved_in_stage: names that only this checkpoint keeps, such as the inputs of a stage's layers.
    over: how the stage function is spread over the stages; another one is an arm of an experiment.
    bubble_fill: what the buffers hold before anything arrives; results never depend on it.

    Returns the outputs, laid out and ordered as `microbatches`, and the sum of the metrics over
    microbatches, repeats and stages. Raises InputError when the shapes do not fit the schedule.
    """
    _check(params, microbatches, side_inputs, schedule, shift_by)
    mapped = over(apply_stage)

    def visit(params: PyTree, repeat: Array, microbatch: Array, x: PyTree) -> tuple[PyTree, PyTree]:
        side = jax.tree.map(lambda leaf: rows(leaf, microbatch), side_inputs)
        return mapped(select_repeat(params, repeat), x, side)

    visit = remat.checkpoint(visit, also=saved_in_stage, in_scan=True)
    tick = functools.partial(_tick, functools.partial(visit, params), schedule, shift_by)
    stream = jax.tree.map(lambda leaf: split(leaf, schedule), microbatches)
    start = _start(functools.partial(visit, params), stream, schedule, bubble_fill)
    end, _ = jax.lax.scan(tick, start, make_plan(schedule))
    # Output m went into slot (first_output_tick + m) mod slots; its place is m mod slots.
    turn = schedule.first_output_tick % schedule.stream_slots
    outputs = jax.tree.map(lambda leaf: merge(jnp.roll(leaf, -turn, axis=1)), end.stream)
    return outputs, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), end.metrics)


def _tick(
    visit: Visit, schedule: CircularSchedule, shift_by: ShiftName, carry: Carry, now: Plan
) -> tuple[Carry, None]:
    """One tick of all stages: take what has come, work on it, hand it on."""
    first, last = mark_stage(0, schedule), mark_stage(schedule.stages - 1, schedule)
    waiting = slot(carry.stream, now.stream_slot)
    sent = jax.tree.map(lambda leaf: shift(leaf, by=1, how=shift_by), carry.given[0])
    arrived = sent if schedule.delay == 1 else carry.arrived
    queue, returning = carry.queue, arrived
    if queue is not None:
        returning = slot(queue, now.queue_slot)
        queue = push(queue, returning, carry.given[-1], now.queue_slot, last, shift_by)
    entering = where(now.from_stream, waiting, returning)
    active = over_stage(now.active)
    x = where(first, entering, arrived)
    # In a bubble a stage works on the microbatch that it stores just now: what comes out is
    # dropped, and no stage function meets values that its derivative may not be fit for.
    x = where(active, x, waiting)
    x = jax.tree.map(lambda leaf: named(leaf, ITERATION_INPUT), x)
    y, metrics = visit(over_stage(now.repeat), over_stage(now.microbatch), x)
    metrics = jax.tree.map(over_stage, metrics)
    metrics = where(active, metrics, jax.tree.map(jnp.zeros_like, metrics))
    return Carry(
        stream=push(carry.stream, waiting, y, now.stream_slot, last, shift_by),
        queue=queue,
        given=(y, *carry.given[:-1]),
        arrived=None if schedule.delay == 1 else sent,
        metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
    ), None


def _check(
    params: PyTree,
    microbatches: PyTree,
    side_inputs: PyTree,
    schedule: CircularSchedule,
    shift_by: ShiftName,
) -> None:
    want = (schedule.repeats, schedule.stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.shape[:2] != want:
            raise InputError(
                f"parameter {jax.tree_util.keystr(path)} has shape {leaf.shape}; its first axes "
                f"must be (repeats, stages) = {want}, as the schedule says"
            )
    for leaf in jax.tree.leaves((microbatches, side_inputs)):
        if leaf.shape[:1] != (schedule.microbatches,):
            raise InputError(
                f"an input has shape {leaf.shape}; its first axis must be the "
                f"{schedule.microbatches} microbatches of the schedule"
            )
    if shift_by == "pad" and schedule.is_ring:
        raise InputError(
            f"shift='pad' loses what leaves the last stage, and with {schedule.microbatches} "
            f"microbatches the first stage takes it at once; choose more microbatches or 'slice'"
        )
    on_mesh = mesh_sizes().get("stage", schedule.stages)
    if on_mesh not in (1, schedule.stages):
        raise InputError(
            f"the schedule has {schedule.stages} stages and the mesh stage={on_mesh}; "
            "make them equal"
        )


def _start(
    visit: Visit,
    stream: PyTree,
    schedule: CircularSchedule,
    bubble_fill: float,
) -> Carry:
    previous = jax.tree.map(lambda leaf: jnp.full_like(leaf[:, 0], bubble_fill), stream)
    queue = None
    if schedule.queue_slots:
        queue = jax.tree.map(
            lambda leaf: jnp.full_like(leaf[:, : schedule.queue_slots], bubble_fill), stream
        )
    stage_ids = over_stage(jnp.zeros(schedule.stages, jnp.int32))
    shapes = jax.eval_shape(visit, stage_ids, stage_ids, previous)[1]
    metrics = jax.tree.map(lambda leaf: over_stage(jnp.zeros(leaf.shape, leaf.dtype)), shapes)
    return Carry(
        stream=stream,
        queue=queue,
        given=(previous,) * schedule.delay,
        arrived=None if schedule.delay == 1 else previous,
        metrics=metrics,
    )
