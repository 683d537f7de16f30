"""Cross-entropy over a large vocabulary, computed without holding all logits at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops._attention import soft_cap, soft_cap_slope
from nnx_pipeline.ops._head import with_columns
from nnx_pipeline.sharding._cast import in_stored_order
from nnx_pipeline.sharding._gradients import or_zeros, refuse_perturbed, scaled, values_of
from nnx_pipeline.sharding.layout import Layout, P, mesh_sizes, place, reordered


class Targets(NamedTuple):
    ids: Int[Array, "*batch seq"]
    weights: Float[Array, "*batch seq"]


_Results = TypeVar("_Results")


class LossOptions(NamedTuple):
    chunks: int  # pieces into which the sequence is cut
    soft_cap: float | None = None  # the bound of the logits
    columns: int | None = None  # of the vocabulary, if zeros may follow them in the kernel


LARGE_HEAD = 2**28  # bytes of the whole kernel in float32


@dataclass(frozen=True)
class _Plan:
    """How the devices share the work; hashable, because it is a static argument."""

    chunks: int
    batch: P  # spec of targets and weights, and of hidden without its last axis
    kernel: P
    rows: tuple[str, ...]  # mesh axes over which rows of the kernel are sharded
    gathered: tuple[str, ...]  # axes of `rows` over which the kernel is gathered
    turned: tuple[str, ...]  # the others: row shards are exchanged for column shards
    vocab: tuple[str, ...]  # mesh axes over which columns are sharded while the loss is computed
    shared: tuple[str, ...]  # the axes of `vocab` that also shard the tokens: tokens are gathered
    tokens: tuple[str, ...]  # mesh axes over which the tokens stay sharded
    padded: int  # columns of the kernel, zeros included, which let it split over `vocab`
    cap: float | None = None  # the bound of the logits
    columns: int | None = None  # of the vocabulary, if the kernel has more

    @property
    def hidden(self) -> P:
        return P(*self.batch, None)


def chunked_cross_entropy(
    hidden: Float[Array, "*batch seq embed"],
    kernel: Float[Array, "embed vocab"],
    targets: Targets,
    *,
    batch_axes: tuple[str, ...],
    options: LossOptions,
    layout: Layout,
) -> Float[Array, ""]:
    """Σ weights · (log Σ_v exp(logits_v) - logits_target), with logits = hidden · kernel.

    `hidden` and `targets` are sharded by `batch_axes`, the logical axes before the sequence;
    sequence and embed are whole on every device. The kernel of the head is sharded by
    ("embed_of_vocab", "vocab"). An id outside the vocabulary costs log Σ exp alone. The product is
    computed in the dtype of `hidden`, everything after it in float32.

    The chunks are computed one after the other. Each device computes the logits of its own columns
    of the vocabulary, for the tokens of all devices that hold the other columns. Where the kernel's
    rows are sharded too (over fsdp), it is either gathered, or its row shards are exchanged for
    column shards, whichever sends fewer bytes. They are always exchanged over mesh axes that shard
    its rows because its columns do not split over them (`Layout.for_vocabulary`); for that it gets
    columns of zeros.

    If the gradient is asked for, the forward pass computes it along with the loss, and no logits
    are computed twice. The largest array kept is the float32 gradient of this device's columns.
    With hidden states in float16 the weights are lifted for that (`lift_of`). Gradients have the
    shardings and dtypes of their arguments; with respect to the weights of the targets there is
    none.
    """
    plan = make_plan(hidden.shape, kernel.shape[1], batch_axes, options.chunks, layout)
    columns = kernel.shape[1] if options.columns is None else options.columns
    kernel = with_columns(kernel, plan.padded, layout)
    plan = dataclasses.replace(
        plan, cap=options.soft_cap, columns=columns if columns < plan.padded else None
    )
    return _loss(plan, hidden, kernel, *targets)


MOST_LIFTED = 4096  # sums of gradients over tokens are then in the range of float16


def lift_of(
    weights: Float[Array, "*any"], dtype: jax.typing.DTypeLike, *, summed: bool = False
) -> Float[Array, ""] | None:
    """The power of two that brings the largest weight of targets to between 1 and 2.

    It is None for a dtype with the exponents of float32. If gradients are `summed` over all tokens
    in the dtype, it is less for weights with a sum above 4096 to 8192: such gradients of 2**18
    tokens overflow float16.
    """
    if jnp.finfo(dtype).minexp <= jnp.finfo(jnp.float32).minexp:
        return None
    sizes = jnp.abs(jax.lax.stop_gradient(weights).astype(jnp.float32))
    largest = jnp.max(sizes)
    if summed:
        largest = jnp.maximum(largest, jnp.sum(sizes) / MOST_LIFTED)
    exponent = jnp.clip(jnp.frexp(largest)[1], -100, 100)
    return jnp.ldexp(jnp.float32(1), 1 - exponent)


def hold_columns(
    kernel: Float[Array, "embed vocab"],
    hidden_shape: tuple[int, ...],
    batch_axes: tuple[str, ...],
    layout: Layout,
) -> tuple[Float[Array, "embed columns"], Layout]:
    """The kernel as a loop holds it that computes a loss at each turn, and its layout."""
    # Row shards that each turn would exchange for column shards are exchanged here, once; gradients
    # then add up in column shards, which are as large. A kernel that a turn gathers is left as it
    # is, because the loop would hold all of it.
    plan = make_plan(hidden_shape, kernel.shape[1], batch_axes, 1, layout)
    if not plan.turned:
        return kernel, layout
    spread = dataclasses.replace(layout, vocab=plan.vocab, embed_of_vocab=())
    # With auto axes the transpose of a constraint is the same one: the first are for the gradient.
    kernel = place(kernel, plan.kernel)
    kernel = place(with_columns(kernel, plan.padded, layout), plan.kernel)
    return place(kernel, spread.spec("embed_of_vocab", "vocab")), spread


def make_plan(
    hidden_shape: tuple[int, ...],
    columns: int,
    batch_axes: tuple[str, ...],
    chunks: int,
    layout: Layout,
) -> _Plan:
    """How the devices of the ambient mesh share the work on hidden states of this shape."""
    sizes = mesh_sizes()
    spread = {axis for name in batch_axes for axis in layout.axes(name)}
    stored, rows = layout.axes("vocab"), layout.axes("embed_of_vocab")
    # What shards rows in the place of columns is exchanged in any case.
    instead = tuple(axis for axis in rows if axis not in layout.axes("embed"))
    others = tuple(axis for axis in rows if axis not in instead)
    if _tokens_travel(hidden_shape, columns, (*stored, *instead), others, spread):
        instead = rows
    splits = columns % math.prod(sizes[axis] for axis in (*stored, *instead)) == 0
    turned = instead if splits or not stored else ()
    vocab = (*stored, *turned)
    devices = math.prod(sizes[axis] for axis in vocab)
    return _Plan(
        chunks=chunks,
        batch=P(*layout.spec(*batch_axes), None),
        kernel=layout.spec("embed_of_vocab", "vocab"),
        rows=rows,
        gathered=tuple(axis for axis in rows if axis not in turned),
        turned=turned,
        padded=-(-columns // devices) * devices,
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
    """Whether sending tokens along the mesh axes `rows` moves fewer bytes than sending the kernel.

    Counted per row of the kernel, in units of the size of an activation: each token of the devices
    that then share the columns arrives and its gradient leaves, 1 + 1, or each column of this
    device's part arrives and its gradient leaves, 1 + 2, because the latter is float32. `stored`
    shard the columns in any case, and `spread` the tokens.
    """
    sizes = mesh_sizes()

    def count(axes: Iterable[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    if not rows:
        return False
    shards = count(axis for axis in spread if axis not in (*stored, *rows))
    tokens = math.prod(hidden_shape[:-1]) // shards
    return 2 * tokens < 3 * columns // count(stored)


def _over_mesh(
    function: Callable[..., _Results], plan: _Plan, *, out_specs: P | tuple[P, ...]
) -> Callable[..., _Results]:
    """Runs `function` on each device's shards; it contains the collectives itself."""
    if not mesh_sizes():
        return function
    in_specs = (plan.hidden, plan.kernel, plan.batch, plan.batch)
    whole: Callable[..., _Results] = jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh_sizes()),
        check_vma=False,
    )
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(plan: _Plan, hidden: Array, kernel: Array, targets: Array, weights: Array) -> Array:
    """The loss when no gradient is asked for; `_loss_forward` is called otherwise."""

    def local(hidden: Array, kernel: Array, targets: Array, weights: Array) -> Array:
        kernel = _spread_columns(kernel.astype(hidden.dtype), plan)

        def one_chunk(total: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
            loss, _ = _chunk_loss(plan, kernel, *chunk)
            return total + loss, None

        total, _ = jax.lax.scan(
            one_chunk, jnp.zeros((), jnp.float32), _cut(plan, hidden, targets, weights)
        )
        return _sum(total, plan.tokens)

    loss: Array = _over_mesh(local, plan, out_specs=P())(hidden, kernel, targets, weights)
    return loss


def _loss_forward(
    plan: _Plan, *primals: CustomVJPPrimal
) -> tuple[Array, tuple[Array, Array, Array | None, Array]]:
    """The loss, the gradients for the lifted weights, their lift, and the kernel's dtype."""
    refuse_perturbed(
        "the loss was asked for the gradient with respect to the weights of its targets, which it "
        "does not give; use jax.lax.stop_gradient on them",
        primals[-1],
    )
    arrays: tuple[Array, ...] = values_of(primals)
    hidden, kernel, targets, weights = arrays
    gradient_dtype, lift = kernel.dtype, lift_of(weights, hidden.dtype)
    of_dtype = jnp.zeros((), kernel.dtype)
    if lift is not None:
        # Most probabilities of a large vocabulary are small beside the largest weight.
        lift = 64 * lift
        gradient_dtype, weights = jnp.dtype(jnp.float32), weights.astype(jnp.float32) * lift

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
            # This device's columns give a part of the tokens' gradient; the sum over the other
            # columns is made chunk by chunk, so that only a chunk of gathered tokens exists.
            back = jnp.einsum("tv,dv->td", logits_gradient, kernel)
            return (total + loss, kernel_gradient), _scatter_tokens(back, plan)

        start = (jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32))
        chunks = _cut(plan, hidden, targets, weights)
        (total, kernel_gradient), pieces = jax.lax.scan(one_chunk, start, chunks)
        hidden_gradient = _join(pieces, hidden.shape)
        kernel_gradient = _reduce_kernel(kernel_gradient, plan)
        # A compiler brings the weights and the optimizer's state into the order of the gradient. In
        # stored order none is moved: two layers of Llama 3.1 8B on 4 TPU v5p (libtpu 0.0.42.1) take
        # 18 % less heap and 4 % less compute. `mixtral-small`, whose head is small, took 6 % more.
        if 4 * hidden.shape[-1] * plan.padded >= LARGE_HEAD:
            kernel_gradient = in_stored_order(kernel_gradient)
        return (
            _sum(total, plan.tokens),
            hidden_gradient,
            kernel_gradient.astype(gradient_dtype),
        )

    out_specs = (P(), plan.hidden, plan.kernel)
    run = _over_mesh(local, plan, out_specs=out_specs)
    total, *gradients = run(hidden, kernel, targets, weights)
    # The backward pass of the layers starts when both are there. Without the barrier a compiler
    # that hides latency puts the reduce-scatter of the kernel's gradient beside that pass, and
    # holds the gradient of all columns unsharded until it ends.
    hidden_gradient, kernel_gradient = jax.lax.optimization_barrier(tuple(gradients))
    total = total if lift is None else total / lift
    return total, (hidden_gradient, kernel_gradient, lift, of_dtype)


