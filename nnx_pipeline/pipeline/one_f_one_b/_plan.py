"""The timetable of 1F1B as arrays that a scan over ticks can read."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_pipeline.pipeline.schedule import OneForwardOneBackward, Visits


class PhasePlan(NamedTuple):
    """The schedule as arrays with one row per tick; in a bubble all indices are still valid."""

    forward: Array  # int32 [ticks, stages]: microbatch of the forward visit
    forward_repeat: Array  # int32 [ticks, stages]
    is_forward: Array  # bool [ticks, stages], False in a bubble
    from_input: Array  # bool [ticks, stages]: takes what enters, not the output of another stage
    backward: Array  # int32 [ticks, stages]: microbatch of the backward visit
    backward_repeat: Array  # int32 [ticks, stages]
    is_backward: Array  # bool [ticks, stages], False in a bubble
    write: Array  # int32 [ticks, stages]: slot of the ring that the forward visit writes
    read: Array  # int32 [ticks, stages]: slot of the ring that the backward visit reads
    entering: Array  # int32 [ticks]: microbatch of the forward visit of the first stage
    leaving: Array  # int32 [ticks]: microbatch of the forward visit of the last stage
    leaves: Array  # bool [ticks]: whether that is the microbatch's last forward visit
    returning: Array  # int32 [ticks]: microbatch of the backward visit of the first stage
    returns: Array  # bool [ticks]: whether that is the microbatch's last backward visit


def one_f_one_b_plan(schedule: OneForwardOneBackward) -> PhasePlan:
    forward, backward = schedule.forward, schedule.backward

    def at(visits: Visits, stage: int, repeat: int) -> Array:
        return jnp.asarray(visits.active[:, stage] & (visits.repeat[:, stage] == repeat))

    # In a forward bubble a stage takes what enters, for the reason given in `Tick._forward`.
    first_stage = np.arange(schedule.stages) == 0
    indices = functools.partial(jnp.asarray, dtype=jnp.int32)
    return PhasePlan(
        forward=jnp.asarray(forward.microbatch),
        forward_repeat=jnp.asarray(forward.repeat),
        is_forward=jnp.asarray(forward.active),
        from_input=jnp.asarray(~forward.active | first_stage & (forward.repeat == 0)),
        backward=jnp.asarray(backward.microbatch),
        backward_repeat=jnp.asarray(backward.repeat),
        is_backward=jnp.asarray(backward.active),
        write=indices(schedule.written),
        read=indices(schedule.read),
        entering=indices(forward.microbatch[:, 0]),
        leaving=indices(forward.microbatch[:, -1]),
        leaves=at(forward, -1, schedule.repeats - 1),
        returning=indices(backward.microbatch[:, 0]),
        returns=at(backward, 0, 0),
    )
