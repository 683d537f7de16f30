"""The ticks of 1F1B: every stage forwards one microbatch and takes another one back."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.buffers import (
    empty_ring,
    from_stage,
    mark_stage,
    over_stage,
    rows,
    to_stages,
    where,
)
from nnx_pipeline.pipeline.lend import Lending
from nnx_pipeline.pipeline.metrics import (
    Mean,
    Metric,
    counts,
    identity,
    include,
    is_metric,
    over_all_stages,
    values,
    weights_like,
)
from nnx_pipeline.pipeline.one_f_one_b_plan import Plan, make_plan
from nnx_pipeline.pipeline.one_f_one_b_state import Held, Inputs, State, Weights
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.shift import ShiftName, shift
from nnx_pipeline.pipeline.stage_vjp import (
    add,
    add_at_repeat,
    backward_from,
    forward_keeping,
    none_for_integers,
    zero_gradients,
)
from nnx_pipeline.pipeline.stages import OverStages, select_repeat, select_slot


class _Phase(NamedTuple):
    """What is done in each tick of a range of ticks."""

    ticks: range
    forward: bool
    leave: bool
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Loop:
    """All ticks; the fields are the arguments of `run_one_f_one_b` that are not arrays.

    The functions have what they close over as a first argument, see `hoist`.
    """

    enter: Callable[..., PyTree]
    apply_stage: Callable[..., tuple[PyTree, PyTree]]
    leave: Callable[..., Array]
    schedule: OneForwardOneBackward
    metric_weights: PyTree
    shift_by: ShiftName
    grad_dtype: jax.typing.DTypeLike | None
    lending: Lending
    over: OverStages
    bubble_fill: float

    def run(self, weights: Held, inputs: Inputs, *, differentiate: bool) -> State:
        """The state after the last tick, without gradients unless they are asked for."""
        filling, steady, draining = self.schedule.phases
        phases = [
            _Phase(filling, forward=True, leave=False, backward=False),
            _Phase(steady, forward=True, leave=True, backward=differentiate),
            _Phase(draining, forward=False, leave=False, backward=True),
        ]
        plan = make_plan(self.schedule)
        stored, weights = weights, weights._replace(stages=self.lending.lend(weights.stages))
        state, kept = self._start(weights, inputs, plan, keep=differentiate)
        if differentiate:
            gradients = zero_gradients(weights, stored, self.grad_dtype)
            each = to_stages(gradients.closed, self.schedule.stages)
            gradients = gradients._replace(closed=each)
            state = state._replace(gradients=gradients, returned=state.given)
        for phase in phases if differentiate else phases[:2]:
            if phase.ticks:
                now = jax.tree.map(lambda leaf, at=phase.ticks: leaf[at.start : at.stop], plan)
                tick = functools.partial(self._tick, weights, inputs, phase, kept)
                state, _ = jax.lax.scan(tick, state, now)
        if state.gradients is None:
            return state
        back = self.lending.give_back(state.gradients.stages, stored.stages)
        of_closed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), state.gradients.closed)
        return state._replace(gradients=state.gradients._replace(stages=back, closed=of_closed))

    def visit_once(self, weights: Weights, inputs: Inputs) -> None:
        """Calls each function as the ticks will, for its types; nothing is computed."""

        def call(weights: Weights, inputs: Inputs) -> Array:
            stages = self.lending.lend(weights.stages)
            held = Held((weights.enter, []), stages, (weights.leave, []), [])
            now = jax.tree.map(lambda leaf: leaf[0], make_plan(self.schedule))
            x = self._entering(held, inputs, now)
            (y, _), _ = self._visit(held, inputs, now, x, keep=False)
            return self._leaving(held.leave, from_stage(y, self.schedule.stages - 1), inputs, now)

        jax.eval_shape(call, weights, inputs)

    def total(self, state: State) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss to minimise; what left the last stage, and the metrics of all visits."""
        metrics = over_all_stages(state.metrics, self._visits)
        weights = weights_like(self.metric_weights, metrics)

        def share(weight: Any, metric: Metric) -> Array:
            weighed = jnp.asarray(weight, metric.value.dtype) * metric.value
            return jnp.sum(weighed).astype(jnp.float32) if counts(weight) else jnp.float32(0)

        shares = jax.tree.map(share, weights, metrics)
        return jax.tree.reduce(jnp.add, shares, state.loss), (state.loss, values(metrics))

    @property
    def _visits(self) -> int:
        """How often the function of a stage is applied."""
        schedule = self.schedule
        return schedule.microbatches * schedule.repeats * schedule.stages

    def _start(self, weights: Held, inputs: Inputs, plan: Plan, *, keep: bool) -> tuple[State, Any]:
        """The state before the first tick, and the tree of what a visit keeps."""

        def first_visit(weights: Held, inputs: Inputs, plan: Plan) -> Any:
            now = jax.tree.map(lambda leaf: leaf[0], plan)
            x = self._entering(weights, inputs, now)
            return x, self._visit(weights, inputs, now, x, keep=keep)

        x, ((_, metrics), kept) = jax.eval_shape(first_visit, weights, inputs, plan)
        kept, tree = jax.tree.flatten(kept)
        nothing = jax.tree.map(lambda leaf: empty_ring(leaf, None, self.bubble_fill), x)
        return State(
            given=nothing,
            returned=None,
            ring=[empty_ring(leaf, self.schedule.ring_slots, self.bubble_fill) for leaf in kept],
            gradients=None,
            loss=jnp.zeros((), jnp.float32),
            metrics=jax.tree.map(
                lambda metric: type(metric)(empty_ring(metric.value, None, identity(metric))),
                metrics,
                is_leaf=is_metric,
            ),
        ), tree

    def _tick(
        self, weights: Held, inputs: Inputs, phase: _Phase, kept: Any, state: State, now: Plan
    ) -> tuple[State, None]:
        of_output = None
        if phase.forward:
            state = self._forward(weights, inputs, now, state)
        if phase.leave:
            state, of_output = self._leave(weights, inputs, now, state)
        if phase.backward:
            state = self._backward(weights, inputs, now, kept, state, of_output)
        return state, None

    def _forward(self, weights: Held, inputs: Inputs, now: Plan, state: State) -> State:
        """Every stage takes a microbatch one step on."""
        entering = self._entering(weights, inputs, now)
        arrived = jax.tree.map(lambda leaf: shift(leaf, by=1, how=self.shift_by), state.given)
        # A stage in a bubble works on what enters: values that its derivative is fit for.
        forwards = over_stage(now.forwards)
        x = where(over_stage(now.fresh), entering, arrived)
        keep = state.gradients is not None
        (y, metrics), kept = self._visit(weights, inputs, now, x, keep=keep)

        def write(ring: Array, leaf: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(ring, over_stage(leaf), now.write, axis=1)

        return state._replace(
            given=y,
            ring=jax.tree.map(write, state.ring, jax.tree.leaves(kept)),
            metrics=include(forwards, state.metrics, metrics),
        )

    def _leave(
        self, weights: Held, inputs: Inputs, now: Plan, state: State
    ) -> tuple[State, PyTree]:
        """The loss of the microbatch that leaves, and the cotangent that it goes back with.

        All devices work on it.
        """

        def loss_of(weights: tuple[PyTree, list[Array]], output: PyTree) -> Array:
            return self._leaving(weights, output, inputs, now)

        def leave(loss: Array, gradients: PyTree, given: PyTree) -> tuple[Array, PyTree, PyTree]:
            output = from_stage(given, self.schedule.stages - 1)
            if gradients is None:
                return loss + loss_of(weights.leave, output), None, None
            of_microbatch, back = jax.vjp(loss_of, weights.leave, output)
            of_weights, of_output = back(jnp.ones_like(of_microbatch))
            of_weights = none_for_integers(of_weights)
            return loss + of_microbatch, add(gradients, of_weights), of_output

        def stay(loss: Array, gradients: PyTree, given: PyTree) -> tuple[Array, PyTree, PyTree]:
            nothing = (
                None if gradients is None else jax.tree.map(jnp.zeros_like, from_stage(given, 0))
            )
            return loss, gradients, nothing

        kept = state.gradients
        loss, of_leave, of_output = self._if_due(
            now.leaves, leave, stay, state.loss, kept and kept.leave, state.given
        )
        gradients = kept and kept._replace(leave=of_leave)
        return state._replace(loss=loss, gradients=gradients), of_output

    def _backward(
        self,
        weights: Held,
        inputs: Inputs,
        now: Plan,
        kept: Any,
        state: State,
        of_output: PyTree,
    ) -> State:
        """Every stage takes a microbatch one step back and adds up the gradient of its weights."""
        if state.gradients is None:
            return state
        stages = self.schedule.stages
        arrived = jax.tree.map(lambda leaf: shift(leaf, by=-1, how=self.shift_by), state.returned)
        if of_output is not None:
            turns = mark_stage(stages - 1, stages)
            turns = turns if self.schedule.repeats == 1 else turns & now.leaves
            arrived = where(turns, to_stages(of_output, stages), arrived)
        takes_back = over_stage(now.takes_back)
        arrived = where(takes_back, arrived, jax.tree.map(jnp.zeros_like, arrived))
        metrics = jax.tree.map(
            functools.partial(self._of_metric, takes_back),
            weights_like(self.metric_weights, state.metrics),
            state.metrics,
        )
        stored = jax.tree.unflatten(kept, select_slot(state.ring, over_stage(now.read)))
        needed = _needed(weights, inputs, now.backward, now.backward_repeat)

        def back(kept: PyTree, needed: tuple[PyTree, PyTree], given: tuple[PyTree, PyTree]) -> Any:
            return backward_from(kept, (*needed, weights.closed), given)

        (of_stages, _, of_closed), of_x = self.over(back)(stored, needed, (arrived, metrics))
        gradients = state.gradients._replace(
            stages=add_at_repeat(
                state.gradients.stages, of_stages, over_stage(now.backward_repeat)
            ),
            enter=self._return(weights.enter, inputs, now, state.gradients.enter, of_x),
            closed=add(state.gradients.closed, of_closed),
        )
        return state._replace(returned=of_x, gradients=gradients)

    def _return(
        self, held: Any, inputs: Inputs, now: Plan, gradients: PyTree, of_x: PyTree
    ) -> PyTree:
        """Adds the gradient of what brought in the microbatch that has come back."""
        row = _row(inputs.enter, now.returning)

        def enter(held: tuple[PyTree, list[Array]]) -> PyTree:
            weights, closed = held
            return self.enter(closed, weights, row)

        def back(gradients: PyTree, of_x: PyTree) -> PyTree:
            _, enter_back = jax.vjp(enter, held)
            (of_weights,) = enter_back(from_stage(of_x, 0))
            return add(gradients, none_for_integers(of_weights))

        return self._if_due(now.returns, back, lambda gradients, _: gradients, gradients, of_x)

    def _if_due(
        self, due: Array, function: Callable[..., Any], otherwise: Callable[..., Any], *state: Any
    ) -> Any:
        """What is not due at every tick: with one repeat it is, but for bubbles that give zeros."""
        if self.schedule.repeats == 1:
            return function(*state)
        return jax.lax.cond(due, function, otherwise, *state)

    def _entering(self, weights: Held, inputs: Inputs, now: Plan) -> PyTree:
        """The microbatch that enters, on every stage."""
        of_enter, closed = weights.enter
        x = self.enter(closed, of_enter, _row(inputs.enter, now.entering))
        return to_stages(x, self.schedule.stages)

    def _leaving(self, weights: Any, output: PyTree, inputs: Inputs, now: Plan) -> Array:
        """The loss of the microbatch that leaves."""
        of_leave, closed = weights
        return self.leave(closed, of_leave, output, _row(inputs.leave, now.leaving))

    def _visit(self, weights: Held, inputs: Inputs, now: Plan, x: PyTree, *, keep: bool) -> Any:
        """What the stages give, and what their derivatives need."""

        def apply(needed: tuple[PyTree, PyTree, list[Array]], x: PyTree) -> tuple[PyTree, PyTree]:
            of_stages, side, closed = needed
            y, metrics = self.apply_stage(closed, of_stages, x, side)
            # What the loss does not count has no derivative: 0 times an infinite one is no number.
            return y, jax.tree.map(
                lambda weight, metric: metric if counts(weight) else jax.lax.stop_gradient(metric),
                weights_like(self.metric_weights, metrics),
                metrics,
            )

        def visit(needed: tuple[PyTree, PyTree], x: PyTree, _: None) -> Any:
            everything = (*needed, weights.closed)
            return forward_keeping(apply, everything, x) if keep else (apply(everything, x), None)

        needed = _needed(weights, inputs, now.forward, now.forward_repeat)
        return self.over(visit)(needed, x, None)

    def _of_metric(self, takes_back: Array, weight: Any, metric: Metric) -> Metric:
        """The cotangent of a metric of every stage, `[stages, …]`."""
        zeros = jnp.zeros_like(metric.value)
        if not counts(weight):
            return type(metric)(zeros)
        weight = jnp.asarray(weight, zeros.dtype)
        each = jnp.full_like(zeros, weight / self._visits if isinstance(metric, Mean) else weight)
        return type(metric)(where(takes_back, each, zeros))


def _needed(
    weights: Held, inputs: Inputs, microbatch: Array, repeat: Array
) -> tuple[PyTree, PyTree]:
    """What a visit reads beside the activations, `[stages, …]`."""
    side = jax.tree.map(lambda leaf: rows(leaf, over_stage(microbatch)), inputs.side)
    return select_repeat(weights.stages, over_stage(repeat)), side


def _row(tree: PyTree, microbatch: Array) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), tree
    )
