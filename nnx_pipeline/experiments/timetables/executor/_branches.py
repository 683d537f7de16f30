"""What a rank may do in a tick: a function for each kind of action, and one that does nothing.

The arrays here are those of one rank, without an axis of stages.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree

from nnx_pipeline.experiments.timetables.executor._outer import EndTotals, FirstAndLast, row_at
from nnx_pipeline.experiments.timetables.executor._plan import Branch, TimetablePlan, TimetableRows
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline.metrics import (
    Max,
    Mean,
    Metric,
    counts,
    identity,
    is_metric,
    only_counted,
    weights_like,
)
from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.pipeline.stage._vjp import (
    add,
    backward_from,
    forward_keeping,
    none_for_integers,
    zero_gradients,
)
from nnx_pipeline.pipeline.stage.apply import Moving
from nnx_pipeline.pipeline.stage.state import alike, types_of
from nnx_pipeline.pipeline.visit import Reads

Totals = tuple[PyTree, list[list[Array]]]  # gradients of a rank's stages, and what they close over


class Rank(NamedTuple):
    """A rank, by what its visits read."""

    stages: PyTree  # the weights of its stages, [chunks, …]
    captured: list[list[Array]]  # what the stage functions close over
    side: PyTree  # [microbatches, …]
    entering: PyTree  # the activations that enter the first stage in this tick; None with `outer`
    outer: FirstAndLast | None  # first and last rank run them; None where all devices do


class RankState(NamedTuple):
    """What passes from tick to tick on a rank."""

    messages: PyTree  # [slots, …]: activations and cotangents that wait for their action
    rings: list[list[Array]]  # for each stage function what its visits keep, [slots, …]
    totals: Totals | None  # None where only the loss is asked for
    metrics: PyTree
    outer: EndTotals | None  # the totals; None where all devices have them


@dataclass(frozen=True)
class Branches:
    """Makes the branches of a loop, and the state that they begin with.

    - `functions`: the different functions of stages, each (closed over, weights, moving, side
      inputs) to (moving, metrics), as in `one_f_one_b.tick.Functions`.
    - `plan`: the timetable.
    - `metric_weights`: the weight of each metric of a stage in the loss, as for `weights_like`.
    - `visits`: how many forward visits all stages make together.
    - `differentiate`: whether gradients are computed.
    """

    functions: tuple[Callable[..., tuple[PyTree, PyTree]], ...]
    plan: TimetablePlan
    metric_weights: PyTree
    visits: int
    differentiate: bool

    def step(self, rank: Rank, state: RankState, row: TimetableRows) -> tuple[RankState, PyTree]:
        """The state after an action, and what the action gives: activations or a cotangent."""
        kinds = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._backward}
        choices: list[Function] = [functools.partial(self._idle, rank)]
        for branch in self.plan.branches:
            choices.append(functools.partial(kinds[branch.kind], branch, rank))
        result: tuple[RankState, PyTree] = jax.lax.switch(row.branch, choices, state, row)
        return result

    def start(
        self, rank: Rank, x: PyTree, outer: EndTotals | None, dtype: DTypeLike | None, fill: float
    ) -> RankState:
        """The state before the first tick.

        - `x`: activations, of which only the types are used.
        - `outer`: the totals that first and last rank begin with, or None.
        - `dtype`: in which gradients add up, None for that of the weights.
        - `fill`: what the buffers hold before anything arrives; results do not depend on it.

        Raises InputError where stage functions report metrics that are not alike.
        """
        visits = [self._types(at, rank, x) for at in range(len(self.functions))]
        for metrics, _ in visits[1:]:
            if not alike(visits[0][0], metrics):
                raise InputError(
                    f"one stage function reports the metrics {types_of(visits[0][0])}, and another "
                    f"one {types_of(metrics)}; all must report the same"
                )

        def buffer(like: Array, slots: int) -> Array:
            value = fill if jnp.issubdtype(like.dtype, jnp.inexact) else 0
            return jnp.full((slots, *like.shape), value, like.dtype)

        weights = rank.stages, rank.captured
        return RankState(
            messages=jax.tree.map(lambda leaf: buffer(leaf, self.plan.messages + 1), x),
            rings=[
                [buffer(leaf, slots) for leaf in jax.tree.leaves(residuals)]
                for (_, residuals), slots in zip(visits, self.plan.rings, strict=True)
            ],
            totals=zero_gradients(weights, weights, dtype) if self.differentiate else None,
            metrics=jax.tree.map(_nothing, visits[0][0], is_leaf=is_metric),
            outer=outer,
        )

    def visit(
        self, function: int, rank: Rank, row: TimetableRows, x: PyTree
    ) -> tuple[tuple[PyTree, PyTree], PyTree]:
        """(activations, metrics) of a forward visit, and what its derivative keeps.

        - `function`: the number of the stage function.
        """

        def apply(reads: Reads, x: Moving) -> tuple[Moving, PyTree]:
            y, metrics = self.functions[function](reads.captured, reads.weights, x, reads.side)
            return y, only_counted(self.metric_weights, metrics)

        reads = self._reads(function, rank, row)
        moving: PyTree = x, []
        if self.differentiate:
            ((y, _), metrics), residuals = forward_keeping(apply, reads, moving)
            return (y, metrics), residuals
        (y, _), metrics = apply(reads, moving)
        return (y, metrics), []

    def _types(self, function: int, rank: Rank, x: PyTree) -> tuple[PyTree, PyTree]:
        reads = rank._replace(entering=None, outer=None)
        visit = functools.partial(self.visit, function, row=first_row())
        (_, metrics), residuals = jax.eval_shape(lambda reads, x: visit(reads, x=x), reads, x)
        return metrics, residuals

    def _idle(self, rank: Rank, state: RankState, row: TimetableRows) -> tuple[RankState, PyTree]:
        del rank, row
        return state, _no_message(state)

    def _forward(
        self, branch: Branch, rank: Rank, state: RankState, row: TimetableRows
    ) -> tuple[RankState, PyTree]:
        """A forward visit; a last rank that has the end gives the cotangent of its output."""
        x = row_at(state.messages, row.take)
        if rank.outer is None:
            x = jax.tree.map(lambda new, old: jnp.where(row.enters > 0, new, old), rank.entering, x)
        elif branch.enters:
            x = rank.outer.enter(row.microbatch)
        (y, metrics), residuals = self.visit(branch.function, rank, row, x)
        rings = list(state.rings)
        if self.differentiate:
            rings[branch.function] = [
                jax.lax.dynamic_update_index_in_dim(ring, leaf, row.keep, 0)
                for ring, leaf in zip(
                    rings[branch.function], jax.tree.leaves(residuals), strict=True
                )
            ]
        totals = jax.tree.map(_together, state.metrics, metrics, is_leaf=is_metric)
        state = state._replace(rings=rings, metrics=totals)
        if rank.outer is None or state.outer is None or not branch.leaves:
            return state, y
        outer = rank.outer.leave(state.outer, row.microbatch, y)
        return state._replace(outer=outer), outer.d_output if self.differentiate else y

    def _backward(
        self, branch: Branch, rank: Rank, state: RankState, row: TimetableRows
    ) -> tuple[RankState, PyTree]:
        """A backward visit, or the part of it that gives one of the two gradients."""
        assert state.totals is not None, "backward visits are there for gradients"
        _, residuals = self._types(branch.function, rank, row_at(state.messages, row.take))
        stored = [row_at(ring, row.keep) for ring in state.rings[branch.function]]
        residuals = jax.tree.unflatten(jax.tree.structure(residuals), stored)
        d_out: PyTree = (row_at(state.messages, row.take), []), self._of_metrics(state.metrics)
        again = self._reads(branch.function, rank, row)
        (d_stage, _, d_hoisted), (d_x, _) = backward_from(residuals, again, d_out)
        message = _no_message(state)
        if branch.kind in "BW":
            stages, captured = state.totals
            captured = list(captured)
            captured[branch.function] = add(captured[branch.function], none_for_integers(d_hoisted))
            state = state._replace(totals=(_add_at(stages, row.chunk, d_stage), captured))
        if branch.kind in "BI":
            message = d_x
            if branch.enters and rank.outer is not None and state.outer is not None:
                state = state._replace(outer=rank.outer.back(state.outer, row.microbatch, d_x))
        return state, message

    def _reads(self, function: int, rank: Rank, row: TimetableRows) -> Reads:
        weights, side = row_at(rank.stages, row.chunk), row_at(rank.side, row.microbatch)
        return Reads(weights, side, rank.captured[function])

    def _of_metrics(self, metrics: PyTree) -> PyTree:
        def cotangent(weight: float | Array, metric: Metric) -> Metric:
            if not counts(weight):
                return type(metric)(jnp.zeros_like(metric.value))
            share = jnp.asarray(weight, metric.value.dtype)
            share = share / self.visits if isinstance(metric, Mean) else share
            return type(metric)(jnp.full_like(metric.value, share))

        return jax.tree.map(cotangent, weights_like(self.metric_weights, metrics), metrics)


def first_row() -> TimetableRows:
    """A row of which only the types matter."""
    return TimetableRows(*[jnp.int32(0)] * len(TimetableRows._fields))


def _add_at(totals: PyTree, chunk: ArrayLike, gradients: PyTree) -> PyTree:
    def add_leaf(total: Array, new: Array) -> Array:
        new = new.astype(total.dtype)
        return (total[0] + new)[None] if total.shape[0] == 1 else total.at[chunk].add(new)

    return jax.tree.map(add_leaf, totals, gradients)


def _no_message(state: RankState) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), state.messages)


def _nothing(metric: Metric) -> Metric:
    value = metric.value
    return type(metric)(jnp.full(value.shape, identity(metric), value.dtype))


def _together(total: Metric, metric: Metric) -> Metric:
    combine = jnp.maximum if isinstance(metric, Max) else jnp.add
    return type(metric)(combine(total.value, metric.value))
