"""State of the layers that is no parameter: each visit reads it, and may write it anew.

The visit of one microbatch reads what the one before it wrote, or, of what is `PerMicrobatch`, what
was there of this microbatch. State has no gradient.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.pipeline._exchange import where
from nnx_pipeline.pipeline.schedule import Schedule
from nnx_pipeline.pipeline.stage.apply import at_repeat, select_repeat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithState:
    """Stacked parameters with a state that the visits of the stages read and write; a pytree.

    - `params`: any pytree of `[repeats, stages, …]`.
    - `state`: another, sharded as the parameters are. What of it is wrapped in `PerMicrobatch` is
      `[repeats, stages, microbatches, …]`.
    """

    params: PyTree
    state: PyTree


def parted(params: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and their state, which is None where there is none."""
    return (params.params, params.state) if isinstance(params, WithState) else (params, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PerMicrobatch:
    """State of which each microbatch has its own, such as a cache of keys and values.

    - `value`: a pytree of `[repeats, stages, microbatches, …]`. A visit gets, and leaves, what
      belongs to its microbatch, `[…]`.
    """

    value: PyTree


def _wrapped(leaf: object) -> bool:
    return isinstance(leaf, PerMicrobatch)


_map = functools.partial(jax.tree.map, is_leaf=_wrapped)


class At(NamedTuple):
    """Which visit each stage makes at a tick, `[stages]` each, sharded over `stage`."""

    repeat: Array  # int32
    row: Array  # int32, repeat · microbatches + microbatch
    active: Array  # bool, False in a bubble


class LayerStates(NamedTuple):
    """The state of all layers; `PerMicrobatch` is `[repeats · microbatches, stages, …]`."""

    now: PyTree
    first: PyTree  # as it was before the loop, without what is `PerMicrobatch`

    def of_visit(self) -> PyTree:
        """A tree like the state of one visit, with other arrays."""
        return _map(lambda leaf: leaf.value if _wrapped(leaf) else leaf, self.now)

    def as_stored(self, microbatches: int) -> PyTree:
        """The state after the loop, as `hold_state` was given it."""

        def by_repeat(x: Array) -> Array:
            return jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 2)

        return _map(
            lambda leaf: jax.tree.map(by_repeat, leaf) if _wrapped(leaf) else leaf, self.now
        )


def hold_state(state: PyTree, schedule: Schedule) -> LayerStates:
    """The state of all layers as the loops read and write it."""

    def as_rows(x: Array) -> Array:
        if jnp.shape(x)[2:3] != (schedule.microbatches,):
            raise InputError(
                f"a state PerMicrobatch has shape {jnp.shape(x)}; its third axis must be the "
                f"{counted(schedule.microbatches, 'microbatch')} of the schedule"
            )
        return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])

    now = _map(lambda leaf: jax.tree.map(as_rows, leaf) if _wrapped(leaf) else leaf, state)
    return LayerStates(now, _map(lambda leaf: None if _wrapped(leaf) else leaf, state))


def take(state: LayerStates, at: At) -> PyTree:
    """The state that each stage reads, `[stages, …]`."""

    # In a bubble a stage reads its first state: what the last visit left may hold the microbatch
    # that the stage works on in the bubble, and a derivative need not be defined where both are
    # equal. Of what is `PerMicrobatch` it reads any row, because a first state would be a second
    # copy of it.
    def taken(now: PyTree, first: PyTree) -> PyTree:
        if isinstance(now, PerMicrobatch):
            return select_repeat(now.value, at.row)
        return where(at.active, select_repeat(now, at.repeat), select_repeat(first, at.repeat))

    return _map(taken, state.now, state.first)


def put(state: LayerStates, at: At, new: PyTree) -> LayerStates:
    """Writes the state `[stages, …]` that the visits left back, except in a bubble."""

    def written(before: PyTree, row: Array, new: PyTree) -> PyTree:
        if not jax.tree.leaves(before):
            return before
        new = where(at.active, new, select_repeat(before, row))
        if jax.tree.leaves(before)[0].shape[0] == 1:
            return jax.tree.map(lambda leaf: leaf[None], new)
        return at_repeat(before, row, new)

    def stored(now: PyTree, new: PyTree) -> PyTree:
        if isinstance(now, PerMicrobatch):
            return PerMicrobatch(written(now.value, at.row, new))
        return written(now, at.repeat, new)

    return state._replace(now=_map(stored, state.now, new))


def without_gradient(tree: PyTree) -> PyTree:
    """State as a visit reads or writes it."""
    return jax.tree.map(jax.lax.stop_gradient, tree)


def check_written(before: PyTree, after: PyTree) -> None:
    """Raises InputError unless a visit left a state of the same types as it read."""

    if not alike(before, after):
        raise InputError(
            f"a stage read the state {types_of(before)} and wrote {types_of(after)}; both must be "
            "the same, as the next visit reads it"
        )


def alike(x: PyTree, y: PyTree) -> bool:
    """Whether two pytrees have the same structure, shapes and dtypes."""
    trees: list[object] = [jax.tree.structure(tree) for tree in (x, y)]
    return trees[0] == trees[1] and jax.tree.leaves(types_of(x)) == jax.tree.leaves(types_of(y))


def types_of(tree: PyTree) -> PyTree:
    return jax.tree.map(type_of, tree)


def type_of(leaf: ArrayLike) -> str:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"
