"""The timetable of the circular loop, one tick of it, and the walk over all ticks.

With one repeat this is the plain pipeline. Every array of a tick begins with the axis of stages, so
one line below is the work of all stages at once:

    for now in plan:                             one row of the timetable per tick
        mid, x = stage_inputs(now, carry)        select what each stage works on
        y, visited = visit(now, x)               apply the layers of every stage
        carry = stage_outputs(now, mid, y)       pass y on to the next stage, or out of the pipeline
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import ITERATION_INPUT, named
from nnx_pipeline.pipeline import _exchange as exchange
from nnx_pipeline.pipeline import visit
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage import apply as stages
from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.pipeline.stage._sums import ReadWithSums, with_sums
from nnx_pipeline.pipeline.stage.apply import ApplyMoving, Moving
from nnx_pipeline.pipeline.stage.state import At, put, take


class CircularPlan(NamedTuple):
    """The schedule as arrays with one row per tick; in a bubble all indices are still valid."""

    microbatch: Array  # int32 [ticks, stages]
    repeat: Array  # int32 [ticks, stages]
    active: Array  # bool [ticks, stages], False in a bubble
    from_stream: Array  # bool [ticks], whether stage 0 takes a new microbatch
    stream_slot: Array  # int32 [ticks], the slot of the stream that is read and written
    queue_slot: Array  # int32 [ticks], the slot of the queue that is read and written
    depth: Array | None  # int32 [ticks], as of `AtDepth`; None if all ticks have the same


def circular_plan(schedule: CircularSchedule, depths: Sequence[int] = ()) -> CircularPlan:
    """In a bubble a stage has microbatch 0 and repeat 0; `depths` as in `LoopOptions`."""
    visits, tick = schedule.visits, np.arange(schedule.ticks, dtype=np.int32)
    depth = schedule.depth_at_ticks(depths) if depths else tick[:0]
    return CircularPlan(
        microbatch=jnp.asarray(visits.microbatch),
        repeat=jnp.asarray(visits.repeat),
        active=jnp.asarray(visits.active),
        from_stream=jnp.asarray(tick < schedule.microbatches),
        stream_slot=jnp.asarray(tick % schedule.stream_slots),
        queue_slot=jnp.asarray(tick % max(schedule.queue_slots, 1)),
        depth=jnp.asarray(depth) if len(set(depth.tolist())) > 1 else None,
    )


# (now, input of every stage) to (output of every stage, whatever else the visit gives)
MakeVisits = Callable[[CircularPlan, Moving], tuple[Moving, PyTree]]
# ((carry, state of all layers), now) to (the next pair, whatever else the tick gives)
Before = tuple["CircularCarry", PyTree]
CircularTick = Callable[[Before, CircularPlan], tuple[Before, PyTree]]
Wrap = Callable[[Function], Function]


class CircularCarry(NamedTuple):
    """What passes from tick to tick; every leaf begins with the axis of stages."""

    stream: PyTree  # [stages, stream slots, …]: inputs not yet taken, then outputs
    queue: PyTree  # [stages, queue slots, …]: microbatches between two repeats, or None
    outputs: tuple[PyTree, ...]  # [stages, …]: of every stage, one tick ago, two ticks ago …
    arrived: PyTree  # [stages, …]: what was sent a tick ago, with a delay of 2; else None


class MidTick(NamedTuple):
    stream: PyTree
    leaving: PyTree  # [stages, …]: the slot of the stream that moves one stage on
    queue: PyTree
    outputs: tuple[PyTree, ...]
    sent: PyTree  # [stages, …]: what arrives at the next tick, with a delay of 2; else None


def stage_inputs(
    schedule: CircularSchedule,
    shift_by: exchange.ShiftName,
    now: CircularPlan,
    carry: CircularCarry,
) -> tuple[MidTick, PyTree]:
    """Selects the input of every stage at a tick; linear in the carry."""
    first = exchange.mark_stage(0, schedule.stages)
    last = exchange.mark_stage(schedule.stages - 1, schedule.stages)
    waiting = exchange.slot(carry.stream, now.stream_slot)
    # Each stage sends its last output to the next stage, and the last stage to the first.
    sent = jax.tree.map(lambda leaf: exchange.shift(leaf, by=1, how=shift_by), carry.outputs[0])
    # With a delay of 2 what is sent now is read a tick later, so that the transfer overlaps with
    # the visit of this tick.
    arrived = sent if schedule.delay == 1 else carry.arrived
    # What the last stage sends to the first waits in the queue until all microbatches have entered.
    # The queue takes the last stage's output of `delay` ticks ago, the oldest that the carry has,
    # which nothing needs after that.
    queue, returning = carry.queue, arrived
    if queue is not None:
        returning = exchange.slot(queue, now.queue_slot)
        queue = exchange.push(queue, returning, carry.outputs[-1], now.queue_slot, last, shift_by)
    entering = exchange.where(now.from_stream, waiting, returning)
    x = exchange.where(first, entering, arrived)
    # In a bubble a stage works on a microbatch that it happens to store, and the result is
    # discarded. So no stage function gets values, such as zeros, at which its derivative may be
    # undefined.
    x = exchange.where(exchange.over_stage(now.active), x, waiting)
    mid = MidTick(
        stream=carry.stream,
        leaving=waiting,
        queue=queue,
        outputs=carry.outputs[:-1],
        sent=None if schedule.delay == 1 else sent,
    )
    return mid, x


def stage_outputs(
    schedule: CircularSchedule,
    shift_by: exchange.ShiftName,
    now: CircularPlan,
    mid: MidTick,
    outputs: PyTree,
) -> CircularCarry:
    """The carry of the next tick from the outputs `[stages, …]`; linear in both inputs."""
    last = exchange.mark_stage(schedule.stages - 1, schedule.stages)
    # The slot that was read moves one stage towards stage 0, so that each microbatch is there when
    # stage 0 takes it. The last stage's entry of the slot is then free and takes its output.
    # After the last tick the stream holds the outputs of the last repeat.
    return CircularCarry(
        stream=exchange.push(mid.stream, mid.leaving, outputs, now.stream_slot, last, shift_by),
        queue=mid.queue,
        outputs=(outputs, *mid.outputs),
        arrived=mid.sent,
    )


IN_SCAN = True
"""Whether a tick is the body of a scan, where XLA has nothing to merge a recomputation with.

