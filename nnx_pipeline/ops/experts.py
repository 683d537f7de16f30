"""All experts on all tokens, one expert after the other."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops.router import combine_weights
from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P, constrain, gather_weight, out_sharding, place


def as_it_is(x: Array) -> Array:
    """No change."""
    return x


@dataclass(frozen=True)
class ExpertParts:
    """What an experiment may exchange in `routed_experts`; the defaults measured best.

    hidden: what an expert's hidden units go through. enter, leave: what the tokens go through
    before the router and behind the experts. mix: another way to do what `dense_experts` does.
    """

    mix: "Mix | None" = None
    hidden: Callable[[Array], Array] = as_it_is
    enter: Callable[[Array], Array] = as_it_is
    leave: Callable[[Array], Array] = as_it_is


DEFAULT_EXPERT_PARTS = ExpertParts()


class Mix(Protocol):
    """Tokens through their experts, see `dense_experts`."""

    def __call__(
        self,
        x: Array,
        choice: tuple[Array, Array],
        gate: Array,
        up: Array,
        down: Array,
        *,
        layout: Layout,
        remat: Remat,
        hidden: Callable[[Array], Array],
    ) -> Array: ...


def dense_experts(
    x: Float[Array, "batch seq embed"],
    choice: tuple[Float[Array, "batch seq chosen"], Int[Array, "batch seq chosen"]],
    gate: Float[Array, "experts embed mlp"],
    up: Float[Array, "experts embed mlp"],
    down: Float[Array, "experts mlp embed"],
    *,
    layout: Layout,
    remat: Remat,
    hidden: Callable[[Array], Array] = as_it_is,
) -> Float[Array, "batch seq embed"]:
    """Σ_e (combine_e · silu(x · gate_e) · (x · up_e)) · down_e, summed in float32, cast to x.dtype.

    A scan over experts: one expert's weights are gathered and one expert's hidden units exist at a
    time, where one product over all of them holds `experts` times as much. A token's weight goes
    onto its hidden units, so that the backward pass has no use for the output of the down
    projection and does not compute it again.

    Each mesh coordinate along `expert` and `tensor` sums what it owns on two leading axes of its
    own (o, t below), so that one reduction follows the scan instead of one per expert.

    choice: the weight of each chosen expert, and which it is, as `route` gives them. remat: what
    to keep of each expert for the backward pass; its hidden units have names. hidden: what these
    go through.
    """
    owners, shares = layout.size("expert"), layout.size("mlp")
    beside = layout.spec("batch_beside_experts", None, None)
    combine = combine_weights(*choice, gate.shape[0])
    x, combine = place(x, beside), place(combine, beside)
    kernels = Kernels(layout)

    def one_expert(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, weight = operands
        opened = kernels.open_up(x, gate, up)
        product = kernels.project(hidden(opened * weight[:, None, :, :, None]), down)
        return total + product.astype(total.dtype), None

    operands = (*kernels.split(gate, up, down), by_owner(combine, owners, layout))
    sums = jnp.zeros((owners, shares, *x.shape), jnp.float32)
    start = constrain(sums, kernels.partial)
    total, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    mixed = jnp.sum(total, axis=(0, 1)).astype(x.dtype)
    return place(mixed, layout.spec("batch", None, None))


@dataclass(frozen=True)
class Kernels:
    """The three products of one expert, on the kernels as `split` gives them."""

    layout: Layout

    @property
    def partial(self) -> P:
        """Of [owners, parts, batch, seq, …], what each device has of the sum over experts."""
        return self.layout.spec("expert", "mlp", "batch_beside_experts", None, None)

    def split(self, gate: Array, up: Array, down: Array) -> tuple[Array, ...]:
        """[experts, …] each to [experts / owners, owners, …], for a scan over the first axis."""
        return self._into.split(gate), self._into.split(up), self._out_of.split(down)

    def open_up(self, x: Array, gate: Array, up: Array) -> Array:
        """silu(x · gate) · (x · up): [batch, seq, embed] to [owners, parts, batch, seq, mlp]."""

        def product(kernel: Array) -> Array:
            kernel = self._into.gathered(kernel.astype(x.dtype))
            spec = out_sharding(self.partial)
            return jnp.einsum("bsd,odtf->otbsf", x, kernel, out_sharding=spec)

        opened, raised = map(named, (product(gate), product(up)), HIDDEN)
        return jax.nn.silu(opened) * raised

    def project(self, hidden: Array, down: Array) -> Array:
        """[owners, parts, batch, seq, mlp] to [owners, parts, batch, seq, embed]."""
        return _project(self._out_of, self.partial, hidden, down.astype(hidden.dtype))

    @property
    def _into(self) -> "_Kernel":
        return _Kernel(self.layout, ("embed_of_expert", "mlp"))

    @property
    def _out_of(self) -> "_Kernel":
        return _Kernel(self.layout, ("mlp", "embed_of_expert"))


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


def by_owner(x: Array, owners: int, layout: Layout) -> Array:
    """[batch, …, experts] to [experts / owners, owners, batch, …], each owner with its own."""
    *rest, experts = x.shape
    x = jnp.moveaxis(x.reshape(*rest, owners, experts // owners), (-2, -1), (1, 0))
    return place(x, layout.spec(None, "expert", "batch_beside_experts", *[None] * (len(rest) - 1)))