def _loss_backward(
    plan: _Plan, saved: tuple[Array, Array, Array | None, Array], cotangent: Array | SymbolicZero
) -> tuple[Array, Array, None, None]:
    hidden_gradient, kernel_gradient, lift, of_dtype = saved
    cotangent = or_zeros(cotangent)
    cotangent = cotangent if lift is None else cotangent / lift
    of_kernel = scaled(kernel_gradient, cotangent, of_dtype.dtype)
    return scaled(hidden_gradient, cotangent), of_kernel, None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _chunk_loss(
    plan: _Plan, kernel: Array, hidden: Array, targets: Array, weights: Array
) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """One chunk's loss on a device, and a function to its gathered tokens and logits' gradient."""
    hidden, targets, weights = (_gather_tokens(x, plan) for x in (hidden, targets, weights))
    logits = (hidden @ kernel).astype(jnp.float32)
    if plan.cap is not None:
        logits = soft_cap(logits, plan.cap)
    columns, known = _columns(logits, plan), logits
    hit = columns == targets[..., None]
    if plan.columns is not None:
        of_vocabulary = columns < plan.columns
        known, hit = jnp.where(of_vocabulary, logits, -jnp.inf), hit & of_vocabulary
    # The largest logit of all devices is subtracted, so that no exponential overflows.
    largest = jnp.max(known, axis=-1)
    if plan.vocab:
        # It cancels out, so that it has no derivative; `pmax` has none for second derivatives.
        largest = jax.lax.pmax(jax.lax.stop_gradient(largest), plan.vocab)
    exponential = jnp.exp(known - largest[:, None])
    total = _sum(jnp.sum(exponential, axis=-1), plan.vocab)
    label = _sum(jnp.sum(jnp.where(hit, logits, 0.0), axis=-1), plan.vocab)
    loss = jnp.sum(weights * (jnp.log(total) + largest - label))

    def gradient() -> tuple[Array, Array]:
        d_logits = weights[:, None] * (exponential / total[:, None] - hit.astype(jnp.float32))
        if plan.cap is not None:
            d_logits *= soft_cap_slope(logits, plan.cap)
        return hidden, d_logits.astype(hidden.dtype)

    return loss, gradient


