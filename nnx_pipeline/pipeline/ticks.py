"""One tick of the circular loop: what every stage takes in, and where what it gives goes."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.buffers import mark_stage, over_stage, push, rows, slot, where
from nnx_pipeline.pipeline.schedule import CircularSchedule, Work
from nnx_pipeline.pipeline.shift import ShiftName, shift
from nnx_pipeline.pipeline.stages import select_repeat
from nnx_pipeline.remat import ITERATION_INPUT, named


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


class Rest(NamedTuple):
    """The carry while the stages are at work: what `receive` leaves for `hand_on`."""

    stream: PyTree
    leaving: PyTree  # [stages, …]: the slot of the stream that moves on
    queue: PyTree
    given: tuple[PyTree, ...]
    sent: PyTree  # [stages, …]: what arrives at the next tick, with a delay of 2; else None


def active_at(schedule: CircularSchedule) -> np.ndarray:
    """bool `[ticks, stages]`, False in a bubble."""
    return np.array([[work is not None for work in row] for row in schedule.rows()])


def make_plan(schedule: CircularSchedule) -> Plan:
    """Writes the schedule out; bubbles read microbatch 0 and repeat 0, and are not active."""
    ticks = list(schedule.rows())
    tick = np.arange(schedule.ticks, dtype=np.int32)

    def table(read: Callable[[Work], int]) -> np.ndarray:
        return np.array([[read(work) if work else 0 for work in row] for row in ticks], np.int32)

    return Plan(
        microbatch=jnp.asarray(table(lambda work: work.microbatch)),
        repeat=jnp.asarray(table(lambda work: work.repeat)),
        active=jnp.asarray(active_at(schedule)),
        from_stream=jnp.asarray(tick < schedule.microbatches),
        stream_slot=jnp.asarray(tick % schedule.stream_slots),
        queue_slot=jnp.asarray(tick % max(schedule.queue_slots, 1)),
    )


def start(stream: PyTree, schedule: CircularSchedule, bubble_fill: float) -> Carry:
    """The carry before the first tick.

    bubble_fill: what the buffers hold before anything arrives.
    """
    previous = jax.tree.map(lambda leaf: jnp.full_like(leaf[:, 0], bubble_fill), stream)
    queue = None
    if schedule.queue_slots:
        queue = jax.tree.map(
            lambda leaf: jnp.full_like(leaf[:, : schedule.queue_slots], bubble_fill), stream
        )
    return Carry(
        stream=stream,
        queue=queue,
        given=(previous,) * schedule.delay,
        arrived=None if schedule.delay == 1 else previous,
    )


def needed_at(
    params: PyTree,
    side: PyTree,
    now: Plan,
    select: Callable[[PyTree, Array], PyTree] = select_repeat,
) -> tuple[PyTree, PyTree]:
    """What a visit reads beside the activations: each stage's parameters and side inputs."""
    return select(params, over_stage(now.repeat)), side_rows(side, now)


def side_rows(side: PyTree, now: Plan) -> PyTree:
    """The side inputs of the microbatch that each stage has, `[stages, …]`."""
    return jax.tree.map(lambda leaf: rows(leaf, over_stage(now.microbatch)), side)


def receive(
    schedule: CircularSchedule, shift_by: ShiftName, now: Plan, carry: Carry
) -> tuple[Rest, PyTree]:
    """The input of every stage at this tick; linear in the carry."""
    first, last = mark_stage(0, schedule.stages), mark_stage(schedule.stages - 1, schedule.stages)
    waiting = slot(carry.stream, now.stream_slot)
    sent = jax.tree.map(lambda leaf: shift(leaf, by=1, how=shift_by), carry.given[0])
    arrived = sent if schedule.delay == 1 else carry.arrived
    queue, returning = carry.queue, arrived
    if queue is not None:
        returning = slot(queue, now.queue_slot)
        queue = push(queue, returning, carry.given[-1], now.queue_slot, last, shift_by)
    entering = where(now.from_stream, waiting, returning)
    x = where(first, entering, arrived)
    # In a bubble a stage works on the microbatch that it stores just now: what comes out is
    # dropped, and no stage function meets values that its derivative may not be fit for.
    x = where(over_stage(now.active), x, waiting)
    rest = Rest(
        stream=carry.stream,
        leaving=waiting,
        queue=queue,
        given=carry.given[:-1],
        sent=None if schedule.delay == 1 else sent,
    )
    return rest, x


def name_input(x: PyTree) -> PyTree:
    """Gives the input of the stages the name under which it is kept."""
    return jax.tree.map(lambda leaf: named(leaf, ITERATION_INPUT), x)


def hand_on(
    schedule: CircularSchedule,
    shift_by: ShiftName,
    now: Plan,
    rest: Rest,
    given: PyTree,
) -> Carry:
    """The carry of the next tick, from the activations that the stages gave; linear in both."""
    last = mark_stage(schedule.stages - 1, schedule.stages)
    return Carry(
        stream=push(rest.stream, rest.leaving, given, now.stream_slot, last, shift_by),
        queue=rest.queue,
        given=(given, *rest.given),
        arrived=rest.sent,
    )
