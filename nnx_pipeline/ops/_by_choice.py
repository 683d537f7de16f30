"""The shell of experts that compute the tokens that chose them: two functions with derivatives."""

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Array, PyTree

from nnx_pipeline.ops._expert_axes import ExpertAxes
from nnx_pipeline.ops._experts import ExpertKernels
from nnx_pipeline.ops._mlp import gated
from nnx_pipeline.ops._per_device import OfDevice, per_device
from nnx_pipeline.sharding.layout import P

Places = TypeVar("Places", bound=PyTree)  # where choices go: integers, which have no gradient
OpenResiduals = tuple[Array, PyTree, Array, Array]  # what the derivatives keep; places are among it
CloseResiduals = tuple[Array, Array, PyTree, Array]


@dataclass(frozen=True, kw_only=True)
class OnDevices(ExpertAxes, abc.ABC):
    """What devices compute for the experts, in both passes."""

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
        """Σ over the choices of a token of weight · hidden · down, and the residuals.

        `weights` are `[batch, seq, chosen]`, and the sum is `[batch, seq, embed]`.
        """

    @abc.abstractmethod
    def close_back(self, residuals: CloseResiduals, cotangent: Array) -> tuple[Array, Array, Array]:
        """The gradients of hidden units, weights and down."""

    def per_device(
        self,
        function: Callable[..., OfDevice],
        in_specs: Sequence[P],
        out_specs: Sequence[P],
    ) -> Callable[..., OfDevice]:
        """`per_device`, for functions that are differentiated by hand, once."""
        refusal = (
            f"{self.kind} experts have first derivatives in reverse mode only; "
            "set model.experts='dense' for second derivatives and for forward mode"
        )
        return per_device(function, in_specs, out_specs, refusal=refusal)

    def mix(self, x: Array, places: PyTree, weights: Array, kernels: ExpertKernels) -> Array:
        """Σ over the choices of a token of weight · (silu(x · gate) · (x · up)) · down."""
        hidden = gated(*_open(self, x, places, kernels.gate, kernels.up))
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
