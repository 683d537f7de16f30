"""How a batch is cut into microbatches and copies, and where the pieces are placed."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, divides
from nnx_pipeline.pipeline.entry import as_arrays
from nnx_pipeline.sharding import Layout, place


@dataclass(frozen=True)
class Batches:
    """How a global batch is cut into pieces, for arrays `[batch, …]` of any kind.

    - `layout`: that of the activations, with an axis of copies where the layers run in copies
      (`Layout.copy`).
    - `microbatches`: how many microbatches the batch has.
    - `one_by_one`: whether the microbatches go through the layers one by one. If they go through
      together, there is no axis of microbatches, and each copy has its part of every microbatch.
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
        """Raises InputError unless every array of the tree is `[batch, …]`."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = jnp.shape(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else None
            if shape is None or shape[:1] != (batch,):
                found = f"{type(leaf).__name__}" if shape is None else f"an array {list(shape)}"
                raise InputError(
                    f"the input {jax.tree_util.keystr(path)} of a pipeline is {found}; it must be "
                    f"an array whose first axis is the batch of {batch}, or Shared(…) if all "
                    "sequences read the same"
                )

    def check(self, batch: int) -> None:
        """Raises InputError unless a batch of `batch` sequences can be cut in this way."""
        if not batch:
            raise InputError("the batch of a pipeline has no sequences; give one or more")
        rule = f"a batch of {batch} does not split into {self.microbatches} microbatches"
        divides(self.microbatches, batch, rule=rule)
        parts = self.layout.size("copy") * self.layout.size("batch")
        if self.one_by_one:
            microbatch = batch // self.microbatches
            rule = f"a microbatch of {microbatch} does not split over {parts} devices of the mesh"
            divides(parts, microbatch, rule=rule)

    def arrange(self, x: Array) -> Array:
        """Cuts `[batch, …]` into the axes of `axes`; microbatches are sharded over the stages."""
        x = as_arrays(x, "an input")
        rest = [None] * (x.ndim - 1)
        if self.one_by_one:
            x = self._cut(x)
        elif self.layout.axes("copy"):
            # Each copy gets its part of every microbatch, as when these go through one by one.
            copies = self.layout.size("copy")
            own = (copies, x.shape[0] // copies, *x.shape[1:])
            x = jnp.swapaxes(self._cut(x), 0, 1).reshape(own)
        return place(x, self.layout.spec(*self.axes, *rest))

    def on_every_stage(self, x: Array) -> Array:
        """Cuts `[batch, …]` into `[microbatches, …]`; every stage holds all microbatches.

        After the axis of microbatches come those of `axes`, from the second on.
        """
        rest = [None] * (x.ndim - 1)
        return place(self._cut(x), self.layout.spec(None, *self.axes[1:], *rest))

    def as_batch(self, x: Array, batch: int) -> Array:
        """The inverse of `arrange`: back to `[batch, …]`, laid out as `whole_batch`.

        - `x`: with the axes of `axes` in the place of the batch.
        - `batch`: the number of sequences.
        """
        # A reshape that merges axes can keep the sharding of the first of them only.
        if self.one_by_one:
            x = place(x, self.layout.spec("microbatch", *[None] * (x.ndim - 1)))
            x = x.reshape(batch, *x.shape[len(self.axes) :])
        elif self.layout.axes("copy"):
            x = place(x, self.layout.spec(*[None] * x.ndim))
            own = x.shape[1] // self.microbatches
            x = x.reshape(self.layout.size("copy"), self.microbatches, own, *x.shape[2:])
            x = jnp.swapaxes(x, 0, 1).reshape(batch, *x.shape[3:])
        return place(x, self.layout.spec("whole_batch", *[None] * (x.ndim - 1)))

    def _cut(self, x: Array) -> Array:
        """`[batch, …]` to `[microbatches, …]`, with an axis of copies next if there are copies."""
        x = place(as_arrays(x, "an input"), self.layout.spec(*[None] * x.ndim))
        copies = (self.layout.size("copy"),) if self.layout.axes("copy") else ()
        own = x.shape[0] // math.prod((self.microbatches, *copies))
        return x.reshape(self.microbatches, *copies, own, *x.shape[1:])


def batch_of(x: PyTree) -> int:
    """The size of the batch of activations; raises InputError unless all are floating `[batch, …]`.

    - `x`: an array or any pytree of arrays.
    """
    leaves = jax.tree.leaves(x, is_leaf=lambda leaf: leaf is None)
    for leaf in leaves or [x]:
        kind = getattr(leaf, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating) or not leaf.shape:
            found = type(leaf).__name__ if kind is None else f"{kind}{list(leaf.shape)}"
            raise InputError(
                f"the activations of a pipeline hold {found}; they must be floating-point arrays "
                "[batch, …]; pass other arrays as side inputs, which every layer reads"
            )
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise InputError(
            f"the activations of a pipeline have the first axes {sizes}; that of each must be the "
            "batch"
        )
    return int(sizes[0])
