"""What the 1F1B loop is given, and the state that passes from tick to tick."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.pipeline.stage.state import Kept

Enter = Callable[[PyTree, PyTree], PyTree]
Leave = Callable[[PyTree, PyTree, PyTree], Array]


@dataclass(frozen=True)
class ModelEnds:
    """What comes before and after the layers of a model, each as a function and its weights.

    - `enter`: (its weights, inputs of a microbatch) to activations, not sharded over `stage`.
    - `enter_weights`: any pytree, such as the embedding table.
    - `leave`: (its weights, activations of the last stage, inputs of a microbatch) to a float32
      scalar, the loss of the microbatch. The losses of all microbatches are added up.
    - `leave_weights`: any pytree, such as final norm and head.
    """

    enter: Enter
    enter_weights: PyTree
    leave: Leave
    leave_weights: PyTree


@dataclass(frozen=True)
class ModelFunctions:
    """The functions of a whole model, which share no state but may close over the same arrays.

    - `enter`: (its weights, inputs of a microbatch) to activations, not sharded over `stage`.
    - `apply_stage`: as for `run_pipeline`, or, for `run_timetable` alone, a list with one such
      function for each stage. All take and give the same activations and metrics.
    - `leave`: (its weights, activations of the last stage, inputs of a microbatch) to a float32
      scalar, the loss of the microbatch. The losses of all microbatches are added up.
    - `metric_weights`: the weight of each metric in the loss: one number for all metrics, or a
      pytree of numbers like that of the metrics. A metric with None or 0 is not differentiated.
    """

    enter: Enter
    apply_stage: ApplyStage | Sequence[ApplyStage]
    leave: Leave
    metric_weights: PyTree = None


class Weights(NamedTuple):
    """The weights of a whole model, with respect to which it is differentiated."""

    enter: PyTree  # of `ModelEnds.enter`, such as the embedding table
    stages: PyTree  # [repeats, stages, …]
    leave: PyTree  # of `ModelEnds.leave`, such as final norm and head


class Held(NamedTuple):
    """The weights and what the functions close over: all arrays that have a gradient."""

    enter: tuple[PyTree, list[Array]]
    stages: PyTree  # [repeats, stages, …]; within the loop as `stage.repeats.hold` returns them
    leave: tuple[PyTree, list[Array]]
    closed: list[Array]  # of the stage function; within the loop their gradients are [stages, …]


class Inputs(NamedTuple):
    """Inputs of the microbatches, `[microbatches, …]`, whole on every stage."""

    enter: PyTree
    side: PyTree
    leave: PyTree


NOTHING = Inputs(None, None, None)


class State(NamedTuple):
    """What passes from tick to tick; activations begin with the axis of stages."""

    outputs: PyTree  # of every stage, one tick ago
    d_inputs: PyTree  # the cotangent of the input of every stage, one tick ago
    ring: list[Array]  # [stages, slots, …]: what the forward visits keep for the backward visits
    gradients: Held | None  # None where only the loss is asked for
    of_inputs: Inputs  # gradients; those of `side` are [stages, …], and None if not asked for
    loss: Array
    metrics: PyTree  # each [stages, …], combined over the ticks that were not a bubble
    layers: Kept  # the state of the layers


def check_model(ends: Any, inputs: Any, schedule: str) -> None:
    """Raises InputError for arguments of a pipeline's loss of other types, or another schedule.

    - `ends`, `inputs`: the arguments.
    - `schedule`: the name of the schedule.
    """
    if not isinstance(ends, ModelEnds) or not callable(ends.enter):
        found = type(ends).__name__
        raise InputError(f"the ends of a model are a {found}; give ModelEnds with two functions")
    if not isinstance(inputs, (tuple, list)) or len(inputs) != 2:
        several = isinstance(inputs, (tuple, list))
        found = f"{len(inputs)} values" if several else type(inputs).__name__
        raise InputError(
            f"the inputs of a model are {found}; give a pair, what `enter` reads and what "
            "`leave` reads"
        )
    if schedule != "1f1b":
        raise InputError(
            f"the loss is computed by 1F1B, and pipeline.schedule={schedule}; set "
            "it to 1f1b, or call the pipeline and compute the loss from its result"
        )
