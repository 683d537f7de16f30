"""BERT pretraining with optax in a loop of its own; gradients of all microbatches are kept."""

import functools

import jax
import jax.numpy as jnp
import optax

VOCAB, WIDTH, LAYERS, HEADS, MICRO, ROWS, LENGTH = 30522, 768, 2, 12, 8, 4, 128
CURE = r"[Aa]dd|sum|carry"
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))


def init():
    layer = lambda: {
        "qkv": jnp.zeros((WIDTH, 3 * WIDTH)),
        "out": jnp.zeros((WIDTH, WIDTH)),
        "up": jnp.zeros((WIDTH, 4 * WIDTH)),
        "down": jnp.zeros((4 * WIDTH, WIDTH)),
    }
    params = {"embed": jnp.zeros((VOCAB, WIDTH)), "layers": [layer() for _ in range(LAYERS)]}
    return params, tx.init(params)


def encode(params, ids):
    x = params["embed"][ids]
    for p in params["layers"]:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x = jax.nn.standardize(
            x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        )
        x = jax.nn.standardize(x + jax.nn.gelu(x @ p["up"]) @ p["down"])
    return x


def mlm_loss(params, batch):
    hidden = jnp.take_along_axis(encode(params, batch["ids"]), batch["places"][..., None], axis=1)
    logits = hidden @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def stacked(params, batches):
    grads = jax.lax.map(lambda batch: jax.grad(mlm_loss)(params, batch), batches)  # planted
    return jax.tree.map(lambda g: g.mean(axis=0), grads)


def summed(params, batches):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(mlm_loss)(params, batch)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
    return jax.tree.map(lambda g: g / MICRO, total)


def train(gradient):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batches):
        grads = gradient(params, batches)  # caller
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return train_step


step, good = train(stacked), train(summed)


def inputs():
    params, opt_state = jax.eval_shape(init)
    of = lambda n: jax.ShapeDtypeStruct((MICRO, ROWS, n), jnp.int32)
    return params, opt_state, {"ids": of(LENGTH), "places": of(20), "labels": of(20)}
