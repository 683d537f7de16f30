"""Dropout whose mask belongs to the sequence, so that no mesh and no schedule changes it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from nnx_pipeline.errors import InputError
from nnx_pipeline.sharding import PORTABLE, P, place, portable_key

Keys = UInt32[Array, "batch words"]


def sequence_keys(key: Array, batch: int) -> Keys:
    """A key for each sequence of the batch, as words: they travel as side inputs do.

    key: one key of `jax.random`. Raises InputError for anything else.
    """
    check_key(key)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(portable_key(key), jnp.arange(batch))
    return jax.random.key_data(keys)


def check_key(key: object) -> None:
    """Raises InputError unless it is one key of `jax.random`, typed or two words as of old."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if typed else (dtype, shape) != (jnp.uint32, (2,)):
        found = type(key).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
        raise InputError(
            f"key is {found}, and must be one key for dropout, as jax.random.key makes it; call a "
            "side input of a layer something else"
        )


def key_of(words: UInt32[Array, "words"]) -> Array:
    """The key that these words are."""
    return jax.random.wrap_key_data(words, impl=PORTABLE)


def fold_in(keys: Keys, number: Array) -> Keys:
    """Other keys for another layer, or for another place in it."""

    def one(words: Array) -> Array:
        folded = jax.random.fold_in(key_of(words), number)
        return jax.random.key_data(folded)

    return jax.vmap(one)(keys)


def dropout(
    x: Float[Array, "batch seq embed"], keys: Keys, *, rate: float, spec: P
) -> Float[Array, "batch seq embed"]:
    """Each value zero with probability `rate`, and divided by 1 - rate otherwise.

    keys: one per sequence (`sequence_keys`). spec: the sharding of x.
    """

    def mask_of(words: Array) -> Array:
        return jax.random.bernoulli(key_of(words), 1.0 - rate, x.shape[1:])

    mask = place(jax.vmap(mask_of)(keys), spec)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros_like(x))
