"""The pieces of the circular loop that an experiment may exchange for other ways to do the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import ShiftName
from nnx_pipeline.pipeline.stages import select_repeat
from nnx_pipeline.pipeline.ticks import Carry, Plan, Rest, receive

# (parameters [repeats, stages, …], repeat of each stage) to [stages, …]
Select = Callable[[PyTree, Array], PyTree]
# (schedule, shift, now, carry) to what `hand_on` needs, and the input of every stage
Receive = Callable[[CircularSchedule, ShiftName, Plan, Carry], tuple[Rest, PyTree]]


class Walk(Protocol):
    """Goes through all ticks as `jax.lax.scan` does."""

    def __call__(
        self,
        schedule: CircularSchedule,
        tick: Callable[[Any, Any], tuple[Any, Any]],
        carry: Any,
        rows: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]: ...


def scan_ticks(
    schedule: CircularSchedule,
    tick: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    rows: Any,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """All ticks in one scan."""
    return jax.lax.scan(tick, carry, rows, length=schedule.ticks, reverse=reverse)


@dataclass(frozen=True)
class LoopParts:
    """Functions that the circular loop calls; the defaults are the ones that measured best.

    is_scan: whether a tick is the body of a scan, where XLA has nothing to merge a recomputation
    with; a `walk` that writes the ticks one after the other says False, or remat comes to nothing.
    """

    select: Select = select_repeat
    receive: Receive = receive
    walk: Walk = scan_ticks
    is_scan: bool = True


DEFAULT_PARTS = LoopParts()
