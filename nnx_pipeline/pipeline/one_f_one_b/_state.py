"""What passes from tick to tick in the 1F1B loop, and the arrays that have a gradient."""

from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.contract import Inputs, Weights
from nnx_pipeline.pipeline.stage.state import LayerStates


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
        cls, weights: Weights, enter: Any = (), stages: Any = (), leave: Any = ()
    ) -> "LoopWeights":
        """The weights of a model, with the arrays that each function closes over."""
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
