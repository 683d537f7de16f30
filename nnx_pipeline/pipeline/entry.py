"""Moves the arrays that a user gives to where the loops read them.

In explicit mode the sharding of an array is part of its type, and the loops are written for one
sharding of the axes that they cut. In auto mode the compiler moves what is placed elsewhere. An
array that is already in place is passed on unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.exchange.buffers import stage_axis
from nnx_pipeline.sharding import Layout, P, is_explicit, mesh_sizes, place

Entry = str | tuple[str, ...] | None


def stacked(tree: PyTree) -> PyTree:
    """Moves parameters `[repeats, stages, …]`: only the second axis is sharded over `stage`.

    The first axis is not sharded; the axes after the second keep their sharding over other mesh
    axes.
    """
    return _each(tree, "a parameter", lambda spec: [None, stage_axis(), *_off_stages(spec[2:])])


def spread(tree: PyTree) -> PyTree:
    """Moves activations `[microbatches, …]`: only the first axis is sharded over `stage`."""
    return _each(tree, "a microbatch", lambda spec: [stage_axis(), *_off_stages(spec[1:])])


def on_every_stage(tree: PyTree) -> PyTree:
    """Moves inputs `[microbatches, …]` so that every stage holds all microbatches."""
    return _each(tree, "an input", lambda spec: [None, *_off_stages(spec[1:])])


def as_arrays(tree: PyTree, what: str = "a weight") -> PyTree:
    """Moves arrays, such as weights that the user's functions read, onto the mesh as they are.

    They keep their sharding.

    - `what`: what to call one of them in an error.
    """
    return _each(tree, what, lambda spec: spec)


def by_names(tree: Any, layout: Layout) -> Any:
    """The module with every variable moved to the placement of its logical axes.

    - `tree`: a module whose variables all have `logical_axes` in their metadata.
    - `layout`: the mesh axes that each logical axis is sharded over.

    Raises InputError for a variable without them, which the pipeline has not made.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("logical_axes")
        if axes is None:
            raise InputError(
                f"the layers of a pipeline hold a {type(variable).__name__} of shape "
                f"{list(jnp.shape(variable.get_value()))} that the pipeline did not make; set the "
                "value of its own variable, [repeats, stages, layers per stage, …], by set_value"
            )
        spec = layout.spec(*axes)
        old = variable.get_value()
        new = _moved(old, "a parameter", lambda _: [*spec])
        return variable if new is old else variable.replace(new)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _off_stages(spec: list[Entry]) -> list[Entry]:
    """The sharding of axes that the user's functions see: over any mesh axes but `stage`."""
    return [_without_stage(entry) for entry in spec]


def _without_stage(entry: Entry) -> Entry:
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != "stage")
    return None if entry == "stage" else entry


def _each(tree: PyTree, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> PyTree:
    return jax.tree.map(lambda leaf: _moved(leaf, what, wanted), tree)


def _moved(leaf: Any, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> Array:
    """Moves an array from its spec to `wanted(spec)`; raises InputError where that fails."""
    try:
        x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError as error:
        raise InputError(
            f"{what} of the pipeline is of type {type(leaf).__name__}; give an array of numbers"
        ) from error
    sharding, mesh = jax.typeof(x).sharding, jax.sharding.get_abstract_mesh()
    elsewhere = _is_elsewhere(x)
    of_another_kind = bool(mesh_sizes()) and AxisType.Explicit in sharding.mesh.axis_types
    if not is_explicit() and not elsewhere and not of_another_kind:
        return x
    spec = P(*wanted([*sharding.spec]))
    if spec == sharding.spec and sharding.mesh == mesh and not elsewhere:
        return x
    try:
        if not is_explicit():
            raise ValueError("an array of explicit axes has no place in a mesh of auto axes")
        return place(x, spec)
    except ValueError as error:
        where = "on other devices" if elsewhere else "from a mesh of another kind"
        raise InputError(
            f"{what} of the pipeline, {x.dtype}{list(x.shape)}, cannot be sharded by {spec} over "
            f"the mesh: it is {where}, {getattr(x, 'sharding', sharding)}; make it under the mesh "
            "of jax.set_mesh, or pass it as a numpy array"
        ) from error


def _is_elsewhere(x: Array) -> bool:
    """Whether an array was put on devices that are not those of the mesh; unknown under jit."""
    if isinstance(x, jax.core.Tracer) or not x.committed or not mesh_sizes():
        return False
    try:
        devices = jax.sharding.get_mesh().devices
    except ValueError:  # JAX gives no devices while it traces
        return False
    return x.sharding.device_set != {*devices.flat}
