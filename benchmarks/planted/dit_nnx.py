"""A diffusion transformer in Flax NNX in bfloat16, which a float32 embedding of time upcasts."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

WIDTH, HEADS, DEPTH, PATCHES, BATCH, CHANNELS = 1152, 16, 4, 256, 32, 16
CURE = r"astype|cast|bfloat16"
BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}


def timestep_embedding(t):
    freq = jnp.exp(-jnp.log(10000.0) * jnp.arange(WIDTH // 2) / (WIDTH // 2))
    angles = t[:, None] * freq
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class DiTBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **BF16)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, **BF16)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, **BF16)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class DiT(nnx.Module):
    def __init__(self, cast, rngs):
        self.patch = nnx.Linear(CHANNELS, WIDTH, rngs=rngs, **BF16)
        self.blocks = nnx.List([DiTBlock(rngs) for _ in range(DEPTH)])
        self.out = nnx.Linear(WIDTH, CHANNELS, rngs=rngs, **BF16)
        self.cast = cast

    def __call__(self, x, t):
        x = self.patch(x)
        emb = timestep_embedding(t)
        if self.cast:
            emb = emb.astype(x.dtype)
        x = x + emb[:, None, :]  # planted
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, latents, noise, t):
    def loss_fn(model):
        noisy = (1 - t)[:, None, None] * latents + t[:, None, None] * noise
        velocity = model(noisy.astype(jnp.bfloat16), 1000 * t)  # caller
        return jnp.mean((velocity.astype(jnp.float32) - (noise - latents)) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


step = good = train_step


def inputs(cast=False):
    def make():
        model = DiT(cast, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    latents = jax.ShapeDtypeStruct((BATCH, PATCHES, CHANNELS), jnp.float32)
    return *nnx.eval_shape(make), latents, latents, jax.ShapeDtypeStruct((BATCH,), jnp.float32)


def good_inputs():
    return inputs(cast=True)
