"""A mixture of experts computed densely: every expert on all tokens, one after the other."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops.router import combine_weights
from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P, constrain, gather_weight, out_sharding, place


def as_it_is(x: Array) -> Array:
    """Returns its argument unchanged."""
    return x


@dataclass(frozen=True)
class ExpertParts:
    """Functions of `routed_experts`; the library uses the defaults, and experiments replace them.

    - `mix`: another implementation of `dense_experts`.
    - `hidden`: applied to an expert's hidden units.
    - `enter`: applied to the tokens before the router.
    - `leave`: applied to the output of the experts.
    """

    mix: "Mix | None" = None
    hidden: Callable[[Array], Array] = as_it_is
    enter: Callable[[Array], Array] = as_it_is
    leave: Callable[[Array], Array] = as_it_is


DEFAULT_EXPERT_PARTS = ExpertParts()


class ExpertKernels(NamedTuple):
    """The kernels of all experts, in the sharding and dtype in which they are stored."""

    gate: Float[Array, "experts embed mlp"]
    up: Float[Array, "experts embed mlp"]
    down: Float[Array, "experts mlp embed"]


class Mix(Protocol):
    """A function that sends tokens through their experts, see `dense_experts`."""

    def __call__(
        self,
        x: Array,
        choice: tuple[Array, Array],
        kernels: ExpertKernels,
        *,
        layout: Layout,
        remat: Remat,
        hidden: Callable[[Array], Array],
    ) -> Array: ...


def dense_experts(
    x: Float[Array, "batch seq embed"],
    choice: tuple[Float[Array, "batch seq chosen"], Int[Array, "batch seq chosen"]],
    kernels: ExpertKernels,
    *,
    layout: Layout,
    remat: Remat,
    hidden: Callable[[Array], Array] = as_it_is,
) -> Float[Array, "batch seq embed"]:
    """Σ_e (combine_e · silu(x · gate_e) · (x · up_e)) · down_e, summed in float32, cast to x.dtype.

    combine_e is the router's weight of expert e for each token, 0 where it was not chosen.

    - `x`: the tokens, sharded by ("batch", None, None), as the result is.
    - `choice`: the weights of the chosen experts of each token, and their numbers, from `route`.
    - `kernels`: as they are stored; each expert's are gathered when it is computed.
    - `layout`: which mesh axes the logical axes of tokens and kernels are sharded over.
    - `remat`: what to keep of each expert for the backward pass; its hidden units have the names
      `remat.HIDDEN`.
    - `hidden`: applied to an expert's hidden units.

    A scan runs over the experts: one expert's gathered weights and hidden units exist at a time,
    where a single product over all of them would hold `experts` times as much. The router's weight
    multiplies the hidden units, so that the backward pass does not need the output of the down
    projection and does not compute it again.

    The sum over experts has two leading axes, over the mesh axes `expert` and `tensor` ("o" and "t"
    in the einsums below). Each device sums its own part there, so that one reduction follows the
    scan instead of one per expert.
    """
    owners, shares = layout.size("expert"), layout.size("mlp")
    # Each device along the mesh axis `expert` applies its own experts to all tokens, so here the
    # tokens are not sharded over that axis.
    beside = layout.spec("batch_beside_experts", None, None)
    combine = combine_weights(*choice, kernels.gate.shape[0])
    x, combine = place(x, beside), place(combine, beside)
    products = Products(layout)

    def one_expert(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
        gate, up, down, weight = operands
        opened = products.open_up(x, gate, up)
        product = products.project(hidden(opened * weight[:, None, :, :, None]), down)
        return total + product.astype(total.dtype), None

    operands = (*products.split(*kernels), by_owner(combine, owners, layout))
    sums = jnp.zeros((owners, shares, *x.shape), jnp.float32)
    start = constrain(sums, products.partial)
    total, _ = jax.lax.scan(remat.checkpoint(one_expert), start, operands)
    mixed = jnp.sum(total, axis=(0, 1)).astype(x.dtype)
    return place(mixed, layout.spec("batch", None, None))


@dataclass(frozen=True)
class Products:
    """The three matrix products of one expert, with the kernels in the shape that `split` gives.

    In the shapes below, `owners` is the number of devices along the mesh axes of the experts, and
    `parts` the number of those along the axes of the hidden units.
    """

    layout: Layout

    @property
    def partial(self) -> P:
        """Sharding of `[owners, parts, batch, seq, …]`, each device's part of the sum."""
        return self.layout.spec("expert", "mlp", "batch_beside_experts", None, None)

    def split(self, gate: Array, up: Array, down: Array) -> tuple[Array, ...]:
        """Kernels `[experts, …]` to `[experts / owners, owners, …]`; a scan runs over the first.

        - `gate`, `up`: `[experts, embed, mlp]`; their mlp axis is split into (parts, mlp / parts).
        - `down`: `[experts, mlp, embed]`, likewise.
        """
        return self._into.split(gate), self._into.split(up), self._out_of.split(down)

    def open_up(self, x: Array, gate: Array, up: Array) -> Array:
        """silu(x · gate) · (x · up): the hidden units of one expert of each owner.

        - `x`: `[batch, seq, embed]`; the result is `[owners, parts, batch, seq, mlp / parts]`.
        - `gate`, `up`: one expert of each owner, `[owners, embed, parts, mlp / parts]`.
        """

        def product(kernel: Array) -> Array:
            kernel = self._into.gathered(kernel.astype(x.dtype))
            spec = out_sharding(self.partial)
            return jnp.einsum("bsd,odtf->otbsf", x, kernel, out_sharding=spec)

        opened, raised = map(named, (product(gate), product(up)), HIDDEN)
        return jax.nn.silu(opened) * raised

    def project(self, hidden: Array, down: Array) -> Array:
        """The down projection, as a partial sum for each owner and part.

        - `hidden`: `[owners, parts, batch, seq, mlp / parts]`; the result is
          `[owners, parts, batch, seq, embed]`.
        - `down`: one expert of each owner, `[owners, parts, mlp / parts, embed]`.
        """
        return _project(self._out_of, self.partial, hidden, down.astype(hidden.dtype))

    @property
    def _into(self) -> "_Kernel":
        return _Kernel(self.layout, ("embed_of_expert", "mlp"))

    @property
    def _out_of(self) -> "_Kernel":
        return _Kernel(self.layout, ("mlp", "embed_of_expert"))


