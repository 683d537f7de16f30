"""The shell of experts that compute the tokens that chose them: mesh axes and derivatives."""

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.ops._experts import ExpertKernels
from nnx_pipeline.ops._mlp import gated
from nnx_pipeline.ops._per_device import OfDevice, per_device
from nnx_pipeline.sharding._gather import first_dimension, gather_in_steps
from nnx_pipeline.sharding.layout import Layout, P

_Axes = TypeVar("_Axes", bound="ExpertAxes")


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """The mesh axes of a layer of experts, and the sums and gathers over them."""

    # Found where the layer is called: inside the functions of one device the mesh looks different.
    kind: str
    experts: int
    local_experts: int
    batch: tuple[str, ...]
    owners: tuple[str, ...]
    embed: tuple[str, ...]
    mlp: tuple[str, ...]
    gather_first: int  # see `gather_in_steps`

    @classmethod
    def of(cls: type[_Axes], kind: str, experts: int, layout: Layout, **more: Any) -> _Axes:
        """The axes on the ambient mesh; `more` are fields of a class below this one."""
        # Only where the tokens are sharded over what shards experts and width do sums over these
        # mesh axes add up other tokens, and no token twice.
        axes = cls(
            kind=kind,
            experts=experts,
            local_experts=experts // layout.size("expert"),
            batch=layout.axes("batch"),
            owners=layout.axes("expert"),
            embed=layout.axes("embed_of_expert"),
            mlp=layout.axes("mlp"),
            gather_first=first_dimension(layout.axes("embed_of_expert")),
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
        if not self.embed:
            return kernel
        if self.gather_first > 1:
            return gather_in_steps(kernel, self.embed, axis, self.gather_first)
        whole: Array = jax.lax.all_gather(kernel, self.embed, axis=axis, tiled=True)
        return whole

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


Places = TypeVar("Places", bound=PyTree)  # where choices go: integers, which have no gradient
OpenResiduals = tuple[Array, PyTree, Array, Array]  # what the derivatives keep; places are among it
CloseResiduals = tuple[Array, Array, PyTree, Array]


@dataclass(frozen=True, kw_only=True)
class OnDevices(ExpertAxes, abc.ABC):
    """What devices compute for the experts, in both passes."""

    activation: str = "silu"

    @abc.abstractmethod
    def open(
        self, x: Array, places: PyTree, gate: Array, up: Array
    ) -> tuple[tuple[Array, Array], OpenResiduals]:
        """The token of each place of `[batch, seq, …]` times gate and up, and the residuals."""

    @abc.abstractmethod
    def open_back(
        self, residuals: OpenResiduals, cotangents: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """The gradients of the tokens, gate and up."""

    @abc.abstractmethod
    def close(
        self, hidden: Array, weights: Array, places: PyTree, down: Array
    ) -> tuple[Array, CloseResiduals]:
        """Σ over a token's choices of weight · hidden · down, and the residuals."""

    @abc.abstractmethod
    def close_back(self, residuals: CloseResiduals, cotangent: Array) -> tuple[Array, Array, Array]:
        """The gradients of hidden units, weights and down."""

    def per_device(
        self, function: Callable[..., OfDevice], in_specs: Sequence[P], out_specs: Sequence[P]
    ) -> Callable[..., OfDevice]:
        """`per_device`, for functions that are differentiated by hand, once."""
        refusal = (
            f"{self.kind} experts have first derivatives in reverse mode only; "
            "set model.experts='dense' for second derivatives and for forward mode"
        )
        return per_device(function, in_specs, out_specs, refusal=refusal)

    def mix(self, x: Array, places: PyTree, weights: Array, kernels: ExpertKernels) -> Array:
        """Σ over the choices of a token of weight · (activation(x · gate) · (x · up)) · down."""
        hidden = gated(*_open(self, x, places, kernels.gate, kernels.up), self.activation)
        return _close(self, hidden, weights, places, kernels.down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _open(on: OnDevices, *args: PyTree) -> tuple[Array, Array]:
    return on.open(*args)[0]


def _open_back(
    on: OnDevices, residuals: OpenResiduals, cotangents: tuple[Array, Array]
) -> tuple[PyTree, ...]:
    d_x, d_gate, d_up = on.open_back(residuals, cotangents)
    return d_x, _no_gradients(residuals[1]), d_gate, d_up


_open.defvjp(lambda on, *args: on.open(*args), _open_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _close(on: OnDevices, *args: PyTree) -> Array:
    return on.close(*args)[0]


def _close_back(on: OnDevices, residuals: CloseResiduals, cotangent: Array) -> tuple[PyTree, ...]:
    d_hidden, d_weights, d_down = on.close_back(residuals, cotangent)
    return d_hidden, d_weights, _no_gradients(residuals[2]), d_down


_close.defvjp(lambda on, *args: on.close(*args), _close_back)


def _no_gradients(places: Places) -> Places:
    nothing: Places = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), places)
    return nothing
