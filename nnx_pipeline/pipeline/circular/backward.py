"""One tick of the circular loop, forward and backward, and the walk with all weights gathered."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.circular.plan import Plan, make_plan
from nnx_pipeline.pipeline.circular.tick import (
    Carry,
    Loop,
    hold_weights,
    stage_side,
    stage_weights,
)
from nnx_pipeline.pipeline.exchange.buffers import over_stage
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.stage.repeats import add_at_repeat, hold, stacked
from nnx_pipeline.pipeline.stage.vjp import (
    add,
    argument_of,
    backward_from,
    forward_keeping,
    only,
    zero_gradients,
)
from nnx_pipeline.pipeline.weights.gathered import WeightGathering

WeightsAt = Callable[[Plan], PyTree]  # the weights of each stage at a tick, [stages, …]


class Beside(NamedTuple):
    """What a visit reads besides weights and activations; it is the same for all ticks."""

    side: PyTree  # [microbatches, …]; each stage reads the row of its microbatch
    closed: list[Array]  # what the stage function closes over, whole on every stage


class Cotangents(NamedTuple):
    """The cotangents that pass from tick to tick, besides the gradients of the weights."""

    carry: Carry
    beside: Beside  # None for integers


@dataclass(frozen=True)
class TwoWayTick:
    """One tick forward, and the same tick backward from what the forward pass kept.

    - `loop`: what every tick does.
    - `apply`: makes the visits of all stages at a tick, within a `jax.checkpoint` of its own. Its
      arguments are what the visits read, as `visit_reads` returns it, and the activations that
      enter the stages, `[stages, …]`. It returns the outputs of the stages and their metrics.
    - `grad_dtype`: the dtype of the gradient accumulators, None for that of the parameters.
    - `weights`: how the weights are held during the loop.
    - `asked`: whether the gradient of each parameter, and of each array of `Beside`, is asked for;
      None in the forward pass, which does not read it.
    """

    loop: Loop
    apply: Callable[[PyTree, Moving], tuple[Moving, PyTree]]
    grad_dtype: jax.typing.DTypeLike | None
    weights: WeightGathering
    asked: tuple[PyTree, Beside] | None = None

    def forward(
        self,
        weights_at: WeightsAt,
        beside: Beside,
        keep: bool,
        before: tuple[Carry, PyTree],
        now: Plan,
    ) -> tuple[tuple[Carry, PyTree], tuple[PyTree, PyTree]]:
        """Makes one tick.

        - `weights_at`: gives the weights of each stage at the tick.
        - `beside`: what the visits read besides weights and activations.
        - `keep`: whether to return what the derivative needs, or None in its place.
        - `before`: the carry before the tick, and the state of all layers.
        - `now`: the tick's row of the timetable.

        Returns both as they are after the tick, and a pair: what the tick's derivative needs, and
        the metrics of the visits.
        """

        def visit(now: Plan, x: Moving) -> tuple[Moving, tuple[PyTree, PyTree]]:
            needed = visit_reads(weights_at, beside, now)
            (y, metrics), kept = forward_keeping(self.apply, needed, x)
            return y, (kept if keep else None, metrics)

        return self.loop.tick(visit)(before, now)

    def backward(
        self,
        weights_at: WeightsAt,
        beside: Beside,
        after: Cotangents,
        now: Plan,
        at: tuple[PyTree, PyTree],
    ) -> tuple[Cotangents, PyTree]:
        """The cotangents before a tick, and the gradient of the weights that it used.

        - `weights_at`, `beside`, `now`: as for `forward`.
        - `after`: the cotangents after the tick.
        - `at`: what the forward pass kept of the tick, and the cotangents of its metrics; None for
          a metric whose gradient is not asked for.
        """
        kept, d_metrics = at
        # A tick is linear except for the visit, so transposing the rest needs only shapes.
        carry = jax.eval_shape(lambda carry: carry, after.carry)
        select = functools.partial(self.loop.before_visit, now)
        pass_on = functools.partial(self.loop.after_visit, now)
        needed = visit_reads(weights_at, beside, now)
        mid, _ = jax.eval_shape(select, carry)
        (y, written), _ = jax.eval_shape(self.apply, needed, argument_of(kept))
        # The three steps of the tick in reverse: outputs, visit, inputs.
        d_mid, d_y = jax.linear_transpose(pass_on, mid, y)(after.carry)
        d_moving = d_y, jax.tree.map(lambda _: None, written)  # the state has no gradient
        (d_weights, d_rows, d_closed), (d_x, _) = backward_from(kept, needed, (d_moving, d_metrics))
        (before,) = jax.linear_transpose(select, carry)((d_mid, d_x))
        asked, asked_beside = self._asked
        d_weights = only(asked, d_weights)
        d_rows, d_closed = only(asked_beside, Beside(d_rows, d_closed))
        d_side = _to_microbatches(beside.side, d_rows, now)
        return Cotangents(before, add(after.beside, Beside(d_side, d_closed))), d_weights

    def no_cotangents(self, d_stream: PyTree, beside: Beside) -> Cotangents:
        """The cotangents after the last tick: those of the stream, and zeros for everything else.

        - `d_stream`: the cotangents of the stream after the last tick.
        - `beside`: what the visits read, for its shapes.
        """
        # Called only for the structure and the shapes of the carry, which then becomes zeros.
        empty = dataclasses.replace(self.loop, bubble_fill=0.0).start(d_stream)
        carry = jax.tree.map(jnp.zeros_like, empty)
        d_closed = zero_gradients(beside.closed, beside.closed, self.grad_dtype)
        d_beside = Beside(zero_gradients(beside.side, beside.side), d_closed)
        return Cotangents(carry._replace(stream=d_stream), only(self._asked[1], d_beside))

    def zeros(self, params: PyTree) -> PyTree:
        """The accumulators of the gradients of all weights, None where none is asked for.

        - `params`: the weights as they are stored, `[repeats, stages, …]`.
        """
        return only(self._asked[0], self.weights.zeros(params, self.grad_dtype))

    def zeros_of_repeat(self, gathered: PyTree, params: PyTree) -> PyTree:
        """As `zeros`, for one repeat of gathered weights, `[stages, …]`."""
        # One repeat of the parameters, for the dtypes of the accumulators.
        one_repeat = jax.tree.map(lambda leaf: leaf[0], params)
        return only(self._asked[0], zero_gradients(gathered, one_repeat, self.grad_dtype))

    @property
    def _asked(self) -> tuple[PyTree, Beside]:
        assert self.asked is not None, "the backward pass sets it"
        return self.asked


class Passage(Protocol):
    """The forward and the backward walk through all ticks, for one way of holding the weights."""

    @property
    def tick(self) -> TwoWayTick:
        """What every tick of the walk does."""
        ...

    def of_asked(self, asked: tuple[PyTree, Beside]) -> "Passage":
        """The walk for what `asked` says, as of `TwoWayTick`; `backward` needs it."""
        ...

    def forward(
        self, params: PyTree, moving: Moving, beside: Beside, *, keep: bool
    ) -> tuple[tuple[Carry, PyTree], PyTree, Any]:
        """Makes all ticks, from the first to the last.

        - `params`: the weights as they are stored, `[repeats, stages, …]`.
        - `moving`: the microbatches, `[stages, slots, …]`, and the state of the layers.
        - `beside`: what the visits read besides weights and activations.
        - `keep`: whether to save what the backward walk needs of each tick.

        Returns carry and state after the last tick, the metrics of every tick, and what is saved
        for `backward`.
        """
        ...

    def backward(
        self, params: PyTree, beside: Beside, saved: tuple[Any, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        """Differentiates all ticks, from the last to the first.

        - `params`, `beside`: as for `forward`.
        - `saved`: what `forward` saved, and the cotangents of the metrics of every tick.
        - `last`: the cotangents after the last tick.

        Returns the gradient of `params`, and the cotangents before the first tick.
        """
        ...


@dataclass(frozen=True)
class AllRepeats:
    """The walk for which the weights of all repeats are gathered before the first tick."""

    tick: TwoWayTick

    def of_asked(self, asked: tuple[PyTree, Beside]) -> "AllRepeats":
        """See `Passage`."""
        return AllRepeats(dataclasses.replace(self.tick, asked=asked))

    def forward(
        self, params: PyTree, moving: Moving, beside: Beside, *, keep: bool
    ) -> tuple[tuple[Carry, PyTree], PyTree, Any]:
        """See `Passage.forward`; it saves the gathered weights and what each tick kept."""
        parts = self.tick.loop.parts
        gathered = hold_weights(self.tick.loop, self.tick.weights.gather(params))
        weights_at = functools.partial(stage_weights, parts, gathered)
        step = functools.partial(self.tick.forward, weights_at, beside, keep)
        loop, (stream, state) = self.tick.loop, moving
        end, (kept, metrics) = loop.run(step, (loop.start(stream), state))
        return end, metrics, (gathered, kept)

    def backward(
        self, params: PyTree, beside: Beside, saved: tuple[Any, PyTree], last: Cotangents
    ) -> tuple[PyTree, Cotangents]:
        """See `Passage`."""
        (gathered, kept), d_metrics = saved
        loop, weights = self.tick.loop, self.tick.weights
        weights_at = functools.partial(stage_weights, loop.parts, gathered)

        def step(
            totals: tuple[PyTree, Cotangents], at: tuple[Plan, tuple[PyTree, PyTree]]
        ) -> tuple[tuple[PyTree, Cotangents], None]:
            d_params, after = totals
            before, d_weights = self.tick.backward(weights_at, beside, after, *at)
            d_weights = weights.of_visit(d_weights, params)
            return (add_at_repeat(d_params, d_weights, over_stage(at[0].repeat)), before), None

        start = (hold(self.tick.zeros(params)), last)
        rows = (make_plan(loop.schedule), (kept, d_metrics))
        (d_params, first), _ = loop.walk(step, start, rows, reverse=True)
        return weights.scatter_gradients(stacked(d_params), params), first


def visit_reads(
    weights_at: WeightsAt, beside: Beside, now: Plan
) -> tuple[PyTree, PyTree, list[Array]]:
    """Everything that a visit reads besides the activations, selected for one tick.

    - `weights_at`: gives the weights of each stage at a tick.
    - `beside`: what the visits read besides weights and activations, for all microbatches.
    - `now`: the tick's row of the timetable.

    Returns the weights and the side inputs of each stage, both `[stages, …]`, and what the stage
    function closes over.
    """
    return weights_at(now), stage_side(beside.side, now), beside.closed


def _to_microbatches(side: PyTree, d_rows: PyTree, now: Plan) -> PyTree:
    """Cotangents of the rows that the stages read, added up to those of `[microbatches, …]`.

    - `d_rows`: None in the place of integers, and of what has no gradient asked for.
    """
    wanted = jax.tree.map(
        lambda d_row, leaf: None if d_row is None else leaf,
        d_rows,
        side,
        is_leaf=lambda leaf: leaf is None,
    )
    (d_side,) = jax.linear_transpose(functools.partial(stage_side, now=now), wanted)(d_rows)
    return d_side
