"""The timetable of 1F1B as arrays that a scan over ticks can read."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_pipeline.pipeline.schedule import OneForwardOneBackward, Work


class Plan(NamedTuple):
    """The schedule as arrays, one row per tick; what is not active reads something that exists."""

    forward: Array  # int32 [ticks, stages]: microbatch
    forward_repeat: Array  # int32 [ticks, stages]
    forwards: Array  # bool [ticks, stages], False in a bubble
    fresh: Array  # bool [ticks, stages]: takes what enters, and not what another stage gave
    backward: Array  # int32 [ticks, stages]
    backward_repeat: Array  # int32 [ticks, stages]
    takes_back: Array  # bool [ticks, stages]
    write: Array  # int32 [ticks]: slot of the ring
    read: Array  # int32 [ticks, stages]
    entering: Array  # int32 [ticks]: microbatch that the first stage takes
    leaving: Array  # int32 [ticks]: microbatch that the last stage gives
    leaves: Array  # bool [ticks]: whether it leaves for good
    returning: Array  # int32 [ticks]: microbatch whose cotangent the first stage gives
    returns: Array  # bool [ticks]: whether it has come back to where it entered


def make_plan(schedule: OneForwardOneBackward) -> Plan:
    """Writes the schedule out.

    A slot of the ring is the tick in which it was written, modulo their number. A stage that has
    nothing to take back reads the slot written last, where it finds something valid.
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

    first_stage = np.arange(schedule.stages) == 0
    indices = functools.partial(jnp.asarray, dtype=jnp.int32)
    return Plan(
        forward=indices(table(forward, "microbatch")),
        forward_repeat=indices(table(forward, "repeat")),
        forwards=jnp.asarray(there(forward)),
        fresh=jnp.asarray(~there(forward) | first_stage & (table(forward, "repeat") == 0)),
        backward=indices(table(backward, "microbatch")),
        backward_repeat=indices(table(backward, "repeat")),
        takes_back=jnp.asarray(there(backward)),
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
