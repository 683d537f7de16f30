"""Applies stages, all at once along the mesh or one after the other as a plain model does."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, PyTree

from nnx_pipeline.lab._tracing.jaxpr import equations_of
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline.metrics import Max, Mean, Metric, is_metric
from nnx_pipeline.pipeline.stage._hoist import Function
from nnx_pipeline.sharding.layout import P, is_explicit, manual_axes, mesh_sizes, spec_of

# (parameters of one stage in one repeat, activations, side inputs) to (activations, metrics); with
# a state it is the last argument, and the last of three results
ApplyStage = Callable[..., tuple[PyTree, ...]]
# what a visit works on: the activations, and the state of the layers, which may have no arrays
Moving = tuple[PyTree, PyTree]
# the same function as the loops call it
ApplyMoving = Callable[[PyTree, Moving, PyTree], tuple[Moving, PyTree]]


# What is known of the index of a scatter, so that XLA makes no code for other cases.
_WITHIN: dict[str, Any] = {
    "mode": "promise_in_bounds",
    "unique_indices": True,
    "indices_are_sorted": True,
}


class AtDepth(NamedTuple):
    """Side inputs, and the first place of a stage in which no stage has a layer at this tick."""

    side: PyTree
    depth: Array | None  # int32, one number for all stages; an axis of `vmap` in its place is None


def map_stages(apply_stage: Function, *, at_depth: bool = False) -> Function:
    """Maps a stage function over a leading axis of stages, sharded over the mesh axis `stage`.

    If `at_depth`, its side inputs, the last of three arguments, are `AtDepth`.

    Raises InputError for a convolution on a mesh on which XLA gets its gradient wrong.
    """
    name = "stage" if mesh_sizes().get("stage", 1) > 1 else None
    axes = (0, 0, AtDepth(0, None)) if at_depth else 0
    return jax.vmap(without_convolutions(apply_stage), axes, spmd_axis_name=name)


def read_row(index: Array, leaf: Array) -> Array:
    """`leaf[index]` for an index array of length 1, as a dynamic slice."""
    # The transpose of a gather adds up the gradients of a repeat by a scatter, that of a slice
    # writes them. Both hold the same memory for `mixtral-small` with 2 repeats (libtpu 0.0.42.1 and
    # XLA for H100, experiment `repeat-select`).
    row: Array = jax.lax.dynamic_index_in_dim(leaf, index[0], axis=0)
    return row


def select_repeat(
    params: PyTree, repeat: Array, read: Callable[[Array, Array], Array] = read_row
) -> PyTree:
    """The parameters of each stage's repeat: `[repeats, stages, …]` to `[stages, …]`."""
    if jax.tree.leaves(params)[0].shape[0] == 1:
        return jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), params)
    return _each_stage(read, repeat, (params,), stage_axes=(1,))


def at_repeat(params: PyTree, repeat: Array, new: PyTree) -> PyTree:
    """Replaces each stage's entry of its own repeat: `[stages, …]` in `[repeats, stages, …]`."""

    def put(repeat: Array, leaf: Array, new: Array) -> Array:
        return jnp.expand_dims(leaf.at[repeat].set(new[None], **_WITHIN), 1)

    return _each_stage(put, repeat, (params, new), stage_axes=(1, 0))


def select_slot(tree: PyTree, slot: Array) -> PyTree:
    """Reads a slot of its own on each stage: `[stages, slots, …]` to `[stages, …]`."""
    return _each_stage(read_row, slot, (tree,), stage_axes=(0,))


def at_slot(tree: PyTree, slot: Array, new: PyTree) -> PyTree:
    """Replaces a slot of its own on each stage: `[stages, …]` in `[stages, slots, …]`."""

    def put(slot: Array, leaf: Array, new: Array) -> Array:
        return jnp.expand_dims(jax.lax.dynamic_update_index_in_dim(leaf, new, slot[0], axis=0), 0)

    return _each_stage(put, slot, (tree, new), stage_axes=(0, 0))


