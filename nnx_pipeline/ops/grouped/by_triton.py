"""Products of groups of rows as kernels for NVIDIA GPUs, in Pallas through Triton.

XLA for NVIDIA expands `jax.lax.ragged_dot` to a product of all rows with all kernels (JAX 0.10 and
0.12), which is the work of dense experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from nnx_pipeline.ops.grouped.order import visits

Tile = tuple[int, int, int]  # rows, width before, width after
SHARED_MEMORY = 200 * 2**10  # bytes for what is loaded ahead; a multiprocessor of an H100 has 227


def product(
    rows: Float[Array, "rows into"],
    kernels: Float[Array, "groups _ _"],
    sizes: Int[Array, "groups"],
    *,
    transposed: bool,
    tile: Tile,
    interpret: bool,
) -> Float[Array, "rows out_of"]:
    """Each row times the kernel of its group; rows after the last group may be anything.

    - `kernels`, `sizes`, `transposed`: as for `by_tiles.product`.
    - `tile`: what one program multiplies; the first number divides the rows.
    - `interpret`: whether to run without a GPU, for tests.

    The products add up in float32, and the result has the dtype of `rows`.
    """
    many, into = rows.shape
    out_of = kernels.shape[1 if transposed else 2]
    high, deep, wide = tile
    group, at, bounds = visits(sizes, many, high)

    def kernel(group: Any, at: Any, bounds: Any, rows: Any, kernels: Any, out: Any) -> None:
        visit, column = pl.program_id(0), pl.program_id(1) * wide
        mine, first = group[visit], at[visit] * high
        columns = column + jnp.arange(wide)

        def step(k: Any, total: Array) -> Array:
            depth = k * deep + jnp.arange(deep)
            left = triton.load(
                rows.at[pl.ds(first, high), pl.ds(k * deep, deep)],
                mask=(depth < into)[None],
                other=0.0,
            )
            inside = (depth < into)[:, None] & (columns < out_of)[None]
            if transposed:
                block = kernels.at[mine, pl.ds(column, wide), pl.ds(k * deep, deep)]
                right = triton.load(block, mask=inside.T, other=0.0).T
            else:
                block = kernels.at[mine, pl.ds(k * deep, deep), pl.ds(column, wide)]
                right = triton.load(block, mask=inside, other=0.0)
            return total + triton.dot(left, right)

        start = jnp.zeros((high, wide), jnp.float32)
        # A visit that is not needed has no rows, and multiplies nothing.
        # Both numbers have a dtype: of a choice between Python numbers Triton's lowering makes a
        # bool (JAX 0.10.2), which it then refuses as the bound of a loop.
        needed = bounds[visit, 1] > bounds[visit, 0]
        steps = jnp.where(needed, jnp.int32(pl.cdiv(into, deep)), jnp.int32(0))
        total = jax.lax.fori_loop(0, steps, step, start)
        row = first + jnp.arange(high)
        inside = (row >= bounds[visit, 0]) & (row < bounds[visit, 1])
        triton.store(
            out.at[pl.ds(first, high), pl.ds(column, wide)],
            total.astype(out.dtype),
            mask=inside[:, None] & (columns < out_of)[None],
        )

    return pl.pallas_call(
        kernel,
        grid=(len(group), pl.cdiv(out_of, wide)),
        out_shape=jax.ShapeDtypeStruct((many, out_of), rows.dtype),
        compiler_params=_parameters(high * deep + deep * wide, rows.dtype),
        metadata=_cost(many, into, out_of, len(sizes), rows.dtype),
        interpret=interpret,
        name="grouped_product",
    )(group, at, bounds, rows, kernels)


def outer(
    left: Float[Array, "rows into"],
    right: Float[Array, "rows out_of"],
    sizes: Int[Array, "groups"],
    *,
    tile: Tile,
    interpret: bool,
) -> Float[Array, "groups into out_of"]:
    """Σ over the rows of each group of leftᵀ · right, see `by_tiles.outer`.

    - `tile`: the first number is how many rows a step of the sum takes, the others are the part of
      a kernel that one program computes.
    - `interpret`: as for `product`.
    """
    (many, into), out_of, groups = left.shape, right.shape[1], len(sizes)
    high, deep, wide = tile
    ends = jnp.cumsum(sizes)
    starts = ends - sizes

    def kernel(starts: Any, ends: Any, left: Any, right: Any, out: Any) -> None:
        group = pl.program_id(0)
        line, column = pl.program_id(1) * deep, pl.program_id(2) * wide
        start, end = starts[group], ends[group]
        lines = (line + jnp.arange(deep) < into)[None]
        columns = (column + jnp.arange(wide) < out_of)[None]

        def step(at: Any, total: Array) -> Array:
            first = at * high
            row = first + jnp.arange(high)
            mine = ((row >= start) & (row < end))[:, None]
            before = triton.load(
                left.at[pl.ds(first, high), pl.ds(line, deep)], mask=mine & lines, other=0.0
            )
            after = triton.load(
                right.at[pl.ds(first, high), pl.ds(column, wide)], mask=mine & columns, other=0.0
            )
            return total + triton.dot(before.T, after)

        zeros = jnp.zeros((deep, wide), jnp.float32)
        total = jax.lax.fori_loop(start // high, pl.cdiv(end, high), step, zeros)
        triton.store(
            out.at[group, pl.ds(line, deep), pl.ds(column, wide)],
            total.astype(out.dtype),
            mask=lines.T & columns,
        )

    return pl.pallas_call(
        kernel,
        grid=(groups, pl.cdiv(into, deep), pl.cdiv(out_of, wide)),
        out_shape=jax.ShapeDtypeStruct((groups, into, out_of), left.dtype),
        compiler_params=_parameters(high * deep + high * wide, left.dtype),
        metadata=_cost(many, into, out_of, groups, left.dtype),
        interpret=interpret,
        name="grouped_outer",
    )(starts, ends, left, right)


def _parameters(elements: int, dtype: Any) -> triton.CompilerParams:
    """How a program runs: how many steps are loaded ahead, as far as shared memory goes.

    - `elements`: what one step loads, in `dtype`.
    """
    fitting = SHARED_MEMORY // (elements * jnp.dtype(dtype).itemsize)
    return triton.CompilerParams(num_warps=8, num_stages=max(1, min(3, fitting)))


def _cost(many: int, into: int, out_of: int, groups: int, dtype: Any) -> dict[str, str]:
    """What a product costs if every row belongs to a group, for readers of compiled programs.

    The lowering through Triton drops a `cost_estimate`, and keeps metadata.
    """
    elements = many * (into + out_of) + groups * into * out_of
    size = elements * jnp.dtype(dtype).itemsize
    return {"flops": str(2 * many * into * out_of), "bytes_accessed": str(size)}
