"""The loop over the ticks of any timetable, in which ranks take different branches.

Each tick runs under a `shard_map` that is manual over `stage` alone, so that a rank has no axis of
stages and one row of the timetable:

    entering = enter(…) in the ticks in which a microbatch enters    all devices together
    state, message = switch(row.branch, branches, state, row)        a visit, or nothing
    messages takes what this rank, the rank before and the rank after send
    loss, and the gradients of `enter` and `leave`, when a microbatch leaves or is back
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from nnx_pipeline.experiments.timetables.executor._branches import (
    Branches,
    Rank,
    RankState,
    first_row,
)
from nnx_pipeline.experiments.timetables.executor._outer import EndTotals, FirstAndLast
from nnx_pipeline.experiments.timetables.executor._plan import (
    EndsOn,
    EndTicks,
    OuterTicks,
    TimetablePlan,
    TimetableRows,
)
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline._exchange import from_stage, stage_axis
from nnx_pipeline.pipeline.contract import Inputs
from nnx_pipeline.pipeline.metrics import Max, Metric, is_metric, objective, over_all_stages
from nnx_pipeline.pipeline.one_f_one_b._state import LoopWeights
from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.sharding.layout import P


@dataclass(frozen=True)
class TimetableFunctions:
    """The functions of a model, each with what it closes over as a first argument (see `hoist`).

    - `enter`, `leave`: as of `one_f_one_b.tick.Functions`.
    - `stages`: the different functions of stages, as `apply_stage` there.
    """

    enter: Callable[..., PyTree]
    stages: tuple[Callable[..., tuple[PyTree, PyTree]], ...]
    leave: Callable[..., Array]


class Done(NamedTuple):
    """What a loop gives, over all ranks."""

    loss: Array
    metrics: PyTree  # each `[1, …]`
    gradients: LoopWeights | None
    layers: PyTree


@dataclass(frozen=True)
class TimetableLoop:
    """All ticks of a timetable.

    - `functions`: the functions of the model.
    - `plans`: of all actions, and of the forward visits alone.
    - `metric_weights`, `visits`: as of `Branches`.
    - `ends_on`: whether all devices run both ends, or the ranks of the first and the last stage.
    - `grad_dtype`: the dtype in which gradients add up; None for that of the weights.
    - `bubble_fill`: what the buffers hold before anything arrives.
    - `unlifted`: whether its functions compute in float16 and it has no lift.
    """

    functions: TimetableFunctions
    plans: tuple[TimetablePlan, TimetablePlan]
    metric_weights: PyTree
    visits: int
    ends_on: EndsOn
    grad_dtype: jax.typing.DTypeLike | None
    bubble_fill: float
    unlifted: bool = False

    def run(
        self, weights: LoopWeights, inputs: Inputs, layers: PyTree, *, differentiate: bool
    ) -> Done:
        """Goes through all ticks.

        - `weights`: `[chunks, ranks, …]` those of the stages; and what the functions close over.
        - `inputs`: `[microbatches, …]`.
        - `layers`: is returned as it is.
        - `differentiate`: whether to compute gradients; without them there are no backward visits.

        Raises InputError for gradients by a timetable without backward visits.
        """
        training, forward = self.plans
        plan = training if differentiate else forward
        if differentiate and all(branch.kind == "F" for branch in plan.branches):
            raise InputError(
                "a gradient was asked for, and the timetable has no backward visits; take one of "
                "make_timetable, or add B, or I and W, to its cells"
            )
        ticks = _Ticks(self, plan, differentiate, weights, inputs)
        rows, outer_ticks = jax.tree.map(jnp.asarray, (plan.rows, plan.outer_ticks))
        (state, shared), _ = jax.lax.scan(ticks.tick, ticks.start(), (rows, outer_ticks))
        return ticks.done(state, shared, layers)

    def total(self, done: Done) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss to minimise, and its two parts: the loss of `leave`, and the metrics."""
        metrics = over_all_stages(done.metrics, self.visits)
        return objective(done.loss, metrics, self.metric_weights)

    def visit_once(self, weights: PyTree, inputs: Inputs) -> None:
        """Calls each function with the types that it gets in the ticks; nothing is computed.

        - `weights`: as of `run`, without what the functions close over.
        """
        all_weights = LoopWeights.of(weights, stages=[[]] * len(self.functions.stages))

        def call(weights: LoopWeights, inputs: Inputs) -> Array:
            return _Ticks(self, self.plans[1], False, weights, inputs).once()

        jax.eval_shape(call, all_weights, inputs)


