"""Products of groups of rows with a kernel each: which implementation computes them where."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import ambient_platform
from nnx_pipeline.ops._grouped import by_tiles
from nnx_pipeline.ops._grouped.order import How, Some, Tile
from nnx_pipeline.ops._per_device import one_by_one

Backend = Literal["megablox", "triton", "tiles"]


class Tiles(NamedTuple):
    """Rows, width before and width after of what a kernel computes at a time, by product."""

    forward: Tile
    to_rows: Tile
    to_kernels: Tile

    @classmethod
    def of(cls, numbers: tuple[int, ...]) -> "Tiles":
        """The tiles of three numbers, which hold for all products, or of nine."""
        numbers = numbers * 3 if len(numbers) == 3 else numbers
        if len(numbers) != 9 or any(max(numbers[::3]) % rows for rows in numbers[::3]):
            raise InputError(
                f"the tiles {numbers} of grouped experts are not (rows, width before, width after) "
                "once or for each of three products, with rows of which one divides the other; "
                "give powers of two"
            )
        forward, to_rows, to_kernels = zip(*[iter(numbers)] * 3, strict=True)
        return cls(forward, to_rows, to_kernels)


@dataclass(frozen=True)
class GroupedProducts:
    """The products of experts with the rows that were sent to them.

    `megablox` is JAX's kernel for TPUs, `triton` that of this package for GPUs, and `tiles`
    a loop in plain JAX, which reads the numbers of rows of its tiles alone.
    """

    backend: Backend
    tiles: Tiles
    share: int = 1
    interpret: bool = False

    def product(
        self,
        rows: Float[Array, "rows into"],
        kernels: Float[Array, "some _ _"],
        sizes: Int[Array, "groups"],
        into: tuple[Array, Array] | None = None,
        *,
        transposed: bool = False,
    ) -> Float[Array, "rows out_of"]:
        """Each row times the kernel of its group; rows of no group may be anything.

        - `kernels`: `[some, into, out_of]`, or `[some, out_of, into]` if they are `transposed`.
        - `sizes`: how many rows each group has, one group behind the other.
        - `into`: where the kernels are those of some groups only, the first of these groups and an
          array of results, which keeps the rows of the other groups.
        """
        tile = self.tiles.to_rows if transposed else self.tiles.forward
        how = How(tile, transposed, self.share, self.interpret)
        function: Callable[..., Array] = _product_of_megablox
        if self.backend == "tiles":
            function = by_tiles.product
        elif self.backend == "triton":
            from nnx_pipeline.ops._grouped import by_triton

            function = by_triton.product
        call = functools.partial(function, how=how)
        return one_by_one(call)(rows, kernels, sizes, *(into or ()))

    def outer(
        self,
        left: Float[Array, "rows into"],
        right: Float[Array, "rows out_of"],
        sizes: Int[Array, "groups"],
        some: Some | None = None,
    ) -> Float[Array, "some into out_of"]:
        """Σ over each group's rows of leftᵀ · right; rows of no group may be anything."""
        first, count = some or Some(jnp.int32(0), len(sizes))
        how = How(self.tiles.to_kernels, share=self.share, interpret=self.interpret)
        function: Callable[..., Array] = _outer_of_megablox
        if self.backend == "tiles":
            function = by_tiles.outer
        elif self.backend == "triton":
            from nnx_pipeline.ops._grouped import by_triton

            function = by_triton.outer
        call = functools.partial(function, count=count, how=how)
        return one_by_one(call)(left, right, sizes, first)

    @property
    def multiple(self) -> int:
        """The number of rows has to be a multiple of this."""
        return max(tile[0] for tile in self.tiles)


def _product_of_megablox(
    rows: Array,
    kernels: Array,
    sizes: Array,
    first: Array | None = None,
    out: Array | None = None,
    *,
    how: How,
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    into, out_of = rows.shape[1], kernels.shape[1 if how.transposed else 2]
    tile = _within(how.tile, into, out_of)
    local, (high, _, wide) = len(rows) // how.share, tile
    visits = -(-local // high) + len(kernels) - 1
    read = local * into * -(-out_of // wide) + visits * into * out_of
    with _calling("gmm", 2 * local * into * out_of, rows.itemsize * (read + local * out_of)):
        product: Array = gmm(
            rows,
            kernels,
            sizes,
            preferred_element_type=rows.dtype,
            tiling=tile,
            group_offset=first,
            existing_out=out,
            transpose_rhs=how.transposed,
            interpret=how.interpret,
        )
    return product


def _outer_of_megablox(
    left: Array, right: Array, sizes: Array, first: Array, *, count: int, how: How
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (rows, into), out_of = left.shape, right.shape[1]
    tile = _within(how.tile, into, out_of)
    local, (_, deep, wide) = rows // how.share, tile
    read = local * into * -(-out_of // wide) + local * out_of * -(-into // deep)
    size = left.itemsize * (read + count * into * out_of)
    with _calling("tgmm", 2 * local * into * out_of, size):
        gradient: Array = tgmm(
            left.T,
            right,
            sizes,
            left.dtype,
            tile,
            group_offset=first,
            num_actual_groups=count,
            interpret=how.interpret,
        )
    return gradient


@contextlib.contextmanager
def _calling(kernel: str, flops: int, size: int) -> Iterator[None]:
    """Calls one of JAX's kernels, which mix dtypes, and states its cost for `lab.hlo.products`."""
    # The kernels themselves state the cost of all rows, though they skip rows of other groups.
    cost = {kernel: f"flops={flops} bytes_accessed={size}"}
    with set_xla_metadata(**cost), jax.numpy_dtype_promotion("standard"):
        yield


def _within(tile: Tile, into: int, out_of: int) -> Tile:
    rows, before, after = tile
    return rows, min(before, into), min(after, out_of)


# What computes the products on each platform, and its tiles. 512 × 1024 × 1024 is what MaxText
# takes on a TPU; the rows of the others are as many as a product needs to be worth its start.
ON_PLATFORM: dict[str, tuple[Backend, Tile]] = {
    "tpu": ("megablox", (512, 1024, 1024)),
    "gpu": ("triton", (128, 64, 128)),
    "cpu": ("tiles", (128, 0, 0)),
}


def products_for(
    rows: int, numbers: tuple[int, ...] | None = None, *, share: int = 1
) -> GroupedProducts:
    """The products of so many rows, of all experts of a device, on the ambient platform."""
    # A tile has no more rows than the next power of two, as each of `numbers` is.
    backend, usual = ON_PLATFORM[ambient_platform()]
    most = max(16, 1 << (rows - 1).bit_length())
    tiles = Tiles.of(numbers or usual)
    tiles = Tiles(*((min(tile[0], most), *tile[1:]) for tile in tiles))
    return GroupedProducts(backend, tiles, share)
