"""Applying stages: all at once along the mesh, or one after the other as the plain model does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.sharding import P, manual_axes, mesh_sizes, spec_of

# (parameters of one stage in one repeat, activations, side inputs) to (activations, metrics)
ApplyStage = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
# a function of one stage to the same over a leading axis of stages
OverStages = Callable[[Callable[..., Any]], Callable[..., Any]]


def over_stages(apply_stage: ApplyStage) -> Callable[..., Any]:
    """The stage function over a leading axis of stages, which lies on the mesh axis `stage`."""
    name = "stage" if mesh_sizes().get("stage", 1) > 1 else None
    return jax.vmap(apply_stage, spmd_axis_name=name)


def read_row(index: Array, leaf: Array) -> Array:
    """Row `index` of an array."""
    return jax.lax.dynamic_index_in_dim(leaf, index, axis=0, keepdims=False)


def select_repeat(
    params: PyTree, repeat: Array, read: Callable[[Array, Array], Array] = read_row
) -> PyTree:
    """Each stage's parameters of its own repeat: `[repeats, stages, …]` to `[stages, …]`.

    repeat: int32[stages]. Every stage slices its own shard; nothing is sent. read: takes one
    repeat out of a stage's shard.
    """
    leaves = jax.tree.leaves(params)
    if leaves and leaves[0].shape[0] == 1:
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), params)
    return _each_stage(read, repeat, (params,), stage_axes=(1,), out_axis=0)


def at_repeat(params: PyTree, repeat: Array, new: PyTree) -> PyTree:
    """`[repeats, stages, …]` with `[stages, …]` put into each stage's entry of its own repeat."""

    def put(repeat: Array, leaf: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(leaf, new, repeat, axis=0)

    return _each_stage(put, repeat, (params, new), stage_axes=(1, 0), out_axis=1)


def select_slot(tree: PyTree, slot: Array) -> PyTree:
    """What each stage has in its own slot: `[stages, slots, …]` to `[stages, …]`."""
    return _each_stage(read_row, slot, (tree,), stage_axes=(0,), out_axis=0)


def _each_stage(
    function: Callable[..., Array],
    index: Array,
    trees: tuple[PyTree, ...],
    *,
    stage_axes: tuple[int, ...],
    out_axis: int,
) -> PyTree:
    """`function(index, *leaves)` on each stage's own shard of the leaves, which none leaves."""
    mapped = jax.vmap(function, in_axes=(0, *stage_axes), out_axes=out_axis)

    def local(index: Array, *columns: list[Array]) -> list[Array]:
        return [mapped(index, *leaves) for leaves in zip(*columns, strict=True)]

    columns = [jax.tree.leaves(tree) for tree in trees]
    if mesh_sizes().get("stage", 1) > 1:
        specs = [
            [spec_of(leaf, stage_axis=axis) for leaf in leaves]
            for leaves, axis in zip(columns, stage_axes, strict=True)
        ]
        out = [_without(spec, 1 - stage_axes[0]) if len(trees) == 1 else spec for spec in specs[0]]
        local = jax.shard_map(
            local, in_specs=(P("stage"), *specs), out_specs=out, axis_names=manual_axes()
        )
    return jax.tree.unflatten(jax.tree.structure(trees[0]), local(index, *columns))


def _without(spec: P, axis: int) -> P:
    return P(*spec[:axis], *spec[axis + 1 :])


def check_shapes(
    params: PyTree, inputs: PyTree, stages: int, repeats: int, microbatches: int
) -> None:
    """Raises InputError unless arrays and mesh have the sizes of the schedule."""
    want = (repeats, stages)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.shape[:2] != want:
            raise InputError(
                f"parameter {jax.tree_util.keystr(path)} has shape {leaf.shape}; its first axes "
                f"must be (repeats, stages) = {want}, as the schedule says"
            )
    for leaf in jax.tree.leaves(inputs):
        if leaf.shape[:1] != (microbatches,):
            raise InputError(
                f"an input has shape {leaf.shape}; its first axis must be the "
                f"{microbatches} microbatches of the schedule"
            )
    on_mesh = mesh_sizes().get("stage", stages)
    if on_mesh not in (1, stages):
        raise InputError(
            f"the schedule has {stages} stages and the mesh stage={on_mesh}; make them equal"
        )


def run_sequential(
    apply_stage: ApplyStage, params: PyTree, microbatches: PyTree, side_inputs: PyTree = None
) -> tuple[PyTree, PyTree]:
    """What `run_pipeline` promises, in its plainest form: the reference that tests compare with.

    Python loops, no mesh, no overlap; the arguments and the result are those of `run_pipeline`.
    """
    repeats, stages = jax.tree.leaves(params)[0].shape[:2]
    count = jax.tree.leaves(microbatches)[0].shape[0]
    outputs, totals = [], []
    for microbatch in range(count):
        x, side = _at(microbatches, microbatch), _at(side_inputs, microbatch)
        for repeat in range(repeats):
            for stage in range(stages):
                x, metrics = apply_stage(_at(params, (repeat, stage)), x, side)
                totals.append(metrics)
        outputs.append(x)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
    return stacked, jax.tree.map(lambda *leaves: sum(leaves), *totals)


def _at(tree: PyTree, index: int | tuple[int, int]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)
