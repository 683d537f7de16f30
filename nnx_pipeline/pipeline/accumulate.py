"""The circular loop with a derivative written by hand."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.buffers import over_stage
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
    shape_of_metrics,
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

    def start(self, select: Select, stream: PyTree, beside: Beside) -> Carry:
        """The carry before the first tick."""

        def visit(now: Plan, x: PyTree) -> tuple[PyTree, PyTree]:
            return self.visit(_needed(select, beside, now), x)

        metrics = shape_of_metrics(visit, make_plan(self.schedule), stream)
        return start(stream, metrics, self.schedule, self.bubble_fill)

    def forward(
        self, select: Select, beside: Beside, keep: bool, carry: Carry, now: Plan
    ) -> tuple[Carry, PyTree]:
        """The next carry, and what the derivative of the tick needs besides."""
        rest, x = self.parts.receive(self.schedule, self.shift_by, now, carry)
        given, kept = forward_keeping(self.visit, _needed(select, beside, now), name_input(x))
        return hand_on(self.schedule, self.shift_by, now, rest, given), kept if keep else None

    def nothing(self, of_stream: PyTree, of_metrics: PyTree, beside: Beside) -> Cotangents:
        """The cotangents after the last tick."""
        empty = start(of_stream, of_metrics, self.schedule, 0.0)
        carry = jax.tree.map(jnp.zeros_like, empty)
        carry = carry._replace(stream=of_stream, metrics=of_metrics)
        of_closed = zero_gradients(beside.closed, beside.closed, self.grad_dtype)
        return Cotangents(carry, Beside(zero_gradients(beside.side, beside.side), of_closed))

    def backward(
        self, select: Select, beside: Beside, after: Cotangents, now: Plan, kept: PyTree
    ) -> tuple[Cotangents, PyTree]:
        """The cotangents before a tick, and the gradient of the weights that it used.

        Everything in a tick but the visit is linear, so that its transpose needs shapes alone.
        """
        carry = jax.eval_shape(lambda carry: carry, after.carry)
        take = functools.partial(self.parts.receive, self.schedule, self.shift_by, now)
        give = functools.partial(hand_on, self.schedule, self.shift_by, now)
        needed = _needed(select, beside, now)
        rest, x = jax.eval_shape(take, carry)
        given = jax.eval_shape(self.visit, needed, x)
        of_rest, of_given = jax.linear_transpose(give, rest, given)(after.carry)
        (of_stage, of_rows, of_closed), of_x = backward_from(kept, needed, of_given)
        (before,) = jax.linear_transpose(take, carry)((of_rest, of_x))
        of_rows = _back_to_microbatches(beside.side, of_rows, now)
        return Cotangents(before, add(after.beside, Beside(of_rows, of_closed))), of_stage


def visit_once(ticks: Ticks, params: PyTree, stream: PyTree, side: PyTree) -> None:
    """Calls the visit as the ticks will, for its types; nothing is computed."""

    def visit(params: PyTree, stream: PyTree, side: PyTree) -> Carry:
        select = functools.partial(_select, ticks.parts, ticks.lending.lend(params))
        return ticks.start(select, stream, Beside(side, []))

    jax.eval_shape(visit, params, stream, side)


def forward_through(
    ticks: Ticks, params: PyTree, stream: PyTree, beside: Beside, *, keep: bool
) -> tuple[Carry, Any]:
    """All ticks with all weights at hand: the carry after the last one, and what to save."""
    lent = ticks.lending.lend(params)
    select = functools.partial(_select, ticks.parts, lent)
    tick = functools.partial(ticks.forward, select, beside, keep)
    begin = ticks.start(select, stream, beside)
    end, kept = ticks.parts.walk(ticks.schedule, tick, begin, make_plan(ticks.schedule))
    return end, (lent, kept)


def backward_through(
    ticks: Ticks, params: PyTree, beside: Beside, saved: Any, last: Cotangents
) -> tuple[PyTree, Cotangents]:
    """All ticks backward: the gradient of the parameters, and the cotangents before the first."""
    lent, kept = saved
    select = functools.partial(_select, ticks.parts, lent)

    def tick(
        totals: tuple[PyTree, Cotangents], at: tuple[Plan, PyTree]
    ) -> tuple[tuple[PyTree, Cotangents], None]:
        of_params, after = totals
        before, of_stage = ticks.backward(select, beside, after, *at)
        return (add_at_repeat(of_params, of_stage, over_stage(at[0].repeat)), before), None

    start = (zero_gradients(lent, params, ticks.grad_dtype), last)
    plan = make_plan(ticks.schedule)
    (of_params, first), _ = ticks.parts.walk(
        ticks.schedule, tick, start, (plan, kept), reverse=True
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
