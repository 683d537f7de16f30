"""Dropout with a mask per sequence that does not depend on the mesh or on the schedule."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from nnx_pipeline.lab.errors import InputError, counted, kind_of
from nnx_pipeline.sharding.layout import PORTABLE, P, is_explicit, place, portable_key

Keys = UInt32[Array, "batch words"]


def sequence_keys(key: Array, batch: int) -> Keys:
    """A random key for each sequence of the batch, derived from one key of `jax.random`.

    Raw `uint32` words can be cut into microbatches like any other side input.
    """
    check_key(key)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(portable_key(key), jnp.arange(batch))
    return jax.random.key_data(keys)


def check_key(key: object) -> None:
    """Raises InputError unless `key` is one key of `jax.random`: typed, or an old `uint32[2]`."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if typed else (dtype, shape) != (jnp.uint32, (2,)):
        raise InputError(
            f"key is {kind_of(key)}, and must be one key for dropout, such as jax.random.key(0); "
            "give a side input of a layer another name"
        )


def typed_key(words: UInt32[Array, "words"]) -> Array:
    key: Array = jax.random.wrap_key_data(words, impl=PORTABLE)
    return key


def fold_in(keys: Keys, number: Array) -> Keys:
    """A new key for each sequence; `number` tells the uses of its key apart."""
    return jax.vmap(
        lambda words: jax.random.key_data(jax.random.fold_in(typed_key(words), number))
    )(keys)


def dropout(
    x: Float[Array, "batch *rest"],
    keys: Keys | None,
    *,
    rate: float,
    number: int = 0,
    spec: P | None = None,
) -> Float[Array, "batch *rest"]:
    """Sets each value to zero with probability `rate`, and divides it by 1 - rate otherwise.

    - `x`: any values, `[batch, …]`.
    - `keys`: one per sequence, `[batch, words]`, as a layer gets them where its pipeline is called
      with a key; None leaves `x` as it is.
    - `rate`: a Python number from 0 up to 1, 1 excluded.
    - `number`: tells the calls within a layer apart: each number has a mask of its own.
    - `spec`: the sharding of `x`; None for the one in its type, on a mesh with explicit axes.

    The mask of a sequence depends on its key and the number alone.
    """
    if not 0 <= rate < 1:
        raise InputError(f"rate={rate} of dropout must be at least 0 and below 1")
    if keys is None:
        return x
    dtype: object = getattr(keys, "dtype", None)
    shape: tuple[int, ...] = getattr(keys, "shape", ())
    if dtype != jnp.uint32 or len(shape) != 2 or shape[0] != x.shape[0]:
        raise InputError(
            f"the keys of dropout are {kind_of(keys)} for {counted(x.shape[0], 'sequence')}; give "
            "the argument `keys` of a layer, which its pipeline makes of the key that it is called "
            "with"
        )

    def mask_of(words: Array) -> Array:
        return jax.random.bernoulli(typed_key(words), 1.0 - rate, x.shape[1:])

    mask = jax.vmap(mask_of)(fold_in(keys, jnp.int32(number)))
    if spec is None and is_explicit():
        spec = jax.typeof(x).sharding.spec
    if spec is not None:
        mask = place(mask, spec)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros_like(x))
