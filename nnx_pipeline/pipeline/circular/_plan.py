"""The timetable of the circular schedule as arrays that a scan over ticks can read."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_pipeline.pipeline.schedule import CircularSchedule


class CircularPlan(NamedTuple):
    """The schedule as arrays with one row per tick; in a bubble all indices are still valid."""

    microbatch: Array  # int32 [ticks, stages]
    repeat: Array  # int32 [ticks, stages]
    active: Array  # bool [ticks, stages], False in a bubble
    from_stream: Array  # bool [ticks], whether stage 0 takes a new microbatch
    stream_slot: Array  # int32 [ticks], the slot of the stream that is read and written
    queue_slot: Array  # int32 [ticks], the slot of the queue that is read and written


def circular_plan(schedule: CircularSchedule) -> CircularPlan:
    """In a bubble a stage has microbatch 0 and repeat 0."""
    visits, tick = schedule.visits, np.arange(schedule.ticks, dtype=np.int32)
    return CircularPlan(
        microbatch=jnp.asarray(visits.microbatch),
        repeat=jnp.asarray(visits.repeat),
        active=jnp.asarray(visits.active),
        from_stream=jnp.asarray(tick < schedule.microbatches),
        stream_slot=jnp.asarray(tick % schedule.stream_slots),
        queue_slot=jnp.asarray(tick % max(schedule.queue_slots, 1)),
    )
