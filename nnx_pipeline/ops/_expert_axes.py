"""Which mesh axes experts, their kernels and their tokens are sharded over, for `per_device`."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jaxtyping import Array

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.sharding.layout import Layout, P

_Axes = TypeVar("_Axes", bound="ExpertAxes")


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """The mesh axes of a layer of experts, and the sums and gathers over them.

    The fields are found where the layer is called; inside the functions of one device the mesh
    looks different.
    """

    kind: str
    experts: int
    own: int
    batch: tuple[str, ...]
    owners: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]

    @classmethod
    def of(cls: type[_Axes], kind: str, experts: int, layout: Layout, **more: Any) -> _Axes:
        """The axes on the ambient mesh; `more` are fields of a class below this one.

        Raises InputError unless the tokens are sharded over what shards experts and width. Only
        then do sums over these mesh axes add up other tokens, and no token twice.
        """
        axes = cls(
            kind=kind,
            experts=experts,
            own=experts // layout.size("expert"),
            batch=layout.axes("batch"),
            owners=layout.axes("expert"),
            embed=layout.axes("embed_of_expert"),
            mlp=layout.axes("mlp"),
            **more,
        )
        same = [name for name in (*axes.owners, *axes.embed) if name not in axes.batch]
        if same:
            raise InputError(
                f"the layout shards the experts or their kernels' width over {', '.join(same)}, "
                f"along which {kind} experts need other tokens, and the batch over "
                f"{', '.join(axes.batch) or 'nothing'}; name it in Layout.batch, or set "
                "model.experts='dense'"
            )
        return axes

    @property
    def tokens(self) -> P:
        """The sharding of `[batch, seq, …]`."""
        return P(self.batch or None, None, None)

    @property
    def into(self) -> P:
        """The sharding of the kernels gate and up."""
        return P(self.owners or None, self.embed or None, self.mlp or None)

    @property
    def down(self) -> P:
        """The sharding of the kernel down."""
        return P(self.owners or None, self.mlp or None, self.embed or None)

    def gathered(self, kernel: Array, axis: int) -> Array:
        """A kernel of this device's experts, whole along embed."""
        return (
            jax.lax.all_gather(kernel, self.embed, axis=axis, tiled=True) if self.embed else kernel
        )

    def summed(self, gradient: Array, axis: int) -> Array:
        """A kernel's gradient over devices with other tokens, sharded as the kernel is."""
        rest = [name for name in self.batch if name not in (*self.embed, *self.owners)]
        if self.embed:
            gradient = jax.lax.psum_scatter(
                gradient, self.embed, scatter_dimension=axis, tiled=True
            )
        return jax.lax.psum(gradient, rest) if rest else gradient

    def over_parts(self, y: Array) -> Array:
        """The sum of what the devices have that share the hidden units."""
        return jax.lax.psum(y, self.mlp) if self.mlp else y
