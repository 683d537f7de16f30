"""Sends arrays between neighbouring stages, and holds buffers from tick to tick.

Every array begins with the axis of stages, which is sharded over the mesh axis `stage`.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.sharding.layout import (
    P,
    hold,
    is_explicit,
    manual_axes,
    mesh_sizes,
    place,
    spec_of,
)

ShiftName = Literal["ppermute", "slice", "pad"]
SHIFTS = ("ppermute", "slice", "pad")


def shift(x: Array, *, by: Literal[1, -1], how: ShiftName = "ppermute") -> Array:
    """Stage s of `[stages, …]` receives the array of stage s - by; the stages form a ring.

    - `ppermute`: one collective-permute in a `shard_map` over `stage`;
    - `slice`: a concatenation of two slices, from which the compiler makes the transfer;
    - `pad`: a slice of the array with one row of zeros added before or after it. Stages form no
      ring: the stage at the end receives the zeros.
    """
    if how == "ppermute" and mesh_sizes().get("stage", 1) > 1:
        return _by_ppermute(x, by)
    move = functools.partial(_padded if how == "pad" else _rolled, by=by)
    if is_explicit():
        move = jax.sharding.auto_axes(move, out_sharding=jax.typeof(x).sharding.spec)
    return move(x)


def _by_ppermute(x: Array, by: int) -> Array:
    stages = mesh_sizes()["stage"]
    ring = [(source, (source + by) % stages) for source in range(stages)]

    spec = spec_of(x, stage_axis=0)
    send = functools.partial(jax.lax.ppermute, axis_name="stage", perm=ring)
    on_stages = jax.shard_map(send, in_specs=spec, out_specs=spec, axis_names=manual_axes())
    sent: Array = on_stages(x)
    return sent


def _rolled(x: Array, by: int) -> Array:
    cut = x.shape[0] - by if by > 0 else -by
    return jnp.concatenate(
        [jax.lax.slice_in_dim(x, cut, x.shape[0]), jax.lax.slice_in_dim(x, 0, cut)]
    )


def _padded(x: Array, by: int) -> Array:
    edges = ((max(by, 0), max(-by, 0)), *[(0, 0)] * (x.ndim - 1))
    start = max(-by, 0)
    return jax.lax.slice_in_dim(jnp.pad(x, edges), start, start + x.shape[0])


def mark_stage(stage: int, stages: int) -> Array:
    return over_stage(jnp.asarray(np.arange(stages) == stage))


def stage_axis() -> str | None:
    """The mesh axis `stage`; None if the ambient mesh has fewer than two stages."""
    return "stage" if mesh_sizes().get("stage", 1) > 1 else None


def over_stage(x: Array) -> Array:
    """Shards the first axis over `stage`, and leaves the sharding of the others unchanged."""
    if stage_axis() is None:
        return x
    if is_explicit():
        return hold(x, P("stage", *jax.typeof(x).sharding.spec[1:]))
    return hold(x, P("stage", *[P.UNCONSTRAINED] * (x.ndim - 1)))


def rows(leaf: Array, microbatch: Array) -> Array:
    """Row `microbatch[s]` of `[microbatches, …]` for each stage s: `[stages, …]`."""
    spec = P(stage_axis(), *jax.typeof(leaf).sharding.spec[1:]) if is_explicit() else None
    return leaf.at[microbatch].get(mode="promise_in_bounds", out_sharding=spec)


def slot(tree: PyTree, index: Array) -> PyTree:
    """Reads the same slot on every stage: `[stages, slots, …]` to `[stages, …]`."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), tree
    )


def to_stages(tree: PyTree, stages: int) -> PyTree:
    """Adds a first axis of stages to arrays that every stage holds; nothing is sent."""

    def spread(leaf: Array) -> Array:
        spec = P(stage_axis(), *jax.typeof(leaf).sharding.spec) if is_explicit() else None
        shape, axes = (stages, *leaf.shape), tuple(range(1, leaf.ndim + 1))
        return over_stage(jax.lax.broadcast_in_dim(leaf, shape, axes, out_sharding=spec))

    return jax.tree.map(spread, tree)


def from_stage(tree: PyTree, stage: int) -> PyTree:
    """The entry of one stage, sent to all stages: `[stages, …]` to `[…]`."""
    # A masked sum: the other stages add zeros, so that an all-reduce brings the entry to all.
    stages = jax.tree.leaves(tree)[0].shape[0]
    tree = where(mark_stage(stage, stages), tree, jax.tree.map(jnp.zeros_like, tree))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)


def empty_ring(like: jax.ShapeDtypeStruct, slots: int | None, fill: float) -> Array:
    """An empty buffer `[stages, slots, …]` for arrays like `like`; 0 in one of integers."""
    between = () if slots is None else (slots,)
    shape = (like.shape[0], *between, *like.shape[1:])
    value = fill if jnp.issubdtype(like.dtype, jnp.inexact) else 0
    full = jnp.full(shape, value, like.dtype)
    if is_explicit() and like.sharding is not None:
        rest = P(*like.sharding.spec)[1:]
        full = place(full, P(None, *[None] * len(between), *rest))
    return over_stage(full)


def empty_host_ring(like: jax.ShapeDtypeStruct, slots: int, fill: float) -> Array:
    """As `empty_ring`, in host memory."""
    # Slot by slot: of a buffer that is sent as a whole, the device would hold a copy first.
    slot = empty_ring(like, None, fill)
    send = functools.partial(jax.device_put, device=jax.memory.Space.Host)
    _, ring = jax.lax.scan(lambda slot, _: (slot, send(slot)), slot, None, length=slots)
    return jnp.swapaxes(ring, 0, 1)


def push(
    tree: PyTree, column: PyTree, new: PyTree, index: Array, last: Array, how: ShiftName
) -> PyTree:
    """Moves a slot, with `column` in it, to the stage before; the last stage puts `new` there."""

    def push_leaf(leaf: Array, column: Array, new: Array) -> Array:
        moved = where(last, new, shift(column, by=-1, how=how))
        written: Array = jax.lax.dynamic_update_index_in_dim(leaf, moved, index, axis=1)
        return written

    return jax.tree.map(push_leaf, tree, column, new)


def where(condition: Array, x: PyTree, y: PyTree) -> PyTree:
    """As `jnp.where` on every leaf; the condition may be `[stages]` for leaves `[stages, …]`."""

    def pick(a: Array, b: Array) -> Array:
        wide = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
        return jnp.where(wide, a, b)

    return jax.tree.map(pick, x, y)
