"""What a rank may do in a tick: a function for each kind of action, and one that does nothing.

The arrays here are those of one rank, without an axis of stages.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.executor.ends import Ends, read
from nnx_pipeline.pipeline.executor.plan import Branch, Plan, Rows
from nnx_pipeline.pipeline.metrics import (
    Max,
    Mean,
    Metric,
    counts,
    identity,
    is_metric,
    weights_like,
)
from nnx_pipeline.pipeline.stage.state import alike, types_of
from nnx_pipeline.pipeline.stage.vjp import (
    add,
    backward_from,
    forward_keeping,
    none_for_integers,
    zero_gradients,
)

Totals = tuple[PyTree, list[list[Array]]]  # gradients of a rank's stages, and what they close over


class Given(NamedTuple):
    """What the visits of a rank read."""

    stages: PyTree  # the weights of its stages, [chunks, …]
    closed: list[list[Array]]  # what the stage functions close over
    side: PyTree  # [microbatches, …]
    entering: PyTree  # the activations that enter the first stage in this tick; None with `ends`
    ends: Ends | None  # first and last rank run them; None where all devices do


class State(NamedTuple):
    """What passes from tick to tick on a rank."""

    inbox: PyTree  # [slots, …]: activations and cotangents that wait for their action
    rings: list[list[Array]]  # for each stage function what its visits keep, [slots, …]
    totals: Totals | None  # None where only the loss is asked for
    metrics: PyTree
    ends: Any  # the totals of `ends.EndTotals`; None where all devices have them


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
    plan: Plan
    metric_weights: PyTree
    visits: int
    differentiate: bool

    def step(self, given: Given, state: State, row: Rows) -> tuple[State, PyTree]:
        """The state after an action, and what the action gives: activations or a cotangent."""
        kinds = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._backward}
        choices: list[Callable[..., Any]] = [functools.partial(self._idle, given)]
        for branch in self.plan.branches:
            choices.append(functools.partial(kinds[branch.kind], branch, given))
        return jax.lax.switch(row.branch, choices, state, row)

    def start(
        self, given: Given, x: PyTree, ends: Any, *, dtype: Any = None, fill: float = 0.0
    ) -> State:
        """The state before the first tick.

        - `x`: activations, of which only the types are used.
        - `ends`: the totals that first and last rank begin with, or None.
        - `dtype`: in which gradients add up, None for that of the weights.
        - `fill`: what the buffers hold before anything arrives; results do not depend on it.

        Raises InputError where stage functions report metrics that are not alike.
        """
        visits = [self._types(at, given, x) for at in range(len(self.functions))]
        for metrics, _ in visits[1:]:
            if not alike(visits[0][0], metrics):
                raise InputError(
                    f"one stage function reports the metrics {types_of(visits[0][0])}, and another "
                    f"one {types_of(metrics)}; all must report the same"
                )

        def buffer(like: Any, slots: int) -> Array:
            value = fill if jnp.issubdtype(like.dtype, jnp.inexact) else 0
            return jnp.full((slots, *like.shape), value, like.dtype)

        own = given.stages, given.closed
        return State(
            inbox=jax.tree.map(lambda leaf: buffer(leaf, self.plan.inbox + 1), x),
            rings=[
                [buffer(leaf, slots) for leaf in jax.tree.leaves(kept)]
                for (_, kept), slots in zip(visits, self.plan.rings, strict=True)
            ],
            totals=zero_gradients(own, own, dtype) if self.differentiate else None,
            metrics=jax.tree.map(_nothing, visits[0][0], is_leaf=is_metric),
            ends=ends,
        )

    def visit(self, function: int, given: Given, row: Rows, x: PyTree) -> Any:
        """(activations, metrics) of a forward visit, and what its derivative keeps.

        - `function`: the number of the stage function.
        """

        def apply(reads: tuple[PyTree, PyTree, list[Array]], x: tuple[PyTree, Any]) -> Any:
            weights, side, closed = reads
            y, metrics = self.functions[function](closed, weights, x, side)
            return y, jax.tree.map(
                lambda weight, metric: metric if counts(weight) else jax.lax.stop_gradient(metric),
                weights_like(self.metric_weights, metrics),
                metrics,
            )

        reads = self._reads(function, given, row)
        moving: Any = x, []
        if self.differentiate:
            ((y, _), metrics), kept = forward_keeping(apply, reads, moving)
            return (y, metrics), kept
        (y, _), metrics = apply(reads, moving)
        return (y, metrics), []

    def _types(self, function: int, given: Given, x: PyTree) -> tuple[PyTree, PyTree]:
        """The types of the metrics of a visit, and of what it keeps."""
        reads = given._replace(entering=None, ends=None)
        visit = functools.partial(self.visit, function, row=first_row())
        (_, metrics), kept = jax.eval_shape(lambda reads, x: visit(reads, x=x), reads, x)
        return metrics, kept

    def _idle(self, given: Given, state: State, row: Rows) -> tuple[State, PyTree]:
        del given, row
        return state, _nothing_given(state)

    def _forward(
        self, branch: Branch, given: Given, state: State, row: Rows
    ) -> tuple[State, PyTree]:
        """A forward visit; a last rank that has the end gives the cotangent of its output."""
        x = read(state.inbox, row.take)
        if given.ends is None:
            x = jax.tree.map(
                lambda new, old: jnp.where(row.enters > 0, new, old), given.entering, x
            )
        elif branch.enters:
            x = given.ends.enter(row.microbatch)
        (y, metrics), kept = self.visit(branch.function, given, row, x)
        rings = list(state.rings)
        if self.differentiate:
            rings[branch.function] = [
                jax.lax.dynamic_update_index_in_dim(ring, leaf, row.keep, 0)
                for ring, leaf in zip(rings[branch.function], jax.tree.leaves(kept), strict=True)
            ]
        totals = jax.tree.map(_together, state.metrics, metrics, is_leaf=is_metric)
        state = state._replace(rings=rings, metrics=totals)
        if given.ends is None or not branch.leaves:
            return state, y
        ends = given.ends.leave(state.ends, row.microbatch, y)
        return state._replace(ends=ends), ends.d_output if self.differentiate else y

    def _backward(
        self, branch: Branch, given: Given, state: State, row: Rows
    ) -> tuple[State, PyTree]:
        """A backward visit, or the part of it that gives one of the two gradients."""
        assert state.totals is not None, "backward visits are there for gradients"
        _, kept = self._types(branch.function, given, read(state.inbox, row.take))
        stored = [read(ring, row.keep) for ring in state.rings[branch.function]]
        kept = jax.tree.unflatten(jax.tree.structure(kept), stored)
        d_out: Any = (read(state.inbox, row.take), []), self._of_metrics(state.metrics)
        again = self._reads(branch.function, given, row)
        (d_stage, _, d_closed), (d_x, _) = backward_from(kept, again, d_out)
        payload = _nothing_given(state)
        if branch.kind in "BW":
            stages, closed = state.totals
            closed = list(closed)
            closed[branch.function] = add(closed[branch.function], none_for_integers(d_closed))
            state = state._replace(totals=(_add_at(stages, row.chunk, d_stage), closed))
        if branch.kind in "BI":
            payload = d_x
            if branch.enters and given.ends is not None:
                state = state._replace(ends=given.ends.back(state.ends, row.microbatch, d_x))
        return state, payload

    def _reads(self, function: int, given: Given, row: Rows) -> tuple[PyTree, PyTree, list[Array]]:
        """What a visit reads beside the activations."""
        weights, side = read(given.stages, row.chunk), read(given.side, row.microbatch)
        return weights, side, given.closed[function]

    def _of_metrics(self, metrics: PyTree) -> PyTree:
        """The cotangents of the metrics of a visit."""

        def one(weight: Any, metric: Metric) -> Metric:
            if not counts(weight):
                return type(metric)(jnp.zeros_like(metric.value))
            share = jnp.asarray(weight, metric.value.dtype)
            share = share / self.visits if isinstance(metric, Mean) else share
            return type(metric)(jnp.full_like(metric.value, share))

        return jax.tree.map(one, weights_like(self.metric_weights, metrics), metrics)


def first_row() -> Rows:
    """A row of which only the types matter."""
    return Rows(*[jnp.int32(0)] * len(Rows._fields))


def _add_at(totals: PyTree, chunk: Any, gradients: PyTree) -> PyTree:
    """Adds the gradients of one stage of a rank; None stands for integers."""

    def one(total: Array, new: Array) -> Array:
        new = new.astype(total.dtype)
        return (total[0] + new)[None] if total.shape[0] == 1 else total.at[chunk].add(new)

    return jax.tree.map(one, totals, gradients)


def _nothing_given(state: State) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), state.inbox)


def _nothing(metric: Metric) -> Metric:
    value = metric.value
    return type(metric)(jnp.full(value.shape, identity(metric), value.dtype))


def _together(total: Metric, metric: Metric) -> Metric:
    combine = jnp.maximum if isinstance(metric, Max) else jnp.add
    return type(metric)(combine(total.value, metric.value))
