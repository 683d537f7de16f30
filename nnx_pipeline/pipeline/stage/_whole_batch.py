"""Sends a whole batch through all layers, one after the other, on a mesh without stages."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.metrics import guarded_values
from nnx_pipeline.pipeline.stage import layers as stages
from nnx_pipeline.pipeline.stage.state import PerMicrobatch
from nnx_pipeline.pipeline.stage.variables import state_of_kinds

State = Sequence[Array | PerMicrobatch]


def run_whole_batch(
    kinds: list[PyTree],
    x: PyTree,
    side: stages.Side,
    stored: State | None,
    *,
    stage: stages.StageLayers,
    copies_of: Callable[[PyTree], PyTree],
) -> tuple[PyTree, ...]:
    """Applies all layers of each kind, `[repeats, 1, layers, …]`, as `Runner.run`."""
    # If ZeRO-1 shards the gradients, the layers run in copies, which `copies_of` makes of one
    # layer, so that the full gradient of only one layer exists at a time.
    state = None if stored is None else _single_microbatch(stored)
    stack, copies = stage.stack, stage.layout.axes("copy")
    call = functools.partial(
        stages.call_layer, stack=stack, microbatches=stage.microbatches, split=stage.split
    )

    def in_copies(x: PyTree, stacked: stages.NumberedLayer) -> tuple[PyTree, stages.LayerResult]:
        def copy(layer: PyTree, x: PyTree, side: stages.Side) -> tuple[PyTree, stages.LayerResult]:
            return call(x, stacked._replace(layer=layer), {**side, **stage.shared})

        mapped = jax.vmap(copy, spmd_axis_name=copies)
        x, result = mapped(copies_of(stacked.layer), x, side)
        return x, result

    numbers = [jnp.asarray(stack.numbers(kind)) for kind in range(len(kinds))]
    whole = tuple(map(stages.NumberedLayer, kinds, numbers, state_of_kinds(kinds, state)))
    apply = in_copies if copies else functools.partial(call, side={**side, **stage.shared})
    x, results = stage.sequence(apply, in_order(whole, stack), x)
    metrics, written = stages.of_all_kinds(results, stack, copies=1 if copies else None, calls=1)
    total = guarded_values(metrics, x)
    if stored is None or state is None:
        return x, total
    after = [written_back(*each, stack) for each in zip(state, written, strict=True)]
    left = [
        PerMicrobatch(new[:, :, None]) if isinstance(old, PerMicrobatch) else new
        for old, new in zip(stored, after, strict=True)
    ]
    return x, total, left


def _single_microbatch(stored: State) -> list[Array]:
    """Refuses caches of several microbatches."""
    leaves = []
    for leaf in stored:
        if isinstance(leaf, PerMicrobatch):
            if leaf.value.shape[2] != 1:
                raise InputError(
                    f"the layers have caches for {leaf.value.shape[2]} microbatches, which go "
                    "through them at once; set pipeline.num_microbatches=1"
                )
            leaf = jnp.squeeze(leaf.value, 2)
        leaves.append(leaf)
    return leaves


def in_order(tree: PyTree, stack: Stack) -> PyTree:
    """`[repeats, 1, layers per stage, …]` as `[layers, …]`: one stage has all of them."""

    # Padding is left out, but for the last layers of some kinds where the last is of another.
    def ordered(leaf: Array) -> Array:
        if stack.repeats == 1:
            return leaf[0, 0] if not stack.padding else leaf[0, 0, : _counts(stack)[0]]
        if not stack.padding:
            return leaf.reshape(-1, *leaf.shape[3:])
        return jnp.concatenate([leaf[at, 0, :count] for at, count in enumerate(_counts(stack))])

    return jax.tree.map(ordered, tree)


def written_back(stacked: Array, new: Array, stack: Stack) -> Array:
    """`[repeats, 1, layers per stage, …]` with new values `[layers, …]`; the rest is padding."""
    if not stack.padding:
        return new.reshape(stacked.shape)
    pieces, start = [], 0
    for at, count in enumerate(_counts(stack)):
        pieces += [new[start : start + count], stacked[at, 0, count:]]
        start += count
    return jnp.concatenate(pieces).reshape(stacked.shape)


def _counts(stack: Stack) -> list[int]:
    """The layers of each kind in each repeat, on the only stage."""
    return [-(-number // stack.kinds) for number in stack.of_visits]
