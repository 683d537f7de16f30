"""A mixture of experts in which each expert takes a limited number of choices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops import per_device as devices
from nnx_pipeline.ops.capacity.slots import (
    Slots,
    assign_slots,
    capacity_of,
    from_slots,
    of_choices,
    of_slots,
    to_slots,
)
from nnx_pipeline.ops.expert_axes import ExpertAxes
from nnx_pipeline.ops.experts import ExpertKernels, Mixed, as_it_is
from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P

# Its functions are differentiated by hand, once.
per_device = partial(
    devices.per_device,
    refusal="capacity experts have first derivatives in reverse mode only; "
    "set model.experts='dense' for second derivatives and for forward mode",
)


@dataclass(frozen=True)
class CapacityExperts:
    """Σ over the choices that are kept of weight · (silu(x · gate_e) · (x · up_e)) · down_e.

    Of each sequence an expert takes at most `capacity_of` choices, by the order of `assign_slots`.
    A choice after these is dropped: it adds nothing, and the weights of the token's other choices
    stay as they are. The limit is one per sequence, so that the choices that are dropped depend on
    the sequence alone: not on the mesh, the schedule or the number of microbatches.

    All shapes are fixed. A device copies the tokens of its sequences to the slots `[experts,
    sequences, capacity, embed]`, and the products of the experts are one batched product.

    Where experts are sharded over the mesh axis `expert`, each device sends every slot to the
    device that has its expert, and gets the result back: an all-to-all each. Per layer and
    microbatch a device has

        slots = experts · capacity · sequences of a microbatch on the device

    and its all-to-alls give, in bytes of the dtype of the tokens,

        forward:    slots · (2 · embed + 1)    tokens, results; weights
        backward:   slots · (2 · embed + 1)    cotangents of both, and those of the weights
        recomputed: slots · (embed + 1)        tokens and weights, where remat keeps no slots

    Results are never recomputed: the weights multiply the hidden units, so that no gradient needs
    them. Beside the mesh axis `tensor` each device sends the same slots, and partial results.

    - `factor`: what an expert takes over what it gets when all get the same.
    """

    factor: float

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        choice: tuple[Float[Array, "batch seq chosen"], Int[Array, "batch seq chosen"]],
        kernels: ExpertKernels,
        *,
        layout: Layout,
        remat: Remat,
        hidden: Callable[[Array], Array] = as_it_is,
    ) -> Mixed:
        """Sends the choices that are kept through their experts; arguments as of `DenseExperts`.

        Raises InputError for a layout in which devices that share the experts, or the width of a
        kernel, have the same tokens.
        """
        del remat  # what a layer keeps of the hidden units is decided by their names
        weights, experts = choice
        number = kernels.gate.shape[0]
        _, length, chosen = experts.shape
        capacity = capacity_of(length, chosen, number, self.factor)
        on = OnDevice.of("capacity", number, layout, capacity=capacity)
        slots = on.assign(experts)
        # Cast here, kernels have gradients in the dtype of the model, which become those of the
        # parameters where they are added up.
        gate, up, down = (kernel.astype(x.dtype) for kernel in kernels)
        opened, raised = map(named, _open(on, x, slots, gate, up), HIDDEN)
        opened = hidden(jax.nn.silu(opened) * raised)
        return Mixed(_close(on, opened, weights, slots, down), slots.dropped)


@dataclass(frozen=True, kw_only=True)
class OnDevice(ExpertAxes):
    """What a device computes for its own experts, and what it exchanges with others.

    Rows of the experts of a device are `[devices, experts of a device, rows, …]`; the rows are the
    slots of all devices that share the experts.

    - `capacity`: how many choices of a sequence an expert takes.
    """

    capacity: int

    @property
    def rows(self) -> P:
        """The sharding of `[devices, own, rows, embed]`."""
        return P(self.batch or None, None, None, None)

    @property
    def hidden(self) -> P:
        """The sharding of hidden units, `[devices, own, rows, mlp]`."""
        return P(self.batch or None, None, None, self.mlp or None)

    def assign(self, experts: Int[Array, "batch seq chosen"]) -> Slots:
        """The slots of the choices of all sequences."""

        def local(experts: Array) -> tuple[Array, ...]:
            return tuple(assign_slots(experts, self.experts, self.capacity))

        return Slots(*per_device(local, [self.tokens], [self.tokens] * 2)(experts))

    def to_owners(self, rows: Array) -> Array:
        """`[experts, batch, capacity, …]` of own tokens to `[own, rows, …]` of own experts."""
        if self.owners:
            rows = jax.lax.all_to_all(rows, self.owners, split_axis=0, concat_axis=1, tiled=True)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])

    def from_owners(self, rows: Array) -> Array:
        """The inverse of `to_owners`."""
        rows = rows.reshape(rows.shape[0], -1, self.capacity, *rows.shape[2:])
        if self.owners:
            rows = jax.lax.all_to_all(rows, self.owners, split_axis=1, concat_axis=0, tiled=True)
        return rows

    def to_tokens(self, rows: Array, slots: Slots, dtype: jax.typing.DTypeLike) -> Array:
        """The sum of each token's rows, over the parts of the hidden units too.

        - `rows`: `[own, rows, embed]`, this device's part.
        - `dtype`: of the result; it is summed in float32.
        """
        return self.over_parts(from_slots(self.from_owners(rows), slots)).astype(dtype)


def _no_gradients(slots: Slots) -> Any:
    return Slots(*(np.zeros(leaf.shape, jax.dtypes.float0) for leaf in slots))  # type: ignore[arg-type]


def _sent(on: OnDevice, x: Array, slots: Slots) -> Array:
    """The tokens of all slots, where their experts are: `[devices, own, rows, embed]`."""

    def local(x: Array, *slots: Array) -> tuple[Array, ...]:
        return (on.to_owners(to_slots(x, Slots(*slots)))[None],)

    (rows,) = per_device(local, [on.tokens] * 3, [on.rows])(x, *slots)
    return rows


def _multiplied(on: OnDevice, rows: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Each row times gate and up of its expert, `[devices, own, rows, mlp]` each."""

    def local(rows: Array, *kernels: Array) -> tuple[Array, ...]:
        return tuple(_product(rows[0], on.gathered(kernel, 1))[None] for kernel in kernels)

    opened, raised = per_device(local, [on.rows, on.into, on.into], [on.hidden] * 2)(rows, gate, up)
    return opened, raised


