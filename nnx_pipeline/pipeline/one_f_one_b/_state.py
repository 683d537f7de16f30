"""What a tick of 1F1B reads and passes on: timetable, weights and state."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.contract import Inputs, Weights
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward, Visits
from nnx_pipeline.pipeline.stage.state import LayerStates


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


class WithCaptured(NamedTuple):
    """The weights of a function of the model, and what it closes over."""

    weights: PyTree
    captured: list[Array]


class LoopWeights(NamedTuple):
    """The weights and what the functions close over: all arrays that have a gradient."""

    enter: WithCaptured
    stages: PyTree  # [repeats, stages, …]; within the loop as from `split_repeats`
    leave: WithCaptured
    captured: list[Array]  # of the stage function; within the loop their gradients are [stages, …]

    @classmethod
    def of(
        cls, weights: Weights, enter: PyTree = (), stages: PyTree = (), leave: PyTree = ()
    ) -> "LoopWeights":
        first, last = WithCaptured(weights.enter, [*enter]), WithCaptured(weights.leave, [*leave])
        return cls(first, weights.stages, last, [*stages])


NOTHING = Inputs(None, None, None)


class LoopState(NamedTuple):
    """What passes from tick to tick; activations begin with the axis of stages."""

    outputs: PyTree  # of every stage, one tick ago
    d_inputs: PyTree  # the cotangent of the input of every stage, one tick ago
    ring: list[Array]  # [stages, slots, …]: what the forward visits keep for the backward visits
    gradients: LoopWeights | None  # None where only the loss is asked for
    of_inputs: Inputs  # gradients; those of `side` are [stages, …], and None if not asked for
    loss: Array
    metrics: PyTree  # each [stages, …], combined over the ticks that were not a bubble
    layers: LayerStates  # the state of the layers
