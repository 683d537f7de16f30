"""One tick of the circular loop, forward and backward, and the loop with all repeats' weights."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline import visit
from nnx_pipeline.pipeline.circular import _tick
from nnx_pipeline.pipeline.circular._tick import CircularCarry, CircularLoop, CircularPlan
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.pipeline.stage._vjp import add, argument_of, only, zero_gradients
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.visit import Reads, Visit

WeightsAt = Callable[[CircularPlan], PyTree]  # the weights of each stage at a tick, [stages, …]


class Others(NamedTuple):
    """What the visits of all ticks read besides weights, activations and state."""

    side: PyTree  # [microbatches, …]; each stage reads the row of its microbatch
    captured: list[Array]  # what the stage function closes over, whole on every stage

    def at(self, weights_at: WeightsAt, now: CircularPlan) -> Reads:
        return Reads(weights_at(now), visit.side_of(self.side, now.microbatch), self.captured)


class Cotangents(NamedTuple):
    carry: CircularCarry
    others: Others  # None for integers


@dataclass(frozen=True)
class TwoWayTick:
    """One tick forward, and backward from what the forward pass saved."""

    loop: CircularLoop
    visit: Visit
    needed: Others | None = None

    def forward(
        self,
        weights_at: WeightsAt,
        others: Others,
        keep: bool,
        before: tuple[CircularCarry, PyTree],
        now: CircularPlan,
    ) -> tuple[tuple[CircularCarry, PyTree], tuple[PyTree, PyTree]]:
        """Makes one tick; also gives the visits' residuals, None unless `keep`, and metrics."""

        def make(now: CircularPlan, x: Moving) -> tuple[Moving, tuple[PyTree, PyTree]]:
            (y, metrics), residuals = self.visit.run(others.at(weights_at, now), x, keep=keep)
            return y, (residuals, metrics)

        return self.loop.tick(make)(before, now)

    def backward(
        self,
        weights_at: WeightsAt,
        others: Others,
        after: Cotangents,
        now: CircularPlan,
        at: tuple[PyTree, PyTree],
    ) -> tuple[Cotangents, PyTree]:
        """The cotangents before a tick, and the gradient of the weights that it used."""
        residuals, d_metrics = at
        # A tick is linear except for the visit, so transposing the rest needs only shapes.
        carry = jax.eval_shape(lambda carry: carry, after.carry)
        how = self.loop.schedule, self.loop.shift_by, now
        select = functools.partial(_tick.stage_inputs, *how)
        pass_on = functools.partial(_tick.stage_outputs, *how)
        reads = others.at(weights_at, now)
        mid, _ = jax.eval_shape(select, carry)
        (y, written), _ = jax.eval_shape(self.visit.apply, reads, argument_of(residuals))
        # The three steps of the tick in reverse: outputs, visit, inputs.
        d_mid, d_y = jax.linear_transpose(pass_on, mid, y)(after.carry)
        d_reads, d_x = self.visit.back(residuals, reads, d_y, d_metrics, state=written)
        (before,) = jax.linear_transpose(select, carry)((d_mid, d_x))
        d_weights = self.visit.only(d_reads.weights)
        d_rows, d_closed = only(self.needed, Others(*d_reads[1:]))
        d_others = Others(_to_microbatches(others.side, d_rows, now), d_closed)
        return Cotangents(before, add(after.others, d_others)), d_weights

    def no_cotangents(self, d_stream: PyTree, others: Others) -> Cotangents:
        """The cotangents after the last tick: of the stream, and zeros for all else."""
        # Called only for the structure and the shapes of the carry, which then becomes zeros.
        empty = dataclasses.replace(self.loop, bubble_fill=0.0).start(d_stream)
        carry = jax.tree.map(jnp.zeros_like, empty)
        d_closed = zero_gradients(others.captured, others.captured, self.visit.grad_dtype)
        d_others = Others(zero_gradients(others.side, others.side), d_closed)
        return Cotangents(carry._replace(stream=d_stream), only(self.needed, d_others))


@dataclass(frozen=True)
class WholeLoop:
    """All ticks as one scan, with the weights of all repeats: as stored, or gathered before it."""

    tick: TwoWayTick

    def forward(
        self, params: PyTree, moving: Moving, others: Others, *, keep: bool
    ) -> tuple[tuple[CircularCarry, PyTree], PyTree, Any]:
        """Makes all ticks with the weights as they are stored, `[repeats, stages, …]`.

        Returns carry and state after the last tick, the metrics of every tick, and what `backward`
        needs: the gathered weights, and with `keep` the residuals of every tick.
        """
        loop, (stream, state) = self.tick.loop, moving
        gathered = self.tick.visit.fsdp_gather.gather(params)
        split = repeats.split_to_read(gathered, cast_at_use=loop.cast_at_use)
        step = functools.partial(self.tick.forward, _reading(split), others, keep)
        start = loop.start(stream), state
        end, (residuals, metrics) = _tick.walk_ticks(loop.schedule, step, start, loop.plan)
        return end, metrics, (split, residuals)

    def backward(
        self, params: PyTree, others: Others, saved: tuple[Any, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        """The gradient of `params`, and the cotangents before the first tick."""
        (split, residuals), d_metrics = saved
        loop, visit = self.tick.loop, self.tick.visit

        def step(
            totals: tuple[PyTree, Cotangents], at: tuple[CircularPlan, tuple[PyTree, PyTree]]
        ) -> tuple[tuple[PyTree, Cotangents], None]:
            d_params, after = totals
            before, d_weights = self.tick.backward(_reading(split), others, after, *at)
            d_weights = visit.fsdp_gather.of_visit(d_weights, params)
            return (visit.add(d_params, d_weights, at[0].repeat), before), None

        rows = (loop.plan, (residuals, d_metrics))
        start = (visit.zeros(params), last)
        (d_params, first), _ = _tick.walk_ticks(loop.schedule, step, start, rows, reverse=True)
        return visit.total(d_params, params), first


def _reading(split: PyTree) -> WeightsAt:
    return lambda now: visit.weights_of(split, now.repeat)


def _to_microbatches(side: PyTree, d_rows: PyTree, now: CircularPlan) -> PyTree:
    """Cotangents of the rows that the stages read, added up to those of `[microbatches, …]`."""
    wanted = jax.tree.map(
        lambda d_row, leaf: None if d_row is None else leaf,
        d_rows,
        side,
        is_leaf=lambda leaf: leaf is None,
    )
    read = functools.partial(visit.side_of, microbatch=now.microbatch)
    (d_side,) = jax.linear_transpose(read, wanted)(d_rows)
    return d_side
