"""A mixture of experts in which each expert takes a limited number of choices, its slots."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.ops._by_choice import CloseResiduals, OnDevices, OpenResiduals
from nnx_pipeline.ops._experts import Choice, ExpertKernels, Mixed, Tokens
from nnx_pipeline.ops._grouped.order import sort_by_expert
from nnx_pipeline.sharding._cast import cast_at_use
from nnx_pipeline.sharding.layout import Layout, P


class Slots(NamedTuple):
    """Which choice each slot of an expert holds, and in which slot each choice lies.

    Choice c of a sequence belongs to token c % seq and is the token's expert number c // seq, the
    best one being number 0. An empty slot has the choice seq · chosen. A choice has the place
    expert · capacity + slot, or experts · capacity if it is dropped, and one more if it is padding.
    """

    choices: Int[Array, "batch experts capacity"]
    places: Int[Array, "batch seq chosen"]

    @property
    def dropped(self) -> Float[Array, "batch"]:
        """The share of the choices of each sequence that found no slot."""
        none = math.prod(self.choices.shape[1:])
        return jnp.mean((self.places == none).astype(jnp.float32), axis=(1, 2))


def capacity_of(length: int, chosen: int, experts: int, factor: float) -> int:
    """How many choices of one sequence an expert takes: ⌈seq · chosen · factor / experts⌉."""
    # No expert is chosen more than once for a token, so the result is `length` at most. The factor
    # counts as the decimal number that is written: 1.1 times 10 choices are 11, and not 12.
    return min(length, math.ceil(length * chosen * Fraction(str(factor)) / experts))


def assign_slots(experts: Int[Array, "batch seq chosen"], num_experts: int, capacity: int) -> Slots:
    """Gives the choices of each sequence to the slots of their experts, until these are full.

    As in GShard (Lepikhin et al., 2020, algorithm 1), the first choices of all tokens come before
    all second ones, and so on, and equal ones in the order of the tokens. With one choice per token
    this is the rule of Switch Transformer (Fedus et al., 2021). Padding has the expert
    `num_experts`, and takes no slot.
    """

    def by_sequence(experts: Array) -> tuple[Array, Array]:
        order = sort_by_expert(experts.T, first=0, count=num_experts, tile=1)
        starts = jnp.cumsum(order.sizes) - order.sizes
        slot = jnp.arange(capacity)
        rows = jnp.minimum(starts[:, None] + slot, len(order.choices) - 1)
        taken = slot < order.sizes[:, None]
        choices = jnp.where(taken, order.choices[rows], len(order.choices))
        rank = order.places.T - starts.at[experts].get(mode="clip")
        none = num_experts * capacity
        places = jnp.where(rank < capacity, experts * capacity + rank, none)
        places = jnp.where(experts < num_experts, places, none + 1)
        return choices.astype(jnp.int32), places.astype(jnp.int32)

    return Slots(*jax.vmap(by_sequence)(experts))


def to_slots(
    x: Float[Array, "batch seq *rest"], slots: Slots
) -> Float[Array, "experts batch capacity *rest"]:
    """The token of each slot, or 0 in an empty one."""
    batch, length = x.shape[:2]
    chosen = slots.places.shape[2]
    tokens = _by_expert(slots.choices % length, slots.choices < length * chosen, length)
    return _filled(x.reshape(batch * length, *x.shape[2:]), tokens)


def of_slots(
    values: Float[Array, "batch seq chosen"], slots: Slots
) -> Float[Array, "experts batch capacity"]:
    """The value of each slot's choice, or 0 in an empty one."""
    _, length, chosen = values.shape
    numbers = slots.choices % length * chosen + slots.choices // length
    filled = slots.choices < length * chosen
    return _filled(values.reshape(-1), _by_expert(numbers, filled, length * chosen))


def of_choices(
    values: Float[Array, "experts batch capacity"], slots: Slots
) -> Float[Array, "batch seq chosen"]:
    """The value of each choice's slot, or 0 for a dropped one; the transpose of `of_slots`."""
    return _filled(values.reshape(-1), _slots_by_choice(slots))


