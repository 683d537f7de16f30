"""One tick of 1F1B: every stage makes one forward visit and one backward visit.

Every array of a stage begins with the axis of stages, so one line below is the work of all stages:

    forward     x = output of the stage before, a tick ago; the first stage takes what enters
                y, kept = visit(x); the ring keeps what the derivative needs
    leave       the last stage's y gives the loss, whose cotangent starts the backward visits
    backward    d_y = d_inputs of the stage after, a tick ago; the last stage takes the loss's
                d_weights, d_x = derivative of the visit that the ring kept; d_weights add up
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.exchange.buffers import (
    from_stage,
    mark_stage,
    over_stage,
    rows,
    to_stages,
    where,
)
from nnx_pipeline.pipeline.exchange.shift import ShiftName, shift
from nnx_pipeline.pipeline.metrics import Mean, Metric, counts, include, weights_like
from nnx_pipeline.pipeline.one_f_one_b.plan import Plan
from nnx_pipeline.pipeline.one_f_one_b.state import Held, Inputs, State
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.stage.apply import MapStages, Moving, at_slot, select_slot
from nnx_pipeline.pipeline.stage.repeats import add_at_repeat, select
from nnx_pipeline.pipeline.stage.state import At, put, take
from nnx_pipeline.pipeline.stage.vjp import (
    add,
    backward_from,
    forward_keeping,
    none_for_integers,
    only,
)
from nnx_pipeline.pipeline.weights.gathered import WeightGathering


@dataclass(frozen=True)
class Functions:
    """The functions of a model, each with what it closes over as a first argument (see `hoist`).

    - `enter`: (closed over, weights, inputs of a microbatch) to activations.
    - `apply_stage`: (closed over, weights, moving, side inputs) to (moving, metrics), where moving
      is activations and the state of the layers.
    - `leave`: (closed over, weights, activations, inputs of a microbatch) to a float32 scalar.
    """

    enter: Callable[..., PyTree]
    apply_stage: Callable[..., tuple[PyTree, PyTree]]
    leave: Callable[..., Array]


class Phase(NamedTuple):
    """A range of ticks, and which parts of a tick are done in each of them."""

    ticks: range
    forward: bool
    leave: bool
    backward: bool


@dataclass(frozen=True)
class Tick:
    """What every tick does.

    - `functions`: those of the model.
    - `schedule`: which stage works on what at each tick.
    - `metric_weights`: the weight of each metric of a stage in the loss, as for `weights_like`.
    - `shift_by`: how activations and cotangents are sent to a neighbouring stage.
    - `map_stages`: how a function of one stage is mapped over the stages.
    - `weights`: how the weights of the stages are held.
    - `asked`: whether the gradient of each weight is asked for; None for all of them.
    """

    functions: Functions
    schedule: OneForwardOneBackward
    metric_weights: PyTree
    shift_by: ShiftName
    map_stages: MapStages
    weights: WeightGathering
    asked: Held | None = None

    def __call__(
        self, weights: Held, inputs: Inputs, phase: Phase, kept_tree: Any, state: State, now: Plan
    ) -> State:
        """The state after a tick.

        - `weights`, `inputs`: what all ticks read, the stages' weights gathered.
        - `phase`: which parts of the tick are done.
        - `kept_tree`: the tree structure of what a visit keeps; its arrays are in the ring.
        - `state`: the state before the tick.
        - `now`: the tick's row of the timetable.
        """
        d_output = None
        if phase.forward:
            state = self._forward(weights, inputs, now, state)
        if phase.leave:
            state, d_output = self._leave(weights, inputs, now, state)
        if phase.backward:
            state = self._backward(weights, inputs, now, kept_tree, state, d_output)
        return state

    def _forward(self, weights: Held, inputs: Inputs, now: Plan, state: State) -> State:
        """The forward visit of every stage."""
        entering = self.entering(weights, inputs, now)
        arrived = jax.tree.map(lambda leaf: shift(leaf, by=1, how=self.shift_by), state.outputs)
        # A stage in a bubble works on what enters, so that the stage function gets no values at
        # which its derivative may be undefined. Its metrics are not counted.
        is_forward = over_stage(now.is_forward)
        x = where(over_stage(now.from_input), entering, arrived)
        keep = state.gradients is not None
        at = self.visits_at(now)
        moving = x, take(state.layers, at)
        ((y, written), metrics), kept = self.visit(weights, inputs, now, moving, keep=keep)
        kept = [over_stage(leaf) for leaf in jax.tree.leaves(kept)]
        return state._replace(
            outputs=y,
            ring=at_slot(state.ring, over_stage(now.write), kept) if keep else state.ring,
            metrics=include(is_forward, state.metrics, metrics),
            layers=put(state.layers, at, written),
        )

    def _leave(
        self, weights: Held, inputs: Inputs, now: Plan, state: State
    ) -> tuple[State, PyTree]:
        """Adds the loss of the microbatch that leaves; also returns the cotangent of its output.

        All devices compute it.
        """

        row = row_of(inputs.leave, now.leaving)
        asked, with_asked = _asked(row, state.of_inputs.leave)

        def loss_of(weights: Any, output: PyTree, asked: list[Array]) -> Array:
            return self.leaving(weights, output, with_asked(asked))

        def leave(loss: Array, gradients: Any, outputs: PyTree) -> tuple[Array, Any, PyTree]:
            output = from_stage(outputs, self.schedule.stages - 1)
            if gradients is None:
                return loss + loss_of(weights.leave, output, asked), None, None
            loss_of_one, back = jax.vjp(loss_of, weights.leave, output, asked)
            d_weights, d_output, d_row = back(jnp.ones_like(loss_of_one))
            d_leave, d_rows = gradients
            gradients = (
                add(d_leave, none_for_integers(d_weights)),
                _add_row(d_rows, d_row, now.leaving),
            )
            return loss + loss_of_one, gradients, d_output

        def stay(loss: Array, gradients: Any, outputs: PyTree) -> tuple[Array, Any, PyTree]:
            nothing = (
                None if gradients is None else jax.tree.map(jnp.zeros_like, from_stage(outputs, 0))
            )
            return loss, gradients, nothing

        totals = state.gradients  # None where no gradient is asked for
        so_far = None if totals is None else (totals.leave, state.of_inputs.leave)
        loss, so_far, d_output = self._if_due(
            now.leaves, leave, stay, state.loss, so_far, state.outputs
        )
        if totals is None:
            return state._replace(loss=loss), d_output
        d_leave, d_rows = so_far
        return state._replace(
            loss=loss,
            gradients=totals._replace(leave=d_leave),
            of_inputs=state.of_inputs._replace(leave=d_rows),
        ), d_output

    def _backward(
        self,
        weights: Held,
        inputs: Inputs,
        now: Plan,
        kept_tree: Any,
        state: State,
        d_output: PyTree,
    ) -> State:
        """The backward visit of every stage, which adds to the gradient of the stage's weights."""
        if state.gradients is None:
            return state
        d_y = self._arriving_cotangents(now, state, d_output)
        is_backward = over_stage(now.is_backward)
        # In a bubble nothing has arrived: with zero cotangents the visit adds zero gradients.
        d_y = where(is_backward, d_y, jax.tree.map(jnp.zeros_like, d_y))
        d_metrics = jax.tree.map(
            functools.partial(self._of_metric, is_backward),
            weights_like(self.metric_weights, state.metrics),
            state.metrics,
        )
        d_moving = d_y, jax.tree.map(lambda _: None, state.layers.of_visit())  # has no gradient
        stored = jax.tree.unflatten(kept_tree, select_slot(state.ring, over_stage(now.read)))
        reads = _stage_reads(weights, inputs, now.backward, now.backward_repeat)

        def back(kept: PyTree, reads: tuple[PyTree, PyTree], given: tuple[PyTree, PyTree]) -> Any:
            return backward_from(kept, (*reads, weights.closed), given)

        given = d_moving, d_metrics
        (d_stages, d_side, d_closed), (d_x, _) = self.map_stages(back)(stored, reads, given)
        if self.asked is not None:
            d_stages = only(self.asked.stages, d_stages)
        d_stages = self.weights.of_visit(d_stages, reads[0])
        totals, of_inputs = state.gradients, state.of_inputs
        so_far = totals.enter, of_inputs.enter
        d_enter, d_rows = self._return(weights.enter, inputs, now, so_far, d_x)
        gradients = totals._replace(
            stages=add_at_repeat(totals.stages, d_stages, over_stage(now.backward_repeat)),
            enter=d_enter,
            closed=add(totals.closed, d_closed),
        )
        d_side = _add_rows(of_inputs.side, d_side, over_stage(now.backward))
        of_inputs = of_inputs._replace(enter=d_rows, side=d_side)
        return state._replace(d_inputs=d_x, gradients=gradients, of_inputs=of_inputs)

    def _arriving_cotangents(self, now: Plan, state: State, d_output: PyTree) -> PyTree:
        """The cotangents of all stages' outputs: of the next stage's input, or from the loss."""
        stages = self.schedule.stages
        arrived = jax.tree.map(lambda leaf: shift(leaf, by=-1, how=self.shift_by), state.d_inputs)
        if d_output is None:
            return arrived
        turns = mark_stage(stages - 1, stages)
        # With several repeats the last stage takes the cotangent of the loss in the microbatch's
        # last repeat only; otherwise it takes what the first stage sends.
        turns = turns if self.schedule.repeats == 1 else turns & now.leaves
        return where(turns, to_stages(d_output, stages), arrived)

    def _return(
        self, held: Any, inputs: Inputs, now: Plan, gradients: PyTree, d_x: PyTree
    ) -> PyTree:
        """Adds the gradients of `enter` for the microbatch whose last backward visit this was.

        - `gradients`: those of its weights so far, and of its inputs.
        """
        row = row_of(inputs.enter, now.returning)
        asked, with_asked = _asked(row, gradients[1])

        def enter(held: tuple[PyTree, list[Array]], asked: list[Array]) -> PyTree:
            weights, closed = held
            return self.functions.enter(closed, weights, with_asked(asked))

        def back(gradients: PyTree, d_x: PyTree) -> PyTree:
            _, enter_back = jax.vjp(enter, held, asked)
            d_weights, d_row = enter_back(from_stage(d_x, 0))
            so_far, d_rows = gradients
            d_weights = add(so_far, none_for_integers(d_weights))
            return d_weights, _add_row(d_rows, d_row, now.returning)

        return self._if_due(now.returns, back, lambda gradients, _: gradients, gradients, d_x)

    def _if_due(
        self, due: Array, function: Callable[..., Any], otherwise: Callable[..., Any], *state: Any
    ) -> Any:
        """Calls `function` in the ticks in which it is due, else `otherwise`.

        With one repeat it is due at every tick, except in bubbles, where the cotangents are zero
        and it adds nothing; so it needs no condition.
        """
        if self.schedule.repeats == 1:
            return function(*state)
        return jax.lax.cond(due, function, otherwise, *state)

    def visits_at(self, now: Plan) -> At:
        """Which forward visits a tick makes."""
        row = now.forward_repeat * self.schedule.microbatches + now.forward
        return At(over_stage(now.forward_repeat), over_stage(row), over_stage(now.is_forward))

    def entering(self, weights: Held, inputs: Inputs, now: Plan) -> PyTree:
        """The activations of the microbatch that enters, on every stage: `[stages, …]`."""
        enter_weights, closed = weights.enter
        x = self.functions.enter(closed, enter_weights, row_of(inputs.enter, now.entering))
        return to_stages(x, self.schedule.stages)

    def leaving(self, weights: Any, output: PyTree, row: PyTree) -> Array:
        """The loss of the microbatch that leaves, a scalar.

        - `weights`: those of `leave`, and what it closes over.
        - `output`: the activations of the last stage.
        - `row`: the inputs of the microbatch.
        """
        leave_weights, closed = weights
        return self.functions.leave(closed, leave_weights, output, row)

    def visit(self, weights: Held, inputs: Inputs, now: Plan, x: Moving, *, keep: bool) -> Any:
        """Applies every stage; returns (outputs, metrics), and what the derivatives need.

        - `x`: the input of every stage and the state of its layers, `[stages, …]`; the outputs are
          such a pair too.
        - `keep`: whether to return what the derivatives need, or None in its place.
        """

        def apply(reads: tuple[PyTree, PyTree, list[Array]], x: Moving) -> tuple[Moving, PyTree]:
            stage_weights, side, closed = reads
            y, metrics = self.functions.apply_stage(closed, stage_weights, x, side)
            # A metric with weight 0 is not differentiated: where its derivative is infinite, 0
            # times that would be NaN.
            return y, jax.tree.map(
                lambda weight, metric: metric if counts(weight) else jax.lax.stop_gradient(metric),
                weights_like(self.metric_weights, metrics),
                metrics,
            )

        def visit(reads: tuple[PyTree, PyTree], x: Moving, _: None) -> Any:
            everything = (*reads, weights.closed)
            return forward_keeping(apply, everything, x) if keep else (apply(everything, x), None)

        reads = _stage_reads(weights, inputs, now.forward, now.forward_repeat)
        return self.map_stages(visit)(reads, x, None)

    @property
    def visits(self) -> int:
        """The number of forward visits of all stages together, without bubbles."""
        schedule = self.schedule
        return schedule.microbatches * schedule.repeats * schedule.stages

    def _of_metric(self, is_backward: Array, weight: Any, metric: Metric) -> Metric:
        """The cotangent of a metric on every stage, `[stages, …]`."""
        zeros = jnp.zeros_like(metric.value)
        if not counts(weight):
            return type(metric)(zeros)
        weight = jnp.asarray(weight, zeros.dtype)
        each = jnp.full_like(zeros, weight / self.visits if isinstance(metric, Mean) else weight)
        return type(metric)(where(is_backward, each, zeros))


