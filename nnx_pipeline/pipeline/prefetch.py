"""The circular loop with a window of two repeats' weights.

All stages are at the same repeat r but for the first ticks of it, in which the later stages still
work on repeat r - 1. So the ticks fall into pieces, where F = delay · (stages - 1):

    fill: F ticks                    weights of repeat 0
    for r = 0 … repeats - 2:
        hold: microbatches - F ticks weights of r, while those of r + 1 are being gathered
        turn: F ticks                weights of r or of r + 1, stage by stage
    last: microbatches ticks         weights of the last repeat

Never are there more than two repeats of gathered weights. The backward pass goes the same way back:
it gathers r beside r + 1 for `turn`, and then r + 1 has its whole gradient, which is given back
while the ticks of `hold` go by.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.accumulate import Beside, Cotangents, Ticks
from nnx_pipeline.pipeline.buffers import over_stage, where
from nnx_pipeline.pipeline.stage_vjp import add, zero_gradients
from nnx_pipeline.pipeline.ticks import Carry, Plan, make_plan


class _Pieces(NamedTuple):
    """Something of every tick, cut as the ticks are; `hold` and `turn` have an axis of repeats."""

    fill: PyTree
    hold: PyTree
    turn: PyTree
    last: PyTree


def forward_through(
    ticks: Ticks, params: PyTree, stream: PyTree, beside: Beside, *, keep: bool
) -> tuple[Carry, PyTree, Any]:
    """All ticks: the carry after the last one, metrics, and what to save; see `accumulate`."""
    plan, repeats = _cut(ticks, make_plan(ticks.schedule)), ticks.schedule.repeats
    lend = functools.partial(_lend, ticks, params)
    now = lend(jnp.int32(0))

    def run(carry: Carry, plan: Plan, *window: PyTree) -> tuple[Carry, PyTree]:
        select = functools.partial(_select, window)
        return jax.lax.scan(functools.partial(ticks.forward, select, beside, keep), carry, plan)

    def turn(
        state: tuple[Carry, PyTree], at: tuple[Array, Plan, Plan]
    ) -> tuple[tuple[Carry, PyTree], tuple[PyTree, PyTree]]:
        (carry, now), (repeat, hold, turn) = state, at
        after = lend(repeat + 1)
        carry, held = run(carry, hold, now)
        carry, turned = run(carry, turn, now, after)
        return (carry, after), (held, turned)

    carry, filled = run(ticks.start(stream), plan.fill, now)
    at = (jnp.arange(repeats - 1, dtype=jnp.int32), plan.hold, plan.turn)
    (carry, now), (held, turned) = jax.lax.scan(turn, (carry, now), at)
    carry, finished = run(carry, plan.last, now)
    kept, metrics = zip(filled, held, turned, finished, strict=True)
    return carry, _joined(_Pieces(*metrics)), _Pieces(*kept)


def backward_through(
    ticks: Ticks, params: PyTree, beside: Beside, saved: tuple[Any, PyTree], last: Cotangents
) -> tuple[PyTree, Cotangents]:
    """All ticks backward: the gradient of the parameters, and the cotangents before the first."""
    plan, repeats = _cut(ticks, make_plan(ticks.schedule)), ticks.schedule.repeats
    # What was kept of every tick, and the cotangents of its metrics.
    at_ticks = _Pieces(*zip(saved[0], _cut(ticks, saved[1]), strict=True))
    lend = functools.partial(_lend, ticks, params)
    one_repeat = jax.tree.map(lambda leaf: leaf[0], params)

    def zeros(lent: PyTree) -> PyTree:
        return zero_gradients(lent, one_repeat, ticks.grad_dtype)

    def run(
        cotangents: Cotangents,
        totals: tuple[PyTree, ...],
        plan: Plan,
        kept: PyTree,
        *window: PyTree,
    ) -> tuple[Cotangents, tuple[PyTree, ...]]:
        select = functools.partial(_select, window)

        def tick(state: Any, at: tuple[Plan, PyTree]) -> tuple[Any, None]:
            cotangents, totals = state
            cotangents, of_stage = ticks.backward(select, beside, cotangents, *at)
            return (cotangents, _collect(totals, of_stage, at[0])), None

        (cotangents, totals), _ = jax.lax.scan(
            tick, (cotangents, totals), (plan, kept), reverse=True
        )
        return cotangents, totals

    def turn_back(state: Any, at: Any) -> tuple[Any, PyTree]:
        cotangents, later, of_later = state
        repeat, hold, turn, held, turned = at
        now = lend(repeat)
        cotangents, (of_now, of_later) = run(
            cotangents, (zeros(now), of_later), turn, turned, now, later
        )
        given_back = _give_back(ticks, of_later, params)
        cotangents, (of_now,) = run(cotangents, (of_now,), hold, held, now)
        return (cotangents, now, of_now), given_back

    now = lend(jnp.int32(repeats - 1))
    cotangents, (of_now,) = run(last, (zeros(now),), plan.last, at_ticks.last, now)
    which = jnp.arange(repeats - 1, dtype=jnp.int32)
    at = (which, plan.hold, plan.turn, at_ticks.hold, at_ticks.turn)
    (cotangents, now, of_now), of_later = jax.lax.scan(
        turn_back, (cotangents, now, of_now), at, reverse=True
    )
    cotangents, (of_first,) = run(cotangents, (of_now,), plan.fill, at_ticks.fill, now)
    of_first = _give_back(ticks, of_first, params)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), of_first, of_later), cotangents


def _cut(ticks: Ticks, whole: PyTree) -> _Pieces:
    """Arrays with a row per tick, cut as the ticks are."""
    schedule = ticks.schedule
    fill, microbatches, turns = schedule.bubble_ticks, schedule.microbatches, schedule.repeats - 1

    def middle(leaf: Array) -> Array:
        between = leaf[fill : fill + turns * microbatches]
        return between.reshape(turns, microbatches, *leaf.shape[1:])

    return _Pieces(
        fill=jax.tree.map(lambda leaf: leaf[:fill], whole),
        hold=jax.tree.map(lambda leaf: middle(leaf)[:, : microbatches - fill], whole),
        turn=jax.tree.map(lambda leaf: middle(leaf)[:, microbatches - fill :], whole),
        last=jax.tree.map(lambda leaf: leaf[fill + turns * microbatches :], whole),
    )


def _joined(pieces: _Pieces) -> PyTree:
    """The inverse of `_cut`."""

    def one(fill: Array, hold: Array, turn: Array, last: Array) -> Array:
        between = jnp.concatenate([hold, turn], axis=1)
        return jnp.concatenate([fill, between.reshape(-1, *fill.shape[1:]), last])

    return jax.tree.map(one, *pieces)


def _lend(ticks: Ticks, params: PyTree, repeat: Array) -> PyTree:
    """The weights of one repeat, gathered: `[stages, …]`."""
    stored = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, repeat, axis=0, keepdims=True), params
    )
    return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), ticks.lending.lend(stored))


def _give_back(ticks: Ticks, gradients: PyTree, params: PyTree) -> PyTree:
    """The gradient of one repeat as its weights are stored, `[stages, …]`."""
    back = ticks.lending.give_back(jax.tree.map(lambda leaf: leaf[None], gradients), params)
    return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), back)


def _select(window: tuple[PyTree, ...], now: Plan) -> PyTree:
    """Each stage's weights: those of the window's only repeat, or of one of its two."""
    if len(window) == 1:
        return window[0]
    return where(over_stage(_is_later(now)), window[1], window[0])


def _collect(totals: tuple[PyTree, ...], of_stage: PyTree, now: Plan) -> tuple[PyTree, ...]:
    """Adds each stage's gradient to that of the repeat it was at."""
    if len(totals) == 1:
        return (add(totals[0], of_stage),)
    later, zeros = over_stage(_is_later(now)), jax.tree.map(jnp.zeros_like, of_stage)
    earlier = where(later, zeros, of_stage)
    return add(totals[0], earlier), add(totals[1], where(later, of_stage, zeros))


def _is_later(now: Plan) -> Array:
    """Which stages have turned to the later repeat, `[stages]`: the first one always has."""
    return now.repeat == now.repeat[0]
