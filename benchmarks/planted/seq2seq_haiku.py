"""An LSTM translator as Haiku programs are written; a float32 rate promotes donated weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

VOCAB, HIDDEN, BATCH, LENGTH = 32000, 1024, 32, 64
CURE = r"astype|cast|same dtype"


class TrainingState(NamedTuple):
    params: dict
    momentum: dict
    step: jax.Array


def linear(params, name, x):
    return x @ params[name]["w"] + params[name]["b"]


def lstm(params, name, xs):
    def core(state, x):
        h, c = state
        i, g, f, o = jnp.split(linear(params, name, jnp.concatenate([x, h], -1)), 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), jax.nn.sigmoid(o) * jnp.tanh(c)

    zeros = jnp.zeros((BATCH, HIDDEN), xs.dtype)
    return jax.lax.scan(core, (zeros, zeros), xs)


def init():
    def pair(rows, columns):
        return {"w": jnp.zeros((rows, columns), "bfloat16"), "b": jnp.zeros(columns, "bfloat16")}

    names = "encoder/lstm", "decoder/lstm", "decoder/lstm_1"
    params = {name: pair(2 * HIDDEN, 4 * HIDDEN) for name in names}
    params["embed"] = {"embeddings": jnp.zeros((VOCAB, HIDDEN), "bfloat16")}
    params["logits"] = pair(HIDDEN, VOCAB)
    return TrainingState(params, jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


def loss_fn(params, source, target):
    embed = params["embed"]["embeddings"]
    _, memory = lstm(params, "encoder/lstm", embed[source.T])
    _, hidden = lstm(params, "decoder/lstm", embed[target.T] + memory)
    _, hidden = lstm(params, "decoder/lstm_1", hidden)
    logits = linear(params, "logits", hidden[:-1])
    logp = jax.nn.log_softmax(logits).astype(jnp.float32)
    return -jnp.take_along_axis(logp, target.T[1:, :, None], -1).mean()


def rate(step):
    return 1e-2 * jnp.minimum(1.0, jnp.float32(step + 1) / 4000)


def train(same_dtype):
    def update(state, source, target):
        grads = jax.grad(loss_fn)(state.params, source, target)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        lr = rate(state.step)

        def sgd(p, m):
            new = p - lr * m  # planted
            return new.astype(p.dtype) if same_dtype else new

        params = jax.tree.map(sgd, state.params, momentum)  # caller
        return TrainingState(params, momentum, state.step + 1)

    return jax.jit(update, donate_argnums=0)


step, good = train(False), train(True)


def inputs():
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return jax.eval_shape(init), tokens, tokens