def _stage_reads(
    weights: Held, inputs: Inputs, microbatch: Array, repeat: Array
) -> tuple[PyTree, PyTree]:
    """What a visit reads besides the activations: weights and side inputs, `[stages, …]`."""
    side = jax.tree.map(lambda leaf: rows(leaf, over_stage(microbatch)), inputs.side)
    return select(weights.stages, over_stage(repeat)), side


def _asked(row: PyTree, totals: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """The arrays of a row whose gradients are asked for, and a function that puts them back.

    - `totals`: the gradients so far, None in the place of an array, or of all.
    """
    leaves, tree = jax.tree.flatten(row)
    wanted = [total is not None for total in _each(totals, tree)]

    def with_asked(asked: list[Array]) -> PyTree:
        new = iter(asked)
        mixed = [next(new) if one else leaf for leaf, one in zip(leaves, wanted, strict=True)]
        return jax.tree.unflatten(tree, mixed)

    return [leaf for leaf, one in zip(leaves, wanted, strict=True) if one], with_asked


def _each(totals: PyTree, tree: Any) -> list[Any]:
    """The gradients of each leaf of a tree, None where they are not asked for."""
    return [None] * tree.num_leaves if totals is None else tree.flatten_up_to(totals)


def _add_row(totals: PyTree, asked: list[Array], microbatch: Array) -> PyTree:
    """Adds the gradients of one microbatch to those of all.

    - `totals`: `[microbatches, …]`, as for `_asked`.
    - `asked`: `[…]`, of the arrays whose gradients are asked for.
    """
    new = iter(asked)
    return jax.tree.map(lambda total: total.at[microbatch].add(next(new)), totals)


def _add_rows(totals: PyTree, new: PyTree, microbatch: Array) -> PyTree:
    """Adds the gradients of each stage's microbatch to those of all, where they are asked for.

    - `totals`: `[stages, microbatches, …]`, as for `_asked`.
    - `new`: `[stages, …]` of all arrays, None for integers.
    - `microbatch`: int32 `[stages]`.
    """
    gradients, tree = jax.tree.flatten(new, is_leaf=lambda leaf: leaf is None)
    pairs = zip(_each(totals, tree), gradients, strict=True)
    asked = iter([gradient for total, gradient in pairs if total is not None])

    def one(total: Array) -> Array:
        return at_slot(total, microbatch, select_slot(total, microbatch) + next(asked))

    return jax.tree.map(one, totals)


def row_of(tree: PyTree, microbatch: Array) -> PyTree:
    """The inputs of one microbatch: `[microbatches, …]` to `[…]`."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), tree
    )
