"""The circular loop with a hand-written derivative, which adds up gradients tick by tick.

The forward pass keeps, for each tick, what the `jax.checkpoint` around the visits keeps: the input
of each stage, and the values whose names the remat policy saves. The backward pass walks the ticks
from the last to the first, differentiates one visit of all stages at a time, and adds the gradient
of each stage's weights in place to the repeat that they belong to. So there is one gradient buffer
per parameter, and nothing else of the size of all parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from nnx_pipeline.ops.gradients import asked_of, is_symbolic_zero, or_zeros, values_of
from nnx_pipeline.pipeline.circular.backward import (
    AllRepeats,
    Beside,
    Passage,
    TwoWayTick,
    visit_reads,
)
from nnx_pipeline.pipeline.circular.plan import make_plan
from nnx_pipeline.pipeline.circular.prefetch import RepeatWindow
from nnx_pipeline.pipeline.circular.tick import Loop, hold_weights, stage_weights
from nnx_pipeline.pipeline.closed import hoist
from nnx_pipeline.pipeline.exchange.buffers import slot
from nnx_pipeline.pipeline.stage.apply import ApplyMoving, Moving
from nnx_pipeline.pipeline.stage.state import take
from nnx_pipeline.pipeline.stage.vjp import as_cotangents, no_gradient
from nnx_pipeline.pipeline.weights.gathered import WeightGathering


@dataclass(frozen=True)
class Accumulate:
    """All ticks, differentiated one by one by a hand-written rule.

    - `loop`: what every tick does.
    - `checkpoint`: is put around the visit of all stages, and decides what is kept of it.
    - `grad_dtype`, `weights`: as for `Accumulation`.
    """

    loop: Loop
    checkpoint: Callable[[Callable[..., Any]], Callable[..., Any]]
    grad_dtype: jax.typing.DTypeLike | None
    weights: WeightGathering

    def __call__(
        self, apply_stage: ApplyMoving, params: PyTree, moving: Moving, side: PyTree
    ) -> tuple[Moving, PyTree]:
        """Stream and state after the last tick, and the metrics of all; see `AllTicks`."""

        def call(look: ApplyMoving) -> None:
            tick = self._tick(lambda _, *arguments: look(*arguments))
            _visit_once(tick, params, moving, side)

        # What the stage function closes over becomes an input of the loop: JAX does not
        # differentiate a `custom_vjp` function with respect to arrays that it closes over.
        (apply,), (closed,) = hoist((apply_stage,), call)
        tick = self._tick(apply)
        # If weights are gathered repeat by repeat, the ticks are walked in pieces.
        passage: Passage = RepeatWindow(tick) if tick.weights.ahead else AllRepeats(tick)
        return _pass(passage, params, moving, Beside(side, closed))

    def _tick(self, apply_stage: Callable[..., tuple[PyTree, PyTree]]) -> TwoWayTick:
        """The tick for a stage function that takes what it closes over as its first argument."""
        map_stages = self.loop.parts.map_stages

        def apply(reads: tuple[PyTree, PyTree, Any], x: Moving) -> tuple[Moving, PyTree]:
            weights, side, closed = reads
            return map_stages(functools.partial(apply_stage, closed))(weights, x, side)

        # Of a single repeat there is none to gather ahead.
        weights = dataclasses.replace(
            self.weights, ahead=self.weights.ahead and self.loop.schedule.repeats > 1
        )
        return TwoWayTick(self.loop, self.checkpoint(apply), self.grad_dtype, weights)


def _visit_once(tick: TwoWayTick, params: PyTree, moving: Moving, side: PyTree) -> None:
    """Calls the visit with the types that it gets in the ticks; nothing is computed."""

    def visit(params: PyTree, moving: Moving, side: PyTree) -> tuple[Moving, PyTree]:
        gathered = tick.weights.gather(params)
        held = hold_weights(tick.loop, gathered)
        weights_at = functools.partial(stage_weights, tick.loop.parts, held)
        now = jax.tree.map(lambda leaf: leaf[0], make_plan(tick.loop.schedule))
        reads = visit_reads(weights_at, Beside(side, []), now)
        stream, state = moving
        return tick.apply(
            reads, (slot(stream, jnp.int32(0)), take(state, tick.loop.visits_at(now)))
        )

    jax.eval_shape(visit, params, moving, side)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Asked:
    """Of which arrays of parameters and `Beside` the gradient is asked for, in tree order."""

    leaves: tuple[bool, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(
    passage: Passage, params: PyTree, moving: Moving, beside: Beside
) -> tuple[Moving, PyTree]:
    (end, state), metrics, _ = passage.forward(params, moving, beside, keep=False)
    return (end.stream, state), metrics


def _pass_forward(
    passage: Passage, params: Any, moving: Any, beside: Any
) -> tuple[tuple[Moving, PyTree], Any]:
    asked = _Asked(tuple(jax.tree.leaves(asked_of((params, beside)))))
    params, moving, beside = values_of((params, moving, beside))
    (end, state), metrics, saved = passage.forward(params, moving, beside, keep=True)
    return ((end.stream, state), metrics), (params, moving[1], beside, saved, asked)


def _pass_backward(
    passage: Passage, saved: Any, cotangents: tuple[tuple[PyTree, PyTree], PyTree]
) -> tuple[PyTree, tuple[PyTree, PyTree], Beside]:
    params, state, beside, saved, asked = saved
    (d_stream, _), d_metrics = cotangents  # the state has no gradient
    d_stream = jax.tree.map(or_zeros, d_stream, is_leaf=is_symbolic_zero)
    # A metric whose gradient is not asked for has the cotangent None instead of zeros: where its
    # derivative is infinite, 0 times that would be NaN.
    d_metrics = jax.tree.map(
        lambda leaf: None if is_symbolic_zero(leaf) else leaf, d_metrics, is_leaf=is_symbolic_zero
    )
    asked = jax.tree.unflatten(jax.tree.structure((params, beside)), asked.leaves)
    passage = passage.of_asked(asked)
    last = passage.tick.no_cotangents(d_stream, beside)
    d_params, first = passage.backward(params, beside, (saved, d_metrics), last)
    d_beside = as_cotangents(first.beside, beside)
    d_moving = first.carry.stream, no_gradient(state)
    return as_cotangents(d_params, params), d_moving, d_beside


_pass.defvjp(_pass_forward, _pass_backward, symbolic_zeros=True)
