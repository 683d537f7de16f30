"""One tick of the circular loop, and the walk over all ticks.

With one repeat this is the plain pipeline. Every array of a tick begins with the axis of stages, so
one line below is the work of all stages at once:

    for now in plan:                             one row of the timetable per tick
        mid, x = stage_inputs(now, carry)        select what each stage works on
        y, visited = visit(now, x)               apply the layers of every stage
        carry = stage_outputs(now, mid, y)       pass y on to the next stage, or out of the pipeline
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.circular.plan import Plan, make_plan
from nnx_pipeline.pipeline.exchange.buffers import mark_stage, over_stage, push, rows, slot, where
from nnx_pipeline.pipeline.exchange.shift import ShiftName, shift
from nnx_pipeline.pipeline.parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.stage.repeats import hold_to_read, select
from nnx_pipeline.pipeline.stage.state import At, put, take
from nnx_pipeline.remat import ITERATION_INPUT, named

# (now, input of every stage) to (output of every stage, whatever else the visit gives)
Visit = Callable[[Plan, Moving], tuple[Moving, PyTree]]
# ((carry, state of all layers), now) to (the next pair, whatever else the tick gives)
Tick = Callable[[tuple["Carry", PyTree], Plan], tuple[tuple["Carry", PyTree], Any]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Carry(NamedTuple):
    """What passes from tick to tick; every leaf begins with the axis of stages."""

    stream: PyTree  # [stages, stream slots, …]: inputs not yet taken, then outputs
    queue: PyTree  # [stages, queue slots, …]: microbatches between two repeats, or None
    outputs: tuple[PyTree, ...]  # [stages, …]: of every stage, one tick ago, two ticks ago …
    arrived: PyTree  # [stages, …]: what was sent a tick ago, with a delay of 2; else None


class MidTick(NamedTuple):
    """The carry within a tick: what `stage_inputs` leaves for `stage_outputs`."""

    stream: PyTree
    leaving: PyTree  # [stages, …]: the slot of the stream that moves one stage on
    queue: PyTree
    outputs: tuple[PyTree, ...]
    sent: PyTree  # [stages, …]: what arrives at the next tick, with a delay of 2; else None


def stage_inputs(
    schedule: CircularSchedule, shift_by: ShiftName, now: Plan, carry: Carry
) -> tuple[MidTick, PyTree]:
    """Selects the input of every stage at a tick; linear in the carry.

    - `shift_by`: how activations are sent to the next stage.
    - `now`: the tick's row of the timetable.
    - `carry`: the carry before the tick.
    """
    first, last = mark_stage(0, schedule.stages), mark_stage(schedule.stages - 1, schedule.stages)
    waiting = slot(carry.stream, now.stream_slot)
    # Each stage sends its last output to the next stage, and the last stage to the first.
    sent = jax.tree.map(lambda leaf: shift(leaf, by=1, how=shift_by), carry.outputs[0])
    # With a delay of 2 what is sent now is read a tick later, so that the transfer overlaps with
    # the visit of this tick.
    arrived = sent if schedule.delay == 1 else carry.arrived
    # What the last stage sends to the first waits in the queue until all microbatches have entered.
    # The queue takes the last stage's output of `delay` ticks ago, the oldest that the carry has,
    # which nothing needs after that.
    queue, returning = carry.queue, arrived
    if queue is not None:
        returning = slot(queue, now.queue_slot)
        queue = push(queue, returning, carry.outputs[-1], now.queue_slot, last, shift_by)
    entering = where(now.from_stream, waiting, returning)
    x = where(first, entering, arrived)
    # In a bubble a stage works on a microbatch that it happens to store, and the result is
    # discarded. So no stage function gets values, such as zeros, at which its derivative may be
    # undefined.
    x = where(over_stage(now.active), x, waiting)
    mid = MidTick(
        stream=carry.stream,
        leaving=waiting,
        queue=queue,
        outputs=carry.outputs[:-1],
        sent=None if schedule.delay == 1 else sent,
    )
    return mid, x


def stage_outputs(
    schedule: CircularSchedule, shift_by: ShiftName, now: Plan, mid: MidTick, outputs: PyTree
) -> Carry:
    """Passes on the outputs of the stages, into the carry of the next tick; linear in both inputs.

    - `shift_by`, `now`: as for `stage_inputs`.
    - `mid`: what `stage_inputs` left.
    - `outputs`: of every stage, `[stages, …]`.
    """
    last = mark_stage(schedule.stages - 1, schedule.stages)
    # The slot that was read moves one stage towards stage 0, so that each microbatch is there when
    # its turn comes. The last stage's place in the slot is then free and takes the stage's output.
    # After the last tick the stream holds the outputs of the last repeat.
    return Carry(
        stream=push(mid.stream, mid.leaving, outputs, now.stream_slot, last, shift_by),
        queue=mid.queue,
        outputs=(outputs, *mid.outputs),
        arrived=mid.sent,
    )


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function unchanged."""
    return function


