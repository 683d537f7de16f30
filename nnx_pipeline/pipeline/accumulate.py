"""The circular loop with a derivative written by hand."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.buffers import over_stage, slot
from nnx_pipeline.pipeline.lend import Lending
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import ShiftName
from nnx_pipeline.pipeline.stage_vjp import (
    add,
    add_at_repeat,
    backward_from,
    forward_keeping,
    is_float,
    zero_gradients,
)
from nnx_pipeline.pipeline.ticks import (
    Carry,
    Plan,
    hand_on,
    make_plan,
    name_input,
    side_rows,
    start,
)

Select = Callable[[Plan], PyTree]  # the weights of each stage at a tick, [stages, …]


class Beside(NamedTuple):
    """What the visits read beside weights and activations; no tick changes it."""

    side: PyTree  # [microbatches, …], each stage the row of its microbatch
    closed: list[Array]  # what the stage function closes over, whole on every stage


class Cotangents(NamedTuple):
    """What travels back through the ticks, beside the gradients of the weights."""

    carry: Carry
    beside: Beside  # None for integers


@dataclass(frozen=True)
class Ticks:
    """A tick forward, and the same tick backward from what was kept.

    visit: ((parameters, side inputs, what is closed over), x) of all stages to (activations,
        metrics), with its own `jax.checkpoint`. grad_dtype: dtype of the accumulators, None for
        that of the parameters.
    lending: how the weights are held while the ticks go by. parts: pieces that an experiment may
        exchange.
    """

    visit: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    schedule: CircularSchedule
    shift_by: ShiftName
    bubble_fill: float
    grad_dtype: jax.typing.DTypeLike | None
    lending: Lending
    parts: LoopParts = DEFAULT_PARTS

    def start(self, stream: PyTree) -> Carry:
        """The carry before the first tick."""
        return start(stream, self.schedule, self.bubble_fill)

    def forward(
        self, select: Select, beside: Beside, keep: bool, carry: Carry, now: Plan
    ) -> tuple[Carry, tuple[PyTree, PyTree]]:
        """The next carry, what the derivative of the tick needs besides, and the metrics."""
        rest, x = self.parts.receive(self.schedule, self.shift_by, now, carry)
        needed = _needed(select, beside, now)
        (y, metrics), kept = forward_keeping(self.visit, needed, name_input(x))
        after = hand_on(self.schedule, self.shift_by, now, rest, y)
        return after, (kept if keep else None, metrics)

    def nothing(self, of_stream: PyTree, beside: Beside) -> Cotangents:
        """The cotangents after the last tick."""
        carry = jax.tree.map(jnp.zeros_like, start(of_stream, self.schedule, 0.0))
        of_closed = zero_gradients(beside.closed, beside.closed, self.grad_dtype)
        of_beside = Beside(zero_gradients(beside.side, beside.side), of_closed)
        return Cotangents(carry._replace(stream=of_stream), of_beside)

    def backward(
        self,
        select: Select,
        beside: Beside,
        after: Cotangents,
        now: Plan,
        at: tuple[PyTree, PyTree],
    ) -> tuple[Cotangents, PyTree]:
        """The cotangents before a tick, and the gradient of the weights that it used.

        at: what was kept of it, and the cotangents of its metrics, None for one that nobody asks
        for. Everything in a tick but the visit is linear, so that its transpose needs shapes alone.
        """
        kept, of_metrics = at
        carry = jax.eval_shape(lambda carry: carry, after.carry)
        take = functools.partial(self.parts.receive, self.schedule, self.shift_by, now)
        give = functools.partial(hand_on, self.schedule, self.shift_by, now)
        needed = _needed(select, beside, now)
        rest, x = jax.eval_shape(take, carry)
        y, _ = jax.eval_shape(self.visit, needed, x)
        of_rest, of_y = jax.linear_transpose(give, rest, y)(after.carry)
        (of_stage, of_rows, of_closed), of_x = backward_from(kept, needed, (of_y, of_metrics))
        (before,) = jax.linear_transpose(take, carry)((of_rest, of_x))
        of_rows = _back_to_microbatches(beside.side, of_rows, now)
        return Cotangents(before, add(after.beside, Beside(of_rows, of_closed))), of_stage


def visit_once(ticks: Ticks, params: PyTree, stream: PyTree, side: PyTree) -> None:
    """Calls the visit as the ticks will, for its types; nothing is computed."""

    def visit(params: PyTree, stream: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
        select = functools.partial(_select, ticks.parts, ticks.lending.lend(params))
        now = jax.tree.map(lambda leaf: leaf[0], make_plan(ticks.schedule))
        return ticks.visit(_needed(select, Beside(side, []), now), slot(stream, jnp.int32(0)))

    jax.eval_shape(visit, params, stream, side)


def forward_through(
    ticks: Ticks, params: PyTree, stream: PyTree, beside: Beside, *, keep: bool
) -> tuple[Carry, PyTree, Any]:
    """All ticks with all weights at hand: the carry after the last one, the metrics of every tick,
    and what to save."""
    lent = ticks.lending.lend(params)
    select = functools.partial(_select, ticks.parts, lent)
    tick = functools.partial(ticks.forward, select, beside, keep)
    plan = make_plan(ticks.schedule)
    end, (kept, metrics) = ticks.parts.walk(ticks.schedule, tick, ticks.start(stream), plan)
    return end, metrics, (lent, kept)


def backward_through(
    ticks: Ticks, params: PyTree, beside: Beside, saved: tuple[Any, PyTree], last: Cotangents
) -> tuple[PyTree, Cotangents]:
    """All ticks backward: the gradient of the parameters, and the cotangents before the first.

    saved: what `forward_through` saved, and the cotangents of the metrics of every tick.
    """
    (lent, kept), of_metrics = saved
    select = functools.partial(_select, ticks.parts, lent)

    def tick(
        totals: tuple[PyTree, Cotangents], at: tuple[Plan, tuple[PyTree, PyTree]]
    ) -> tuple[tuple[PyTree, Cotangents], None]:
        of_params, after = totals
        before, of_stage = ticks.backward(select, beside, after, *at)
        return (add_at_repeat(of_params, of_stage, over_stage(at[0].repeat)), before), None

    start = (zero_gradients(lent, params, ticks.grad_dtype), last)
    plan = make_plan(ticks.schedule)
    (of_params, first), _ = ticks.parts.walk(
        ticks.schedule, tick, start, (plan, (kept, of_metrics)), reverse=True
    )
    return ticks.lending.give_back(of_params, params), first


def _needed(select: Select, beside: Beside, now: Plan) -> tuple[PyTree, PyTree, list[Array]]:
    """What a visit reads beside the activations."""
    return select(now), side_rows(beside.side, now), beside.closed


def _select(parts: LoopParts, lent: PyTree, now: Plan) -> PyTree:
    return parts.select(lent, over_stage(now.repeat))


def _back_to_microbatches(side: PyTree, of_rows: PyTree, now: Plan) -> PyTree:
    """Cotangents of the rows that the stages read, added up where they were read from."""
    floats = jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, side)
    (of_side,) = jax.linear_transpose(functools.partial(side_rows, now=now), floats)(of_rows)
    return of_side
