"""The circular loop with the gathered weights of at most two repeats at a time.

All stages are at the same repeat r, except in its first ticks, in which the later stages still work
on repeat r - 1. So the ticks fall into pieces, where F = delay · (stages - 1):

    fill: F ticks                    weights of repeat 0
    for r = 0 … repeats - 2:
        hold: microbatches - F ticks weights of r, while those of r + 1 are being gathered
        turn: F ticks                weights of r or of r + 1, stage by stage
    last: microbatches ticks         weights of the last repeat

There are never more than two repeats of gathered weights. The backward pass goes through the same
pieces in reverse: for `turn` it gathers r while it still holds r + 1. After `turn` the gradient of
r + 1 is complete, and is scattered during the ticks of `hold`.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.circular.backward import Beside, Cotangents, TwoWayTick
from nnx_pipeline.pipeline.circular.plan import Plan, make_plan
from nnx_pipeline.pipeline.circular.tick import Carry
from nnx_pipeline.pipeline.exchange.buffers import over_stage, where
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.stage.vjp import add


class _Pieces(NamedTuple):
    """Rows of all ticks, cut into the pieces of the loop.

    `hold` and `turn` begin with an axis of repeats - 1.
    """

    fill: PyTree
    hold: PyTree
    turn: PyTree
    last: PyTree


@dataclass(frozen=True)
class RepeatWindow:
    """The walk that holds the gathered weights of the repeat in use and of the one after it."""

    tick: TwoWayTick

    def of_asked(self, asked: tuple[PyTree, Beside]) -> "RepeatWindow":
        """See `Passage`."""
        return RepeatWindow(dataclasses.replace(self.tick, asked=asked))

    def forward(
        self, params: PyTree, moving: Moving, beside: Beside, *, keep: bool
    ) -> tuple[tuple[Carry, PyTree], PyTree, Any]:
        """See `Passage`; it saves what each tick kept, and no weights: they are gathered again."""
        schedule = self.tick.loop.schedule
        plan = _cut(schedule, make_plan(schedule))
        now = self._gather(params, jnp.int32(0))

        def run(carry: Any, plan: Plan, *window: PyTree) -> tuple[Any, PyTree]:
            weights_at = functools.partial(_stage_weights, window)
            step = functools.partial(self.tick.forward, weights_at, beside, keep)
            return jax.lax.scan(step, carry, plan)

        def turn(
            state: tuple[Any, PyTree], at: tuple[Array, Plan, Plan]
        ) -> tuple[tuple[Any, PyTree], tuple[PyTree, PyTree]]:
            (carry, now), (repeat, hold, turn) = state, at
            # Gathered here and first used in `turn`, so that the transfer overlaps with `hold`.
            after = self._gather(params, repeat + 1)
            carry, held = run(carry, hold, now)
            carry, turned = run(carry, turn, now, after)
            return (carry, after), (held, turned)

        carry, filled = run((self.tick.loop.start(moving[0]), moving[1]), plan.fill, now)
        at = (jnp.arange(schedule.repeats - 1, dtype=jnp.int32), plan.hold, plan.turn)
        (carry, now), (held, turned) = jax.lax.scan(turn, (carry, now), at)
        carry, finished = run(carry, plan.last, now)
        kept, metrics = zip(filled, held, turned, finished, strict=True)
        return carry, _joined(_Pieces(*metrics)), _Pieces(*kept)

    def backward(
        self, params: PyTree, beside: Beside, saved: tuple[Any, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        """See `Passage`."""
        schedule = self.tick.loop.schedule
        plan = _cut(schedule, make_plan(schedule))
        # What was kept of every tick, and the cotangents of its metrics.
        at_ticks = _Pieces(*zip(saved[0], _cut(schedule, saved[1]), strict=True))
        run = self._run_backward(beside)

        def zeros(gathered: PyTree) -> PyTree:
            return self.tick.zeros_of_repeat(gathered, params)

        def turn_back(state: Any, at: Any) -> tuple[Any, PyTree]:
            cotangents, later, d_later = state
            repeat, hold, turn, held, turned = at
            now = self._gather(params, repeat)
            totals = (zeros(now), d_later)
            cotangents, (d_now, d_later) = run(cotangents, totals, turn, turned, now, later)
            # The gradient of the later repeat is complete: its transfer overlaps with `hold`.
            scattered = self._scatter(d_later, params)
            cotangents, (d_now,) = run(cotangents, (d_now,), hold, held, now)
            return (cotangents, now, d_now), scattered

        now = self._gather(params, jnp.int32(schedule.repeats - 1))
        cotangents, (d_now,) = run(last, (zeros(now),), plan.last, at_ticks.last, now)
        which = jnp.arange(schedule.repeats - 1, dtype=jnp.int32)
        at = (which, plan.hold, plan.turn, at_ticks.hold, at_ticks.turn)
        (cotangents, now, d_now), d_later = jax.lax.scan(
            turn_back, (cotangents, now, d_now), at, reverse=True
        )
        cotangents, (d_first,) = run(cotangents, (d_now,), plan.fill, at_ticks.fill, now)
        d_first = self._scatter(d_first, params)
        d_params = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), d_first, d_later)
        return d_params, cotangents

    def _run_backward(self, beside: Beside) -> Callable[..., tuple[Cotangents, tuple[PyTree, ...]]]:
        """A function that goes back through some ticks, with one or two repeats of weights.

        It adds to as many gradients as there are repeats of weights.
        """

        def run(
            cotangents: Cotangents,
            totals: tuple[PyTree, ...],
            plan: Plan,
            kept: PyTree,
            *window: PyTree,
        ) -> tuple[Cotangents, tuple[PyTree, ...]]:
            weights_at = functools.partial(_stage_weights, window)

            def step(state: Any, at: tuple[Plan, PyTree]) -> tuple[Any, None]:
                cotangents, totals = state
                cotangents, d_weights = self.tick.backward(weights_at, beside, cotangents, *at)
                return (cotangents, _collect(totals, d_weights, at[0])), None

            (cotangents, totals), _ = jax.lax.scan(
                step, (cotangents, totals), (plan, kept), reverse=True
            )
            return cotangents, totals

        return run

    def _gather(self, params: PyTree, repeat: Array) -> PyTree:
        """The weights of one repeat, gathered: `[stages, …]`."""
        stored = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, repeat, axis=0, keepdims=True), params
        )
        gathered = self.tick.weights.gather(stored)
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), gathered)

    def _scatter(self, gradients: PyTree, params: PyTree) -> PyTree:
        """The gradient of one repeat as its weights are stored, `[stages, …]`."""
        whole = jax.tree.map(lambda leaf: leaf[None], gradients)
        scattered = self.tick.weights.scatter_gradients(whole, params)
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), scattered)


def _cut(schedule: CircularSchedule, whole: PyTree) -> _Pieces:
    """Cuts arrays with one row per tick into the pieces of the loop."""
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


def _stage_weights(window: tuple[PyTree, ...], now: Plan) -> PyTree:
    """Each stage's weights, from the one or two repeats that are held; `[stages, …]`."""
    if len(window) == 1:
        return window[0]
    return where(over_stage(_is_later(now)), window[1], window[0])


def _collect(totals: tuple[PyTree, ...], d_weights: PyTree, now: Plan) -> tuple[PyTree, ...]:
    """Adds the gradient of each stage to the total of the repeat that the stage was at."""
    if len(totals) == 1:
        return (add(totals[0], d_weights),)
    later, zeros = over_stage(_is_later(now)), jax.tree.map(jnp.zeros_like, d_weights)
    earlier = where(later, zeros, d_weights)
    return add(totals[0], earlier), add(totals[1], where(later, d_weights, zeros))


def _is_later(now: Plan) -> Array:
    """Which stages are at the later of two repeats, bool `[stages]`: stage 0 always is."""
    return now.repeat == now.repeat[0]