def from_slots(
    rows: Float[Array, "experts batch capacity embed"], slots: Slots
) -> Float[Array, "batch seq embed"]:
    """The sum of the slots of each token, in float32; the transpose of `to_slots`."""
    flat, places = rows.reshape(-1, rows.shape[-1]), _slots_by_choice(slots)
    total = jnp.zeros((*places.shape[:2], flat.shape[-1]), jnp.float32)
    for number in range(places.shape[2]):  # an array of all of them would be larger than x
        total = total + _filled(flat, places[..., number]).astype(jnp.float32)
    return total


def _by_expert(numbers: Array, filled: Array, each: int) -> Array:
    """Positions `[experts, batch, capacity]` of `each` per sequence; after the end where empty."""
    batch = len(numbers)
    first = jnp.arange(batch)[:, None, None] * each
    return jnp.where(filled, first + numbers, batch * each).transpose(1, 0, 2)


def _slots_by_choice(slots: Slots) -> Array:
    """The position of each choice in `[experts · batch · capacity]`, after the end if dropped."""
    batch, _, capacity = slots.choices.shape
    expert, slot = slots.places // capacity, slots.places % capacity
    row = jnp.arange(batch)[:, None, None]
    # A dropped choice has the number of an expert that does not exist, after all slots.
    return (expert * batch + row) * capacity + slot


def _filled(values: Array, positions: Array) -> Array:
    """The values at these positions of the first axis, 0 after the end."""
    return values.at[positions].get(mode="fill", fill_value=0)


@dataclass(frozen=True)
class CapacityExperts:
    """Σ over the choices that are kept of weight · (silu(x · gate_e) · (x · up_e)) · down_e.

    Of each sequence an expert takes at most `capacity_of` choices, by the order of `assign_slots`.
    A choice after these is dropped: it adds nothing, and the weights of the token's other choices
    stay as they are. So the choices that are dropped depend on the sequence alone: not on the mesh,
    the schedule or the number of microbatches.

    All shapes are fixed: the products of the experts are one batched product of the slots
    `[experts, sequences, capacity, embed]`. Where experts are sharded over the mesh axis `expert`,
    each device sends every slot to the device that has its expert, and gets the result back. With
    slots = experts · capacity · sequences of a microbatch on the device, its all-to-alls give, per
    layer and microbatch, in bytes of the dtype of the tokens,

        forward:    slots · (2 · embed + 1)    tokens, results; weights
        backward:   slots · (2 · embed + 1)    cotangents of tokens, of results, of weights
        recomputed: slots · (embed + 1)        tokens and weights, where remat keeps no slots

    Results are never recomputed: the weights multiply the hidden units, so that no gradient needs
    them. Beside the mesh axis `tensor` each device sends the same slots, and partial results.
    """

    factor: float
    activation: str = "silu"

    def __call__(
        self, x: Tokens, choice: Choice, kernels: ExpertKernels, *, layout: Layout, remat: Remat
    ) -> Mixed:
        """As `DenseExperts`; raises InputError where devices of an expert share tokens."""
        del remat  # what a layer keeps of the hidden units is decided by their names
        weights, experts = choice
        number = kernels.gate.shape[0]
        _, length, chosen = experts.shape
        capacity = capacity_of(length, chosen, number, self.factor)
        more = {"capacity": capacity, "activation": self.activation}
        on = _OnDevice.of("capacity", number, layout, **more)
        slots = on.assign(experts)
        # Cast here, kernels have gradients in the dtype of the model; adding them up casts to the
        # dtype of the parameters.
        kernels = ExpertKernels(*(cast_at_use(kernel, x.dtype) for kernel in kernels))
        return Mixed(on.mix(x, slots, weights, kernels), slots.dropped)


