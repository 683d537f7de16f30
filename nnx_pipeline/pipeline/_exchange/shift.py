"""Sends each stage's array to a neighbouring stage.

All ways take `[stages, …]` with the first axis sharded over the mesh axis `stage` (or not sharded,
on a mesh without it). They give the same values, except `pad` at the ends, and
differ in what the compiler sees.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from nnx_pipeline.sharding.layout import is_explicit, manual_axes, mesh_sizes, spec_of

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
