"""The slots of experts with limited capacity; all arrays here are what one device holds."""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops._grouped.order import sort_by_expert


class Slots(NamedTuple):
    """Which choice each slot of an expert holds, and in which slot each choice lies.

    A choice is a token and one of the experts that the router has chosen for it. Choice c of a
    sequence belongs to token c % seq and is the token's expert number c // seq, the best one being
    number 0. A device has the slots `[experts, batch, capacity]`.

    - `choices`: the choice of each slot; seq · chosen in an empty one.
    - `places`: expert · capacity + slot of each choice; experts · capacity if it is dropped, and
      one more if it is padding, for which no expert was chosen.
    """

    choices: Int[Array, "batch experts capacity"]
    places: Int[Array, "batch seq chosen"]

    @property
    def dropped(self) -> Float[Array, "batch"]:
        """The share of the choices of each sequence that found no slot."""
        none = math.prod(self.choices.shape[1:])
        return jnp.mean((self.places == none).astype(jnp.float32), axis=(1, 2))


def capacity_of(length: int, chosen: int, experts: int, factor: float) -> int:
    """How many choices of one sequence an expert takes: ⌈seq · chosen · factor / experts⌉.

    No expert is chosen more than once for a token, so the result is `length` at most. The factor
    counts as the decimal number that is written: 1.1 times 10 choices are 11, and not 12.
    """
    return min(length, math.ceil(length * chosen * Fraction(str(factor)) / experts))


def assign_slots(experts: Int[Array, "batch seq chosen"], num_experts: int, capacity: int) -> Slots:
    """Gives the choices of each sequence to the slots of their experts, until these are full.

    As in GShard (Lepikhin et al., 2020, algorithm 1), the first choices of all tokens come before
    all second ones, and so on, and equal ones in the order of the tokens. With one choice per token
    this is the rule of Switch Transformer (Fedus et al., 2021). Padding has the expert
    `num_experts`, and takes no slot.
    """

    def one(experts: Array) -> tuple[Array, Array]:
        order = sort_by_expert(experts.T, first=0, own=num_experts, tile=1)
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

    return Slots(*jax.vmap(one)(experts))


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
    """Positions in an array of all sequences, `[experts, batch, capacity]`, from those in one.

    An empty slot gets a position after the end; a sequence has `each` positions.
    """
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
