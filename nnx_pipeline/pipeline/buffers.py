"""Buffers of the pipeline: what every stage holds, read and written at one place per tick.

Every array begins with the axis of stages, which lies on the mesh axis `stage`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline.schedule import CircularSchedule
from nnx_pipeline.pipeline.shift import ShiftName, shift
from nnx_pipeline.sharding import P, is_explicit, mesh_sizes, place


def mark_stage(stage: int, schedule: CircularSchedule) -> Array:
    """bool[stages], True at one stage."""
    return over_stage(jnp.asarray(np.arange(schedule.stages) == stage))


def over_stage(x: Array) -> Array:
    return place(x, P("stage")) if mesh_sizes().get("stage", 1) > 1 else x


def rows(leaf: Array, microbatch: Array) -> Array:
    """Row `microbatch[s]` for each stage s: `[microbatches, …]` to `[stages, …]`."""
    spec = P("stage", *jax.typeof(leaf).sharding.spec[1:]) if is_explicit() else None
    return leaf.at[microbatch].get(mode="promise_in_bounds", out_sharding=spec)


def slot(tree: PyTree, index: Array) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), tree
    )


def push(
    tree: PyTree, column: PyTree, new: PyTree, index: Array, last: Array, how: ShiftName
) -> PyTree:
    """Moves the slot `column` one stage towards stage 0; the last stage's place takes `new`."""

    def one(leaf: Array, column: Array, new: Array) -> Array:
        moved = where(last, new, shift(column, by=-1, how=how))
        return jax.lax.dynamic_update_index_in_dim(leaf, moved, index, axis=1)

    return jax.tree.map(one, tree, column, new)


def where(condition: Array, one: PyTree, other: PyTree) -> PyTree:
    """`jnp.where` with a condition on the leading axis (or none) of every leaf.

    The checkpoint keeps the condition for the backward pass as it is; `jnp.where` alone would keep
    it spread out to the shape of the activations, once per tick.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def pick(condition: Array, a: Array, b: Array) -> Array:
        return jnp.where(
            condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b
        )

    return jax.tree.map(functools.partial(pick, condition), one, other)


def split(leaf: Array, schedule: CircularSchedule) -> Array:
    """[microbatches, …] to [stages, slots, …]."""
    return leaf.reshape(schedule.stages, schedule.stream_slots, *leaf.shape[1:])


def merge(leaf: Array) -> Array:
    """[stages, slots, …] to [microbatches, …]."""
    return leaf.reshape(-1, *leaf.shape[2:])
