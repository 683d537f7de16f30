"""A ViT in Flax Linen, its encoder under nn.scan, whose blocks keep all that they compute."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

CLASSES, WIDTH, DEPTH, HEADS, PATCH, SIZE, BATCH = 1000, 768, 12, 12, 16, 224, 64
CURE = r"checkpoint|remat"


class EncoderBlock(nn.Module):
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, deterministic):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype)(y, y)
        x = x + nn.Dropout(0.1)(y, deterministic=deterministic)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(y))
        y = nn.Dense(WIDTH, dtype=self.dtype)(y)
        return x + nn.Dropout(0.1)(y, deterministic=deterministic), None


class ViT(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), dtype=jnp.bfloat16)(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        pos = self.param("pos", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        x = x + pos.astype(x.dtype)
        block = nn.remat(EncoderBlock, static_argnums=(2,)) if self.remat else EncoderBlock
        encoder = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=DEPTH,
        )
        x, _ = encoder(name="encoder")(x, not train)  # planted
        x = nn.LayerNorm(dtype=jnp.bfloat16)(x).mean(axis=1)
        return nn.Dense(CLASSES)(x)


def train_step(state, images, labels, dropout_key):
    key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images, True, rngs={"dropout": key})  # caller
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


step = good = jax.jit(train_step, donate_argnames="state")


def state_of(remat):
    model = ViT(remat)
    image = jnp.ones((1, SIZE, SIZE, 3), jnp.bfloat16)
    params = model.init(jax.random.key(0), image, False)["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adamw(1e-3, weight_decay=0.05)
    )


def inputs(remat=False):
    images = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    state = jax.eval_shape(lambda: state_of(remat))
    return state, images, labels, jax.eval_shape(lambda: jax.random.key(1))


def good_inputs():
    return inputs(remat=True)
