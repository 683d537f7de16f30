"""All experts on all tokens, one expert after the other."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P, constrain, gather_weight, out_sharding, place


def as_it_is(x: Array) -> Array:
    """No change."""
    return x


@dataclass(frozen=True)
class ExpertParts:
    """What an experiment may exchange in `dense_experts`; the defaults measured best.

    sum_dtype: that in which the outputs of experts add up, None for that of x. hidden: what an
    expert's hidden units go through. enter, leave: what the tokens go through before and behind.
    """

    sum_dtype: str | None = "float32"
    hidden: Callable[[Array], Array] = as_it_is
    enter: Callable[[Array], Array] = as_it_is
    leave: Callable[[Array], Array] = as_it_is


DEFAULT_EXPERT_PARTS = ExpertParts()


def dense_experts(
    x: Float[Array, "batch seq embed"],
    combine: Float[Array, "batch seq experts"],
    gate: Float[Array, "experts embed mlp"],
    up: Float[Array, "experts embed mlp"],
    down: Float[Array, "experts mlp embed"],
    *,
    layout: Layout,
    remat: Remat,
    parts: ExpertParts = ExpertParts(),
) -> Float[Array, "batch seq embed"]:
    """Σ_e (combine_e · silu(x · gate_e) · (x · up_e)) · down_e, summed in float32, cast to x.dtype.

    A scan over experts: one expert's weights are gathered and one expert's hidden units exist at a
    time, where one product over all of them holds `experts` times as much. A token's weight goes
    onto its hidden units, so that the backward pass has no use for the output of the down
    projection and does not compute it again.

    Each mesh coordinate along `expert` and `tensor` sums what it owns on two leading axes of its
    own (o, t below), so that one reduction follows the scan instead of one per expert.

    remat: what to keep of each expert for the backward pass; its hidden units have names.
    """
    owners, shares = layout.size("expert"), layout.size("mlp")
    beside = layout.spec("batch_beside_experts", None, None)
    x, combine = place(parts.enter(x), beside), place(combine, beside)
    partial = layout.spec("expert", "mlp", "batch_beside_experts", None, None)
    into = _Kernel(layout, ("embed_of_expert", "mlp"))
    out_of = _Kernel(layout, ("mlp", "embed_of_expert"))

    def open_up(kernel: Array) -> Array:
        kernel = into.gathered(kernel.astype(x.dtype))
        return jnp.einsum("bsd,odtf->otbsf", x, kernel, out_sharding=out_sharding(partial))

    def one_expert(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, weight = operands
        opened, raised = map(named, (open_up(gate), open_up(up)), HIDDEN)
        hidden = parts.hidden(jax.nn.silu(opened) * raised * weight[:, None, :, :, None])
        product = _project(out_of, partial, hidden, down.astype(x.dtype))
        return total + product.astype(total.dtype), None

    operands = (
        into.split(gate),
        into.split(up),
        out_of.split(down),
        _split_weights(combine, owners, layout),
    )
    sums = jnp.zeros((owners, shares, *x.shape), parts.sum_dtype or x.dtype)
    start = constrain(sums, partial)
    total, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    mixed = jnp.sum(total, axis=(0, 1)).astype(x.dtype)
    return parts.leave(place(mixed, layout.spec("batch", None, None)))


@dataclass(frozen=True)
class _Kernel:
    """Layout of the kernels `[experts, *names]`, with owners and tensor parts split off."""

    layout: Layout
    names: tuple[str, str]

    @property
    def stored(self) -> P:
        """[owners, embed, parts, mlp / parts], or [owners, parts, mlp / parts, embed]."""
        return self._spec(*self.names)

    def split(self, kernel: Array) -> Array:
        """[experts, …] to [experts / owners, owners, …], the axis of mlp in parts."""
        owners, parts = self.layout.size("expert"), self.layout.size("mlp")
        shape = [owners, kernel.shape[0] // owners]
        for name, size in zip(self.names, kernel.shape[1:], strict=True):
            shape += [parts, size // parts] if name == "mlp" else [size]
        spec = P(self.stored[0], None, *self.stored[1:])
        return jnp.swapaxes(jax.lax.reshape(kernel, shape, out_sharding=out_sharding(spec)), 0, 1)

    def gathered(self, kernel: Array) -> Array:
        used = self._spec(*(name if name == "mlp" else None for name in self.names))
        return gather_weight(kernel, self.stored, used)

    def _spec(self, *names: str | None) -> P:
        axes: list[str | None] = []
        for name in names:
            axes += [name, None] if name == "mlp" else [name]
        return self.layout.spec("expert", *axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(kernel: _Kernel, out: P, hidden: Array, down: Array) -> Array:
    """The down projection, with the gradient of its kernel in the order of the kernel.

    JAX would make it `[embed, mlp]` and turn it around; from that, spread over embed, XLA for TPU
    (libtpu 0.0.42.1) makes an all-reduce, which sends twice as much as a reduce-scatter. The price
    with 2 repeats at `mixtral-small` on v5p is a temp of 261 MB instead of 220, none with 1 repeat.
    """
    return jnp.einsum(
        "otbsf,otfd->otbsd", hidden, kernel.gathered(down), out_sharding=out_sharding(out)
    )


def _project_forward(
    kernel: _Kernel, out: P, hidden: Array, down: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _project(kernel, out, hidden, down), (hidden, down)


def _project_backward(
    kernel: _Kernel, out: P, kept: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    hidden, down = kept
    to_hidden, to_down = out_sharding(out), out_sharding(kernel.stored)
    of_hidden = jnp.einsum(
        "otbsd,otfd->otbsf", cotangent, kernel.gathered(down), out_sharding=to_hidden
    )
    of_down = jnp.einsum("otbsf,otbsd->otfd", hidden, cotangent, out_sharding=to_down)
    return of_hidden, place(of_down, kernel.stored)


_project.defvjp(_project_forward, _project_backward)


def _split_weights(combine: Array, owners: int, layout: Layout) -> Array:
    """[batch, seq, experts] to [experts / owners, owners, batch, seq], each owner with its own."""
    batch, length, experts = combine.shape
    combine = jnp.moveaxis(
        combine.reshape(batch, length, owners, experts // owners), (2, 3), (1, 0)
    )
    return place(combine, layout.spec(None, "expert", "batch_beside_experts", None))
