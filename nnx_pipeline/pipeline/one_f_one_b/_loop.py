"""The loop over the ticks of 1F1B: one scan each for filling, steady state and draining."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline._exchange import empty_host_ring, empty_ring, from_stage, to_stages
from nnx_pipeline.pipeline.contract import Inputs, Weights
from nnx_pipeline.pipeline.metrics import Metric, identity, is_metric, objective, over_all_stages
from nnx_pipeline.pipeline.one_f_one_b._state import (
    NOTHING,
    LoopState,
    LoopWeights,
    PhasePlan,
    one_f_one_b_plan,
)
from nnx_pipeline.pipeline.one_f_one_b._tick import (
    OneForwardOneBackwardTick,
    Phase,
    reads_of,
    row_of,
)
from nnx_pipeline.pipeline.stage._repeats import split_to_read
from nnx_pipeline.pipeline.stage._sums import ReadWithSums
from nnx_pipeline.pipeline.stage._vjp import only, zero_gradients
from nnx_pipeline.pipeline.stage.state import take


@jax.tree_util.register_static
@dataclass(frozen=True)
class _OnHost:
    """Which arrays are in host memory: of this `jax.eval_shape` tells nothing by itself."""

    marks: tuple[bool, ...]


def _on_host(tree: PyTree) -> _OnHost:
    spaces = (jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(tree))
    return _OnHost(tuple(space == jax.memory.Space.Host for space in spaces))


@dataclass(frozen=True)
class OneForwardOneBackwardLoop:
    """All ticks; `needed` says of which inputs the gradient is asked for."""

    tick: OneForwardOneBackwardTick
    bubble_fill: float
    cast_at_use: bool = False
    needed: Inputs | None = None
    unlifted: bool = False

    def run(
        self, weights: LoopWeights, inputs: Inputs, layers: PyTree, *, differentiate: bool
    ) -> LoopState:
        """Goes through all ticks from the weights as they are stored; returns the last state."""
        schedule = self.tick.schedule
        filling, steady, draining = schedule.phases
        phases = [
            Phase(filling, forward=True, loss=False, backward=False),
            Phase(steady, forward=True, loss=True, backward=differentiate),
            Phase(draining, forward=False, loss=False, backward=True),
        ]
        plan = one_f_one_b_plan(schedule)
        stored, visit = weights, self.tick.visit
        weights = weights._replace(stages=self._readable(stored.stages))
        state, residual_tree = self._start(weights, inputs, (layers, plan), keep=differentiate)
        if differentiate:
            others = stored._replace(stages=None)
            gradients = zero_gradients(others, others, visit.grad_dtype)
            if self.tick.needed is not None:
                gradients = only(self.tick.needed._replace(stages=None), gradients)
            # What the stage function closes over is the same on every stage, but its gradient is
            # not: each stage adds up its own, and these are summed over stages once, at the end.
            each = to_stages(gradients.captured, schedule.stages)
            gradients = gradients._replace(stages=visit.zeros(stored.stages), captured=each)
            state = state._replace(
                gradients=gradients,
                d_inputs=state.outputs,
                of_inputs=self._no_gradients_yet(inputs),
            )
        # Without gradients nothing drains: the last phase has backward visits only.
        for phase in phases if differentiate else phases[:2]:
            if phase.ticks:
                state = self._scan(phase, weights, inputs, residual_tree, state, plan)
        if state.gradients is None:
            return state
        scattered = visit.total(state.gradients.stages, stored.stages)
        d_captured = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), state.gradients.captured)
        gradients = state.gradients._replace(stages=scattered, captured=d_captured)
        d_side = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), state.of_inputs.side)
        of_inputs = state.of_inputs._replace(side=d_side)
        return state._replace(gradients=gradients, of_inputs=of_inputs)

    def _readable(self, stored: PyTree) -> PyTree:
        gathered = self.tick.visit.fsdp_gather.gather(stored)
        split = split_to_read(gathered, cast_at_use=self.cast_at_use)
        visit = self.tick.visit
        return ReadWithSums.of(split, visit.zeros(stored)) if visit.sums_in_layers else split

    def _no_gradients_yet(self, inputs: Inputs) -> Inputs:
        if self.needed is None:
            return NOTHING
        zeros: Inputs = jax.tree.map(
            lambda needed, leaf: jnp.zeros_like(leaf) if needed else None, self.needed, inputs
        )
        # Each stage adds up what its layers read, and these are summed over stages at the end.
        return zeros._replace(side=to_stages(zeros.side, self.tick.schedule.stages))

    def _scan(
        self,
        phase: Phase,
        weights: LoopWeights,
        inputs: Inputs,
        residual_tree: PyTreeDef,
        state: LoopState,
        plan: PhasePlan,
    ) -> LoopState:
        now = jax.tree.map(lambda leaf: leaf[phase.ticks.start : phase.ticks.stop], plan)
        tick = functools.partial(self.tick, weights, inputs, phase, residual_tree)
        state, _ = jax.lax.scan(lambda state, now: (tick(state, now), None), state, now)
        return state

    def visit_once(self, weights: Weights, inputs: Inputs, layers: PyTree) -> None:
        """Calls each function with the types that it gets in the ticks; nothing is computed."""
        tick = self.tick

        def call(weights: Weights, inputs: Inputs, layers: PyTree) -> Array:
            stages = self._readable(weights.stages)
            all_weights = LoopWeights.of(weights._replace(stages=stages))
            plan = one_f_one_b_plan(tick.schedule)
            _, ((y, _), _), _ = self._first_visit(all_weights, inputs, (layers, plan), keep=False)
            row = row_of(inputs.leave, plan.leaving[0])
            output = from_stage(y, tick.schedule.stages - 1)
            end = all_weights.leave
            return tick.functions.leave(end.captured, end.weights, output, row)

        jax.eval_shape(call, weights, inputs, layers)

    def _first_visit(
        self, weights: LoopWeights, inputs: Inputs, start: tuple[PyTree, PhasePlan], *, keep: bool
    ) -> tuple[PyTree, PyTree, PyTree]:
        layers, plan = start
        now = jax.tree.map(lambda leaf: leaf[0], plan)
        x = self.tick.entering(weights, inputs, now)
        moving = x, take(layers, self.tick.visits_at(now))
        reads = reads_of(weights, inputs, now.forward, now.forward_repeat)
        return x, *self.tick.visit.run(reads, moving, keep=keep)

    def total(self, state: LoopState) -> tuple[Array, tuple[Array, PyTree]]:
        metrics = over_all_stages(state.metrics, self.tick.visits)
        return objective(state.loss, metrics, self.tick.metric_weights)

    def _start(
        self, weights: LoopWeights, inputs: Inputs, start: tuple[PyTree, PhasePlan], *, keep: bool
    ) -> tuple[LoopState, PyTreeDef]:
        """The state before the first tick, and the tree structure of what a visit keeps."""

        def first_visit(*args: PyTree) -> tuple[PyTree, PyTree, PyTree, _OnHost]:
            x, (_, metrics), residuals = self._first_visit(*args, keep=keep)
            return x, metrics, residuals, _on_host(residuals)

        def no_metric(metric: Metric) -> PyTree:
            return jax.tree.map(lambda leaf: empty_ring(leaf, None, identity(metric)), metric)

        x, metrics, residuals, on_host = jax.eval_shape(first_visit, weights, inputs, start)
        residuals, tree = jax.tree.flatten(residuals)
        slots, fill = self.tick.schedule.ring_slots, self.bubble_fill
        return LoopState(
            outputs=jax.tree.map(lambda leaf: empty_ring(leaf, None, fill), x),
            d_inputs=None,
            ring=[
                (empty_host_ring if host else empty_ring)(leaf, slots, fill)
                for leaf, host in zip(residuals, on_host.marks, strict=True)
            ],
            gradients=None,
            loss=jnp.zeros((), jnp.float32),
            metrics=jax.tree.map(no_metric, metrics, is_leaf=is_metric),
            layers=start[0],
            of_inputs=NOTHING,
        ), tree
