"""A GAN in Flax Linen, both nets trained in one step; the discriminator's state is not donated."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

LATENT, BATCH = 1024, 32
CURE = r"donate_argnums=\(0, 1\)|donate_argnums=\(1,\)|'d_state'"


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.relu(nn.Dense(4 * 4 * 1024)(z)).reshape(-1, 4, 4, 1024)
        for features in (512, 256, 128):
            x = jax.image.resize(
                x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest"
            )
            x = nn.relu(nn.GroupNorm()(nn.Conv(features, (3, 3))(x)))
        return jnp.tanh(nn.Conv(3, (3, 3))(x))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (256, 512, 1024, 2048):
            x = nn.leaky_relu(nn.Conv(features, (4, 4), strides=(2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))


def bce(logits, label):
    return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, label)).mean()


def train_step(g_state, d_state, real, key):  # planted
    z = jax.random.normal(key, (real.shape[0], LATENT))

    def d_loss(params):
        fake = g_state.apply_fn({"params": g_state.params}, z)
        apply = partial(d_state.apply_fn, {"params": params})
        return bce(apply(real), 1.0) + bce(apply(jax.lax.stop_gradient(fake)), 0.0)

    def g_loss(params):
        fake = g_state.apply_fn({"params": params}, z)
        return bce(d_state.apply_fn({"params": d_state.params}, fake), 1.0)

    d_value, d_grads = jax.value_and_grad(d_loss)(d_state.params)
    g_value, g_grads = jax.value_and_grad(g_loss)(g_state.params)
    metrics = {"d": d_value, "g": g_value}
    return g_state.apply_gradients(grads=g_grads), d_state.apply_gradients(grads=d_grads), metrics


step = jax.jit(train_step, donate_argnums=0)  # caller
good = jax.jit(train_step, donate_argnums=(0, 1))


def inputs():
    def made(module, shape):
        params = module.init(jax.random.key(0), jnp.ones(shape))["params"]
        tx = optax.adam(2e-4, b1=0.5)
        return TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    real = jax.ShapeDtypeStruct((BATCH, 32, 32, 3), jnp.float32)
    states = jax.eval_shape(
        lambda: (made(Generator(), (1, LATENT)), made(Discriminator(), (1, 32, 32, 3)))
    )
    return *states, real, jax.eval_shape(lambda: jax.random.key(0))
