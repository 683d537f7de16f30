"""The timetable of the circular schedule as arrays that a scan over ticks can read."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_pipeline.pipeline.schedule import CircularSchedule, Work


class Plan(NamedTuple):
    """The schedule as arrays with one row per tick; in a bubble all indices are still valid."""

    microbatch: Array  # int32 [ticks, stages]
    repeat: Array  # int32 [ticks, stages]
    active: Array  # bool [ticks, stages], False in a bubble
    from_stream: Array  # bool [ticks], whether stage 0 takes a new microbatch
    stream_slot: Array  # int32 [ticks], the slot of the stream that is read and written
    queue_slot: Array  # int32 [ticks], the slot of the queue that is read and written


def make_plan(schedule: CircularSchedule) -> Plan:
    """Writes a schedule out as arrays; in a bubble a stage has microbatch 0 and repeat 0."""
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


def active_at(schedule: CircularSchedule) -> np.ndarray:
    """Which stages work at which tick: bool `[ticks, stages]`, False in a bubble."""
    return np.array([[work is not None for work in row] for row in schedule.rows()])
