"""Casts of weights that a compiler must not move in front of a loop."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

_SLICES: contextvars.ContextVar[bool] = contextvars.ContextVar("slices", default=False)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def reading_slices() -> Iterator[None]:
    """Within it weights are slices of larger arrays that a loop reads one by one."""
    token = _SLICES.set(True)
    try:
        yield
    finally:
        _SLICES.reset(token)


def of_slices(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The function within `reading_slices`."""

    @functools.wraps(function)
    def call(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        with reading_slices():
            return function(*args, **options)

    return call


def cast_at_use(kernel: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The kernel in a dtype; inside `reading_slices` a bfloat16 copy is made where it is read.

    If all that reads a float32 array takes it in bfloat16, the TPU compiler casts the whole array
    where it comes from: all repeats before the first tick, and the copy lives through the step. It
    does not move an array that is rounded first; in float16 that would flush what is subnormal.
    With one repeat, without slices, it would keep the weights in float32 beside that copy.
    """
    if _SLICES.get() and (kernel.dtype, jnp.dtype(dtype)) == (jnp.float32, jnp.bfloat16):
        kernel = jax.lax.reduce_precision(kernel, exponent_bits=8, mantissa_bits=7)
    return kernel.astype(dtype)
