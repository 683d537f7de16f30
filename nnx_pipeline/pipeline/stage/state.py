"""State of the layers that is no parameter: each visit reads it, and may write it anew.

Running statistics and the counters of random numbers are such state. A stage works on the
microbatches one after the other, so it leaves a state as a loop over microbatches would: the
visit of one microbatch reads what the one before it wrote. State has no gradient.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.exchange.buffers import where
from nnx_pipeline.pipeline.stage.apply import at_repeat, select_repeat


@dataclass(frozen=True)
class WithState:
    """Stacked parameters with a state that the visits of the stages read and write.

    - `params`: any pytree of `[repeats, stages, …]`.
    - `state`: another, sharded as the parameters are.
    """

    params: PyTree
    state: PyTree


def parted(params: Any) -> tuple[PyTree, PyTree]:
    """Parameters and their state, which is None where there is none."""
    return (params.params, params.state) if isinstance(params, WithState) else (params, None)


class Kept(NamedTuple):
    """The state of all layers in a loop, `[repeats, stages, …]`; it may have no arrays."""

    now: PyTree
    first: PyTree  # as it was before the loop


def take(state: Kept, repeat: Array, active: Array) -> PyTree:
    """The state that each stage reads, `[stages, …]`.

    - `state`: of all layers.
    - `repeat`: int32 `[stages]`, sharded over `stage`: the repeat that each stage is at.
    - `active`: bool `[stages]`, False in a bubble. There a stage reads its first state: what the
      last visit left may hold the microbatch that the stage works on in the bubble, and a
      derivative need not be defined where both are equal.
    """
    if not jax.tree.leaves(state.now):
        return state.now
    return where(active, select_repeat(state.now, repeat), select_repeat(state.first, repeat))


def put(state: Kept, repeat: Array, active: Array, new: PyTree) -> Kept:
    """Writes the state of each stage back, except in a bubble.

    - `state`, `repeat`, `active`: as for `take`.
    - `new`: what the visits left, `[stages, …]`.
    """
    leaves = jax.tree.leaves(state.now)
    if not leaves:
        return state
    new = where(active, new, select_repeat(state.now, repeat))
    if leaves[0].shape[0] == 1:
        return state._replace(now=jax.tree.map(lambda leaf: leaf[None], new))
    return state._replace(now=at_repeat(state.now, repeat, new))


def without_gradient(tree: PyTree) -> PyTree:
    """State as a visit reads or writes it: its gradient is zero."""
    return jax.tree.map(jax.lax.stop_gradient, tree)


def check_written(before: PyTree, after: PyTree) -> None:
    """Raises InputError unless a visit left a state of the same types as it read."""

    if not alike(before, after):
        raise InputError(
            f"a stage read the state {types_of(before)} and wrote {types_of(after)}; both must be "
            "the same, as the next visit reads it"
        )


def alike(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees have the same structure, and arrays of the same shapes and dtypes."""
    trees: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return trees[0] == trees[1] and jax.tree.leaves(types_of(one)) == jax.tree.leaves(
        types_of(other)
    )


def types_of(tree: PyTree) -> PyTree:
    """The tree with the dtype and shape of each array in its place."""
    return jax.tree.map(type_of, tree)


def type_of(leaf: Any) -> str:
    """The dtype and shape of an array or a number."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"