@dataclass(frozen=True)
class Loop:
    """The loop over the ticks of one schedule.

    - `schedule`: which stage works on what at each tick.
    - `shift_by`: how outputs are sent to the next stage.
    - `bubble_fill`: what the buffers hold before anything arrives; results do not depend on it.
    - `parts`: pieces that an experiment exchanges.
    - `cast_at_use`: as in `WeightOptions`.
    """

    schedule: CircularSchedule
    shift_by: ShiftName
    bubble_fill: float
    parts: LoopParts = DEFAULT_PARTS
    cast_at_use: bool = False

    def run(self, tick: Tick, start: tuple[Carry, PyTree]) -> tuple[tuple[Carry, PyTree], Any]:
        """Goes through all ticks; returns the last pair, and the other results of every tick.

        - `tick`: one tick, such as `Loop.tick` makes it.
        - `start`: the carry before the first tick, from `Loop.start`, and the state of the layers,
          `[repeats, stages, …]`.
        """
        return self.walk(tick, start, make_plan(self.schedule))

    def walk(
        self,
        tick: Callable[[Any, Any], tuple[Any, Any]],
        carry: Any,
        rows: Any,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Calls `tick` for one tick after the other, as `jax.lax.scan` does.

        - `tick`: (carry, row) to (the next carry, what to collect).
        - `carry`: before the first call.
        - `rows`: arrays with one row per tick.
        - `reverse`: whether to go from the last tick to the first, as a backward pass does.
        """
        if self.parts.walk is not None:
            return self.parts.walk(self.schedule, tick, carry, rows, reverse=reverse)
        return jax.lax.scan(tick, carry, rows, length=self.schedule.ticks, reverse=reverse)

    def start(self, stream: PyTree) -> Carry:
        """The carry before the first tick.

        - `stream`: the microbatches, `[stages, slots, …]`.
        """

        def empty(leaf: Array) -> Array:
            return jnp.full_like(leaf, self.bubble_fill)

        previous = jax.tree.map(lambda leaf: empty(leaf[:, 0]), stream)
        slots, queue = self.schedule.queue_slots, None
        if slots:
            queue = jax.tree.map(lambda leaf: empty(leaf[:, :slots]), stream)
        return Carry(
            stream=stream,
            queue=queue,
            outputs=(previous,) * self.schedule.delay,
            arrived=None if self.schedule.delay == 1 else previous,
        )

    def tick(self, visit: Visit, *, linear: Wrap = as_it_is) -> Tick:
        """Makes one tick, from carry and state to the next ones and the visit's other results.

        - `visit`: applies the layers of every stage.
        - `linear`: is put around the steps before and after the visit, which are linear in the
          carry: with `jax.checkpoint`, JAX keeps nothing of them but the timetable's row.
        """
        enter, pass_on = linear(self.before_visit), linear(self.after_visit)

        def tick(before: tuple[Carry, PyTree], now: Plan) -> tuple[tuple[Carry, PyTree], PyTree]:
            carry, state = before
            at = self.visits_at(now)
            mid, x = enter(now, carry)
            (y, written), visited = visit(now, (name_input(x), take(state, at)))
            return (pass_on(now, mid, y), put(state, at, written)), visited

        return tick

    def visits_at(self, now: Plan) -> At:
        """Which visits a tick makes."""
        row = now.repeat * self.schedule.microbatches + now.microbatch
        return At(over_stage(now.repeat), over_stage(row), over_stage(now.active))

    def before_visit(self, now: Plan, carry: Carry) -> tuple[MidTick, PyTree]:
        """`stage_inputs` with the schedule of this loop, or the function that an arm put there."""
        choose = self.parts.stage_inputs or stage_inputs
        return choose(self.schedule, self.shift_by, now, carry)

    def after_visit(self, now: Plan, mid: MidTick, outputs: PyTree) -> Carry:
        """`stage_outputs` with the schedule of this loop."""
        return stage_outputs(self.schedule, self.shift_by, now, mid, outputs)


def hold_weights(loop: Loop, params: PyTree) -> PyTree:
    """The parameters `[repeats, stages, …]` in the form that `stage_weights` reads."""
    return params if loop.parts.select else hold_to_read(params, cast_at_use=loop.cast_at_use)


def stage_weights(parts: LoopParts, held: PyTree, now: Plan) -> PyTree:
    """The parameters of each stage for the repeat that it works on, `[stages, …]`.

    - `held`: all parameters, as `hold_weights` returns them.
    """
    return (parts.select or select)(held, over_stage(now.repeat))


def stage_side(side: PyTree, now: Plan) -> PyTree:
    """The side inputs of the microbatch that each stage works on, `[stages, …]`."""
    return jax.tree.map(lambda leaf: rows(leaf, over_stage(now.microbatch)), side)


def name_input(x: PyTree) -> PyTree:
    """Names the input of the stages `ITERATION_INPUT`; every remat policy keeps it."""
    return jax.tree.map(lambda leaf: named(leaf, ITERATION_INPUT), x)
