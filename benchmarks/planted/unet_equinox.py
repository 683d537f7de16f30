"""A U-Net for diffusion in Equinox; self-attention over 64 x 64 pixels stores all scores."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

SIZE, CHANNELS, HEADS, BATCH = 64, 128, 4, 2
CURE = r"scores|block|flash"
optim = optax.adam(2e-4)


def attend(q, k, v):
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1), v)  # planted


def attend_in_blocks(q, k, v):
    rows = jnp.moveaxis(q.reshape(HEADS, 16, -1, q.shape[-1]), 1, 0)
    out = jax.lax.map(jax.checkpoint(lambda q: attend(q, k, v)), rows)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


class AttentionBlock(eqx.Module):
    norm: eqx.nn.GroupNorm
    qkv: eqx.nn.Conv2d
    out: eqx.nn.Conv2d
    blocks: bool = eqx.field(static=True)

    def __init__(self, channels, blocks, key):
        k1, k2 = jax.random.split(key)
        self.norm = eqx.nn.GroupNorm(8, channels)
        self.qkv = eqx.nn.Conv2d(channels, 3 * channels, 1, key=k1)
        self.out = eqx.nn.Conv2d(channels, channels, 1, key=k2)
        self.blocks = blocks

    def __call__(self, x):
        c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(3, HEADS, c // HEADS, h * w).swapaxes(-1, -2)
        a = attend_in_blocks(q, k, v) if self.blocks else attend(q, k, v)  # caller
        return x + self.out(a.swapaxes(-1, -2).reshape(c, h, w))


class ResBlock(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    time: eqx.nn.Linear
    skip: eqx.nn.Conv2d

    def __init__(self, cin, cout, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(cin, cout, 3, padding=1, key=k1)
        self.conv2 = eqx.nn.Conv2d(cout, cout, 3, padding=1, key=k2)
        self.time = eqx.nn.Linear(CHANNELS, cout, key=k3)
        self.skip = eqx.nn.Conv2d(cin, cout, 1, key=k4)

    def __call__(self, x, t):
        h = jax.nn.silu(self.conv1(x)) + self.time(t)[:, None, None]
        return self.conv2(jax.nn.silu(h)) + self.skip(x)


class UNet(eqx.Module):
    down: list
    up: list
    attention: AttentionBlock
    lift: eqx.nn.Conv2d
    out: eqx.nn.Conv2d

    def __init__(self, blocks, key):
        k = jax.random.split(key, 7)
        self.lift = eqx.nn.Conv2d(3, CHANNELS, 3, padding=1, key=k[0])
        self.attention = AttentionBlock(CHANNELS, blocks, k[1])
        self.down = [ResBlock(CHANNELS, CHANNELS, k[2]), ResBlock(CHANNELS, 2 * CHANNELS, k[3])]
        self.up = [ResBlock(3 * CHANNELS, CHANNELS, k[4]), ResBlock(2 * CHANNELS, CHANNELS, k[5])]
        self.out = eqx.nn.Conv2d(CHANNELS, 3, 3, padding=1, key=k[6])

    def __call__(self, t, x):
        freq = jnp.exp(-jnp.arange(CHANNELS // 2) / 10.0)
        temb = jnp.concatenate([jnp.sin(t * freq), jnp.cos(t * freq)])
        x = self.lift(x)
        h1 = self.attention(self.down[0](x, temb))
        h2 = self.down[1](h1[:, ::2, ::2], temb)
        h = jax.image.resize(h2, (h2.shape[0], SIZE, SIZE), "nearest")
        h = self.up[0](jnp.concatenate([h, h1]), temb)
        return self.out(self.up[1](jnp.concatenate([h, x]), temb))


@eqx.filter_jit(donate="all-except-first")
def make_step(batch, model, opt_state):
    def loss_fn(model):
        x, noise, t = batch
        noisy = jnp.sqrt(1 - t)[:, None, None, None] * x + jnp.sqrt(t)[:, None, None, None] * noise
        return jnp.mean((jax.vmap(model)(t, noisy) - noise) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = optim.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


step = good = make_step


def inputs(blocks=False):
    def make():
        model = UNet(blocks, jax.random.key(0))
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

    model, opt_state = eqx.filter_eval_shape(make)
    image = jax.ShapeDtypeStruct((BATCH, 3, SIZE, SIZE), jnp.float32)
    return (image, image, jax.ShapeDtypeStruct((BATCH,), jnp.float32)), model, opt_state


def good_inputs():
    return inputs(blocks=True)
