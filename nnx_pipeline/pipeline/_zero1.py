"""ZeRO-1: weights stay whole along `data`, and each device gets only a shard of the gradients."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.sharding._gradients import Cotangent, or_zeros, refuse_perturbed, values_of
from nnx_pipeline.sharding.layout import Layout, P, is_variable, place


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class Zero1Layers:
    """The layers as they are stored, and as `Layout.zero1` shards them, with the gradient."""

    whole: PyTree
    shards: PyTree


@dataclass(frozen=True)
class GradientShards:
    """Which shard of the gradient each device gets, for weights that are replicated along `over`.

    `stored` and `sharded` are the specs of each array in tree order, without and with `over`. Where
    both are equal, because the array has no axis to shard, an all-reduce sums the gradient, in
    `dtype`.

    The layers get weights with an axis of copies (`axis`), one copy per device, so that each
    device's gradient is its own until it is summed. The gradient is taken with respect to a second
    argument, the same weights sharded over `over` too; so one reduce-scatter makes it. With respect
    to the whole weights it would be an all-reduce with twice the traffic, and XLA keeps that even
    if only a part of the result is read afterwards.
    """

    stored: tuple[P, ...]
    sharded: tuple[P, ...]
    over: tuple[str, ...]
    axis: int
    dtype: jax.typing.DTypeLike | None = None

    def copies(self, layers: PyTree) -> PyTree:
        """The values of the layers, with one copy per device along the mesh axes."""
        # Of plain layers the gradient is summed by an all-reduce.
        if isinstance(layers, Zero1Layers):
            leaves, tree = jax.tree.flatten(layers.whole)
            return jax.tree.unflatten(tree, _copy(self, jax.tree.leaves(layers.shards), leaves))
        leaves, tree = jax.tree.flatten(layers)
        stored = dataclasses.replace(self, sharded=self.stored)
        return jax.tree.unflatten(tree, _copy(stored, leaves, jax.lax.stop_gradient(leaves)))

    def of(self, layers: PyTree) -> PyTree:
        """The layers as shards, which a loop gathers like other weights."""
        if isinstance(layers, Zero1Layers):
            leaves, tree = jax.tree.flatten(layers.shards)
            return jax.tree.unflatten(tree, _take(leaves, jax.tree.leaves(layers.whole)))
        leaves, tree = jax.tree.flatten(layers)
        return jax.tree.unflatten(tree, map(place, leaves, self.sharded))

    @property
    def copy_specs(self) -> tuple[P, ...]:
        at = self.axis
        return tuple(P(*spec[:at], self.over, *spec[at:]) for spec in self.stored)

    def shard(self, gradient: Array, stored: P, sharded: P) -> Array:
        """This device's shard of the sum of all copies' gradients, within a `shard_map`."""
        dtype = gradient.dtype
        gradient = jnp.squeeze(gradient, self.axis).astype(self.dtype or dtype)
        spread = [axis for axis, entry in enumerate(sharded) if entry != stored[axis]]
        if spread:
            gradient = jax.lax.psum_scatter(
                gradient, self.over, scatter_dimension=spread[0], tiled=True
            )
        else:
            gradient = jax.lax.psum(gradient, self.over)
        return gradient.astype(dtype)


def gradient_shards(
    layers: PyTree,
    layout: Layout,
    over: tuple[str, ...],
    *,
    skip: int,
    axis: int,
    dtype: jax.typing.DTypeLike | None,
) -> GradientShards:
    """The shards of layers whose arrays do not have the first `skip` axes of the stack."""
    variables = jax.tree.leaves(layers, is_leaf=is_variable)
    names = [variable.get_metadata("logical_axes")[skip:] for variable in variables]
    spread = layout.zero1(over)
    return GradientShards(
        stored=tuple(layout.spec(*axes) for axes in names),
        sharded=tuple(spread.spec(*axes) for axes in names),
        over=over,
        axis=axis,
        dtype=dtype,
    )


_BOTH = (
    "the gradient was asked for with respect to both the parameters and their shards, and goes to "
    "the shards; use jax.lax.stop_gradient on the parameters, or leave `shards` out"
)


@jax.custom_vjp
def _take(shards: list[Array], whole: list[Array]) -> list[Array]:
    del whole  # only to refuse its gradient, which would be zero
    return shards


def _take_forward(shards: PyTree, whole: PyTree) -> tuple[list[Array], None]:
    refuse_perturbed(_BOTH, whole)
    return values_of(shards), None


def _take_backward(_: None, gradients: list[Cotangent]) -> tuple[list[Array], None]:
    return [or_zeros(gradient) for gradient in gradients], None


_take.defvjp(_take_forward, _take_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy(to: GradientShards, shards: list[Array], whole: list[Array]) -> list[Array]:
    del shards  # only their gradient is of interest

    def local(*leaves: Array) -> list[Array]:
        return [jnp.expand_dims(leaf, to.axis) for leaf in leaves]

    return _on_each_device(local, to.stored, to.copy_specs)(*whole)


def _copy_forward(to: GradientShards, shards: PyTree, whole: PyTree) -> tuple[list[Array], None]:
    whole = refuse_perturbed(_BOTH, whole)
    return _copy(to, values_of(shards), whole), None


def _copy_backward(
    to: GradientShards, _: None, cotangents: list[Cotangent]
) -> tuple[list[Array], None]:
    gradients = [or_zeros(cotangent) for cotangent in cotangents]

    def local(*leaves: Array) -> list[Array]:
        return list(map(to.shard, leaves, to.stored, to.sharded))

    return _on_each_device(local, to.copy_specs, to.sharded)(*gradients), None


_copy.defvjp(_copy_forward, _copy_backward, symbolic_zeros=True)


def _on_each_device(
    function: Callable[..., list[Array]], in_specs: tuple[P, ...], out_specs: tuple[P, ...]
) -> Callable[..., list[Array]]:
    return jax.shard_map(function, in_specs=in_specs, out_specs=list(out_specs), check_vma=False)