def _opened(on: OnDevice, x: Array, slots: Slots, gate: Array, up: Array) -> tuple[Array, Array]:
    """The token of each slot times gate and up of its expert.

    - `x`: `[batch, seq, embed]`; the results are `[devices, own, rows, mlp]`.
    """
    return _multiplied(on, _sent(on, x, slots), gate, up)


def _open_forward(on: OnDevice, x: Array, slots: Slots, gate: Array, up: Array) -> Any:
    rows = _sent(on, x, slots)
    return _multiplied(on, rows, gate, up), (rows, slots, gate, up)


def _open_backward(on: OnDevice, kept: Any, cotangents: tuple[Array, Array]) -> Any:
    rows, slots, gate, up = kept

    def local(*args: Array) -> tuple[Array, ...]:
        slots, rows, *kernels = Slots(*args[:2]), args[2][0], *args[3:5]
        d_kernels, total = [], jnp.zeros((), rows.dtype)
        for kernel, d_row in zip(kernels, args[5:], strict=True):
            total = total + _product(d_row[0], on.gathered(kernel, 1), transposed=True)
            d_kernels.append(on.summed(_outer(rows, d_row[0]), 1))
        return on.to_tokens(total, slots, rows.dtype), *d_kernels

    specs = [on.tokens, on.tokens, on.rows, on.into, on.into, on.hidden, on.hidden]
    outs = [on.tokens, on.into, on.into]
    d_x, d_gate, d_up = per_device(local, specs, outs)(*slots, rows, gate, up, *cotangents)
    return d_x, _no_gradients(slots), d_gate, d_up