def _columns(logits: Array, plan: _Plan) -> Array:
    """The token id of each column of this device: int32 `[tokens, columns]`."""
    width = logits.shape[-1]
    offset = width * jax.lax.axis_index(plan.vocab) if plan.vocab else 0
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) + offset


def _cut(plan: _Plan, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """`[*batch, seq, …]` to `[chunks, tokens, …]`; each chunk has a piece of every sequence."""

    def pieces(x: Array, trailing: int) -> Array:
        length = x.shape[x.ndim - 1 - trailing]
        tail = x.shape[x.ndim - trailing :]
        x = x.reshape(-1, plan.chunks, length // plan.chunks, *tail)
        return jnp.swapaxes(x, 0, 1).reshape(plan.chunks, -1, *tail)

    return pieces(hidden, 1), pieces(targets, 0), pieces(weights, 0)


def _join(pieces: Array, shape: tuple[int, ...]) -> Array:
    chunks, _, embed = pieces.shape
    length = shape[-2]
    pieces = pieces.reshape(chunks, math.prod(shape[:-2]), length // chunks, embed)
    return jnp.swapaxes(pieces, 0, 1).reshape(shape)


def _spread_columns(kernel: Array, plan: _Plan) -> Array:
    """From the stored shard of the kernel to all rows of this device's columns."""
    if plan.turned:
        kernel = jax.lax.all_to_all(kernel, plan.turned, split_axis=1, concat_axis=0, tiled=True)
    if plan.gathered:
        kernel = jax.lax.all_gather(kernel, plan.gathered, axis=0, tiled=True)
    return reordered(kernel, 0, (*plan.gathered, *plan.turned), plan.rows)


def _gather_tokens(x: Array, plan: _Plan) -> Array:
    """The tokens of all devices that hold the other columns."""
    axes = plan.shared
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def _scatter_tokens(x: Array, plan: _Plan) -> Array:
    """The gradient of the gathered tokens, summed over the columns; each device gets its own."""
    x = _sum(x, tuple(axis for axis in plan.vocab if axis not in plan.shared))
    axes = plan.shared
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True) if axes else x


def _reduce_kernel(gradient: Array, plan: _Plan) -> Array:
    """Sums the kernel's gradient over the tokens and brings it to the stored sharding."""
    gradient = reordered(gradient, 0, plan.rows, (*plan.gathered, *plan.turned))
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
