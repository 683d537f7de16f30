"""Decoding with attention in Flax NNX; each step appends to the caches by concatenation."""

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 1024, 16, 2, 16, 4096
CURE = r"dynamic_update_slice|\.at\["


class Attention(nnx.Module):
    def __init__(self, rngs):
        make = lambda size: nnx.Linear(WIDTH, size, dtype=jnp.bfloat16, rngs=rngs)
        self.qkv, self.out = make(3 * WIDTH), make(WIDTH)

    def __call__(self, x, cache, pos, append):
        q, k, v = jnp.split(self.qkv(x).reshape(BATCH, 3, HEADS, -1), 3, axis=1)
        k, v = append(cache["k"], k, pos), append(cache["v"], v, pos)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        scores = jnp.where(jnp.arange(k.shape[1]) <= pos, scores, -1e9)
        a = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        return x + self.out(a.reshape(x.shape)), {"k": k, "v": v}


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])

    def __call__(self, x, caches, pos, append):
        new = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache, pos, append)
            new.append(cache)
        return x, new


def concatenated(cache, entry, pos):
    return jnp.concatenate([cache, entry], axis=1)  # planted


def written(cache, entry, pos):
    return jax.lax.dynamic_update_slice(cache, entry, (0, pos, 0, 0))


def decode(append):
    def decode_step(model, caches, x, pos):
        return model(x, caches, pos, append)

    return nnx.jit(decode_step, donate_argnames="caches")


step, good = decode(concatenated), decode(written)


def inputs():
    model = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    cache = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, WIDTH // HEADS), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.bfloat16)
    caches = [{"k": cache, "v": cache} for _ in range(LAYERS)]
    return model, caches, x, jax.ShapeDtypeStruct((), jnp.int32)
