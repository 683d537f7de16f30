"""Cuts batches into microbatches, and moves arrays of the user to where the loops read them.

In explicit mode the sharding of an array is part of its type, and the loops are written for one. In
auto mode the compiler moves what is placed elsewhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError, counted, divides
from nnx_pipeline.pipeline._exchange import stage_axis
from nnx_pipeline.sharding.dropout import sequence_keys
from nnx_pipeline.sharding.layout import Layout, P, is_explicit, is_variable, mesh_sizes, place

Entry = str | tuple[str, ...] | None


def place_stacked(tree: PyTree) -> PyTree:
    """Moves parameters `[repeats, stages, …]`: only the second axis is sharded over `stage`."""
    return _each(
        tree, "a parameter", lambda spec: [None, stage_axis(), *map(_without_stage, spec[2:])]
    )


def place_microbatches(tree: PyTree) -> PyTree:
    """Moves activations `[microbatches, …]`: only the first axis is sharded over `stage`."""
    return _each(tree, "a microbatch", lambda spec: [stage_axis(), *map(_without_stage, spec[1:])])


def place_on_every_stage(tree: PyTree) -> PyTree:
    """Moves inputs `[microbatches, …]` so that every stage holds all microbatches."""
    return _each(tree, "an input", lambda spec: [None, *map(_without_stage, spec[1:])])


def as_arrays(tree: PyTree, what: str = "a weight") -> PyTree:
    """Moves arrays onto the mesh, with the sharding that they have; errors call one `what`."""
    return _each(tree, what, lambda spec: spec)


def by_names(tree: PyTree, layout: Layout) -> PyTree:
    """The module with every variable moved to the placement of its logical axes."""

    def moved(variable: nnx.Variable[Array]) -> nnx.Variable[Array]:
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

    return jax.tree.map(moved, tree, is_leaf=is_variable)


@dataclass(frozen=True)
class Batches:
    """How a global batch is cut into pieces, for arrays `[batch, …]` of any kind.

    If the microbatches do not go through the layers `one_by_one`, there is no axis of microbatches,
    and each copy (`Layout.copy`) has its part of every microbatch.
    """

    layout: Layout
    microbatches: int
    one_by_one: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical axes that replace the batch axis in what the pipeline takes and returns."""
        copy = ("copy",) if self.layout.axes("copy") else ()
        if self.one_by_one:
            return ("microbatch", *copy, "batch")
        return ("copy", "batch") if copy else ("whole_batch",)

    def check_inputs(self, tree: PyTree, batch: int) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = jnp.shape(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else None
            if shape is None or shape[:1] != (batch,):
                text = f"{type(leaf).__name__}" if shape is None else f"an array {list(shape)}"
                raise InputError(
                    f"the input {jax.tree_util.keystr(path)} of a pipeline is {text}; it must be "
                    f"an array whose first axis is the batch of {batch}, or Shared(…) if all "
                    "sequences read the same"
                )

    def check(self, batch: int) -> None:
        if not batch:
            raise InputError("the batch of a pipeline has no sequences; give one or more")
        into = counted(self.microbatches, "microbatch")
        divides(self.microbatches, batch, rule=f"a batch of {batch} does not split into {into}")
        parts = self.layout.size("copy") * self.layout.size("batch")
        if self.one_by_one:
            microbatch = batch // self.microbatches
            rule = f"a microbatch of {microbatch} does not split over {parts} devices of the mesh"
            rule += f", with a batch of {batch} in {into}"
            divides(parts * self.microbatches, batch, rule=rule, cure="for the batch")

    def arrange_all(self, x: PyTree, key: Array | None) -> tuple[PyTree, Array | None, int]:
        """Every array of a batch arranged, a dropout key per sequence, and their number."""
        batch = batch_of(x)
        self.check(batch)
        keys = None if key is None else sequence_keys(key, batch)
        return jax.tree.map(self.arrange, x), keys, batch

    def arrange(self, x: Array) -> Array:
        """Cuts `[batch, …]` into the axes of `axes`; microbatches are sharded over the stages."""
        x = as_arrays(x, "an input")
        rest = [None] * (x.ndim - 1)
        if self.one_by_one:
            x = self._cut(x)
        elif self.layout.axes("copy"):
            # Each copy gets its part of every microbatch, as when these go through one by one.
            copies = self.layout.size("copy")
            shape = (copies, x.shape[0] // copies, *x.shape[1:])
            x = jnp.swapaxes(self._cut(x), 0, 1).reshape(shape)
        return place(x, self.layout.spec(*self.axes, *rest))

    def on_every_stage(self, x: Array) -> Array:
        """Cuts `[batch, …]` into microbatches, which every stage holds, and copies."""
        rest = [None] * (x.ndim - 1)
        return place(self._cut(x), self.layout.spec(None, *self.axes[1:], *rest))

    def as_batch(self, x: Array, batch: int) -> Array:
        """The inverse of `arrange`: back to `[batch, …]`, laid out as `whole_batch`."""
        # A reshape that merges axes can keep the sharding of the first of them only.
        if self.one_by_one:
            x = place(x, self.layout.spec("microbatch", *[None] * (x.ndim - 1)))
            x = x.reshape(batch, *x.shape[len(self.axes) :])
        elif self.layout.axes("copy"):
            x = place(x, self.layout.spec(*[None] * x.ndim))
            size = x.shape[1] // self.microbatches
            x = x.reshape(self.layout.size("copy"), self.microbatches, size, *x.shape[2:])
            x = jnp.swapaxes(x, 0, 1).reshape(batch, *x.shape[3:])
        return place(x, self.layout.spec("whole_batch", *[None] * (x.ndim - 1)))

    def _cut(self, x: Array) -> Array:
        """`[batch, …]` to `[microbatches, …]`, with an axis of copies next if there are copies."""
        x = place(as_arrays(x, "an input"), self.layout.spec(*[None] * x.ndim))
        copies = (self.layout.size("copy"),) if self.layout.axes("copy") else ()
        size = x.shape[0] // math.prod((self.microbatches, *copies))
        return x.reshape(self.microbatches, *copies, size, *x.shape[1:])


def batch_of(x: PyTree) -> int:
    """The size of the batch; raises InputError unless all activations are floating `[batch, …]`."""
    leaves = jax.tree.leaves(x, is_leaf=lambda leaf: leaf is None)
    for leaf in leaves or [x]:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating) or not leaf.shape:
            text = type(leaf).__name__ if kind is None else f"{kind}{list(leaf.shape)}"
            raise InputError(
                f"the activations of a pipeline hold {text}; they must be floating-point arrays "
                "[batch, …]; pass other arrays as side inputs, which every layer reads"
            )
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise InputError(
            f"the activations of a pipeline have the first axes {sizes}; that of each must be the "
            "batch"
        )
    return int(sizes[0])


def _without_stage(entry: Entry) -> Entry:
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != "stage")
    return None if entry == "stage" else entry


def _each(tree: PyTree, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> PyTree:
    return jax.tree.map(lambda leaf: _moved(leaf, what, wanted), tree)


def _moved(leaf: ArrayLike, what: str, wanted: Callable[[list[Entry]], list[Entry]]) -> Array:
    """Moves an array from its spec to `wanted(spec)`."""
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
    """Whether an array was put on devices outside of the mesh; unknown under jit."""
    if isinstance(x, jax.core.Tracer) or not x.committed or not mesh_sizes():
        return False
    try:
        devices = jax.sharding.get_mesh().devices
    except ValueError:  # JAX gives no devices while it traces
        return False
    return x.sharding.device_set != {*devices.flat}
