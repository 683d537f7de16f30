"""Whole weights whose gradients arrive in parts, each device along `data` its own (ZeRO-1)."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.ops.gradients import or_zeros, refuse_perturbed, values_of
from nnx_pipeline.sharding import Layout, P


@dataclass(frozen=True)
class Owners:
    """Who gets which part of the gradient of weights that are the same along `over`.

    The weights are handed out with an axis of copies over these mesh axes, one copy per device, so
    that each device's gradient is its own until it is summed. The sum is asked of a second
    argument, which holds the same weights with every array spread over `over` besides: its
    gradient is made by one reduce-scatter. Were it asked of the whole weights, it would be an
    all-reduce with twice the traffic, and XLA keeps that even if only a part is read afterwards.

    stored: where each array is, in tree order. owned: where its parts are; an array that is the
    same in both (it has no axis to spread) gets an all-reduce. axis: place of the axis of copies.
    dtype: in which gradients are summed, None for their own.
    """

    stored: tuple[P, ...]
    owned: tuple[P, ...]
    over: tuple[str, ...]
    axis: int
    dtype: jax.typing.DTypeLike | None = None

    def lend(self, whole: PyTree, owned: PyTree) -> PyTree:
        """The values of `whole` in copies; the gradient goes to `owned`.

        Without `owned` it goes to `whole`, by an all-reduce; with it, asking for that of `whole` is
        an InputError.
        """
        leaves, tree = jax.tree.flatten(whole)
        if owned is None:
            owners, parts = dataclasses.replace(self, owned=self.stored), leaves
            leaves = jax.lax.stop_gradient(leaves)
        else:
            owners, parts = self, jax.tree.leaves(owned)
        return jax.tree.unflatten(tree, _lend(owners, parts, leaves))

    @property
    def lent(self) -> tuple[P, ...]:
        """Where the copies are."""
        at = self.axis
        return tuple(P(*spec[:at], self.over, *spec[at:]) for spec in self.stored)

    def back(self, gradient: Array, stored: P, owned: P) -> Array:
        """On each device: its part of the sum of all copies' gradients."""
        dtype = gradient.dtype
        gradient = jnp.squeeze(gradient, self.axis).astype(self.dtype or dtype)
        spread = [axis for axis, entry in enumerate(owned) if entry != stored[axis]]
        if spread:
            gradient = jax.lax.psum_scatter(
                gradient, self.over, scatter_dimension=spread[0], tiled=True
            )
        else:
            gradient = jax.lax.psum(gradient, self.over)
        return gradient.astype(dtype)


def make_owners(
    layers: PyTree,
    layout: Layout,
    over: tuple[str, ...],
    *,
    skip: int,
    axis: int,
    dtype: jax.typing.DTypeLike | None,
) -> Owners:
    """The owners of stacked layers, for arrays without the first `skip` axes of the stack."""
    variables = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    names = [variable.get_metadata("logical_axes")[skip:] for variable in variables]
    spread = layout.owned(over)
    return Owners(
        stored=tuple(layout.spec(*axes) for axes in names),
        owned=tuple(spread.spec(*axes) for axes in names),
        over=over,
        axis=axis,
        dtype=dtype,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lend(owners: Owners, owned: list[Array], whole: list[Array]) -> list[Array]:
    del owned  # only its gradient is of interest

    def local(*leaves: Array) -> list[Array]:
        return [jnp.expand_dims(leaf, owners.axis) for leaf in leaves]

    return _on_each_device(local, owners.stored, owners.lent)(*whole)


def _lend_forward(owners: Owners, owned: list[Any], whole: list[Any]) -> tuple[list[Array], None]:
    whole = refuse_perturbed(
        "the gradient with respect to the parameters was asked for beside that of owned ones, to "
        "which it goes; use jax.lax.stop_gradient on the parameters, or leave `owned` out",
        whole,
    )
    return _lend(owners, values_of(owned), whole), None


def _lend_backward(owners: Owners, _: None, gradients: list[Any]) -> tuple[list[Array], None]:
    gradients = [or_zeros(gradient) for gradient in gradients]

    def local(*leaves: Array) -> list[Array]:
        return list(map(owners.back, leaves, owners.stored, owners.owned))

    return _on_each_device(local, owners.lent, owners.owned)(*gradients), None


_lend.defvjp(_lend_forward, _lend_backward, symbolic_zeros=True)


def _on_each_device(
    function: Callable[..., list[Array]], in_specs: tuple[P, ...], out_specs: tuple[P, ...]
) -> Callable[..., list[Array]]:
    return jax.shard_map(function, in_specs=in_specs, out_specs=list(out_specs), check_vma=False)
