"""Products of groups of rows as kernels for GPUs, in Pallas through Triton.

XLA for GPUs expands `jax.lax.ragged_dot` to a product of all rows with all kernels (JAX 0.10 and
0.12), which is the work of dense experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from nnx_pipeline.lab.mesh import ambient_device_kind
from nnx_pipeline.ops._grouped.order import How, Some, visits

Ref = Any  # a reference of Pallas to an array, for which JAX has no public type
# KiB for what is loaded ahead, by a word of the device's kind. A multiprocessor of an H100 has 227.
# An MI300X has 64, the least of all devices that the lab knows, and the rest gets as much.
SHARED_MEMORY = {
    **dict.fromkeys(("H100", "H200", "B200", "B300"), 200),
    **dict.fromkeys(("A100", "MI350", "MI355"), 160),
}
LEAST_SHARED_MEMORY = 64


def product(
    rows: Float[Array, "rows into"],
    kernels: Float[Array, "some _ _"],
    sizes: Int[Array, "groups"],
    first: Int[Array, ""] | int = 0,
    out: Float[Array, "rows out_of"] | None = None,
    *,
    how: How,
) -> Float[Array, "rows out_of"]:
    """As `by_tiles.product`; other rows are as in `out`, without which they may be anything."""
    many, into = rows.shape
    out_of = kernels.shape[1 if how.transposed else 2]
    high, deep, wide = how.tile
    group, at, bounds = visits(Some(first, len(kernels)), sizes, many, high)

    def kernel(group: Ref, at: Ref, bounds: Ref, rows: Ref, kernels: Ref, *out: Ref) -> None:
        *_, written = out  # where nothing is written it holds what it held before
        visit, column = pl.program_id(0), pl.program_id(1) * wide
        mine, top = group[visit], at[visit] * high
        columns = column + jnp.arange(wide)

        def step(k: Array, total: Array) -> Array:
            depth = k * deep + jnp.arange(deep)
            left = triton.load(
                rows.at[pl.ds(top, high), pl.ds(k * deep, deep)],
                mask=(depth < into)[None],
                other=0.0,
            )
            inside = (depth < into)[:, None] & (columns < out_of)[None]
            if how.transposed:
                block = kernels.at[mine, pl.ds(column, wide), pl.ds(k * deep, deep)]
                right = triton.load(block, mask=inside.T, other=0.0).T
            else:
                block = kernels.at[mine, pl.ds(k * deep, deep), pl.ds(column, wide)]
                right = triton.load(block, mask=inside, other=0.0)
            total += triton.dot(left, right)
            return total

        start = jnp.zeros((high, wide), jnp.float32)
        # A visit that is not needed has no rows, and multiplies nothing.
        # Both numbers have a dtype: of a choice between Python numbers Triton's lowering makes a
        # bool (JAX 0.10.2), which it then refuses as the bound of a loop.
        needed = bounds[visit, 1] > bounds[visit, 0]
        steps = jnp.where(needed, jnp.int32(pl.cdiv(into, deep)), jnp.int32(0))
        total = jax.lax.fori_loop(0, steps, step, start)
        row = top + jnp.arange(high)
        inside = (row >= bounds[visit, 0]) & (row < bounds[visit, 1])
        triton.store(
            written.at[pl.ds(top, high), pl.ds(column, wide)],
            total.astype(written.dtype),
            mask=inside[:, None] & (columns < out_of)[None],
        )

    result: Array = pl.pallas_call(
        kernel,
        grid=(len(group), pl.cdiv(out_of, wide)),
        out_shape=jax.ShapeDtypeStruct((many, out_of), rows.dtype),
        compiler_params=_parameters(high * deep + deep * wide, rows.dtype),
        metadata=_cost(many // how.share, into, out_of, len(kernels), rows.dtype),
        input_output_aliases={} if out is None else {5: 0},
        interpret=how.interpret,
        name="grouped_product",
    )(group, at, bounds, rows, kernels, *([] if out is None else [out]))
    return result


def outer(
    left: Float[Array, "rows into"],
    right: Float[Array, "rows out_of"],
    sizes: Int[Array, "groups"],
    first: Int[Array, ""] | int = 0,
    *,
    count: int,
    how: How,
) -> Float[Array, "count into out_of"]:
    """As `by_tiles.outer`."""
    (many, into), out_of = left.shape, right.shape[1]
    high, deep, wide = how.tile
    starts, ends = Some(first, count).bounds(sizes)

    def kernel(starts: Ref, ends: Ref, left: Ref, right: Ref, out: Ref) -> None:
        group = pl.program_id(0)
        line, column = pl.program_id(1) * deep, pl.program_id(2) * wide
        start, end = starts[group], ends[group]
        lines = (line + jnp.arange(deep) < into)[None]
        columns = (column + jnp.arange(wide) < out_of)[None]

        def step(at: Array, total: Array) -> Array:
            top = at * high
            row = top + jnp.arange(high)
            mine = ((row >= start) & (row < end))[:, None]
            before = triton.load(
                left.at[pl.ds(top, high), pl.ds(line, deep)], mask=mine & lines, other=0.0
            )
            after = triton.load(
                right.at[pl.ds(top, high), pl.ds(column, wide)], mask=mine & columns, other=0.0
            )
            total += triton.dot(before.T, after)
            return total

        zeros = jnp.zeros((deep, wide), jnp.float32)
        total = jax.lax.fori_loop(start // high, pl.cdiv(end, high), step, zeros)
        triton.store(
            out.at[group, pl.ds(line, deep), pl.ds(column, wide)],
            total.astype(out.dtype),
            mask=lines.T & columns,
        )

    result: Array = pl.pallas_call(
        kernel,
        grid=(count, pl.cdiv(into, deep), pl.cdiv(out_of, wide)),
        out_shape=jax.ShapeDtypeStruct((count, into, out_of), left.dtype),
        compiler_params=_parameters(high * deep + high * wide, left.dtype),
        metadata=_cost(many // how.share, into, out_of, count, left.dtype),
        interpret=how.interpret,
        name="grouped_outer",
    )(starts, ends, left, right)
    return result


def _parameters(elements: int, dtype: jax.typing.DTypeLike) -> triton.CompilerParams:
    """How many steps, each of so many elements, are loaded ahead, as far as shared memory goes."""
    kind = ambient_device_kind()
    sizes = (size for name, size in SHARED_MEMORY.items() if name in kind)
    size = next(sizes, LEAST_SHARED_MEMORY) * 2**10
    fitting = size // (elements * jnp.dtype(dtype).itemsize)
    return triton.CompilerParams(num_warps=8, num_stages=max(1, min(3, fitting)))


def _cost(
    many: int, into: int, out_of: int, groups: int, dtype: jax.typing.DTypeLike
) -> dict[str, str]:
    """What a product costs if so many rows belong to its groups, for readers of programs."""
    # The lowering through Triton drops a `cost_estimate`, and keeps metadata.
    elements = many * (into + out_of) + groups * into * out_of
    size = elements * jnp.dtype(dtype).itemsize
    return {"flops": str(2 * many * into * out_of), "bytes_accessed": str(size)}
