"""Functions of the loops that an arm of an experiment exchanges for other ones.

You need not read this file to understand the pipeline: the library uses the defaults, and only the
arms of experiments set other values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.exchange.shift import ShiftName
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage.apply import MapStages, map_stages


class Walk(Protocol):
    """A function that goes through all ticks as `jax.lax.scan` does."""

    def __call__(
        self,
        schedule: CircularSchedule,
        tick: Callable[[Any, Any], tuple[Any, Any]],
        carry: Any,
        rows: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]: ...


class StageInputs(Protocol):
    """A function that takes the place of `circular.tick.stage_inputs`, with the same result.

    - `schedule`, `shift_by`: the schedule, and how activations are sent to the next stage.
    - `now`: the tick's row of the timetable, a `circular.plan.Plan`.
    - `carry`: the `circular.tick.Carry` before the tick.

    Those types are not named below, because the modules that define them import this one.
    """

    def __call__(
        self, schedule: CircularSchedule, shift_by: ShiftName, now: Any, carry: Any
    ) -> tuple[Any, PyTree]: ...


@dataclass(frozen=True)
class LoopParts:
    """Pieces of the loops that can be exchanged; all but the first belong to the circular loop.

    - `map_stages`: how the function of one stage is mapped over all stages, in both loops.
    - `select`: (parameters `[repeats, stages, …]`, repeat of each stage) to `[stages, …]`.
      With None the loop holds them as `stage.repeats.hold` says.
    - `stage_inputs`: takes the place of `circular.tick.stage_inputs`; None for that function.
    - `walk`: goes through the ticks; None for one scan.
    - `is_scan`: whether a tick is the body of a scan, where XLA has nothing to merge a
      recomputation with. With a `walk` that unrolls the ticks it must be False, or XLA merges the
      recomputation with the forward pass and remat has no effect.
    """

    map_stages: MapStages = map_stages
    select: Callable[[PyTree, Array], PyTree] | None = None
    stage_inputs: StageInputs | None = None
    walk: Walk | None = None
    is_scan: bool = True


DEFAULT_PARTS = LoopParts()
