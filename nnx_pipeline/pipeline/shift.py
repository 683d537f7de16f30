"""Sending each stage's array to its neighbour.

Both functions take `[stages, …]` with the first axis spread over the mesh axis `stage` (or not
spread, on a mesh without it) and give the same values; they differ in how the compiler sees it.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from nnx_pipeline.sharding import is_explicit, manual_axes, mesh_sizes, spec_of

ShiftName = Literal["ppermute", "slice"]


def shift(x: Array, *, by: Literal[1, -1], how: ShiftName = "ppermute") -> Array:
    """Stage s receives the array of stage s - by; the ends are joined to a ring.

    ppermute: one collective-permute in a `shard_map` over `stage`.
    slice: a concatenation of two slices, from which the compiler makes the transfer (seeds S1.1).
    """
    if how == "ppermute" and mesh_sizes().get("stage", 1) > 1:
        return _by_ppermute(x, by)
    return _by_slice(x, by)


def _by_ppermute(x: Array, by: int) -> Array:
    stages = mesh_sizes()["stage"]
    ring = [(source, (source + by) % stages) for source in range(stages)]

    def send(local: Array) -> Array:
        return jax.lax.ppermute(local, "stage", ring)

    spec = spec_of(x, stage_axis=0)
    return jax.shard_map(send, in_specs=spec, out_specs=spec, axis_names=manual_axes())(x)


def _by_slice(x: Array, by: int) -> Array:
    def roll(x: Array) -> Array:
        stages = x.shape[0]
        head = jax.lax.slice_in_dim(x, 0, stages - by if by > 0 else -by)
        tail = jax.lax.slice_in_dim(x, stages - by if by > 0 else -by, stages)
        return jnp.concatenate([tail, head])

    if is_explicit():
        return jax.sharding.auto_axes(roll, out_sharding=jax.typeof(x).sharding.spec)(x)
    return roll(x)