Where it is not, remat has no effect unless it keeps XLA from merging the recomputation with the
forward pass.
"""


def walk_ticks(
    schedule: CircularSchedule,
    tick: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    rows: PyTree,
    *,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """As `jax.lax.scan` over rows, one for each tick."""
    return jax.lax.scan(tick, carry, rows, length=schedule.ticks, reverse=reverse)


@dataclass(frozen=True)
class CircularLoop:
    """The loop over the ticks of one schedule; results do not depend on `bubble_fill`."""

    schedule: CircularSchedule
    shift_by: exchange.ShiftName
    bubble_fill: float
    cast_at_use: bool = False
    sums_in_layers: bool = False
    depths: tuple[int, ...] = ()

    @property
    def plan(self) -> CircularPlan:
        return circular_plan(self.schedule, self.depths)

    def start(self, stream: PyTree) -> CircularCarry:
        def empty(leaf: Array) -> Array:
            return jnp.full_like(leaf, self.bubble_fill)

        previous = jax.tree.map(lambda leaf: empty(leaf[:, 0]), stream)
        slots, queue = self.schedule.queue_slots, None
        if slots:
            queue = jax.tree.map(lambda leaf: empty(leaf[:, :slots]), stream)
        return CircularCarry(
            stream=stream,
            queue=queue,
            outputs=(previous,) * self.schedule.delay,
            arrived=None if self.schedule.delay == 1 else previous,
        )

    def tick(self, make: MakeVisits, *, linear: Wrap = lambda function: function) -> CircularTick:
        """One tick, from carry and state to the next ones and what else `make` gives."""
        # With `jax.checkpoint` as `linear`, put around the steps before and after the visit, which
        # are linear in the carry, JAX saves only the timetable's row of them.
        how = self.schedule, self.shift_by
        select = linear(functools.partial(stage_inputs, *how))
        pass_on = linear(functools.partial(stage_outputs, *how))

        def tick(before: Before, now: CircularPlan) -> tuple[Before, PyTree]:
            carry, state = before
            at = self.visits_at(now)
            mid, x = select(now, carry)
            (y, written), visited = make(now, (name_input(x), take(state, at)))
            return (pass_on(now, mid, y), put(state, at, written)), visited

        return tick

    def visits_at(self, now: CircularPlan) -> At:
        microbatches = self.schedule.microbatches
        return visit.visits_at(now.repeat, now.microbatch, now.active, microbatches)


def side_at(side: PyTree, now: CircularPlan) -> PyTree:
    """What the stages read at a tick besides weights and activations."""
    rows = visit.side_of(side, now.microbatch)
    return rows if now.depth is None else stages.AtDepth(rows, now.depth)


def name_input(x: PyTree) -> PyTree:
    """Every remat policy keeps the input of the stages."""
    return jax.tree.map(lambda leaf: named(leaf, ITERATION_INPUT), x)


def autodiff_tick(
    loop: CircularLoop, checkpoint: Wrap, apply_stage: ApplyMoving, split: PyTree, side: PyTree
) -> Callable[[PyTree, CircularPlan], tuple[PyTree, PyTree]]:
    """A tick that JAX differentiates; with `ReadWithSums` it passes on the accumulators too."""
    # The weights of a visit are selected inside its checkpoint, or every tick would keep them. The
    # checkpoints of the rest keep the conditions of each `where` as they are, while JAX alone would
    # keep them broadcast to the shape of the activations.
    apply = stages.map_stages(apply_stage, at_depth=loop.plan.depth is not None)
    linear = functools.partial(jax.checkpoint, prevent_cse=not IN_SCAN)

    @checkpoint
    def select_and_visit(split: PyTree, now: CircularPlan, x: Moving) -> tuple[Moving, PyTree]:
        weights = visit.weights_of(split, now.repeat)
        result: tuple[Moving, PyTree] = apply(weights, x, side_at(side, now))
        return result

    if not isinstance(split, ReadWithSums):
        return loop.tick(functools.partial(select_and_visit, split), linear=linear)

    def tick(
        start: tuple[Before, PyTree], now: CircularPlan
    ) -> tuple[tuple[Before, PyTree], PyTree]:
        before, sums = start
        make = functools.partial(select_and_visit, with_sums(split, sums))
        after, (metrics, sums) = loop.tick(make, linear=linear)(before, now)
        return (after, sums), metrics

    return tick
