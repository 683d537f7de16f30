"""The timetable of 1F1B as arrays that a scan over ticks can read."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_pipeline.pipeline.schedule import OneForwardOneBackward, Work


class Plan(NamedTuple):
    """The schedule as arrays with one row per tick; in a bubble all indices are still valid."""

    forward: Array  # int32 [ticks, stages]: microbatch of the forward visit
    forward_repeat: Array  # int32 [ticks, stages]
    is_forward: Array  # bool [ticks, stages], False in a bubble
    from_input: Array  # bool [ticks, stages]: takes what enters, not the output of another stage
    backward: Array  # int32 [ticks, stages]: microbatch of the backward visit
    backward_repeat: Array  # int32 [ticks, stages]
    is_backward: Array  # bool [ticks, stages], False in a bubble
    write: Array  # int32 [ticks]: slot of the ring that forward visits write
    read: Array  # int32 [ticks, stages]: slot of the ring that the backward visit reads
    entering: Array  # int32 [ticks]: microbatch of the forward visit of the first stage
    leaving: Array  # int32 [ticks]: microbatch of the forward visit of the last stage
    leaves: Array  # bool [ticks]: whether that is the microbatch's last forward visit
    returning: Array  # int32 [ticks]: microbatch of the backward visit of the first stage
    returns: Array  # bool [ticks]: whether that is the microbatch's last backward visit


def make_plan(schedule: OneForwardOneBackward) -> Plan:
    """Writes a schedule out as arrays.

    The slot of the ring that a visit is written to is its tick modulo the number of slots. In a
    backward bubble a stage reads the slot written last, which holds valid values.
    """
    slots, last = schedule.ring_slots, schedule.repeats - 1
    forward = list(schedule.forward_rows())
    backward = list(schedule.backward_rows())
    last_write = schedule.phases[1].stop - 1

    def read(tick: int, stage: int, work: Work | None) -> int:
        return schedule.forwarded_at(work, stage) if work else min(tick, last_write)

    def table(rows: list[list[Work | None]], name: str) -> np.ndarray:
        return np.array([[getattr(work or Work(0, 0), name) for work in row] for row in rows])

    def there(rows: list[list[Work | None]]) -> np.ndarray:
        return np.array([[work is not None for work in row] for row in rows])

    def at(rows: list[list[Work | None]], stage: int, repeat: int) -> Array:
        works = [row[stage] for row in rows]
        return jnp.asarray([work is not None and work.repeat == repeat for work in works])

    # In a forward bubble a stage takes what enters, for the reason given in `Tick._forward`.
    first_stage = np.arange(schedule.stages) == 0
    indices = functools.partial(jnp.asarray, dtype=jnp.int32)
    return Plan(
        forward=indices(table(forward, "microbatch")),
        forward_repeat=indices(table(forward, "repeat")),
        is_forward=jnp.asarray(there(forward)),
        from_input=jnp.asarray(~there(forward) | first_stage & (table(forward, "repeat") == 0)),
        backward=indices(table(backward, "microbatch")),
        backward_repeat=indices(table(backward, "repeat")),
        is_backward=jnp.asarray(there(backward)),
        write=indices(np.arange(schedule.ticks) % slots),
        read=indices(
            [
                [read(tick, stage, work) % slots for stage, work in enumerate(row)]
                for tick, row in enumerate(backward)
            ]
        ),
        entering=indices(table(forward, "microbatch")[:, 0]),
        leaving=indices(table(forward, "microbatch")[:, -1]),
        leaves=at(forward, -1, last),
        returning=indices(table(backward, "microbatch")[:, 0]),
        returns=at(backward, 0, 0),
    )
