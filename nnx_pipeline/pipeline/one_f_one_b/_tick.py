"""One tick of 1F1B: every stage makes one forward visit and one backward visit.

Every array of a stage begins with the axis of stages, so one line below is the work of all stages:

    forward     x = output of the stage before, a tick ago; the first stage takes what enters
                y, residuals = visit(x); the ring stores the residuals
    loss        the last stage's y gives the loss, whose cotangent starts the backward visits
    backward    d_y = d_inputs of the stage after, a tick ago; the last stage takes the loss's
                d_weights, d_x = derivative from the residuals in the ring; d_weights add up
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline import _exchange as exchange
from nnx_pipeline.pipeline.contract import Inputs
from nnx_pipeline.pipeline.metrics import Mean, Metric, counts, include, only_counted, weights_like
from nnx_pipeline.pipeline.one_f_one_b._state import LoopState, LoopWeights, PhasePlan, WithCaptured
from nnx_pipeline.pipeline.options import Accumulation
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward
from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.pipeline.stage._sums import WithSums, with_sums
from nnx_pipeline.pipeline.stage._vjp import add, none_for_integers
from nnx_pipeline.pipeline.stage.apply import Moving, at_slot, select_slot
from nnx_pipeline.pipeline.stage.state import At, put, take
from nnx_pipeline.pipeline.visit import Reads, Visit, side_of, visits_at, weights_of


@dataclass(frozen=True)
class HoistedFunctions:
    """The functions of a model, with what each closes over as a first argument (see `hoist`)."""

    enter: Callable[..., PyTree]  # (…, weights, inputs of a microbatch) to activations
    apply_stage: Callable[..., tuple[PyTree, PyTree]]  # (…, weights, moving, side inputs)
    leave: Callable[..., Array]  # (…, weights, activations, inputs of a microbatch) to the loss


class Phase(NamedTuple):
    ticks: range
    forward: bool
    loss: bool
    backward: bool


@dataclass(frozen=True)
class OneForwardOneBackwardTick:
    """`needed` says whether the gradient of each weight is asked for; None for all."""

    functions: HoistedFunctions
    schedule: OneForwardOneBackward
    metric_weights: PyTree
    shift_by: exchange.ShiftName
    how: Accumulation
    needed: LoopWeights | None = None
    sums_in_layers: bool = False

    def __call__(
        self,
        weights: LoopWeights,
        inputs: Inputs,
        phase: Phase,
        residual_tree: PyTreeDef,
        state: LoopState,
        now: PhasePlan,
    ) -> LoopState:
        """The state after a tick; the ring has the arrays of `residual_tree`."""
        d_output = None
        if phase.forward:
            state = self._forward(weights, inputs, now, state)
        if phase.loss:
            state, d_output = self._add_loss(weights, inputs, now, state)
        if phase.backward:
            state = self._backward(weights, inputs, now, residual_tree, state, d_output)
        return state

    def _forward(
        self, weights: LoopWeights, inputs: Inputs, now: PhasePlan, state: LoopState
    ) -> LoopState:
        entering = self.entering(weights, inputs, now)
        arrived = jax.tree.map(
            lambda leaf: exchange.shift(leaf, by=1, how=self.shift_by), state.outputs
        )
        # A stage in a bubble works on what enters, so that the stage function gets no values at
        # which its derivative may be undefined. Its metrics are not counted.
        is_forward = exchange.over_stage(now.is_forward)
        x = exchange.where(exchange.over_stage(now.from_input), entering, arrived)
        keep = state.gradients is not None
        at = self.visits_at(now)
        moving = x, take(state.layers, at)
        reads = reads_of(weights, inputs, now.forward, now.forward_repeat)
        ((y, written), metrics), residuals = self.visit.run(reads, moving, keep=keep)
        residuals = [exchange.over_stage(leaf) for leaf in jax.tree.leaves(residuals)]
        return state._replace(
            outputs=y,
            ring=at_slot(state.ring, exchange.over_stage(now.write), residuals)
            if keep
            else state.ring,
            metrics=include(is_forward, state.metrics, metrics),
            layers=put(state.layers, at, written),
        )

    def _add_loss(
        self, weights: LoopWeights, inputs: Inputs, now: PhasePlan, state: LoopState
    ) -> tuple[LoopState, PyTree]:
        """On all devices, adds the loss of the microbatch that leaves; gives its cotangent."""

        row = row_of(inputs.leave, now.leaving)
        needed, with_needed = _needed(row, state.of_inputs.leave)

        def loss_of(weights: WithCaptured, output: PyTree, needed: list[Array]) -> Array:
            end, row = weights, with_needed(needed)
            return self.functions.leave(end.captured, end.weights, output, row)

        def add_loss(loss: Array, so_far: PyTree, outputs: PyTree) -> tuple[Array, PyTree, PyTree]:
            output = exchange.from_stage(outputs, self.schedule.stages - 1)
            if so_far is None:
                return loss + loss_of(weights.leave, output, needed), None, None
            new_loss, back = jax.vjp(loss_of, weights.leave, output, needed)
            d_weights, d_output, d_row = back(jnp.ones_like(new_loss))
            d_exit, d_rows = so_far
            so_far = add(d_exit, none_for_integers(d_weights)), _add_row(d_rows, d_row, now.leaving)
            return loss + new_loss, so_far, d_output

        def stay(loss: Array, so_far: PyTree, outputs: PyTree) -> tuple[Array, PyTree, PyTree]:
            if so_far is None:
                return loss, None, None
            return loss, so_far, jax.tree.map(jnp.zeros_like, exchange.from_stage(outputs, 0))

        totals = state.gradients  # None where no gradient is asked for
        so_far = None if totals is None else (totals.leave, state.of_inputs.leave)
        loss, so_far, d_output = self._if_due(
            now.leaves, add_loss, stay, state.loss, so_far, state.outputs
        )
        if totals is None:
            return state._replace(loss=loss), d_output
        d_exit, d_rows = so_far
        return state._replace(
            loss=loss,
            gradients=totals._replace(leave=d_exit),
            of_inputs=state.of_inputs._replace(leave=d_rows),
        ), d_output

    def _backward(
        self,
        weights: LoopWeights,
        inputs: Inputs,
        now: PhasePlan,
        residual_tree: PyTreeDef,
        state: LoopState,
        d_output: PyTree,
    ) -> LoopState:
        if state.gradients is None:
            return state
        d_y = self._arriving_cotangents(now, state, d_output)
        is_backward = exchange.over_stage(now.is_backward)
        # In a bubble nothing has arrived: with zero cotangents the visit adds zero gradients.
        d_y = exchange.where(is_backward, d_y, jax.tree.map(jnp.zeros_like, d_y))
        d_metrics = jax.tree.map(
            functools.partial(self._of_metric, is_backward),
            weights_like(self.metric_weights, state.metrics),
            state.metrics,
        )
        stored = jax.tree.unflatten(
            residual_tree, select_slot(state.ring, exchange.over_stage(now.read))
        )
        weights = weights._replace(stages=with_sums(weights.stages, state.gradients.stages))
        reads = reads_of(weights, inputs, now.backward, now.backward_repeat)
        visit, layers = self.visit, state.layers.of_visit()
        d_reads, d_x = visit.back(stored, reads, d_y, d_metrics, state=layers)
        totals, of_inputs = state.gradients, state.of_inputs
        so_far = totals.enter, of_inputs.enter
        d_entry, d_rows = self._return(weights.enter, inputs, now, so_far, d_x)
        gradients = totals._replace(
            stages=visit.add(totals.stages, d_reads.weights, reads.weights, now.backward_repeat),
            enter=d_entry,
            captured=add(totals.captured, d_reads.captured),
        )
        d_side = _add_rows(of_inputs.side, d_reads.side, exchange.over_stage(now.backward))
        of_inputs = of_inputs._replace(enter=d_rows, side=d_side)
        return state._replace(d_inputs=d_x, gradients=gradients, of_inputs=of_inputs)

    def _arriving_cotangents(self, now: PhasePlan, state: LoopState, d_output: PyTree) -> PyTree:
        """The cotangents of all stages' outputs: of the next stage's input, or from the loss."""
        stages = self.schedule.stages
        arrived = jax.tree.map(
            lambda leaf: exchange.shift(leaf, by=-1, how=self.shift_by), state.d_inputs
        )
        if d_output is None:
            return arrived
        turns = exchange.mark_stage(stages - 1, stages)
        # With several repeats the last stage takes the cotangent of the loss in the microbatch's
        # last repeat only; otherwise it takes what the first stage sends.
        turns = turns if self.schedule.repeats == 1 else turns & now.leaves
        return exchange.where(turns, exchange.to_stages(d_output, stages), arrived)

    def _return(
        self, end: WithCaptured, inputs: Inputs, now: PhasePlan, gradients: PyTree, d_x: PyTree
    ) -> PyTree:
        """Adds `enter`'s gradients for the microbatch whose last backward visit this was."""
        row = row_of(inputs.enter, now.returning)
        needed, with_needed = _needed(row, gradients[1])

        def entry(end: WithCaptured, needed: list[Array]) -> PyTree:
            return self.functions.enter(end.captured, end.weights, with_needed(needed))

        def back(gradients: PyTree, d_x: PyTree) -> PyTree:
            _, entry_back = jax.vjp(entry, end, needed)
            d_weights, d_row = entry_back(exchange.from_stage(d_x, 0))
            so_far, d_rows = gradients
            d_weights = add(so_far, none_for_integers(d_weights))
            return d_weights, _add_row(d_rows, d_row, now.returning)

        return self._if_due(now.returns, back, lambda gradients, _: gradients, gradients, d_x)

    def _if_due(
        self, due: Array, function: Function, otherwise: Function, *state: PyTree
    ) -> PyTree:
        # With one repeat it is due at every tick, except in bubbles, where the cotangents are zero
        # and it adds nothing; so it needs no condition.
        if self.schedule.repeats == 1:
            return function(*state)
        return jax.lax.cond(due, function, otherwise, *state)

    def visits_at(self, now: PhasePlan) -> At:
        microbatches = self.schedule.microbatches
        return visits_at(now.forward_repeat, now.forward, now.is_forward, microbatches)

    def entering(self, weights: LoopWeights, inputs: Inputs, now: PhasePlan) -> PyTree:
        """The activations of the microbatch that enters, on every stage: `[stages, …]`."""
        end, row = weights.enter, row_of(inputs.enter, now.entering)
        x = self.functions.enter(end.captured, end.weights, row)
        return exchange.to_stages(x, self.schedule.stages)

    @property
    def visit(self) -> Visit:
        """The visits of all stages; each has residuals of its own, which go into its ring."""

        def apply(reads: Reads, x: Moving) -> tuple[Moving, PyTree]:
            y, metrics = self.functions.apply_stage(reads.captured, reads.weights, x, reads.side)
            if not isinstance(reads.weights, WithSums):
                return y, only_counted(self.metric_weights, metrics)
            metrics, sums = metrics
            return y, (only_counted(self.metric_weights, metrics), sums)

        gather = self.how.fsdp_gather.of_repeats(self.schedule.repeats)
        needed = None if self.needed is None else self.needed.stages
        return Visit(apply, True, self.how.grad_dtype, gather, needed, self.sums_in_layers)

    @property
    def visits(self) -> int:
        """The number of forward visits of all stages together, without bubbles."""
        schedule = self.schedule
        return schedule.microbatches * schedule.repeats * schedule.stages

    def _of_metric(self, is_backward: Array, weight: float | Array, metric: Metric) -> Metric:
        zeros = jnp.zeros_like(metric.value)
        if not counts(weight):
            return type(metric)(zeros)
        weight = jnp.asarray(weight, zeros.dtype)
        each = jnp.full_like(zeros, weight / self.visits if isinstance(metric, Mean) else weight)
        return type(metric)(exchange.where(is_backward, each, zeros))


