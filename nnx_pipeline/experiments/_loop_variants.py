"""Alternative code for the circular loop, kept only as arms of experiments."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline._exchange import (
    ShiftName,
    over_stage,
    push,
    shift,
    slot,
    stage_axis,
    where,
)
from nnx_pipeline.pipeline.circular._tick import CircularCarry, CircularPlan, MidTick
from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.stage.apply import at_repeat, select_repeat
from nnx_pipeline.sharding.layout import P, out_sharding

Item = TypeVar("Item")
_Tick = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def python_loop(
    schedule: CircularSchedule, tick: _Tick, carry: PyTree, rows: PyTree, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Runs all ticks in a Python loop, so that the program has them one after the other.

    Arguments and result are those of `circular.tick.walk_ticks`.
    """
    results = []
    for index in _order(range(schedule.ticks), reverse):
        row = jax.tree.map(
            lambda leaf, at=index: jax.lax.index_in_dim(leaf, at, keepdims=False), rows
        )
        carry, result = tick(carry, row)
        results.append(result)
    return carry, _join(jnp.stack, _order(results, reverse))


def scan_per_repeat(
    schedule: CircularSchedule, tick: _Tick, carry: PyTree, rows: PyTree, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Runs one scan for each repeat, one after the other, and one for the ticks that drain.

    Arguments and result are those of `circular.tick.walk_ticks`.
    """
    starts = [repeat * schedule.microbatches for repeat in range(schedule.repeats + 1)]
    results = []
    for begin, end in _order(
        list(zip(starts, [*starts[1:], schedule.ticks], strict=True)), reverse
    ):
        part = jax.tree.map(
            lambda leaf, begin=begin, end=end: jax.lax.slice_in_dim(leaf, begin, end), rows
        )
        carry, result = jax.lax.scan(tick, carry, part, length=end - begin, reverse=reverse)
        results.append(result)
    return carry, _join(jnp.concatenate, _order(results, reverse))


def carry_layers(
    schedule: CircularSchedule, tick: _Tick, carry: PyTree, rows: PyTree, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Runs all ticks in one scan that also carries the layers from tick to tick.

    That is what `nnx.scan` does with the state of a module. At each tick a stage writes the state
    of its repeat back into the state of all repeats. The state has not changed, but without this
    JAX itself would take a value that is only passed on out of the loop.

    Arguments and result are those of `circular.tick.walk_ticks`.
    """
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    pure, reads = jax.closure_convert(tick, carry, first)
    stack = (schedule.repeats, schedule.stages)

    def step(carry: PyTree, row: CircularPlan) -> tuple[PyTree, PyTree]:
        carry, reads = carry
        carry, result = pure(carry, row, *reads)
        repeat = over_stage(row.repeat)
        # Of what the tick reads, the layers are the arrays that begin with [repeats, stages].
        layers = [leaf for leaf in reads if leaf.shape[:2] == stack]
        written = iter(at_repeat(layers, repeat, select_repeat(layers, repeat)))
        return (
            carry,
            [next(written) if leaf.shape[:2] == stack else leaf for leaf in reads],
        ), result

    (carry, _), results = jax.lax.scan(
        step, (carry, reads), rows, length=schedule.ticks, reverse=reverse
    )
    return carry, results


def _join(how: Callable[[Sequence[Array]], Array], results: list[PyTree]) -> PyTree:
    """The results joined as a scan gives them, in the tree of the first.

    They are joined leaf by leaf: the tree of what a tick keeps contains its traced function, so
    that JAX does not take the trees of two ticks for equal.
    """
    columns = zip(*map(jax.tree.leaves, results), strict=True)
    return jax.tree.unflatten(jax.tree.structure(results[0]), [how(column) for column in columns])


def _order(items: Sequence[Item], reverse: bool) -> list[Item]:
    return list(reversed(items)) if reverse else list(items)


def one_array(params: PyTree, *, cast_at_use: bool) -> PyTree:
    """Parameters `[repeats, stages, …]` as they are, for a `select` that reads such an array."""
    del cast_at_use
    return params


def select_by_gather(params: PyTree, repeat: Array) -> PyTree:
    """The parameters of each stage's repeat, `[stages, …]`, by one gather per array.

    - `params`: `[repeats, stages, …]`.
    - `repeat`: the repeat that each stage is at, int32[stages].
    """
    return select_repeat(params, repeat, read=_row_by_gather)


def _row_by_gather(index: Array, leaf: Array) -> Array:
    return jax.lax.gather(
        leaf,
        index[:, None],
        jax.lax.GatherDimensionNumbers(
            offset_dims=tuple(range(1, leaf.ndim)),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
        ),
        slice_sizes=(1, *leaf.shape[1:]),
        mode="promise_in_bounds",
        unique_indices=True,
        indices_are_sorted=True,
    )


def stage_inputs_constrained(
    schedule: CircularSchedule, shift_by: ShiftName, now: CircularPlan, carry: CircularCarry
) -> tuple[MidTick, PyTree]:
    """`tick.stage_inputs` with constraints that repeat the shardings that hold anyway (seeds S1.2).

    They are on the shifted activations, on the input of the first stage and of every stage, and on
    the stream, as in MaxText before it dropped them. The stages are numbered by an iota that is
    told its sharding. In explicit mode the types contain all of this anyway.

    Arguments and result are those of `tick.stage_inputs`.
    """
    first, last = _mark(0, schedule.stages), _mark(schedule.stages - 1, schedule.stages)
    stream = _hold(carry.stream)
    waiting = slot(stream, now.stream_slot)
    sent = _hold(jax.tree.map(lambda leaf: shift(leaf, by=1, how=shift_by), carry.outputs[0]))
    arrived = sent if schedule.delay == 1 else carry.arrived
    queue, returning = carry.queue, arrived
    if queue is not None:
        returning = slot(queue, now.queue_slot)
        queue = push(queue, returning, carry.outputs[-1], now.queue_slot, last, shift_by)
    entering = _hold(where(now.from_stream, waiting, returning))
    x = where(first, entering, arrived)
    x = _hold(where(over_stage(now.active), x, waiting))
    mid = MidTick(
        stream=stream,
        leaving=waiting,
        queue=queue,
        outputs=carry.outputs[:-1],
        sent=None if schedule.delay == 1 else sent,
    )
    return mid, x


def _hold(tree: PyTree) -> PyTree:
    return jax.tree.map(over_stage, tree)


def _mark(stage: int, stages: int) -> Array:
    spec = out_sharding(P(stage_axis()))
    numbers = jax.lax.broadcasted_iota(jnp.int32, (stages,), 0, out_sharding=spec)
    return over_stage(numbers) == stage
