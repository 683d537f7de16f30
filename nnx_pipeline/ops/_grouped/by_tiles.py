"""Products of groups of rows as a loop over tiles, in plain JAX: for every platform."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops._grouped.order import How, Some, visits


def product(
    rows: Float[Array, "rows into"],
    kernels: Float[Array, "some _ _"],
    sizes: Int[Array, "groups"],
    first: Int[Array, ""] | int = 0,
    out: Float[Array, "rows out_of"] | None = None,
    *,
    how: How,
) -> Float[Array, "rows out_of"]:
    """Each row of some groups times the kernel of its group; other rows as in `out`, or 0.

    - `kernels`: `[some, into, out_of]`, or `[some, out_of, into]` if `how.transposed`.
    - `sizes`: how many rows each of all groups has, one group behind the other.
    - `first`: the group of the first kernel.

    The products add up in float32, and the result has the dtype of `rows`.
    """
    tile, *_ = how.tile
    tiles = rows.reshape(-1, tile, rows.shape[1])
    of_kernel = 1 if how.transposed else 0  # the axis that is summed over

    def visit(out: Array, group: Array, at: Array, bounds: Array) -> Array:
        mine = _within(at, tile, bounds)
        tile_rows = jax.lax.dynamic_index_in_dim(tiles, at, keepdims=False)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        new = jax.lax.dot_general(
            tile_rows, kernel, (((1,), (of_kernel,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(out.dtype)
        before = jax.lax.dynamic_index_in_dim(out, at, keepdims=False)
        new = jnp.where(mine, new, before)
        out = jax.lax.dynamic_update_index_in_dim(out, new, at, 0)
        return out

    plan = visits(Some(first, len(kernels)), sizes, len(rows), tile)
    if out is None:
        out = jnp.zeros((len(rows), kernels.shape[2 - of_kernel]), rows.dtype)
    return _over_visits(visit, out.reshape(*tiles.shape[:2], -1), plan).reshape(len(rows), -1)


def outer(
    left: Float[Array, "rows into"],
    right: Float[Array, "rows out_of"],
    sizes: Int[Array, "groups"],
    first: Int[Array, ""] | int = 0,
    *,
    count: int,
    how: How,
) -> Float[Array, "count into out_of"]:
    """Σ over the rows of each of `count` groups of leftᵀ · right: the gradient of their kernels.

    Rows of other groups may hold anything. The sum is made in float32, and the result has the dtype
    of `left`.
    """
    tile, *_ = how.tile
    lefts = left.reshape(-1, tile, left.shape[1])
    rights = right.reshape(-1, tile, right.shape[1])

    def visit(total: Array, group: Array, at: Array, bounds: Array) -> Array:
        mine = _within(at, tile, bounds)
        rows, others = (
            jnp.where(mine, jax.lax.dynamic_index_in_dim(each, at, keepdims=False), 0)
            for each in (lefts, rights)
        )
        new = jnp.dot(rows.T, others, preferred_element_type=jnp.float32)
        before = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        total = jax.lax.dynamic_update_index_in_dim(total, before + new, group, 0)
        return total

    start = jnp.zeros((count, left.shape[1], right.shape[1]), jnp.float32)
    plan = visits(Some(first, count), sizes, len(left), tile)
    return _over_visits(visit, start, plan).astype(left.dtype)


def _over_visits(
    visit: Callable[[Array, Array, Array, Array], Array],
    start: Array,
    rows: tuple[Array, Array, Array],
) -> Array:
    """The state after all visits of `visits`; `visit` takes (state, group, tile, bounds)."""

    def step(state: Array, row: tuple[Array, Array, Array]) -> tuple[Array, None]:
        bounds = row[2]
        needed = bounds[1] > bounds[0]
        return jax.lax.cond(needed, visit, lambda state, *_: state, state, *row), None

    return jax.lax.scan(step, start, rows)[0]


def _within(at: Array, tile: int, bounds: Array) -> Array:
    row = at * tile + jnp.arange(tile)
    return ((row >= bounds[0]) & (row < bounds[1]))[:, None]
