"""The circular loop with a hand-written derivative, which adds up gradients tick by tick.

The backward pass differentiates one visit of all stages at a time, from what the forward pass saved
of its tick, and adds the gradients in place. So there is one gradient buffer per parameter, and
nothing else of the size of all parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from nnx_pipeline.pipeline import visit
from nnx_pipeline.pipeline._exchange import slot
from nnx_pipeline.pipeline.circular._backward import Others, PrefetchLoop, TwoWayTick, WholeLoop
from nnx_pipeline.pipeline.circular._tick import CircularLoop, Wrap
from nnx_pipeline.pipeline.options import Accumulation
from nnx_pipeline.pipeline.stage import apply as stages
from nnx_pipeline.pipeline.stage._hoist import Function, hoist
from nnx_pipeline.pipeline.stage._vjp import as_cotangents, no_gradient
from nnx_pipeline.pipeline.stage.apply import ApplyMoving, Moving
from nnx_pipeline.pipeline.stage.state import take
from nnx_pipeline.pipeline.visit import Reads, Visit
from nnx_pipeline.sharding._gradients import is_symbolic_zero, or_zeros, perturbed, values_of


@dataclass(frozen=True)
class Accumulate:
    """All ticks, differentiated one by one; `checkpoint` decides which residuals are saved."""

    loop: CircularLoop
    checkpoint: Wrap
    how: Accumulation

    def __call__(
        self, apply_stage: ApplyMoving, params: PyTree, moving: Moving, side: PyTree
    ) -> tuple[Moving, PyTree]:
        """What moves, `[stages, slots, …]` and state, after the last tick, and all metrics."""

        def call(look: Function) -> None:  # with the types that the ticks have
            jax.eval_shape(functools.partial(_first_visit, self._tick(look)), params, moving, side)

        # What the stage function closes over becomes an input of the loop: JAX does not
        # differentiate a `custom_vjp` function with respect to arrays that it closes over.
        (apply,), (captured,), _ = hoist((apply_stage,), call)
        tick = self._tick(apply)
        prefetches = tick.visit.fsdp_gather.prefetch
        ticks: AllTicks = PrefetchLoop(tick) if prefetches else WholeLoop(tick)
        return _run(ticks, params, moving, Others(side, captured))

    def _tick(self, apply_stage: Callable[..., tuple[PyTree, PyTree]]) -> TwoWayTick:
        """The tick for a stage function that takes what it closes over as its first argument."""

        def apply(reads: Reads, x: Moving) -> tuple[Moving, PyTree]:
            at_depth = isinstance(reads.side, stages.AtDepth)
            stage = functools.partial(apply_stage, reads.captured)
            mapped = stages.map_stages(stage, at_depth=at_depth)
            result: tuple[Moving, PyTree] = mapped(reads.weights, x, reads.side)
            return result

        gather = self.how.fsdp_gather.of_repeats(self.loop.schedule.repeats)
        visits = Visit(
            self.checkpoint(apply),
            False,
            self.how.grad_dtype,
            gather,
            sums_in_layers=self.loop.sums_in_layers,
        )
        return TwoWayTick(self.loop, visits)


def _first_visit(
    tick: TwoWayTick, params: PyTree, moving: Moving, side: PyTree
) -> tuple[Moving, PyTree]:
    split = tick.readable(params)
    now = jax.tree.map(lambda leaf: leaf[0], tick.loop.plan)
    reads = Others(side, []).at(lambda now: visit.weights_of(split, now.repeat), now)
    stream, state = moving
    x = slot(stream, jnp.int32(0)), take(state, tick.loop.visits_at(now))
    return tick.visit.apply(reads, x)


AllTicks = WholeLoop | PrefetchLoop


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needed:
    """Of which arrays of parameters and `Others` the gradient is asked for, in tree order."""

    leaves: tuple[bool, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(ticks: AllTicks, params: PyTree, moving: Moving, others: Others) -> tuple[Moving, PyTree]:
    (end, state), metrics, _ = ticks.forward(params, moving, others, keep=False)
    return (end.stream, state), metrics


def _run_forward(
    ticks: AllTicks, params: PyTree, moving: PyTree, others: PyTree
) -> tuple[tuple[Moving, PyTree], PyTree]:
    needed = _Needed(tuple(jax.tree.leaves(perturbed((params, others)))))
    params, moving, others = values_of((params, moving, others))
    (end, state), metrics, saved = ticks.forward(params, moving, others, keep=True)
    return ((end.stream, state), metrics), (params, moving[1], others, saved, needed)


def _run_backward(
    ticks: AllTicks, saved: PyTree, cotangents: tuple[tuple[PyTree, PyTree], PyTree]
) -> tuple[PyTree, tuple[PyTree, PyTree], Others]:
    params, state, others, saved, needed = saved
    (d_stream, _), d_metrics = cotangents  # the state has no gradient
    d_stream = jax.tree.map(or_zeros, d_stream, is_leaf=is_symbolic_zero)
    # A metric whose gradient is not asked for has the cotangent None instead of zeros: where its
    # derivative is infinite, 0 times that would be NaN.
    d_metrics = jax.tree.map(
        lambda leaf: None if is_symbolic_zero(leaf) else leaf, d_metrics, is_leaf=is_symbolic_zero
    )
    of_params, of_others = jax.tree.unflatten(jax.tree.structure((params, others)), needed.leaves)
    visits = dataclasses.replace(ticks.tick.visit, needed=of_params)
    tick = dataclasses.replace(ticks.tick, visit=visits, needed=of_others)
    ticks = dataclasses.replace(ticks, tick=tick)
    last = ticks.tick.no_cotangents(d_stream, others)
    d_params, first = ticks.backward(params, others, (saved, d_metrics), last)
    d_others = as_cotangents(first.others, others)
    d_moving = first.carry.stream, no_gradient(state)
    return as_cotangents(d_params, params), d_moving, d_others


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
