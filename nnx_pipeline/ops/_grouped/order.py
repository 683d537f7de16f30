"""Tokens sorted by expert, and back; all arrays here are what one device holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Tile = tuple[int, int, int]  # rows, width before, width after


class How(NamedTuple):
    """How rows are multiplied by the kernels of their groups.

    The first number of `tile` divides the rows of a product; in the gradient of kernels it is how
    many rows a step of the sum takes, and the others are the part of a kernel that is computed. A
    loop in plain JAX reads the first number alone.
    """

    tile: Tile
    transposed: bool = False  # kernels are `[groups, out_of, into]`
    share: int = 1  # 1 / share of all rows are of the call's groups, for what a kernel states
    interpret: bool = False  # for tests where a kernel's platform is not


class Order(NamedTuple):
    """Where each choice of a token lies when all choices are sorted by their expert.

    Choice c belongs to token c // chosen. The rows of an expert are consecutive, and the first
    expert comes first. Rows after the last expert may be anything: choices of experts on other
    devices, and rows that fill up a tile.
    """

    choices: Int[Array, "rows"]  # of each row
    places: Int[Array, "tokens chosen"]  # the row of each choice
    sizes: Int[Array, "experts"]  # the rows of each expert of this device

    @property
    def used(self) -> Int[Array, ""]:
        """The number of rows that experts of this device have."""
        return jnp.sum(self.sizes)

    @property
    def tokens(self) -> Int[Array, "rows"]:
        return self.choices // self.places.shape[1]


def sort_by_expert(
    experts: Int[Array, "tokens chosen"], *, first: Int[Array, ""] | int, count: int, tile: int
) -> Order:
    """Sorts choices by expert and token, for `count` experts from `first` on, in whole tiles."""
    flat = experts.reshape(-1) - first
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)  # other devices' experts come last
    choices = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.argsort(choices).astype(jnp.int32).reshape(experts.shape)
    # Ends of the groups by search: a count by scatter takes a TPU longer.
    ends = jnp.searchsorted(flat[choices], jnp.arange(count), side="right").astype(jnp.int32)
    choices = jnp.pad(choices, (0, -len(choices) % tile))
    return Order(choices, places, jnp.diff(ends, prepend=0))


def to_rows(x: Float[Array, "tokens *rest"], order: Order) -> Float[Array, "rows *rest"]:
    """The token of each row; rows that belong to no expert of this device get any."""
    return x.at[order.tokens].get(mode="promise_in_bounds")


def from_rows(rows: Float[Array, "rows embed"], order: Order) -> Float[Array, "tokens embed"]:
    """The sum of the rows of each token, in float32; the transpose of `to_rows`."""
    # Rows that belong to no expert of this device may hold anything, even NaN.
    total = jnp.zeros((order.places.shape[0], rows.shape[1]), jnp.float32)
    for places in order.places.T:  # few; one array for all choices would be larger than x
        picked = rows.at[places].get(mode="promise_in_bounds").astype(jnp.float32)
        total = total + jnp.where((places < order.used)[:, None], picked, 0)
    return total


def weights_of_choices(values: Float[Array, "rows"], order: Order) -> Float[Array, "tokens chosen"]:
    """The value of each choice's row, 0 where its expert is on another device."""
    picked = values.at[order.places].get(mode="promise_in_bounds")
    return jnp.where(order.places < order.used, picked, 0)


def of_rows(values: Float[Array, "tokens chosen"], order: Order) -> Float[Array, "rows"]:
    """The value of each row's choice."""
    return values.reshape(-1).at[order.choices].get(mode="promise_in_bounds")


class Some(NamedTuple):
    """`number` consecutive groups of rows from number `first` on."""

    first: Int[Array, ""] | int
    number: int

    def bounds(self, sizes: Int[Array, "groups"]) -> tuple[Int[Array, "some"], Int[Array, "some"]]:
        """The first row of each of these groups, and the row after its last."""
        ends = jnp.cumsum(sizes)
        starts, ends = (
            jax.lax.dynamic_slice_in_dim(each, self.first, self.number)
            for each in (ends - sizes, ends)
        )
        return starts, ends


def visits(
    some: Some, sizes: Int[Array, "groups"], rows: int, tile: int
) -> tuple[Int[Array, "visits"], Int[Array, "visits"], Int[Array, "visits 2"]]:
    """Cuts rows into tiles, and says which of some groups computes which tile.

    Returns for each visit its group, counted from the first of these, its tile, and the range of
    the group's rows. There are as many visits as may be needed (rows / tile + groups - 1); a visit
    that is not needed has an empty range.
    """
    groups = some.number
    starts, ends = some.bounds(sizes)
    sizes = ends - starts
    first = starts // tile
    count = jnp.where(sizes > 0, -(-ends // tile) - first, 0)
    stop = jnp.cumsum(count)
    visit = jnp.arange(rows // tile + groups - 1)
    group = jnp.minimum(jnp.searchsorted(stop, visit, side="right"), groups - 1)
    needed = visit < stop[-1]
    at = jnp.where(needed, first[group] + visit - (stop - count)[group], 0)
    bounds = jnp.stack([starts[group], jnp.where(needed, ends[group], starts[group])], axis=1)
    return group.astype(jnp.int32), at.astype(jnp.int32), bounds.astype(jnp.int32)
