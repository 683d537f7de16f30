"""A transformer in Equinox whose layers are scanned, with a checkpoint around each layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

WIDTH, LAYERS, HEADS, BATCH, LENGTH, VOCABULARY = 256, 4, 4, 4, 512, 1024


class Layer(eqx.Module):
    norm: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[2])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[3])

    def __call__(self, x):
        h = checkpoint_name(jax.vmap(self.norm)(x), "norm")
        qkv = checkpoint_name(jax.vmap(self.qkv)(h), "qkv")
        q, k, v = jnp.moveaxis(qkv.reshape(-1, 3, HEADS, WIDTH // HEADS), 1, 0)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        shares = checkpoint_name(shares, "shares")
        mixed = jnp.einsum("hqk,khd->qhd", shares, v).reshape(x.shape)
        x = x + checkpoint_name(jax.vmap(self.out)(mixed), "out")
        up = checkpoint_name(jax.vmap(self.up)(x), "up")
        return x + jax.vmap(self.down)(jax.nn.gelu(up))


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    layers: Layer
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(keys[1], LAYERS))
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def visit(x, layer):
            return jax.vmap(eqx.combine(layer, static))(x), None

        x = jax.vmap(jax.vmap(self.embed))(tokens)
        x, _ = jax.lax.scan(jax.checkpoint(visit), x, arrays)
        return jax.vmap(jax.vmap(self.head))(x)


def loss(model, batch):
    tokens, targets = batch
    logits = jax.nn.log_softmax(model(tokens))
    return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], axis=-1))


@eqx.filter_jit
def step(model, batch):
    value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
    return value, eqx.apply_updates(model, jax.tree.map(lambda g: -1e-3 * g, gradients))


def inputs():
    model = eqx.filter_eval_shape(Transformer, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    return model, (ids, ids)