@dataclass(frozen=True, kw_only=True)
class _OnDevice(OnDevices):
    """What a device computes for its experts; rows are `[devices, own experts, slots, …]`."""

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
        def local(experts: Array) -> tuple[Array, ...]:
            return tuple(assign_slots(experts, self.experts, self.capacity))

        return Slots(*self.per_device(local, [self.tokens], [self.tokens] * 2)(experts))

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
        """The sum of each token's rows, over the parts of the hidden units too, in float32."""
        return self.over_parts(from_slots(self.from_owners(rows), slots)).astype(dtype)

    def open(
        self, x: Array, places: Slots, gate: Array, up: Array
    ) -> tuple[tuple[Array, Array], OpenResiduals]:
        rows = self._sent(x, places)

        def local(rows: Array, *kernels: Array) -> tuple[Array, ...]:
            return tuple(_product(rows[0], self.gathered(kernel, 1))[None] for kernel in kernels)

        specs = [self.rows, self.into, self.into]
        opened, raised = self.per_device(local, specs, [self.hidden] * 2)(rows, gate, up)
        return (opened, raised), (rows, places, gate, up)

    def open_back(
        self, residuals: OpenResiduals, cotangents: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        rows, slots, gate, up = residuals

        def local(*args: Array) -> tuple[Array, ...]:
            slots, rows, *kernels = Slots(*args[:2]), args[2][0], *args[3:5]
            d_kernels, total = [], jnp.zeros((), rows.dtype)
            for kernel, d_row in zip(kernels, args[5:], strict=True):
                total = total + _product(d_row[0], self.gathered(kernel, 1), transposed=True)
                d_kernels.append(self.summed(_outer(rows, d_row[0]), 1))
            return self.to_tokens(total, slots, rows.dtype), *d_kernels

        tokens, into = self.tokens, self.into
        specs = [tokens, tokens, self.rows, into, into, self.hidden, self.hidden]
        d_x, d_gate, d_up = self.per_device(local, specs, [tokens, into, into])(
            *slots, rows, gate, up, *cotangents
        )
        return d_x, d_gate, d_up

    def close(
        self, hidden: Array, weights: Array, places: Slots, down: Array
    ) -> tuple[Array, CloseResiduals]:
        share = self._shares(weights, places)

        def local(hidden: Array, share: Array, down: Array, *slots: Array) -> tuple[Array, ...]:
            rows = _product(hidden[0] * share[0], self.gathered(down, 2))
            return (self.to_tokens(rows, Slots(*slots), hidden.dtype),)

        specs = [self.hidden, self.rows, self.down, self.tokens, self.tokens]
        (mixed,) = self.per_device(local, specs, [self.tokens])(hidden, share, down, *places)
        return mixed, (hidden, share, places, down)

    def close_back(self, residuals: CloseResiduals, cotangent: Array) -> tuple[Array, Array, Array]:
        hidden, share, slots, down = residuals

        def local(cotangent: Array, *args: Array) -> tuple[Array, ...]:
            slots, hidden, share, down = Slots(*args[:2]), args[2][0], args[3][0], args[4]
            d_rows = self.to_owners(to_slots(cotangent, slots))
            d_weighed = _product(d_rows, self.gathered(down, 2), transposed=True)
            d_down = self.summed(_outer(hidden * share, d_rows), 2)
            d_share = self.over_parts(jnp.sum((d_weighed * hidden).astype(jnp.float32), axis=-1))
            d_weights = of_choices(self.from_owners(d_share.astype(cotangent.dtype)), slots)
            return (d_weighed * share)[None], d_weights, d_down

        specs = [*[self.tokens] * 3, self.hidden, self.rows, self.down]
        outs = [self.hidden, self.tokens, self.down]
        d_hidden, d_weights, d_down = self.per_device(local, specs, outs)(
            cotangent, *slots, hidden, share, down
        )
        return d_hidden, d_weights, d_down

    def _sent(self, x: Array, slots: Slots) -> Array:
        """The tokens of all slots, where their experts are: `[devices, own, rows, embed]`."""

        def local(x: Array, *slots: Array) -> tuple[Array, ...]:
            return (self.to_owners(to_slots(x, Slots(*slots)))[None],)

        (rows,) = self.per_device(local, [self.tokens] * 3, [self.rows])(x, *slots)
        return rows

    def _shares(self, weights: Array, slots: Slots) -> Array:
        """The weights of all slots, where their experts are: `[devices, own, rows, 1]`."""

        def local(weights: Array, *slots: Array) -> tuple[Array, ...]:
            return (self.to_owners(of_slots(weights, Slots(*slots)))[None, ..., None],)

        (share,) = self.per_device(local, [self.tokens] * 3, [self.rows])(weights, *slots)
        return share


def _product(rows: Array, kernels: Array, *, transposed: bool = False) -> Array:
    return jnp.einsum("erd,efd->erf" if transposed else "erd,edf->erf", rows, kernels)


def _outer(left: Array, right: Array) -> Array:
    return jnp.einsum("erd,erf->edf", left, right)
