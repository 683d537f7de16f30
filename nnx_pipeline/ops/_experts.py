"""A mixture of experts computed densely: every expert on all tokens, group by group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.lab.errors import is_divisor
from nnx_pipeline.lab.mesh import ambient_platform
from nnx_pipeline.ops._mlp import gated
from nnx_pipeline.ops._router import combine_weights
from nnx_pipeline.sharding._cast import cast_at_use, slices_in_stored_order
from nnx_pipeline.sharding.layout import (
    Layout,
    P,
    constrain,
    gather_weight,
    is_explicit,
    out_sharding,
    place,
)

Tokens = Float[Array, "batch seq embed"]
# the weights of the chosen experts of each token, and their numbers
Choice = tuple[Float[Array, "batch seq chosen"], Int[Array, "batch seq chosen"]]


class ExpertKernels(NamedTuple):
    """The kernels of all experts, in the sharding and dtype in which they are stored."""

    gate: Float[Array, "experts embed mlp"]
    up: Float[Array, "experts embed mlp"]
    down: Float[Array, "experts mlp embed"]


class ExpertBiases(NamedTuple):
    """What is added to the three products of each expert, sharded and stored as their kernels."""

    gate: Float[Array, "experts mlp"]
    up: Float[Array, "experts mlp"]
    down: Float[Array, "experts embed"]


class Mixed(NamedTuple):
    """`dropped` is the share of each sequence's choices that no expert took, or None."""

    output: Float[Array, "batch seq embed"]
    dropped: Float[Array, "batch"] | None = None


@runtime_checkable  # the tests check the types of arguments and results
class Mix(Protocol):
    def __call__(
        self, x: Tokens, choice: Choice, kernels: ExpertKernels, *, layout: Layout, remat: Remat
    ) -> Mixed: ...


# Below this many operations a product of one expert is too small to keep a device busy: on a TPU
# v5p it takes less than 20 µs. See `group_size`.
WORTHWHILE = 8e9
# On a CPU, where a device of a mesh is a few threads at most, a step takes 7 to 15 % less time so
# than with all experts at once (benchmarks/step_time.py).
WORTHWHILE_ON_CPU = 8e6


@dataclass(frozen=True)
class DenseExperts:
    """Σ_e (combine_e · silu(x · gate_e) · (x · up_e)) · down_e, with all experts on all tokens.

    combine_e is the router's weight of expert e for each token, 0 where it was not chosen. A scan
    runs over groups of `group` experts of a device, by default `group_size`: the weights of one
    group are gathered at a time, and its hidden units exist at a time. So a small group saves
    memory, and a large one time. The router's weight multiplies the hidden units, so that the
    backward pass does not need the output of the down projection.

    The sum over groups is made in float32, and has two leading axes, over the mesh axes `expert`
    and `tensor` ("o" and "t" in the einsums below). Each device sums its own part there, so that
    one reduction follows the scan instead of one per group.
    """

    group: int | None = None
    activation: str = "silu"
    biases: ExpertBiases | None = None

    def __call__(
        self, x: Tokens, choice: Choice, kernels: ExpertKernels, *, layout: Layout, remat: Remat
    ) -> Mixed:
        """Sends all tokens through all experts; the result is cast to x.dtype.

        `x` and the result are sharded by ("batch", None, None), and `choice` is from `route`.
        `remat` says what to keep of each group; its hidden units have the names `remat.HIDDEN`.
        """
        # Each device along the mesh axis `expert` applies its own experts to all tokens, so here
        # the tokens are not sharded over that axis.
        spec = layout.spec("batch_beside_experts", None, None)
        experts = kernels.gate.shape[0]
        combine = combine_weights(*choice, experts)
        x, combine = place(x, spec), place(combine, spec)
        rows = x.shape[0] * x.shape[1] // layout.size("batch_beside_experts")
        products = ExpertProducts(
            layout, self.group or group_size(rows, kernels.gate.shape, layout), self.activation
        )

        def one_group(operands: tuple[Array, ...]) -> Array:
            gate, up, down, weight, *biases = operands
            opened = weighed(products.open_up(x, gate, up, biases), weight)
            if products.group < experts // layout.size("expert"):
                # The products of a group are large then, and read what they multiply several times.
                # A compiler that fuses the hidden units into the product computes them each time:
                # When this was tried, Mixtral 8x7B on 64 TPU v5p took 2.4 % more compute without
                # the barrier, all experts of `mixtral-small` at once 0.5 %.
                opened = jax.lax.optimization_barrier(opened)
            return products.project(opened, down)

        operands = (*products.split(kernels, x.dtype), products.split_choice(combine))
        if self.biases is not None:
            added = (self.biases.gate, self.biases.up)
            operands = (*operands, *(products.split_bias(bias.astype(x.dtype)) for bias in added))
        mixed = products.sum_over_steps(remat.checkpoint(one_group), operands)
        if self.biases is not None:
            down = self.biases.down.astype(mixed.dtype)
            down = gather_weight(down, layout.spec("expert", "norm"), layout.spec(None, None))
            out = out_sharding(spec)
            mixed += jnp.einsum("bse,ed->bsd", combine.astype(mixed.dtype), down, out_sharding=out)
        return Mixed(place(mixed.astype(x.dtype), layout.spec("batch", None, None)))


