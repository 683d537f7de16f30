"""A step of decoding as Llama in plain JAX does it; the caches of its layers are stacked anew."""

import jax
import jax.numpy as jnp

VOCAB, WIDTH, LAYERS, HEADS, KV, SIZE, BATCH, LENGTH = 32000, 2048, 8, 16, 8, 128, 16, 4096
CURE = r"dynamic_update_slice|\.at\[|in place"


def init():
    shapes = {
        "wq": (WIDTH, HEADS * SIZE),
        "wk": (WIDTH, KV * SIZE),
        "wv": (WIDTH, KV * SIZE),
        "wo": (HEADS * SIZE, WIDTH),
        "w1": (WIDTH, 5632),
        "w3": (WIDTH, 5632),
        "w2": (5632, WIDTH),
    }
    layers = [{k: jnp.zeros(s, jnp.bfloat16) for k, s in shapes.items()} for _ in range(LAYERS)]
    return {"embed": jnp.zeros((VOCAB, WIDTH), jnp.bfloat16), "layers": layers}


def rmsnorm(x):
    return (
        x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
    ).astype(x.dtype)


def attention(p, x, k_cache, v_cache, pos):
    q = (x @ p["wq"]).reshape(BATCH, KV, HEADS // KV, SIZE)
    k, v = ((x @ p[name]).reshape(BATCH, 1, KV, SIZE) for name in ("wk", "wv"))
    k_cache = jax.lax.dynamic_update_slice(k_cache, k, (0, pos, 0, 0))
    v_cache = jax.lax.dynamic_update_slice(v_cache, v, (0, pos, 0, 0))
    scores = jnp.einsum("bkgd,btkd->bkgt", q, k_cache).astype(jnp.float32) / SIZE**0.5
    scores = jnp.where(jnp.arange(LENGTH) <= pos, scores, -jnp.inf)
    a = jnp.einsum("bkgt,btkd->bkgd", jax.nn.softmax(scores).astype(x.dtype), v_cache)
    return a.reshape(BATCH, -1) @ p["wo"], k_cache, v_cache


def ffn(p, x):
    return (jax.nn.silu(x @ p["w1"]) * (x @ p["w3"])) @ p["w2"]


def decode_stacked(params, cache, token, pos):
    x = params["embed"][token]
    ks, vs = [], []
    for i, p in enumerate(params["layers"]):
        a, k, v = attention(p, rmsnorm(x), cache["k"][i], cache["v"][i], pos)
        x = x + a
        x = x + ffn(p, rmsnorm(x))
        ks.append(k)
        vs.append(v)
    cache = {"k": jnp.stack(ks), "v": jnp.stack(vs)}  # planted
    return jnp.argmax(rmsnorm(x) @ params["embed"].T, -1), cache


def decode(params, cache, token, pos):
    x, ks, vs = params["embed"][token], cache["k"], cache["v"]
    new = {"k": [], "v": []}
    for p, k, v in zip(params["layers"], ks, vs, strict=True):
        a, k, v = attention(p, rmsnorm(x), k, v, pos)
        x = x + a
        x = x + ffn(p, rmsnorm(x))
        new["k"].append(k)
        new["v"].append(v)
    return jnp.argmax(rmsnorm(x) @ params["embed"].T, -1), new


step = jax.jit(decode_stacked, donate_argnames="cache")
good = jax.jit(decode, donate_argnames="cache")
ONE = jax.ShapeDtypeStruct((BATCH, LENGTH, KV, SIZE), jnp.bfloat16)


def given(cache):
    token = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    return (
        jax.eval_shape(init),
        {"k": cache, "v": cache},
        token,
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def inputs():
    return given(jax.ShapeDtypeStruct((LAYERS, *ONE.shape), ONE.dtype))


def good_inputs():
    return given([ONE] * LAYERS)
