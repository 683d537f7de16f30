"""A small U-Net in plain JAX, two sizes of images, with a checkpoint around each block."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SIZE, CHANNELS, BATCH = 16, 128, 8


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normed(x, scale):
    mean = jnp.mean(x, axis=(1, 2, 3), keepdims=True)
    variance = jnp.var(x, axis=(1, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def block(weights, x, time):
    h = checkpoint_name(normed(x, weights["scale"]), "norm")
    h = checkpoint_name(convolved(jax.nn.silu(h), weights["first"]), "first_conv")
    h = h + (time @ weights["time"])[:, None, None]
    h = checkpoint_name(jax.nn.gelu(h), "gelu")
    h = checkpoint_name(convolved(h, weights["second"]), "second_conv")
    return h + checkpoint_name(convolved(x, weights["skip"]), "skip")


def predict(weights, x, time):
    remat = jax.checkpoint(block)
    h = convolved(x, weights["lift"])
    fine = remat(weights["down"], h, time)
    coarse = remat(weights["middle"], fine[:, ::2, ::2], time)
    h = jnp.repeat(jnp.repeat(coarse, 2, axis=1), 2, axis=2)
    h = remat(weights["up"], jnp.concatenate([h, fine], axis=-1), time)
    return convolved(h, weights["out"])


def loss(weights, batch):
    images, noise, time = batch
    found = predict(
        weights, images + noise, jnp.cos(time[:, None] * jnp.arange(CHANNELS, dtype="float32"))
    )
    return jnp.mean((found - noise) ** 2)


def step(weights, batch):
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return value, jax.tree.map(lambda w, gradient: w - 1e-3 * gradient, weights, gradients)


def shapes():
    def of_block(channels):
        return {
            "scale": (channels,),
            "first": (3, 3, channels, CHANNELS),
            "time": (CHANNELS, CHANNELS),
            "second": (3, 3, CHANNELS, CHANNELS),
            "skip": (1, 1, channels, CHANNELS),
        }

    ends = {"lift": (3, 3, 3, CHANNELS), "out": (3, 3, CHANNELS, 3)}
    blocks = {"down": of_block(CHANNELS), "middle": of_block(CHANNELS)}
    return {**ends, **blocks, "up": of_block(2 * CHANNELS)}


def inputs():
    def is_shape(value):
        return isinstance(value, tuple)

    images = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), "float32")
    weights = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), shapes(), is_leaf=is_shape
    )
    return weights, (images, images, jax.ShapeDtypeStruct((BATCH,), "float32"))
