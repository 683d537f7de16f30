"""What attention keeps of the tokens that a model has read, so that it can go on from there."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.ops._attention import Options, cached_attention, in_slots
from nnx_pipeline.ops._fast_attention.kernels import Kernel
from nnx_pipeline.sharding.layout import P


class KeyValueCache(nnx.Module):
    """The keys and values of one attention layer: of the token at position p in slot p.

    No token reads the slot of a later one, so that sequences of a batch may have different lengths:
    what padding leaves behind a shorter one is overwritten before it is read.
    """

    def __init__(self, config: ModelConfig, *, batch: int, slots: int) -> None:
        heads = (batch, slots, config.num_kv_heads)
        axes = ("batch", None, "kv_heads", None)
        key = jnp.zeros((*heads, config.head_dim), config.dtype)
        value = jnp.zeros((*heads, config.value_head_dim or config.head_dim), config.dtype)
        self.key = nnx.Cache(key, logical_axes=axes)
        self.value = nnx.Cache(value, logical_axes=axes)

    def through(self, kernel: Kernel, positions: Array | None, options: Options) -> Kernel:
        """A kernel in the place of another that stores keys and values too, and reads stored ones.

        `kernel` computes the first tokens of the sequences, which read nothing stored; for these
        `positions` is None. Else it is `[batch, 1]`, of one new token of each sequence. Raises
        InputError where it is called with segment ids, or with more tokens than positions or slots.
        """
        return functools.partial(self._attend, kernel, options, positions)

    def _attend(
        self, kernel: Kernel, options: Options, positions: Array | None, *heads: Array, grouped: P
    ) -> Array:
        query, key, value, segment_ids = heads
        if segment_ids is not None:
            raise InputError(
                "a model with a cache was called with segment ids, and a cache holds one document "
                "of each sequence; leave segment_ids out"
            )
        length, slots = query.shape[1], self.key.shape[1]
        if positions is None:
            if length > slots:
                raise InputError(
                    f"a cache with {counted(slots, 'slot')} was given {counted(length, 'token')}; "
                    "make it with as many slots as there are tokens, new ones included"
                )
            room = ((0, 0), (0, slots - length), (0, 0), (0, 0))
            self.key[...], self.value[...] = jnp.pad(key, room), jnp.pad(value, room)
            return kernel(query, key, value, None, grouped=grouped)
        if length != 1:
            raise InputError(
                f"a model with a cache was called with positions of {length} tokens per sequence; "
                "give one token of each with its position, or the first ones without positions"
            )
        self.key[...] = in_slots(self.key[...], key, positions)
        self.value[...] = in_slots(self.value[...], value, positions)
        stored = self.key[...], self.value[...]
        return cached_attention(query, *stored, positions, grouped=grouped, options=options)