@dataclass(frozen=True)
class _Kernel:
    """Layout of kernels `[experts, *names]` after `split` has given owners and parts own axes."""

    layout: Layout
    names: tuple[str, str]

    @property
    def stored(self) -> P:
        """The stored sharding of one expert per owner, with the axes in the order of `names`.

        These are `[owners, embed, parts, mlp / parts]` or `[owners, parts, mlp / parts, embed]`.
        """
        return self._spec(*self.names)

    def split(self, kernel: Array) -> Array:
        """`[experts, …]` to `[experts / owners, owners, …]`, with the mlp axis split into parts."""
        owners, parts = self.layout.size("expert"), self.layout.size("mlp")
        shape = [owners, kernel.shape[0] // owners]
        for name, size in zip(self.names, kernel.shape[1:], strict=True):
            shape += [parts, size // parts] if name == "mlp" else [size]
        spec = P(self.stored[0], None, *self.stored[1:])
        return jnp.swapaxes(jax.lax.reshape(kernel, shape, out_sharding=out_sharding(spec)), 0, 1)

    def gathered(self, kernel: Array) -> Array:
        """The kernel of one expert per owner, gathered over all axes but owners and parts."""
        used = self._spec(*(name if name == "mlp" else None for name in self.names))
        return gather_weight(kernel, self.stored, used)

    def _spec(self, *names: str | None) -> P:
        """The spec of `[owners, *names]`, with the mlp axis split into parts."""
        axes: list[str | None] = []
        for name in names:
            axes += [name, None] if name == "mlp" else [name]
        return self.layout.spec("expert", *axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(kernel: _Kernel, out: P, hidden: Array, down: Array) -> Array:
    """The down projection, whose kernel gradient is computed in the kernel's own order of axes.

    JAX would compute the gradient as `[embed, mlp]` and transpose it. With that sharded over embed,
    XLA for TPU (libtpu 0.0.42.1) makes an all-reduce, which sends twice as much as a
    reduce-scatter. The cost of avoiding it, for `mixtral-small` on v5p, is a temp of 261 MB instead
    of 220 with 2 repeats, and nothing with 1 repeat.
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
    d_hidden = jnp.einsum(
        "otbsd,otfd->otbsf", cotangent, kernel.gathered(down), out_sharding=to_hidden
    )
    # "otfd" is the stored order, so that a reduce-scatter brings the sum to its shards.
    d_down = jnp.einsum("otbsf,otbsd->otfd", hidden, cotangent, out_sharding=to_down)
    return d_hidden, place(d_down, kernel.stored)


_project.defvjp(_project_forward, _project_backward)


def by_owner(x: Array, owners: int, layout: Layout) -> Array:
    """Moves the experts of an array to the front, in the order in which a scan visits them.

    - `x`: an array with a value per token and expert, `[batch, …, experts]`; the result is
      `[experts / owners, owners, batch, …]`, sharded over the owners and the batch.
    - `owners`: the number of devices along the mesh axes of the experts.
    - `layout`: which mesh axes the experts and the batch are sharded over.
    """
    *rest, experts = x.shape
    x = jnp.moveaxis(x.reshape(*rest, owners, experts // owners), (-2, -1), (1, 0))
    return place(x, layout.spec(None, "expert", "batch_beside_experts", *[None] * (len(rest) - 1)))
