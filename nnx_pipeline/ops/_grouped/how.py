"""How one product of groups of rows is made, the same for every implementation."""

from typing import NamedTuple

Tile = tuple[int, int, int]  # rows, width before, width after


class How(NamedTuple):
    """How rows are multiplied by the kernels of their groups.

    - `tile`: what is computed at a time. In a product of rows the first number divides the rows; in
      the gradient of kernels it is how many rows a step of the sum takes, and the others are the
      part of a kernel that is computed. A loop in plain JAX reads the first number alone.
    - `transposed`: whether kernels are `[groups, out_of, into]` and not `[groups, into, out_of]`.
    - `share`: 1 / `share` of all rows belong to the groups of the call; it is for what a kernel
      states of its cost.
    - `interpret`: whether a kernel is interpreted, for tests where its platform is not.
    """

    tile: Tile
    transposed: bool = False
    share: int = 1
    interpret: bool = False
