"""What the 1F1B loop is given, and what lives from tick to tick."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, PyTree

Enter = Callable[[PyTree, PyTree], PyTree]
Leave = Callable[[PyTree, PyTree, PyTree], Array]


class Weights(NamedTuple):
    """What has a gradient."""

    enter: PyTree  # of the first function, such as the embedding
    stages: PyTree  # [repeats, stages, …]
    leave: PyTree  # of the last function, such as final norm and head


class Held(NamedTuple):
    """The weights, and with them what the functions close over: all that has a gradient."""

    enter: tuple[PyTree, list[Array]]
    stages: PyTree  # [repeats, stages, …]
    leave: tuple[PyTree, list[Array]]
    closed: list[Array]  # of the stage function; their gradients [stages, …] within the loop


class Inputs(NamedTuple):
    """What a microbatch brings along, `[microbatches, …]`, whole on every stage; no gradients."""

    enter: PyTree
    side: PyTree
    leave: PyTree


class State(NamedTuple):
    """What lives from tick to tick. Activations begin with the axis of stages."""

    given: PyTree  # what every stage gave, one tick ago
    returned: PyTree  # the cotangent that every stage gave, one tick ago
    ring: list[Array]  # [stages, slots, …]: what the visits kept
    gradients: Held | None
    loss: Array
    metrics: PyTree  # [stages, …] of each, put together over the ticks that were not a bubble
