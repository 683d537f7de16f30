"""What a model gives to the pipeline: its functions, their weights, and the inputs of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline import _entry as entry
from nnx_pipeline.pipeline.stage.apply import ApplyStage

Entry = Callable[[PyTree, PyTree], PyTree]
Exit = Callable[[PyTree, PyTree, PyTree], Array]


@dataclass(frozen=True)
class ModelEnds:
    """What comes before and after the layers of a model, each as a function and its weights.

    - `enter`: (its weights, inputs of a microbatch) to activations, not sharded over `stage`.
    - `enter_weights`: any pytree, such as the embedding table.
    - `leave`: (its weights, activations of the last stage, inputs of a microbatch) to a float32
      scalar, the loss of the microbatch. The losses of all microbatches are added up.
    - `leave_weights`: any pytree, such as final norm and head.
    - `lift`: a number above 0, such as 2.0**12, that the loop multiplies the loss by while it
      computes gradients, and divides by afterwards, in float32. The loop knows no loss scale, so
      that functions that compute in float16 need it: as large as no gradient overflows.
    """

    enter: Entry
    enter_weights: PyTree
    leave: Exit
    leave_weights: PyTree
    lift: float | Array | None = None


@dataclass(frozen=True)
class ModelFunctions:
    """The functions of a whole model, which share no state but may close over the same arrays.

    - `enter`, `leave`, `lift`: as of `ModelEnds`.
    - `apply_stage`: as for `run_pipeline`; all stages run it.
    - `metric_weights`: the weight of each metric in the loss: one number for all metrics, or a
      pytree of numbers like the metrics. A metric with None or 0 is not differentiated.
    """

    enter: Entry
    apply_stage: ApplyStage
    leave: Exit
    metric_weights: PyTree = None
    lift: float | Array | None = None


class Weights(NamedTuple):
    """The weights of a whole model, with respect to which it is differentiated."""

    enter: PyTree  # of `ModelEnds.enter`, such as the embedding table
    stages: PyTree  # [repeats, stages, …]
    leave: PyTree  # of `ModelEnds.leave`, such as final norm and head

    def placed(self) -> "Weights":
        stages = entry.place_stacked(self.stages)
        return Weights(entry.as_arrays(self.enter), stages, entry.as_arrays(self.leave))


class Inputs(NamedTuple):
    """Inputs of the microbatches, `[microbatches, …]`, whole on every stage."""

    enter: PyTree
    side: PyTree
    leave: PyTree


def check_loss(ends: object, inputs: PyTree, schedule: str) -> None:
    if not isinstance(ends, ModelEnds) or not callable(ends.enter):
        kind = type(ends).__name__
        raise InputError(f"the ends of a model are a {kind}; give ModelEnds with two functions")
    if not isinstance(inputs, (tuple, list)) or len(inputs) != 2:
        several = isinstance(inputs, (tuple, list))
        kind = f"{len(inputs)} values" if several else type(inputs).__name__
        raise InputError(
            f"the inputs of a model are {kind}; give a pair, what `enter` reads and what "
            "`leave` reads"
        )
    if schedule != "1f1b":
        raise InputError(
            f"the loss is computed by 1F1B, and pipeline.schedule={schedule}; set "
            "it to 1f1b, or call the pipeline and compute the loss from its result"
        )
