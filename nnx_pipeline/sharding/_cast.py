"""Casts and orders of weights that a compiler must not move in front of a loop."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AxisType
from jaxtyping import Array

from nnx_pipeline.lab.mesh import ambient_platform
from nnx_pipeline.sharding.layout import is_explicit

_Slices = Literal["no", "each tick", "once"]
_SLICES: contextvars.ContextVar[_Slices] = contextvars.ContextVar("slices", default="no")


@contextlib.contextmanager
def reading_slices(*, once: bool = False) -> Iterator[None]:
    """Within it weights are slices of larger arrays that a loop reads one by one.

    - `once`: each is read once in each pass over the whole batch, and not at each tick.
    """
    token = _SLICES.set("once" if once else "each tick")
    try:
        yield
    finally:
        _SLICES.reset(token)


def cast_at_use(kernel: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The kernel in a dtype; inside `reading_slices` a bfloat16 copy is made where it is read.

    If all that reads a float32 array takes it in bfloat16, the TPU compiler casts the whole array
    where it comes from: all repeats before the first tick, and the copy lives through the step. It
    does not move an array that is rounded first; in float16 that would flush what is subnormal.
    With one repeat, without slices, it would keep the weights in float32 beside that copy.
    """
    if _SLICES.get() != "no" and (kernel.dtype, jnp.dtype(dtype)) == (jnp.float32, jnp.bfloat16):
        kernel = jax.lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=7)
    return kernel.astype(dtype)


def slices_in_stored_order(kernel: Array, *, read: Literal["each tick", "once"]) -> Array:
    """The kernel; inside `reading_slices` a TPU reads each slice in the order of its axes.

    A compiler orders axes in memory as a product likes them best. If the product reads slices in a
    loop, it copies the whole array into that order before the loop, in float32. Where a slice has
    to stay in the order in which it is stored, the compiler orders what it reads of it.

    - `read`: how often slices have to be read for that; each time they are ordered anew. So only
      those kernels do it with which that was seen to save memory for little time.
    """
    return in_stored_order(kernel) if _SLICES.get() == read else kernel


@jax.custom_jvp
def in_stored_order(x: Array) -> Array:
    """The array, which a TPU has in the order of its axes here, the last one closest together.

    In auto mode it may have any order outside of a `shard_map` over all axes: no type says there
    how the array is sharded, and the partitioner would gather it.
    """
    is_auto = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types
    return x if is_auto or ambient_platform() != "tpu" else _on_each_device(x)


@in_stored_order.defjvp
def _in_stored_order_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return in_stored_order(*primals), tangents[0]


@custom_vmap
def _on_each_device(x: Array) -> Array:
    if not is_explicit():
        return _constrained(x)
    spec = jax.typeof(x).sharding.spec
    whole: Callable[[Array], Array] = jax.shard_map(
        _constrained, in_specs=spec, out_specs=spec, check_vma=False
    )
    return whole(x)


@_on_each_device.def_vmap
def _mapped(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    # A map of a `shard_map` would gather the mapped axis; here the type names its mesh axes.
    del size, batched
    return _on_each_device(x), True


def _constrained(x: Array) -> Array:
    ordered: Array = with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))
    return ordered