def reads_of(weights: LoopWeights, inputs: Inputs, microbatch: Array, repeat: Array) -> Reads:
    side = side_of(inputs.side, microbatch)
    return Reads(weights_of(weights.stages, repeat), side, weights.captured)


def _needed(row: PyTree, totals: PyTree) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
    """The arrays of a row whose gradients are asked for, and a function that puts them back."""
    leaves, tree = jax.tree.flatten(row)
    wanted = [total is not None for total in _each(totals, tree)]

    def with_needed(needed: list[Array]) -> PyTree:
        new = iter(needed)
        mixed = [next(new) if yes else leaf for leaf, yes in zip(leaves, wanted, strict=True)]
        return jax.tree.unflatten(tree, mixed)

    return [leaf for leaf, yes in zip(leaves, wanted, strict=True) if yes], with_needed


def _each(totals: PyTree, tree: PyTreeDef) -> list[PyTree]:
    return [None] * tree.num_leaves if totals is None else tree.flatten_up_to(totals)


def _add_row(totals: PyTree, needed: list[Array], microbatch: Array) -> PyTree:
    """Adds the gradients of one microbatch to `[microbatches, …]`."""
    new = iter(needed)
    return jax.tree.map(lambda total: total.at[microbatch].add(next(new)), totals)


def _add_rows(totals: PyTree, new: PyTree, microbatch: Array) -> PyTree:
    """Adds the gradients of each stage's microbatch to `[stages, microbatches, …]`."""
    gradients, tree = jax.tree.flatten(new, is_leaf=lambda leaf: leaf is None)
    pairs = zip(_each(totals, tree), gradients, strict=True)
    needed = iter([gradient for total, gradient in pairs if total is not None])

    def added(total: Array) -> Array:
        sums: Array = at_slot(total, microbatch, select_slot(total, microbatch) + next(needed))
        return sums

    return jax.tree.map(added, totals)


def row_of(tree: PyTree, microbatch: Array) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), tree
    )
