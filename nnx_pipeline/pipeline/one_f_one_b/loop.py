"""The loop over the ticks of 1F1B: one scan each for filling, steady state and draining."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.exchange.buffers import (
    empty_host_ring,
    empty_ring,
    from_stage,
    to_stages,
)
from nnx_pipeline.pipeline.metrics import identity, is_metric, objective, over_all_stages
from nnx_pipeline.pipeline.one_f_one_b.plan import Plan, make_plan
from nnx_pipeline.pipeline.one_f_one_b.state import NOTHING, Held, Inputs, State, Weights
from nnx_pipeline.pipeline.one_f_one_b.tick import Phase, Tick, row_of
from nnx_pipeline.pipeline.options import Accumulation
from nnx_pipeline.pipeline.stage.repeats import hold, hold_to_read, stacked
from nnx_pipeline.pipeline.stage.state import take
from nnx_pipeline.pipeline.stage.vjp import only, zero_gradients


@jax.tree_util.register_static
@dataclass(frozen=True)
class _OnHost:
    """Which arrays are in host memory: of this `jax.eval_shape` tells nothing by itself."""

    marks: tuple[bool, ...]


def _on_host(tree: PyTree) -> _OnHost:
    spaces = (jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(tree))
    return _OnHost(tuple(space == jax.memory.Space.Host for space in spaces))


@dataclass(frozen=True)
class Loop:
    """All ticks of a 1F1B schedule.

    - `tick`: what every tick does.
    - `how`: in which dtype gradients add up, and how the weights are held during the loop.
    - `bubble_fill`: what the buffers hold before anything arrives; results do not depend on it.
    - `cast_at_use`: as in `WeightOptions`.
    - `asked`: for each input of the microbatches, whether its gradient is asked for; None for none.
    """

    tick: Tick
    how: Accumulation
    bubble_fill: float
    cast_at_use: bool = False
    asked: Inputs | None = None

    def run(self, weights: Held, inputs: Inputs, layers: PyTree, *, differentiate: bool) -> State:
        """Goes through all ticks; returns the state after the last one.

        - `weights`: the weights as they are stored, and what the functions close over.
        - `inputs`: what the microbatches bring along.
        - `layers`: the state of the layers, `[repeats, stages, …]`, or no arrays.
        - `differentiate`: whether to compute gradients; without them there is no backward visit.
        """
        schedule = self.tick.schedule
        filling, steady, draining = schedule.phases
        phases = [
            Phase(filling, forward=True, leave=False, backward=False),
            Phase(steady, forward=True, leave=True, backward=differentiate),
            Phase(draining, forward=False, leave=False, backward=True),
        ]
        plan = make_plan(schedule)
        stored, gathering = weights, self.tick.weights
        weights = weights._replace(stages=self._held(stored.stages))
        state, kept_tree = self._start(weights, inputs, (layers, plan), keep=differentiate)
        if differentiate:
            others = stored._replace(stages=None)
            gradients = zero_gradients(others, others, self.how.grad_dtype)
            zeros = gathering.zeros(stored.stages, self.how.grad_dtype)
            if self.tick.asked is not None:
                gradients = only(self.tick.asked, gradients._replace(stages=zeros))
                zeros = gradients.stages
            # What the stage function closes over is the same on every stage, but its gradient is
            # not: each stage adds up its own, and these are summed over stages once, at the end.
            each = to_stages(gradients.closed, schedule.stages)
            gradients = gradients._replace(stages=hold(zeros), closed=each)
            state = state._replace(
                gradients=gradients,
                d_inputs=state.outputs,
                of_inputs=self._no_gradients_yet(inputs),
            )
        # Without gradients nothing drains: the last phase has backward visits only.
        for phase in phases if differentiate else phases[:2]:
            if phase.ticks:
                state = self._scan(phase, weights, inputs, kept_tree, state, plan)
        if state.gradients is None:
            return state
        totals = stacked(state.gradients.stages)
        scattered = gathering.scatter_gradients(totals, stored.stages)
        d_closed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), state.gradients.closed)
        gradients = state.gradients._replace(stages=scattered, closed=d_closed)
        d_side = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), state.of_inputs.side)
        of_inputs = state.of_inputs._replace(side=d_side)
        return state._replace(gradients=gradients, of_inputs=of_inputs)

    def _held(self, stored: PyTree) -> PyTree:
        """The weights of the stages as the ticks read them."""
        return hold_to_read(self.tick.weights.gather(stored), cast_at_use=self.cast_at_use)

    def _no_gradients_yet(self, inputs: Inputs) -> Inputs:
        """The accumulators of the gradients that are asked for of inputs."""
        if self.asked is None:
            return NOTHING
        zeros = jax.tree.map(
            lambda asked, leaf: jnp.zeros_like(leaf) if asked else None, self.asked, inputs
        )
        # Each stage adds up what its layers read, and these are summed over stages at the end.
        return zeros._replace(side=to_stages(zeros.side, self.tick.schedule.stages))

    def _scan(
        self, phase: Phase, weights: Held, inputs: Inputs, kept_tree: Any, state: State, plan: Plan
    ) -> State:
        """Goes through the ticks of one phase."""
        now = jax.tree.map(lambda leaf: leaf[phase.ticks.start : phase.ticks.stop], plan)
        tick = functools.partial(self.tick, weights, inputs, phase, kept_tree)
        state, _ = jax.lax.scan(lambda state, now: (tick(state, now), None), state, now)
        return state

    def visit_once(self, weights: Weights, inputs: Inputs, layers: PyTree) -> None:
        """Calls each function with the types that it gets in the ticks; nothing is computed."""
        tick = self.tick

        def call(weights: Weights, inputs: Inputs, layers: PyTree) -> Array:
            stages = self._held(weights.stages)
            held = Held((weights.enter, []), stages, (weights.leave, []), [])
            now = jax.tree.map(lambda leaf: leaf[0], make_plan(tick.schedule))
            x = tick.entering(held, inputs, now)
            moving = x, take(layers, tick.visits_at(now))
            ((y, _), _), _ = tick.visit(held, inputs, now, moving, keep=False)
            row = row_of(inputs.leave, now.leaving)
            return tick.leaving(held.leave, from_stage(y, tick.schedule.stages - 1), row)

        jax.eval_shape(call, weights, inputs, layers)

    def total(self, state: State) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss to minimise, and its two parts: the loss of `leave`, and the metrics.

        - `state`: after the last tick.
        """
        metrics = over_all_stages(state.metrics, self.tick.visits)
        return objective(state.loss, metrics, self.tick.metric_weights)

    def _start(
        self, weights: Held, inputs: Inputs, given: tuple[PyTree, Plan], *, keep: bool
    ) -> tuple[State, Any]:
        """The state before the first tick, and the tree structure of what a visit keeps.

        - `given`: the state of the layers, and the timetable.
        """

        def first_visit(weights: Held, inputs: Inputs, given: tuple[PyTree, Plan]) -> Any:
            layers, plan = given
            now = jax.tree.map(lambda leaf: leaf[0], plan)
            x = self.tick.entering(weights, inputs, now)
            moving = x, take(layers, self.tick.visits_at(now))
            (_, metrics), kept = self.tick.visit(weights, inputs, now, moving, keep=keep)
            return x, metrics, kept, _on_host(kept)

        x, metrics, kept, on_host = jax.eval_shape(first_visit, weights, inputs, given)
        kept, tree = jax.tree.flatten(kept)
        nothing = jax.tree.map(lambda leaf: empty_ring(leaf, None, self.bubble_fill), x)
        slots = self.tick.schedule.ring_slots
        return State(
            outputs=nothing,
            d_inputs=None,
            ring=[
                (empty_host_ring if host else empty_ring)(leaf, slots, self.bubble_fill)
                for leaf, host in zip(kept, on_host.marks, strict=True)
            ],
            gradients=None,
            loss=jnp.zeros((), jnp.float32),
            metrics=jax.tree.map(
                lambda metric: type(metric)(empty_ring(metric.value, None, identity(metric))),
                metrics,
                is_leaf=is_metric,
            ),
            layers=given[0],
            of_inputs=NOTHING,
        ), tree
