"""Buffers of the pipeline: what every stage holds, read and written at one place per tick.

Every array begins with the axis of stages, which lies on the mesh axis `stage`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import ShiftName, shift
from nnx_pipeline.sharding import P, hold, is_explicit, mesh_sizes, place


def mark_stage(stage: int, stages: int) -> Array:
    """bool[stages], True at one stage."""
    return over_stage(jnp.asarray(np.arange(stages) == stage))


def stage_axis() -> str | None:
    """The mesh axis of the stages, None on a mesh without one."""
    return "stage" if mesh_sizes().get("stage", 1) > 1 else None


def over_stage(x: Array) -> Array:
    """Puts the first axis over `stage` and leaves the others where they are."""
    if stage_axis() is None:
        return x
    if is_explicit():
        return hold(x, P("stage", *jax.typeof(x).sharding.spec[1:]))
    return hold(x, P("stage", *[P.UNCONSTRAINED] * (x.ndim - 1)))


def rows(leaf: Array, microbatch: Array) -> Array:
    """Row `microbatch[s]` for each stage s: `[microbatches, …]` to `[stages, …]`."""
    spec = P(stage_axis(), *jax.typeof(leaf).sharding.spec[1:]) if is_explicit() else None
    return leaf.at[microbatch].get(mode="promise_in_bounds", out_sharding=spec)


def slot(tree: PyTree, index: Array) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), tree
    )


def to_stages(tree: PyTree, stages: int) -> PyTree:
    """What every device along `stage` has, as `[stages, …]`: nothing is sent."""

    def one(leaf: Array) -> Array:
        spec = P(stage_axis(), *jax.typeof(leaf).sharding.spec) if is_explicit() else None
        shape, axes = (stages, *leaf.shape), tuple(range(1, leaf.ndim + 1))
        return over_stage(jax.lax.broadcast_in_dim(leaf, shape, axes, out_sharding=spec))

    return jax.tree.map(one, tree)


def from_stage(tree: PyTree, stage: int) -> PyTree:
    """What one stage has of `[stages, …]`, sent to all."""
    stages = jax.tree.leaves(tree)[0].shape[0]
    tree = where(mark_stage(stage, stages), tree, jax.tree.map(jnp.zeros_like, tree))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)


def empty_ring(like: jax.ShapeDtypeStruct, slots: int | None, fill: float) -> Array:
    """`[stages, slots, …]`, or without slots, for arrays of `[stages, …]`; integers are zero."""
    between = () if slots is None else (slots,)
    shape = (like.shape[0], *between, *like.shape[1:])
    value = fill if jnp.issubdtype(like.dtype, jnp.inexact) else 0
    full = jnp.full(shape, value, like.dtype)
    if is_explicit() and like.sharding is not None:
        rest = P(*like.sharding.spec)[1:]
        full = place(full, P(None, *[None] * len(between), *rest))
    return over_stage(full)


def push(
    tree: PyTree, column: PyTree, new: PyTree, index: Array, last: Array, how: ShiftName
) -> PyTree:
    """Moves the slot `column` one stage towards stage 0; the last stage's place takes `new`."""

    def one(leaf: Array, column: Array, new: Array) -> Array:
        moved = where(last, new, shift(column, by=-1, how=how))
        return jax.lax.dynamic_update_index_in_dim(leaf, moved, index, axis=1)

    return jax.tree.map(one, tree, column, new)


def where(condition: Array, one: PyTree, other: PyTree) -> PyTree:
    """`jnp.where` with a condition on the leading axis (or none) of every leaf."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(
            condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b
        )

    return jax.tree.map(pick, one, other)


def split(leaf: Array, schedule: CircularSchedule) -> Array:
    """[microbatches, …] to [stages, slots, …]."""
    return leaf.reshape(schedule.stages, schedule.stream_slots, *leaf.shape[1:])


def merge(leaf: Array) -> Array:
    """[stages, slots, …] to [microbatches, …]."""
    return leaf.reshape(-1, *leaf.shape[2:])