def _each_stage(
    function: Callable[..., Array],
    index: Array,
    trees: tuple[PyTree, ...],
    *,
    stage_axes: tuple[int, ...],
) -> PyTree:
    """Calls `function(index, *leaves)` on each stage with its own shards; nothing is sent."""
    # It gets an index `[1]` and leaves without the axis of stages, which is at `stage_axes` in each
    # tree; its result has an axis of stages of length 1.
    columns = [jax.tree.leaves(tree) for tree in trees]
    index = index.astype(jnp.uint32)  # an unsigned index needs no code for negative values

    def one_stage(index: Array, *leaves: Array) -> Array:
        shards = [jax.lax.squeeze(x, (axis,)) for x, axis in zip(leaves, stage_axes, strict=True)]
        return function(index, *shards)

    def local(index: Array, *columns: list[Array]) -> list[Array]:
        return [one_stage(index, *leaves) for leaves in zip(*columns, strict=True)]

    def stage_by_stage(*leaves: Array) -> Array:
        stages = [
            one_stage(
                index[at : at + 1],
                *(
                    jax.lax.slice_in_dim(leaf, at, at + 1, axis=axis)
                    for leaf, axis in zip(leaves, stage_axes, strict=True)
                ),
            )
            for at in range(index.shape[0])
        ]
        return jnp.concatenate(stages, axis=0 if len(trees) == 1 else stage_axes[0])

    if mesh_sizes().get("stage", 1) > 1:
        specs = [
            [spec_of(leaf, stage_axis=axis) for leaf in leaves]
            for leaves, axis in zip(columns, stage_axes, strict=True)
        ]
        out = specs[0]
        if len(trees) == 1:  # what is read has no axis of repeats or slots
            at = 1 - stage_axes[0]
            out = [P(*spec[:at], *spec[at + 1 :]) for spec in out]
        everywhere = jax.shard_map(
            local, in_specs=(P("stage"), *specs), out_specs=out, axis_names=manual_axes()
        )
        new = everywhere(index, *columns)
    else:
        new = [stage_by_stage(*leaves) for leaves in zip(*columns, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), new)


def run_sequential(
    apply_stage: ApplyStage, params: PyTree, microbatches: PyTree, side_inputs: PyTree = None
) -> tuple[PyTree, PyTree]:
    """Computes the results of `run_pipeline` by plain Python loops, as a reference for tests.

    - `apply_stage`: as for `run_pipeline`; it must wrap its metrics in `Sum`, `Mean` or `Max`, as
      `MicrobatchMean` is not supported.
    - `params`: `[repeats, stages, …]`.
    - `microbatches`, `side_inputs`: `[microbatches, …]`; None for no side inputs.

    Returns the outputs `[microbatches, …]` and the metrics of all visits combined, as
    `run_pipeline` does. It uses no mesh and no overlap.
    """
    leaves = jax.tree.leaves(params)
    if not all(hasattr(leaf, "shape") for leaf in leaves):
        raise InputError(
            f"run_sequential was given parameters of type {type(params).__name__}; give a pytree "
            "of arrays [repeats, stages, …], without a state"
        )
    repeats, stages = leaves[0].shape[:2]
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

    def whole(*visits: Metric) -> Array:
        values: list[Array] = [metric.value for metric in visits]
        if isinstance(visits[0], Max):
            return functools.reduce(jnp.maximum, values)
        total = functools.reduce(jnp.add, values)
        return total / (len(values) if isinstance(visits[0], Mean) else 1)

    return stacked, jax.tree.map(whole, *totals, is_leaf=is_metric)


def _at(tree: PyTree, index: int | tuple[int, int]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)


SHARED, COPIES = ("data", "fsdp", "expert"), ("tensor", "context")


def without_convolutions(apply_stage: Function) -> Function:
    """The function of a stage, with an InputError where it has a convolution that goes wrong."""
    # A convolution that is mapped over stages becomes one with groups. Where the batch is sharded
    # too and a further mesh axis holds copies, XLA adds the gradient of the kernel up over these
    # copies as well (jaxlib 0.10.2 and 0.12.0.1 on the CPU; see
    # tests/pipeline/test_convolutions.py). On meshes with explicit axes JAX itself refuses it.
    sizes = mesh_sizes()
    shared, copies = (
        " and ".join(axis for axis in axes if sizes.get(axis, 1) > 1) for axes in (SHARED, COPIES)
    )
    if sizes.get("stage", 1) == 1 or not shared or not copies or is_explicit():
        return apply_stage

    @functools.wraps(apply_stage)
    def checked(*args: PyTree) -> PyTree:
        if _has_convolution(jax.make_jaxpr(apply_stage)(*args)):
            raise InputError(
                "a layer has a convolution, and XLA gets the gradient of its kernel wrong on a "
                f"mesh with stages, a batch that is sharded over {shared}, and copies along "
                f"{copies}; take a mesh in which {copies} is 1, or write the convolution as a sum "
                "of shifted products"
            )
        return apply_stage(*args)

    return checked


def _has_convolution(program: ClosedJaxpr) -> bool:
    names = (equation.primitive.name for equation in equations_of(program))
    return "conv_general_dilated" in names