def group_size(rows: int, kernel: tuple[int, ...], layout: Layout) -> int:
    """The smallest divisor of a device's experts whose product has `WORTHWHILE` operations."""
    experts, embed, mlp = kernel
    local = experts // layout.size("expert")
    operations = 2 * rows * embed * mlp // layout.size("mlp")
    least = WORTHWHILE_ON_CPU if ambient_platform() == "cpu" else WORTHWHILE
    enough = (size for size in range(1, local) if local % size == 0 and size * operations >= least)
    return next(enough, local)


@dataclass(frozen=True)
class ExpertProducts:
    """The three matrix products of a group of experts, and the sum over groups.

    In the shapes below, `owners` are the devices along the mesh axes of the experts, `parts` those
    along the axes of the hidden units, and `steps` the groups of an owner, over which a scan runs.
    """

    layout: Layout
    group: int
    activation: str = "silu"

    @property
    def partial(self) -> P:
        """Sharding of `[owners, parts, batch, seq, …]`, each device's part of the sum."""
        return self.layout.spec("expert", "mlp", "batch_beside_experts", None, None)

    def split(self, kernels: ExpertKernels, dtype: jax.typing.DTypeLike) -> tuple[Array, ...]:
        """Kernels to `[steps, embed, group, owners, parts, mlp / parts]` for a scan over steps."""
        # Cast here and not for each group, their gradients are stacked in this dtype by the scan,
        # and not in float32. The axis over which kernels are gathered comes first, so that what is
        # sent may lie in one piece: 2 % less compute for `mixtral-small` on 8 TPU v5p without a
        # pipeline.
        local = kernels.gate.shape[0] // self.layout.size("expert")
        rule = f"model.expert_group={self.group} does not divide the {local} experts of a device"
        is_divisor(self.group, local, rule=rule)
        # With 8 layers per stage of `mixtral-small` in a loop, on 8 TPU v5p (libtpu 0.0.42.1), in
        # stored order: heap 404 MB in the place of 481 by 1F1B and 425 of 493 by circular stages,
        # for no more compute. Without a pipeline the heap is 262 MB in the place of 245. Not where
        # a scan slices groups: of Mixtral 8x7B on 64 it takes 28 % off the heap, but its products
        # then read the worse order, for 11 % more compute.
        if self.group == local:
            held = (slices_in_stored_order(kernel, read="each tick") for kernel in kernels)
            kernels = ExpertKernels(*held)
        gate, up, down = (cast_at_use(kernel, dtype) for kernel in kernels)
        return self._split(gate, 1), self._split(up, 1), self._split(down, 2)

    def split_choice(self, weights: Array) -> Array:
        """`[batch, seq, …, experts]` as the scan has it."""
        # The result, `[steps, owners, 1, batch, seq, …, group, 1]`, fits the hidden units.
        *rest, experts = weights.shape
        owners = self.layout.size("expert")
        steps = experts // (owners * self.group)
        split = weights.reshape(*rest, owners, steps, self.group)
        split = jnp.moveaxis(split, (-2, -3), (0, 1))[:, :, None, ..., None]
        unsharded = [None] * (split.ndim - 4)
        return place(
            split, self.layout.spec(None, "expert", None, "batch_beside_experts", *unsharded)
        )

    def split_bias(self, bias: Array) -> Array:
        """`[experts, mlp]` to `[steps, owners, parts, 1, 1, group, mlp / parts]` for the scan."""
        experts, mlp = bias.shape
        owners, parts = self.layout.size("expert"), self.layout.size("mlp")
        shape = (owners, experts // owners // self.group, self.group, parts, mlp // parts)
        spec = self.layout.spec("expert", None, None, "mlp", None)
        split = jax.lax.reshape(bias, shape, out_sharding=out_sharding(spec))
        return jnp.transpose(split, (1, 0, 3, 2, 4))[:, :, :, None, None]

    def open_up(self, x: Array, gate: Array, up: Array, biases: Sequence[Array] = ()) -> Array:
        """The hidden units of a group, `[owners, parts, batch, seq, group, mlp / parts]`.

        - `biases`: of gate and up, `[owners, parts, 1, 1, group, mlp / parts]`; none without.
        """
        both = _open(self, x, gate), _open(self, x, up)
        opened, raised = map(jnp.add, both, biases) if biases else both
        return gated(opened, raised, self.activation)

    def project(self, hidden: Array, down: Array) -> Array:
        """The down projection summed over the group: `[owners, parts, batch, seq, embed]`."""
        return _project(self, hidden, down)

    def kernel_gradient(self, tokens: Array, hidden: Array) -> Array:
        """The gradient of a kernel of one group, sharded as the kernel is stored."""
        # The product is not sharded over embed from the start. Where it is, XLA for TPU (libtpu
        # 0.0.42.1) cuts it into one per device, each of which waits for a neighbour: on 8 devices
        # without a pipeline this takes 0.87 ms, and the whole product 0.35.
        operands = [("bsd" if tokens.ndim == 3 else "otbsd", tokens), ("otbsef", hidden)]
        if ambient_platform() == "cpu":
            # `jnp.einsum` puts the free axes of its second operand first. With those of the hidden
            # units first, XLA for the CPU transposes these, and a step takes 1.5 times as long
            # (benchmarks/step_time.py). XLA for TPU chooses layouts by itself, but with embed first
            # it makes an all-reduce where there are 16 devices to scatter to (Mixtral 8x7B).
            operands.reverse()
        (left, first), (right, second) = operands
        used = out_sharding(self._used)
        gradient = jnp.einsum(f"{left},{right}->deotf", first, second, out_sharding=used)
        if not is_explicit():  # in explicit mode the product has this sharding by its argument
            gradient = place(gradient, self._used)
        return place(gradient, self._stored)

    def sum_over_steps(
        self,
        one_group: Callable[[tuple[Array, ...]], Array],
        operands: tuple[Array, ...],
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> Array:
        """Σ over the groups, owners and parts, `[batch, seq, …]`; operands are `[steps, …]`."""
        steps = operands[0].shape[0]
        first = tuple(operand[0] for operand in operands)
        if steps == 1:  # a scan of one step would keep a copy of what it reads
            total = one_group(first).astype(dtype)
        else:

            def step(total: Array, operands: tuple[Array, ...]) -> tuple[Array, None]:
                return total + one_group(operands).astype(total.dtype), None

            shape = jax.eval_shape(one_group, first).shape
            spec = P(*self.partial, *[None] * (len(shape) - len(self.partial)))
            start = constrain(jnp.zeros(shape, dtype), spec)
            total, _ = jax.lax.scan(step, start, operands)
        return jnp.sum(total, axis=(0, 1))

    def _split(self, kernel: Array, embed_axis: int) -> Array:
        owners, parts = self.layout.size("expert"), self.layout.size("mlp")
        kernel = jnp.moveaxis(kernel, embed_axis, 0)
        embed, experts, mlp = kernel.shape
        shape = (embed, owners, experts // owners // self.group, self.group, parts, mlp // parts)
        spec = self.layout.spec("embed_of_expert", "expert", None, None, "mlp", None)
        kernel = jax.lax.reshape(kernel, shape, out_sharding=out_sharding(spec))
        return jnp.transpose(kernel, (2, 0, 3, 1, 4, 5))

    @property
    def _stored(self) -> P:
        """The stored sharding of a group's kernel `[embed, group, owners, parts, mlp / parts]`."""
        return self.layout.spec("embed_of_expert", None, "expert", "mlp", None)

    @property
    def _used(self) -> P:
        """Its sharding when it is gathered over all axes but owners and parts."""
        return self.layout.spec(None, None, "expert", "mlp", None)


def weighed(hidden: Array, weight: Array) -> Array:
    """Hidden units times weights `[owners, 1, batch, seq, group, 1]` of their expert."""
    return _weighed_on_cpu(hidden, weight) if ambient_platform() == "cpu" else hidden * weight


# What follows is differentiated by hand, the products for `ExpertProducts.kernel_gradient`. The
# rules call functions that JAX can differentiate once more, for second derivatives.


@jax.custom_vjp
def _weighed_on_cpu(hidden: Array, weight: Array) -> Array:
    """As `weighed`; the gradient of the weights is computed as products of matrices."""
    # XLA for the CPU makes one loop of the multiplication and the sum over a token's hidden units
    # that JAX would use, and this loop takes as long as several products of the experts.
    return hidden * weight


def _weigh_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    hidden, weight = residuals
    d_weight = jnp.einsum(
        "otbsef,otbsef->otbse", cotangent, hidden, preferred_element_type=jnp.float32
    )
    d_weight = jnp.sum(d_weight, axis=1, keepdims=True)[..., None]
    return cotangent * weight, d_weight.astype(weight.dtype)


_weighed_on_cpu.defvjp(lambda *args: (args[0] * args[1], args), _weigh_backward)


def _opened(products: ExpertProducts, x: Array, kernel: Array) -> Array:
    whole = gather_weight(kernel, products._stored, products._used)
    spec = out_sharding(P(*products.partial, None))
    # In the other order XLA for TPU copies each gathered kernel into another layout.
    return jnp.einsum("deotf,bsd->otbsef", whole, x, out_sharding=spec)


def _open_backward(
    products: ExpertProducts, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    whole = gather_weight(kernel, products._stored, products._used)
    spec = out_sharding(products.layout.spec("batch_beside_experts", None, None))
    d_x = jnp.einsum("otbsef,deotf->bsd", cotangent, whole, out_sharding=spec)
    return d_x, products.kernel_gradient(x, cotangent)


_open = jax.custom_vjp(_opened, nondiff_argnums=(0,))
_open.defvjp(lambda products, *args: (_opened(products, *args), args), _open_backward)


def _projected(products: ExpertProducts, hidden: Array, down: Array) -> Array:
    whole = gather_weight(down, products._stored, products._used)
    spec = out_sharding(products.partial)
    return jnp.einsum("otbsef,deotf->otbsd", hidden, whole, out_sharding=spec)


def _project_backward(
    products: ExpertProducts, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    hidden, down = residuals
    whole = gather_weight(down, products._stored, products._used)
    spec = out_sharding(P(*products.partial, None))
    d_hidden = jnp.einsum("otbsd,deotf->otbsef", cotangent, whole, out_sharding=spec)
    return d_hidden, products.kernel_gradient(cotangent, hidden)


_project = jax.custom_vjp(_projected, nondiff_argnums=(0,))
_project.defvjp(lambda products, *args: (_projected(products, *args), args), _project_backward)
