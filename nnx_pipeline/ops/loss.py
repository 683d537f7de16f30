"""Cross-entropy over a large vocabulary, without the logits ever existing as a whole."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops.gradients import or_zeros, refuse_perturbed, values_of
from nnx_pipeline.sharding import Layout, P, mesh_sizes


class Loss(Protocol):
    """A loss of hidden states and the head's kernel."""

    def __call__(
        self,
        hidden: Float[Array, "*batch seq embed"],
        kernel: Float[Array, "embed vocab"],
        targets: Int[Array, "*batch seq"],
        weights: Float[Array, "*batch seq"],
        *,
        batch_axes: tuple[str, ...],
        chunks: int,
        layout: Layout,
    ) -> Float[Array, ""]: ...


@dataclass(frozen=True)
class _Plan:
    """How the devices share the work; hashable, as a static argument must be."""

    chunks: int
    batch: P  # spec of hidden, targets and weights without their last axes
    kernel: P
    gathered: tuple[str, ...]  # axes that spread the kernel's rows: it is gathered over them
    turned: tuple[str, ...]  # the same, but its columns are spread over them instead
    vocab: tuple[str, ...]  # axes that spread the kernel's columns while the loss is computed
    shared: tuple[str, ...]  # those of them that spread the tokens too: tokens are gathered
    tokens: tuple[str, ...]  # axes along which tokens still differ after that

    @property
    def hidden(self) -> P:
        return P(*self.batch, None)


