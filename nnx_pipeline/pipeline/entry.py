"""Arrays as a user gives them, moved to where the loops read them.

In explicit mode the place of an array is part of its type, and the loops are written for one place
of the axes that they cut; in auto mode the compiler moves what lies elsewhere. An array that lies
right already is handed on as it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.buffers import stage_axis
from nnx_pipeline.sharding import Layout, P, is_explicit, place

Entry = str | tuple[str, ...] | None


def stacked(tree: PyTree) -> PyTree:
    """Parameters `[repeats, stages, …]`, every repeat whole, the second axis over `stage`."""
    return _each(tree, "a parameter", lambda spec: [None, stage_axis(), *_off_stages(spec[2:])])


def spread(tree: PyTree) -> PyTree:
    """Activations `[microbatches, …]`, the first axis over `stage`."""
    return _each(tree, "a microbatch", lambda spec: [stage_axis(), *_off_stages(spec[1:])])


def on_every_stage(tree: PyTree) -> PyTree:
    """Inputs `[microbatches, …]` that every stage reads, all microbatches on each of them."""
    return _each(tree, "an input", lambda spec: [None, *_off_stages(spec[1:])])


def as_arrays(tree: PyTree) -> PyTree:
    """Weights that functions of the user's read: on the mesh, wherever they lie there."""
    return _each(tree, "a weight", lambda spec: spec)


def by_names(tree: Any, layout: Layout) -> Any:
    """A module with every variable where its logical axes say."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        spec = layout.spec(*variable.get_metadata("logical_axes"))
        old = variable.get_value()
        new = _moved(old, "a parameter", lambda _: [*spec])
        return variable if new is old else variable.replace(new)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _off_stages(spec: list[Entry]) -> list[Entry]:
    """Axes that the functions of the user's see: they may be spread, but not over the stages."""
    return [_without_stage(entry) for entry in spec]


def _without_stage(entry: Entry) -> Entry:
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != "stage")
    return None if entry == "stage" else entry


def _each(tree: PyTree, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> PyTree:
    return jax.tree.map(lambda leaf: _moved(leaf, what, wanted), tree)


def _moved(leaf: Any, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> Array:
    """The array in the place that `wanted` makes of its own; InputError where it cannot go."""
    try:
        x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise InputError(
            f"{what} of the pipeline is {type(leaf).__name__}, and a pipeline computes with arrays "
            "of numbers; give it one"
        ) from error
    if not is_explicit():
        return x
    sharding = jax.typeof(x).sharding
    spec = P(*wanted([*sharding.spec]))
    if spec == sharding.spec and sharding.mesh == jax.sharding.get_abstract_mesh():
        return x
    try:
        return place(x, spec)
    except ValueError as error:
        raise InputError(
            f"{what} of the pipeline, {x.dtype}{list(x.shape)}, cannot be spread by {spec} over "
            f"the mesh: it lies on other devices, {getattr(x, 'sharding', None)}; make it under "
            "the mesh of jax.set_mesh, or hand it over as a numpy array"
        ) from error