@dataclass(frozen=True)
class _Ticks:
    """The ticks of one plan, on one model."""

    loop: TimetableLoop
    plan: TimetablePlan
    differentiate: bool
    weights: LoopWeights
    inputs: Inputs

    def start(self) -> tuple[RankState, EndTotals | None]:
        """The state of all ranks, `[stages, …]`, and the totals of what all devices run."""
        dtype, fill = self.loop.grad_dtype, self.loop.bubble_fill

        def local(rank: Rank, x: PyTree) -> RankState:
            totals = None if rank.outer is None else rank.outer.start(dtype)
            state = self._branches.start(_local(rank), x, totals, dtype, fill)
            with_axis: RankState = _with_axis(state)
            return with_axis

        x = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._x)
        state = self._on_ranks(local, (x,), (P(),), over_stages())
        return state, self._outer.start(dtype) if self.loop.ends_on == "all" else None

    def tick(
        self, carry: tuple[RankState, EndTotals | None], now: tuple[TimetableRows, OuterTicks]
    ) -> tuple[tuple[RankState, EndTotals | None], None]:
        """One tick of all ranks."""
        (state, shared), (rows, outer_ticks) = carry, now
        entering, d_output = None, None
        if shared is not None:
            entering, d_output = self._entering(outer_ticks.entry), shared.d_output

        def local(
            rank: Rank, entering: PyTree, d_output: PyTree, state: RankState, rows: TimetableRows
        ) -> tuple[RankState, PyTree]:
            state, row = jax.tree.map(lambda leaf: leaf[0], (state, rows))
            if d_output is not None:  # of the loss of the tick before
                state = state._replace(messages=_put(state.messages, row.loss, d_output))
            rank = _local(rank)._replace(entering=entering)
            state, message = self._branches.step(rank, state, row)
            state = state._replace(messages=self._arrive(state.messages, message, row))
            return _with_axis(state), _with_axis(message)

        stages = over_stages()
        state, message = self._on_ranks(
            local, (entering, d_output, state, rows), (P(), P(), stages, stages), stages
        )
        return (state, self._pass_outer(shared, outer_ticks, message)), None

    def done(self, state: RankState, shared: EndTotals | None, layers: PyTree) -> Done:
        """What the loop gives.

        - `state`, `shared`: after the last tick.
        - `layers`: is returned as it is.
        """

        def over_ranks(metric: Metric) -> Metric:
            fold = jnp.max if isinstance(metric, Max) else jnp.sum
            return type(metric)(fold(metric.value, axis=0)[None])

        metrics = jax.tree.map(over_ranks, state.metrics, is_leaf=is_metric)
        outer = shared or jax.tree.map(_over_all, state.outer)
        gradients = None
        if state.totals is not None:
            stages, captured = state.totals
            stages = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), stages)
            gradients = LoopWeights(
                outer.enter, stages, outer.leave, jax.tree.map(_over_all, captured)
            )
        return Done(outer.loss, metrics, gradients, layers)

    def once(self) -> Array:
        """The loss of one microbatch after one visit by each stage function."""
        outer = self._outer if self.loop.ends_on == "all" else None
        number = jnp.int32(0)

        def local(rank: Rank, x: PyTree) -> Array:
            rank, on_rank = _local(rank), rank.outer
            y = x if on_rank is None else on_rank.enter(number)
            for function in range(len(self.loop.functions.stages)):
                (y, _), _ = self._branches.visit(function, rank, first_row(), y)
            return y if on_rank is None else on_rank.leave(on_rank.start(None), number, y).loss

        x = None if outer is None else outer.enter(number)
        y = self._on_ranks(local, (x,), (P(),), P())
        return y if outer is None else outer.leave(outer.start(None), number, y).loss

    def _entering(self, at: EndTicks) -> PyTree:
        """The activations of the microbatch that enters; zeros where none does."""

        def nothing(_: Array) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._x)

        return jax.lax.cond(at.due, self._outer.enter, nothing, at.microbatch)

    def _pass_outer(
        self, totals: EndTotals | None, at: OuterTicks, message: PyTree
    ) -> EndTotals | None:
        """The totals of `enter` and `leave`, if all devices run them, after a tick.

        - `at`: which microbatches pass.
        - `message`: what the ranks have given, `[stages, …]`.
        """
        if totals is None:
            return None
        first, last = self.plan.edges

        def leave(totals: EndTotals, message: PyTree) -> EndTotals:
            return self._outer.leave(totals, at.exit.microbatch, from_stage(message, last))

        def back(totals: EndTotals, message: PyTree) -> EndTotals:
            return self._outer.back(totals, at.back.microbatch, from_stage(message, first))

        def stay(totals: EndTotals, message: PyTree) -> EndTotals:
            del message
            return totals

        totals = jax.lax.cond(at.exit.due, leave, stay, totals, message)
        if not self.differentiate:
            return totals
        passed: EndTotals = jax.lax.cond(at.back.due, back, stay, totals, message)
        return passed

    def _on_ranks(
        self, function: Function, args: tuple[PyTree, ...], specs: tuple[P, ...], out_specs: P
    ) -> PyTree:
        """Calls a function on each rank: with what the rank's visits read, and with `args`."""
        weights, inputs, whole = self.weights, self.inputs, P()
        outer_reads = self._outer_reads if self.loop.ends_on == "own" else None

        def local(reads: tuple[PyTree, ...], *args: PyTree) -> PyTree:
            stages, captured, side, outer = reads
            outer = None if outer is None else self._make_outer(*outer)
            return function(Rank(stages, captured, side, None, outer), *args)

        reads = weights.stages, weights.captured, inputs.side, outer_reads
        return on_ranks(
            local,
            in_specs=((P(None, stage_axis()), whole, whole, whole), *specs),
            out_specs=out_specs,
        )(reads, *args)

    def _arrive(self, messages: PyTree, message: PyTree, row: TimetableRows) -> PyTree:
        ranks = len(self.plan.stages)
        messages = _put(messages, row.same, message)
        if ranks > 1:
            messages = _put(messages, row.before, _sent(message, 1, ranks))
        if ranks > 2:  # of two ranks each is before and after the other
            messages = _put(messages, row.after, _sent(message, -1, ranks))
        return messages

    @property
    def _branches(self) -> Branches:
        loop = self.loop
        functions = loop.functions.stages
        return Branches(functions, self.plan, loop.metric_weights, loop.visits, self.differentiate)

    @property
    def _outer_reads(self) -> tuple[PyTree, PyTree]:
        weights, inputs = self.weights, self.inputs
        return (weights.enter, weights.leave), (inputs.enter, inputs.leave)

    @property
    def _outer(self) -> FirstAndLast:
        return self._make_outer(*self._outer_reads)

    def _make_outer(self, weights: PyTree, inputs: PyTree) -> FirstAndLast:
        functions = self.loop.functions
        return FirstAndLast((functions.enter, functions.leave), weights, inputs, self.differentiate)

    @functools.cached_property
    def _x(self) -> PyTree:
        return jax.eval_shape(lambda: self._outer.enter(jnp.int32(0)))


def over_stages() -> P:
    """The spec of an array whose first axis is that of stages."""
    return P(stage_axis())


def on_ranks(function: Function, *, in_specs: PyTree, out_specs: P) -> Function:
    """The function on each rank, with its part of what the specs shard over `stage`."""
    if stage_axis() is None:
        return function
    mapped = jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={"stage"}, check_vma=False
    )
    return jax.jit(mapped)  # without jit JAX runs no shard_map over some of the axes


def _local(rank: Rank) -> Rank:
    return rank._replace(stages=jax.tree.map(lambda leaf: leaf[:, 0], rank.stages))


def _with_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _over_all(leaf: Array) -> Array:
    return jnp.sum(leaf, axis=0)


def _put(messages: PyTree, slot: ArrayLike, new: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, slot, 0), messages, new
    )


def _sent(message: PyTree, by: int, ranks: int) -> PyTree:
    ring = [(rank, (rank + by) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "stage", ring), message)
