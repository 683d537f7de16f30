"""A plain Flax NNX step: an MLP mixer whose blocks are in a loop without any checkpoint."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

PATCHES, WIDTH, LAYERS, CLASSES, BATCH = 256, 256, 4, 100, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.first_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.across = nnx.Linear(PATCHES, PATCHES, rngs=rngs)
        self.back = nnx.Linear(PATCHES, PATCHES, rngs=rngs)
        self.second_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = checkpoint_name(self.first_norm(x).swapaxes(-1, -2), "turned")
        h = checkpoint_name(self.across(h), "across")
        x = checkpoint_name(x + self.back(nnx.gelu(h)).swapaxes(-1, -2), "middle")
        h = checkpoint_name(self.up(self.second_norm(x)), "up")
        return x + self.down(nnx.gelu(h))


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.fork(split=LAYERS))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.blocks)

        def visit(x, weights):
            return nnx.merge(graph, weights)(x), None

        x, _ = jax.lax.scan(visit, x, state)
        return self.head(jnp.mean(x, axis=1))


def loss(model, batch):
    images, labels = batch
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(images), labels))


@nnx.jit(donate_argnames="model")
def step(model, batch):
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    nnx.update(
        model, jax.tree.map(lambda w, g: w - 1e-3 * g, nnx.state(model, nnx.Param), gradients)
    )
    return value


def inputs():
    model = nnx.eval_shape(lambda: Mixer(nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((BATCH, PATCHES, WIDTH), "float32")
    return model, (images, jax.ShapeDtypeStruct((BATCH,), "int32"))
