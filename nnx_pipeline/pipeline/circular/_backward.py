"""One tick of the circular loop, forward and backward, and the loops that make all ticks.

`WholeLoop` has the weights of all repeats, `PrefetchLoop` gathers those of at most two at a time.
All stages are at the same repeat r, except in its first ticks, in which the later stages still work
on repeat r - 1. So its ticks fall into pieces, where F = delay · (stages - 1):

    fill: F ticks                      weights of repeat 0
    for r = 0 … repeats - 2:
        steady: microbatches - F ticks weights of r, while those of r + 1 are being gathered
        change: F ticks                weights of r or of r + 1, stage by stage
    last: microbatches ticks           weights of the last repeat

The backward pass goes through the same pieces in reverse. For `change` it gathers the weights of r
once more. After `change` the gradient of r + 1 is complete, and is scattered during `steady`.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline import visit
from nnx_pipeline.pipeline._exchange import over_stage, where
from nnx_pipeline.pipeline.circular import _tick
from nnx_pipeline.pipeline.circular._tick import (
    CircularCarry,
    CircularLoop,
    CircularPlan,
)
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.pipeline.stage._sums import ReadWithSums, with_sums
from nnx_pipeline.pipeline.stage._vjp import add, argument_of, only, zero_gradients
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.visit import Reads, Visit

WeightsAt = Callable[[CircularPlan], PyTree]  # the weights of each stage at a tick, [stages, …]


class Others(NamedTuple):
    """What the visits of all ticks read besides weights, activations and state."""

    side: PyTree  # [microbatches, …]; each stage reads the row of its microbatch
    captured: list[Array]  # what the stage function closes over, whole on every stage

    def at(self, weights_at: WeightsAt, now: CircularPlan) -> Reads:
        return Reads(weights_at(now), _tick.side_at(self.side, now), self.captured)


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
        d_weights = d_reads.weights
        d_side = d_reads.side if now.depth is None else d_reads.side.side
        d_rows, d_captured = only(self.needed, Others(d_side, d_reads.captured))
        d_others = Others(_to_microbatches(others.side, d_rows, now), d_captured)
        return Cotangents(before, add(after.others, d_others)), d_weights

    def readable(self, stored: PyTree) -> PyTree:
        """Parameters as a loop over ticks reads them: as stored, or gathered before it."""
        gathered = self.visit.fsdp_gather.gather(stored)
        split = repeats.split_to_read(gathered, cast_at_use=self.loop.cast_at_use)
        if not self.visit.sums_in_layers:
            return split
        return ReadWithSums.of(split, self.visit.zeros(stored))

    def no_cotangents(self, d_stream: PyTree, others: Others) -> Cotangents:
        """The cotangents after the last tick: of the stream, and zeros for all else."""
        # Called only for the structure and the shapes of the carry, which then becomes zeros.
        empty = dataclasses.replace(self.loop, bubble_fill=0.0).start(d_stream)
        carry = jax.tree.map(jnp.zeros_like, empty)
        d_captured = zero_gradients(others.captured, others.captured, self.visit.grad_dtype)
        d_others = Others(zero_gradients(others.side, others.side), d_captured)
        return Cotangents(carry._replace(stream=d_stream), only(self.needed, d_others))


@dataclass(frozen=True)
class WholeLoop:
    """All ticks as one scan, with the weights of all repeats: as stored, or gathered before it."""

    tick: TwoWayTick

    def forward(
        self, params: PyTree, moving: Moving, others: Others, *, keep: bool
    ) -> tuple[tuple[CircularCarry, PyTree], PyTree, tuple[PyTree, PyTree]]:
        """Makes all ticks with the weights as they are stored, `[repeats, stages, …]`.

        Returns carry and state after the last tick, the metrics of every tick, and what `backward`
        needs: the gathered weights, and with `keep` the residuals of every tick.
        """
        loop, (stream, state) = self.tick.loop, moving
        split = self.tick.readable(params)
        step = functools.partial(self.tick.forward, _reading(split), others, keep)
        start = loop.start(stream), state
        end, (residuals, metrics) = _tick.walk_ticks(loop.schedule, step, start, loop.plan)
        return end, metrics, (split, residuals)

    def backward(
        self, params: PyTree, others: Others, saved: tuple[PyTree, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        """The gradient of `params`, and the cotangents before the first tick."""
        (split, residuals), d_metrics = saved
        loop, visit = self.tick.loop, self.tick.visit

        def step(
            totals: tuple[PyTree, Cotangents], at: tuple[CircularPlan, tuple[PyTree, PyTree]]
        ) -> tuple[tuple[PyTree, Cotangents], None]:
            d_params, after = totals
            weights_at = _reading(with_sums(split, d_params))
            before, d_weights = self.tick.backward(weights_at, others, after, *at)
            return (visit.add(d_params, d_weights, params, at[0].repeat), before), None

        rows = (loop.plan, (residuals, d_metrics))
        start = (visit.zeros(params), last)
        (d_params, first), _ = _tick.walk_ticks(loop.schedule, step, start, rows, reverse=True)
        return visit.total(d_params, params), first


def _reading(split: PyTree) -> WeightsAt:
    return lambda now: visit.weights_of(split, now.repeat)


def _to_microbatches(side: PyTree, d_rows: PyTree, now: CircularPlan) -> PyTree:
    """Cotangents of the rows that the stages read, added up to those of `[microbatches, …]`."""
    wanted = jax.tree.map(lambda leaf, d_row: None if d_row is None else leaf, side, d_rows)
    read = functools.partial(visit.side_of, microbatch=now.microbatch)
    (d_side,) = jax.linear_transpose(read, wanted)(d_rows)
    return d_side


class _Pieces(NamedTuple):
    """Rows of all ticks in pieces; `steady` and `change` begin with an axis of repeats - 1."""

    fill: PyTree
    steady: PyTree
    change: PyTree
    last: PyTree


@dataclass(frozen=True)
class PrefetchLoop:
    """As `WholeLoop`, with gathered weights of two repeats, which are gathered again backward."""

    tick: TwoWayTick

    def forward(
        self, params: PyTree, moving: Moving, others: Others, *, keep: bool
    ) -> tuple[tuple[CircularCarry, PyTree], PyTree, _Pieces]:
        schedule = self.tick.loop.schedule
        plan = _cut(schedule, self.tick.loop.plan)
        now = self._gather(params, jnp.int32(0))

        def run(carry: PyTree, plan: CircularPlan, *weights: PyTree) -> tuple[PyTree, PyTree]:
            weights_at = functools.partial(_stage_weights, weights)
            step = functools.partial(self.tick.forward, weights_at, others, keep)
            return jax.lax.scan(step, carry, plan)

        def change(
            state: tuple[PyTree, PyTree], at: tuple[Array, CircularPlan, CircularPlan]
        ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, PyTree]]:
            (carry, now), (repeat, steady, change) = state, at
            # Gathered here and first used in `change`, so that the transfer overlaps with `steady`.
            after = self._gather(params, repeat + 1)
            carry, settled = run(carry, steady, now)
            carry, changed = run(carry, change, now, after)
            return (carry, after), (settled, changed)

        carry, filled = run((self.tick.loop.start(moving[0]), moving[1]), plan.fill, now)
        at = (jnp.arange(schedule.repeats - 1, dtype=jnp.int32), plan.steady, plan.change)
        (carry, now), (settled, changed) = jax.lax.scan(change, (carry, now), at)
        carry, finished = run(carry, plan.last, now)
        residuals, metrics = zip(filled, settled, changed, finished, strict=True)
        return carry, _joined(_Pieces(*metrics)), _Pieces(*residuals)

    def backward(
        self, params: PyTree, others: Others, saved: tuple[_Pieces, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        schedule = self.tick.loop.schedule
        plan = _cut(schedule, self.tick.loop.plan)
        # The residuals of every tick, and the cotangents of its metrics.
        at_ticks = _Pieces(*zip(saved[0], _cut(schedule, saved[1]), strict=True))
        run = functools.partial(self._back, others)

        def zeros(gathered: PyTree) -> PyTree:
            # One repeat of the parameters, for the dtypes of the accumulators.
            one_repeat = jax.tree.map(lambda leaf: leaf[0], params)
            visits = self.tick.visit
            return visits.only(zero_gradients(gathered, one_repeat, visits.grad_dtype))

        def change_back(state: PyTree, at: PyTree) -> tuple[PyTree, PyTree]:
            cotangents, later, d_later = state
            repeat, steady, change, settled, changed = at
            now = self._gather(params, repeat)
            totals = (zeros(now), d_later)
            cotangents, (d_now, d_later) = run(cotangents, totals, change, changed, now, later)
            # The gradient of the later repeat is complete: its transfer overlaps with `steady`.
            scattered = self._scatter(d_later, params)
            cotangents, (d_now,) = run(cotangents, (d_now,), steady, settled, now)
            return (cotangents, now, d_now), scattered

        now = self._gather(params, jnp.int32(schedule.repeats - 1))
        cotangents, (d_now,) = run(last, (zeros(now),), plan.last, at_ticks.last, now)
        which = jnp.arange(schedule.repeats - 1, dtype=jnp.int32)
        at = (which, plan.steady, plan.change, at_ticks.steady, at_ticks.change)
        (cotangents, now, d_now), d_later = jax.lax.scan(
            change_back, (cotangents, now, d_now), at, reverse=True
        )
        cotangents, (d_first,) = run(cotangents, (d_now,), plan.fill, at_ticks.fill, now)
        d_first = self._scatter(d_first, params)
        d_params = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), d_first, d_later)
        return d_params, cotangents

    def _back(
        self,
        others: Others,
        cotangents: Cotangents,
        totals: tuple[PyTree, ...],
        plan: CircularPlan,
        residuals: PyTree,
        *weights: PyTree,
    ) -> tuple[Cotangents, tuple[PyTree, ...]]:
        """Goes back through ticks, with one or two repeats of weights and gradients."""
        weights_at = functools.partial(_stage_weights, weights)

        def step(state: PyTree, at: tuple[CircularPlan, PyTree]) -> tuple[PyTree, None]:
            cotangents, totals = state
            cotangents, d_weights = self.tick.backward(weights_at, others, cotangents, *at)
            d_weights = self.tick.visit.only(d_weights)
            return (cotangents, _collect(totals, d_weights, at[0])), None

        state, _ = jax.lax.scan(step, (cotangents, totals), (plan, residuals), reverse=True)
        return state

    def _gather(self, params: PyTree, repeat: Array) -> PyTree:
        stored = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, repeat, axis=0, keepdims=True), params
        )
        gathered = self.tick.visit.fsdp_gather.gather(stored)
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), gathered)

    def _scatter(self, gradients: PyTree, params: PyTree) -> PyTree:
        whole = jax.tree.map(lambda leaf: leaf[None], gradients)
        scattered = self.tick.visit.fsdp_gather.scatter_gradients(whole, params)
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), scattered)


def _cut(schedule: CircularSchedule, whole: PyTree) -> _Pieces:
    fill, microbatches, turns = schedule.bubble_ticks, schedule.microbatches, schedule.repeats - 1

    def middle(leaf: Array) -> Array:
        between = leaf[fill : fill + turns * microbatches]
        return between.reshape(turns, microbatches, *leaf.shape[1:])

    return _Pieces(
        fill=jax.tree.map(lambda leaf: leaf[:fill], whole),
        steady=jax.tree.map(lambda leaf: middle(leaf)[:, : microbatches - fill], whole),
        change=jax.tree.map(lambda leaf: middle(leaf)[:, microbatches - fill :], whole),
        last=jax.tree.map(lambda leaf: leaf[fill + turns * microbatches :], whole),
    )


def _joined(pieces: _Pieces) -> PyTree:
    def joined(fill: Array, steady: Array, change: Array, last: Array) -> Array:
        between = jnp.concatenate([steady, change], axis=1)
        return jnp.concatenate([fill, between.reshape(-1, *fill.shape[1:]), last])

    return jax.tree.map(joined, *pieces)


def _stage_weights(weights: tuple[PyTree, ...], now: CircularPlan) -> PyTree:
    if len(weights) == 1:
        return weights[0]
    return where(over_stage(_is_later(now)), weights[1], weights[0])


def _collect(
    totals: tuple[PyTree, ...], d_weights: PyTree, now: CircularPlan
) -> tuple[PyTree, ...]:
    if len(totals) == 1:
        return (add(totals[0], d_weights),)
    later, zeros = over_stage(_is_later(now)), jax.tree.map(jnp.zeros_like, d_weights)
    earlier = where(later, zeros, d_weights)
    return add(totals[0], earlier), add(totals[1], where(later, d_weights, zeros))


def _is_later(now: CircularPlan) -> Array:
    """Which stages are at the later of two repeats, bool `[stages]`: stage 0 always is."""
    return now.repeat == now.repeat[0]
