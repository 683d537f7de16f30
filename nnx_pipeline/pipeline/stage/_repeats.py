"""Parameters and gradients of several repeats in a loop over ticks: split, selected, added to."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.pipeline._exchange import where
from nnx_pipeline.pipeline.stage._vjp import add, is_float
from nnx_pipeline.pipeline.stage.apply import at_repeat, select_repeat

SEPARATE_REPEATS = 2  # up to so many repeats are separate arrays


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class ByRepeat:
    """Parameters, or gradients, of a few repeats: one pytree of `[stages, …]` for each."""

    trees: tuple[PyTree, ...]


def split_repeats(params: PyTree) -> PyTree:
    """Parameters `[repeats, stages, …]` as a loop adds to them: up to two repeats `ByRepeat`."""
    # Of repeats in separate arrays a visit selects its weights by a `where`, and its gradient is
    # added in place to arrays of their own. With more repeats it reads a slice of one array,
    # because a `where` would read all. For `mixtral-small` on a TPU v5p (libtpu 0.0.42.1), 2
    # repeats apart and as one array: temp 243 and 276 MB, 20.0 and 19.6 ms of compute, the peak is
    # the same; 4 repeats: temp 378 and 335 MB, peak 453 and 416 MB, 35.3 and 33.8 ms.
    leaves = jax.tree.leaves(params)
    repeats = leaves[0].shape[0] if leaves else 1  # integers alone have a gradient without arrays
    if repeats > SEPARATE_REPEATS:
        return params
    return ByRepeat(
        tuple(jax.tree.map(lambda leaf, at=at: leaf[at], params) for at in range(repeats))
    )


def float_sums(params: PyTree) -> ByRepeat:
    """Parameters of up to two repeats as the start of their accumulators; None for integers."""
    # The values are not read: that the loop starts with the parameters is what makes the cotangent
    # of the accumulators their gradient.
    start: ByRepeat = jax.tree.map(
        lambda leaf: leaf if is_float(leaf) else None, split_repeats(params)
    )
    return start


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class ReadWhole:
    """Parameters read from one array, with the gradients of `by_repeat`, which nothing reads."""

    whole: PyTree
    by_repeat: PyTree


def split_to_read(params: PyTree, *, cast_at_use: bool) -> PyTree:
    """Parameters `[repeats, stages, …]` as a loop reads them: apart, or one array of two."""
    # Two repeats apart take a copy. The compiler makes it in the dtype to which all layers cast,
    # unless layers `cast_at_use`: then a slice of the array that is there needs none. With
    # `mixtral-small`, `model.experts=grouped` and `model.attention=flash` (2 repeats, TPU v5p,
    # libtpu 0.0.42.1) copies in bfloat16 are 27 MB and those in float32 50.
    split = split_repeats(params)
    if not (cast_at_use and isinstance(split, ByRepeat) and len(split.trees) > 1):
        return split
    return ReadWhole(jax.lax.stop_gradient(params), split)


@jax.custom_jvp
def _read_whole(split: ReadWhole, repeat: Array) -> PyTree:
    return select_repeat(split.whole, repeat)


@_read_whole.defjvp
def _read_whole_jvp(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
    (split, repeat), (d_split, _) = primals, tangents
    return _read_whole(split, repeat), select(d_split.by_repeat, repeat)


def join_repeats(split: PyTree) -> PyTree:
    """The inverse of `split_repeats`; None stays None."""
    if not isinstance(split, ByRepeat):
        return split
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *split.trees)


def select(split: PyTree, repeat: Array) -> PyTree:
    """The parameters of each stage for the repeat that it is at, `[stages, …]`."""
    if isinstance(split, ReadWhole):
        return _read_whole(split, repeat)
    if not isinstance(split, ByRepeat):
        return select_repeat(split, repeat)
    selected = split.trees[0]
    for number, tree in enumerate(split.trees[1:], start=1):
        selected = where(repeat == number, tree, selected)
    return selected


def add_at_repeat(totals: PyTree, gradients: PyTree, repeat: Array) -> PyTree:
    """Adds the gradients `[stages, …]` to the total of the repeat that each stage is at."""
    if not isinstance(totals, ByRepeat):
        return at_repeat(totals, repeat, add(select_repeat(totals, repeat), gradients))
    if len(totals.trees) == 1:
        return ByRepeat((add(totals.trees[0], gradients),))
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    return ByRepeat(
        tuple(
            add(tree, where(repeat == number, gradients, zeros))
            for number, tree in enumerate(totals.trees)
        )
    )
