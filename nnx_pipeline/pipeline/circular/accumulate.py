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

from nnx_pipeline.ops.gradients import is_symbolic_zero, or_zeros, values_of
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
from nnx_pipeline.pipeline.stage.apply import ApplyStage
from nnx_pipeline.pipeline.stage.vjp import as_cotangents
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
        self, apply_stage: ApplyStage, params: PyTree, stream: PyTree, side: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The stream after the last tick, and the metrics of every tick; see `AllTicks`."""

        def call(look: ApplyStage) -> None:
            tick = self._tick(lambda _, *arguments: look(*arguments))
            _visit_once(tick, params, stream, side)

        # What the stage function closes over becomes an input of the loop: JAX does not
        # differentiate a `custom_vjp` function with respect to arrays that it closes over.
        (apply,), (closed,) = hoist((apply_stage,), call)
        tick = self._tick(apply)
        # If weights are gathered repeat by repeat, the ticks are walked in pieces.
        passage: Passage = RepeatWindow(tick) if tick.weights.ahead else AllRepeats(tick)
        return _pass(passage, params, stream, Beside(side, closed))

    def _tick(self, apply_stage: Callable[..., tuple[PyTree, PyTree]]) -> TwoWayTick:
        """The tick for a stage function that takes what it closes over as its first argument."""
        map_stages = self.loop.parts.map_stages

        def apply(reads: tuple[PyTree, PyTree, Any], x: PyTree) -> tuple[PyTree, PyTree]:
            weights, side, closed = reads
            return map_stages(functools.partial(apply_stage, closed))(weights, x, side)

        # Of a single repeat there is none to gather ahead.
        weights = dataclasses.replace(
            self.weights, ahead=self.weights.ahead and self.loop.schedule.repeats > 1
        )
        return TwoWayTick(self.loop, self.checkpoint(apply), self.grad_dtype, weights)


def _visit_once(tick: TwoWayTick, params: PyTree, stream: PyTree, side: PyTree) -> None:
    """Calls the visit with the types that it gets in the ticks; nothing is computed."""

    def visit(params: PyTree, stream: PyTree, side: PyTree) -> tuple[PyTree, PyTree]:
        gathered = tick.weights.gather(params)
        held = hold_weights(tick.loop.parts, gathered)
        weights_at = functools.partial(stage_weights, tick.loop.parts, held)
        now = jax.tree.map(lambda leaf: leaf[0], make_plan(tick.loop.schedule))
        reads = visit_reads(weights_at, Beside(side, []), now)
        return tick.apply(reads, slot(stream, jnp.int32(0)))

    jax.eval_shape(visit, params, stream, side)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pass(
    passage: Passage, params: PyTree, stream: PyTree, beside: Beside
) -> tuple[PyTree, PyTree]:
    end, metrics, _ = passage.forward(params, stream, beside, keep=False)
    return end.stream, metrics


def _pass_forward(
    passage: Passage, params: Any, stream: Any, beside: Any
) -> tuple[tuple[PyTree, PyTree], Any]:
    params, stream, beside = values_of((params, stream, beside))
    end, metrics, saved = passage.forward(params, stream, beside, keep=True)
    return (end.stream, metrics), (params, beside, saved)


def _pass_backward(
    passage: Passage, saved: Any, cotangents: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree, Beside]:
    params, beside, saved = saved
    d_stream, d_metrics = cotangents
    d_stream = jax.tree.map(or_zeros, d_stream, is_leaf=is_symbolic_zero)
    # A metric whose gradient is not asked for has the cotangent None instead of zeros: where its
    # derivative is infinite, 0 times that would be NaN.
    d_metrics = jax.tree.map(
        lambda leaf: None if is_symbolic_zero(leaf) else leaf, d_metrics, is_leaf=is_symbolic_zero
    )
    last = passage.tick.no_cotangents(d_stream, beside)
    d_params, first = passage.backward(params, beside, (saved, d_metrics), last)
    d_beside = as_cotangents(first.beside, beside)
    return as_cotangents(d_params, params), first.carry.stream, d_beside


_pass.defvjp(_pass_forward, _pass_backward, symbolic_zeros=True)