_open = jax.custom_vjp(_opened, nondiff_argnums=(0,))
_open.defvjp(_open_forward, _open_backward)


def _shares(on: OnDevice, weights: Array, slots: Slots) -> Array:
    """The weights of the choices of all slots, where their experts are: `[devices, own, rows, 1]`.

    They are 0 in empty slots.
    """

    def local(weights: Array, *slots: Array) -> tuple[Array, ...]:
        return (on.to_owners(of_slots(weights, Slots(*slots)))[None, ..., None],)

    (share,) = per_device(local, [on.tokens] * 3, [on.rows])(weights, *slots)
    return share


def _projected(on: OnDevice, hidden: Array, share: Array, slots: Slots, down: Array) -> Array:
    """As `_closed`, of shares in the place of weights."""

    def local(hidden: Array, share: Array, down: Array, *slots: Array) -> tuple[Array, ...]:
        rows = _product(hidden[0] * share[0], on.gathered(down, 2))
        return (on.to_tokens(rows, Slots(*slots), hidden.dtype),)

    specs = [on.hidden, on.rows, on.down, on.tokens, on.tokens]
    (mixed,) = per_device(local, specs, [on.tokens])(hidden, share, down, *slots)
    return mixed


def _closed(on: OnDevice, hidden: Array, weights: Array, slots: Slots, down: Array) -> Array:
    """Σ over the choices of a token that are kept of weight · hidden · down.

    - `hidden`: `[devices, own, rows, mlp]`; the result is `[batch, seq, embed]`.
    - `weights`: of the choices, `[batch, seq, chosen]`.
    """
    return _projected(on, hidden, _shares(on, weights, slots), slots, down)


def _close_forward(on: OnDevice, hidden: Array, weights: Array, slots: Slots, down: Array) -> Any:
    share = _shares(on, weights, slots)
    return _projected(on, hidden, share, slots, down), (hidden, share, slots, down)


def _close_backward(on: OnDevice, kept: Any, cotangent: Array) -> Any:
    hidden, share, slots, down = kept

    def local(cotangent: Array, *args: Array) -> tuple[Array, ...]:
        slots, hidden, share, down = Slots(*args[:2]), args[2][0], args[3][0], args[4]
        d_rows = on.to_owners(to_slots(cotangent, slots))
        d_weighed = _product(d_rows, on.gathered(down, 2), transposed=True)
        d_down = on.summed(_outer(hidden * share, d_rows), 2)
        d_share = on.over_parts(jnp.sum((d_weighed * hidden).astype(jnp.float32), axis=-1))
        d_weights = of_choices(on.from_owners(d_share.astype(cotangent.dtype)), slots)
        return (d_weighed * share)[None], d_weights, d_down

    specs = [*[on.tokens] * 3, on.hidden, on.rows, on.down]
    outs = [on.hidden, on.tokens, on.down]
    args = (cotangent, *slots, hidden, share, down)
    d_hidden, d_weights, d_down = per_device(local, specs, outs)(*args)
    return d_hidden, d_weights, _no_gradients(slots), d_down


_close = jax.custom_vjp(_closed, nondiff_argnums=(0,))
_close.defvjp(_close_forward, _close_backward)


def _product(rows: Array, kernels: Array, *, transposed: bool = False) -> Array:
    """Rows `[own, rows, into]` times the kernels `[own, into, out of]`, or their transposes."""
    return jnp.einsum("erd,efd->erf" if transposed else "erd,edf->erf", rows, kernels)


def _outer(left: Array, right: Array) -> Array:
    """Σ over the rows of each expert of leftᵀ · right: the gradient of its kernel."""
    return jnp.einsum("erd,erf->edf", left, right)
