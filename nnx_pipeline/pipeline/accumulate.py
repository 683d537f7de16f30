"""The circular loop with a derivative written by hand."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from nnx_pipeline.pipeline.buffers import over_stage
from nnx_pipeline.pipeline.lend import Lending
from nnx_pipeline.pipeline.loop_parts import LoopParts
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import ShiftName
from nnx_pipeline.pipeline.stage_vjp import (
    add,
    add_at_repeat,
    as_cotangents,
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
    needed_at,
    shape_of_metrics,
    side_rows,
    start,
)


class _Totals(NamedTuple):
    """Cotangents on their way back through the ticks."""

    carry: Carry
    params: PyTree  # [repeats, stages, …], None for integers
    side: PyTree


@dataclass(frozen=True)
class AccumulatingLoop:
    """All ticks, forward and backward.

    visit: ((parameters, side inputs), x) of all stages to (activations, metrics), with its own
        `jax.checkpoint`. grad_dtype: dtype of the accumulators, None for that of the parameters.
    lending: how the weights are held while the ticks go by. parts: pieces that arms exchange.
    """

    visit: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    schedule: CircularSchedule
    shift_by: ShiftName
    bubble_fill: float
    grad_dtype: jax.typing.DTypeLike | None
    lending: Lending
    parts: LoopParts

    def __call__(self, params: PyTree, stream: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
        """The stream after the last tick and the metrics of every stage.

        The derivative keeps what the checkpoint of a visit keeps, one entry per tick: the input of
        each stage and the names it saves. It walks the ticks backward, differentiates one visit at
        a time, and adds the gradient of a stage's weights to its repeat in place: there is one
        gradient buffer per parameter, and nothing the size of all parameters beside it.
        """
        return _run(self, params, stream, side)

    def forward(
        self, lent: PyTree, stream: PyTree, side: PyTree, *, keep: bool
    ) -> tuple[Carry, PyTree]:
        """The carry after the last tick, and what was kept, a leading axis of ticks on it."""

        def tick(carry: Carry, now: Plan) -> tuple[Carry, PyTree]:
            rest, x = self.parts.receive(self.schedule, self.shift_by, now, carry)
            needed = needed_at(lent, side, now, self.parts.select)
            given, kept = forward_keeping(self.visit, needed, name_input(x))
            return hand_on(self.schedule, self.shift_by, now, rest, given), kept if keep else None

        plan = make_plan(self.schedule)
        return self.parts.walk(self.schedule, tick, self._start(lent, stream, side, plan), plan)

    def backward(
        self,
        params: PyTree,
        lent: PyTree,
        side: PyTree,
        kept: PyTree,
        of_stream: PyTree,
        of_metrics: PyTree,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Cotangents of parameters, stream and side inputs from those of the results."""
        plan = make_plan(self.schedule)
        begin = jax.eval_shape(self._start, lent, of_stream, side, plan)
        take = functools.partial(self.parts.receive, self.schedule, self.shift_by)
        give = functools.partial(hand_on, self.schedule, self.shift_by)

        def tick(totals: _Totals, at: tuple[Plan, PyTree]) -> tuple[_Totals, None]:
            now, kept = at
            needed = needed_at(lent, side, now, self.parts.select)
            rest, x = jax.eval_shape(functools.partial(take, now), begin)
            given = jax.eval_shape(self.visit, needed, x)
            hand_back = jax.linear_transpose(functools.partial(give, now), rest, given)
            of_rest, of_given = hand_back(totals.carry)
            (of_stage, of_rows), of_x = backward_from(kept, needed, of_given)
            return_to = jax.linear_transpose(functools.partial(take, now), begin)
            (carry,) = return_to((of_rest, of_x))
            return _Totals(
                carry=carry,
                params=add_at_repeat(totals.params, of_stage, over_stage(now.repeat)),
                side=add(totals.side, _back_to_microbatches(side, of_rows, now)),
            ), None

        nothing = jax.tree.map(jnp.zeros_like, start(of_stream, of_metrics, self.schedule, 0.0))
        totals = _Totals(
            carry=nothing._replace(stream=of_stream, metrics=of_metrics),
            params=zero_gradients(lent, params, self.grad_dtype),
            side=zero_gradients(side, side),
        )
        totals, _ = self.parts.walk(self.schedule, tick, totals, (plan, kept), reverse=True)
        return self.lending.give_back(totals.params), totals.carry.stream, totals.side

    def _start(self, lent: PyTree, stream: PyTree, side: PyTree, plan: Plan) -> Carry:
        def visit(now: Plan, x: PyTree) -> tuple[PyTree, PyTree]:
            return self.visit(needed_at(lent, side, now, self.parts.select), x)

        metrics = shape_of_metrics(visit, plan, stream)
        return start(stream, metrics, self.schedule, self.bubble_fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    loop: AccumulatingLoop, params: PyTree, stream: PyTree, side: PyTree
) -> tuple[PyTree, PyTree]:
    end, _ = loop.forward(loop.lending.lend(params), stream, side, keep=False)
    return end.stream, end.metrics


def _run_forward(
    loop: AccumulatingLoop, params: PyTree, stream: PyTree, side: PyTree
) -> tuple[tuple[PyTree, PyTree], Any]:
    lent = loop.lending.lend(params)
    end, kept = loop.forward(lent, stream, side, keep=True)
    return (end.stream, end.metrics), (params, lent, side, kept)


def _run_backward(
    loop: AccumulatingLoop, saved: Any, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree, PyTree]:
    params, lent, side, kept = saved
    of_params, of_stream, of_side = loop.backward(params, lent, side, kept, *cotangents)
    return as_cotangents(of_params, params), of_stream, as_cotangents(of_side, side)


_run.defvjp(_run_forward, _run_backward)


def _back_to_microbatches(side: PyTree, of_rows: PyTree, now: Plan) -> PyTree:
    """Cotangents of the rows that the stages read, added up where they were read from."""
    floats = jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, side)
    (of_side,) = jax.linear_transpose(functools.partial(side_rows, now=now), floats)(of_rows)
    return of_side