def chunked_cross_entropy(
    hidden: Float[Array, "*batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    targets: Int[Array, "*batch seq"],
    weights: Float[Array, "*batch seq"],
    *,
    batch_axes: tuple[str, ...],
    chunks: int,
    layout: Layout,
) -> Float[Array, ""]:
    """Σ weights · (log Σ_v exp(logits_v) - logits_target), logits = hidden · kernel, in float32.

    The product is in the dtype of `hidden`; a target outside the vocabulary costs log Σ exp alone.

    The sequence is cut into `chunks`, one after the other. Each device has its columns of the
    kernel and sees the tokens of all devices that share the other columns: a chunk of activations
    travels, not the kernel. Where the rows are stored apart (fsdp), the kernel is gathered, or
    turned to columns stored apart when fewer bytes move that way (`_tokens_travel`).

    Where the gradient is asked for, the forward pass computes it on the way (the loss is a scalar,
    its gradient is known up to a factor), so that no logits are computed twice. The gradient of
    this device's columns, in float32, is the largest thing kept.

    batch_axes: logical axes of `hidden` before its sequence. Sharding: hidden, targets and weights
    by them, sequence and embed axes whole; kernel ("embed", "vocab").
    Gradients come back in the shardings and dtypes of their arguments; asking for one with respect
    to the weights is an InputError.
    """
    plan = _make_plan(hidden.shape, kernel.shape[1], batch_axes, chunks, layout)
    return _loss(plan, hidden, kernel, targets, weights)


def _make_plan(
    hidden_shape: tuple[int, ...],
    columns: int,
    batch_axes: tuple[str, ...],
    chunks: int,
    layout: Layout,
) -> _Plan:
    sizes = mesh_sizes()
    spread = {axis for name in batch_axes for axis in layout.axes(name)}
    stored = layout.axes("vocab")
    rows = layout.axes("embed")
    turned = rows if _tokens_travel(hidden_shape, columns, stored, rows, spread) else ()
    vocab = (*stored, *turned)
    return _Plan(
        chunks=chunks,
        batch=P(*layout.spec(*batch_axes), None),
        kernel=layout.spec("embed", "vocab"),
        gathered=tuple(axis for axis in rows if axis not in turned),
        turned=turned,
        vocab=vocab,
        shared=tuple(axis for axis in vocab if axis in spread),
        tokens=tuple(axis for axis in sizes if axis in spread and axis not in vocab),
    )


def _tokens_travel(
    hidden_shape: tuple[int, ...],
    columns: int,
    stored: tuple[str, ...],
    rows: tuple[str, ...],
    spread: set[str],
) -> bool:
    """Whether sending tokens along `rows` moves fewer bytes than sending the kernel.

    Per row of the kernel, in units of the activation's size: every token of the devices that then
    share the columns arrives and its gradient leaves (1 + 1), or every column of this device's
    part arrives and its float32 gradient leaves (1 + 2). Columns must split evenly.
    """
    sizes = mesh_sizes()

    def count(axes: Iterable[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    if not rows or columns % count((*stored, *rows)):
        return False
    apart = count(axis for axis in spread if axis not in (*stored, *rows))
    tokens = math.prod(hidden_shape[:-1]) // apart
    return 2 * tokens < 3 * columns // count(stored)


def _over_mesh(function: Callable[..., Any], plan: _Plan, *, out_specs: Any) -> Callable[..., Any]:
    """The function of one device, on all of them; it says itself what it sends."""
    if not mesh_sizes():
        return function
    in_specs = (plan.hidden, plan.kernel, plan.batch, plan.batch)
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(plan: _Plan, hidden: Array, kernel: Array, targets: Array, weights: Array) -> Array:
    def local(hidden: Array, kernel: Array, targets: Array, weights: Array) -> Array:
        kernel = _spread_columns(kernel.astype(hidden.dtype), plan)

        def one_chunk(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
            loss, _ = _chunk_loss(plan, kernel, *chunk)
            return total + loss, None

        total, _ = jax.lax.scan(
            one_chunk, jnp.zeros((), jnp.float32), _cut(plan, hidden, targets, weights)
        )
        return _sum(total, plan.tokens)

    return _over_mesh(local, plan, out_specs=P())(hidden, kernel, targets, weights)


def _loss_forward(
    plan: _Plan, hidden: Any, kernel: Any, targets: Any, weights: Any
) -> tuple[Array, tuple[Array, Array]]:
    weights = refuse_perturbed(
        "the loss was asked for the gradient with respect to the weights of its targets, which it "
        "does not give; use jax.lax.stop_gradient on them",
        weights,
    )
    hidden, kernel, targets = values_of((hidden, kernel, targets))
    kernel_dtype = kernel.dtype

    def local(
        hidden: Array, kernel: Array, targets: Array, weights: Array
    ) -> tuple[Array, Array, Array]:
        kernel = _spread_columns(kernel.astype(hidden.dtype), plan)

        def one_chunk(
            carry: tuple[Array, Array], chunk: tuple[Array, Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            total, kernel_gradient = carry
            loss, gradient = _chunk_loss(plan, kernel, *chunk)
            tokens, logits_gradient = gradient()
            kernel_gradient += jnp.einsum(
                "td,tv->dv", tokens, logits_gradient, preferred_element_type=jnp.float32
            )
            back = jnp.einsum("tv,dv->td", logits_gradient, kernel)
            return (total + loss, kernel_gradient), _scatter_tokens(back, plan)

        start = (jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32))
        chunks = _cut(plan, hidden, targets, weights)
        (total, kernel_gradient), pieces = jax.lax.scan(one_chunk, start, chunks)
        hidden_gradient = _join(pieces, hidden.shape)
        return (
            _sum(total, plan.tokens),
            hidden_gradient,
            _reduce_kernel(kernel_gradient, plan).astype(kernel_dtype),
        )

    out_specs = (P(), plan.hidden, plan.kernel)
    run = _over_mesh(local, plan, out_specs=out_specs)
    total, hidden_gradient, kernel_gradient = run(hidden, kernel, targets, weights)
    return total, (hidden_gradient, kernel_gradient)


def _loss_backward(
    plan: _Plan, saved: tuple[Array, Array], cotangent: Any
) -> tuple[Array, Array, None, None]:
    cotangent = or_zeros(cotangent)
    hidden_gradient, kernel_gradient = (
        gradient * cotangent.astype(gradient.dtype) for gradient in saved
    )
    return hidden_gradient, kernel_gradient, None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _chunk_loss(
    plan: _Plan, kernel: Array, hidden: Array, targets: Array, weights: Array
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """One chunk on one device: its loss, and how to get its tokens and their logits' gradient.

    hidden [tokens, embed], targets and weights [tokens], before the gather over `plan.shared`.
    """
    hidden, targets, weights = (_gather_tokens(x, plan) for x in (hidden, targets, weights))
    logits = (hidden @ kernel).astype(jnp.float32)
    largest = jnp.max(logits, axis=-1)
    if plan.vocab:
        largest = jax.lax.pmax(largest, plan.vocab)
    exponential = jnp.exp(logits - largest[:, None])
    total = _sum(jnp.sum(exponential, axis=-1), plan.vocab)
    hit = _hit(targets, logits, plan)
    label = _sum(jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), plan.vocab)
    loss = jnp.sum(weights * (jnp.log(total) + largest - label))

    def gradient() -> tuple[Array, Array]:
        of_logits = weights[:, None] * (exponential / total[:, None] - hit.astype(jnp.float32))
        return hidden, of_logits.astype(hidden.dtype)

    return loss, gradient


def _hit(targets: Array, logits: Array, plan: _Plan) -> Array:
    """Where a column of this device's logits is the target of its token."""
    width = logits.shape[-1]
    offset = width * jax.lax.axis_index(plan.vocab) if plan.vocab else 0
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + offset
    return columns == targets[..., None]


def _cut(plan: _Plan, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """[*batch, seq, …] to [chunks, tokens, …], a chunk being a piece of every sequence."""

    def one(x: Array, trailing: int) -> Array:
        length = x.shape[x.ndim - 1 - trailing]
        tail = x.shape[x.ndim - trailing :]
        x = x.reshape(-1, plan.chunks, length // plan.chunks, *tail)
        return jnp.swapaxes(x, 0, 1).reshape(plan.chunks, -1, *tail)

    return one(hidden, 1), one(targets, 0), one(weights, 0)


def _join(pieces: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_cut` for hidden states."""
    chunks, _, embed = pieces.shape
    length = shape[-2]
    pieces = pieces.reshape(chunks, math.prod(shape[:-2]), length // chunks, embed)
    return jnp.swapaxes(pieces, 0, 1).reshape(shape)


def _spread_columns(kernel: Array, plan: _Plan) -> Array:
    """The stored part of the kernel to whole rows and this device's columns."""
    if plan.turned:
        kernel = jax.lax.all_to_all(kernel, plan.turned, split_axis=1, concat_axis=0, tiled=True)
    if plan.gathered:
        kernel = jax.lax.all_gather(kernel, plan.gathered, axis=0, tiled=True)
    return kernel


def _gather_tokens(x: Array, plan: _Plan) -> Array:
    axes = plan.shared
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def _scatter_tokens(x: Array, plan: _Plan) -> Array:
    """The gradient of the gathered tokens: summed over the vocabulary, each device its own."""
    x = _sum(x, tuple(axis for axis in plan.vocab if axis not in plan.shared))
    axes = plan.shared
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True) if axes else x


def _reduce_kernel(gradient: Array, plan: _Plan) -> Array:
    """Sums the kernel's gradient over the tokens of other devices; the inverse of the spreading."""
    scattered = tuple(axis for axis in plan.gathered if axis in plan.tokens)
    gradient = _sum(gradient, tuple(axis for axis in plan.tokens if axis not in scattered))
    if scattered:
        gradient = jax.lax.psum_scatter(gradient, scattered, scatter_dimension=0, tiled=True)
    if plan.turned:
        gradient = jax.lax.all_to_all(
            gradient, plan.turned, split_axis=0, concat_axis=1, tiled=True
        )
    return gradient


def _sum(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, axes) if axes else x
