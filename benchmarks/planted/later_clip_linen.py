"""CLIP in Flax Linen; the loss makes the similarities of all images with all texts at once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

BATCH, FEATURES, WIDTH, PARTS = 16384, 768, 512, 32
CURE = r"chunk|part|block"


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(WIDTH, dtype=jnp.bfloat16)(x))
        x = nn.Dense(WIDTH, dtype=jnp.bfloat16)(x)
        return x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True).astype(x.dtype)


class CLIP(nn.Module):
    def setup(self):
        self.image, self.text = Tower(), Tower()
        self.scale = self.param("scale", nn.initializers.constant(2.66), ())

    def __call__(self, images, texts):
        return self.image(images), self.text(texts), jnp.exp(self.scale)


def clip_loss(image, text, scale):
    logits = scale * (image @ text.T).astype(jnp.float32)  # planted
    labels = jnp.arange(BATCH)
    loss_i = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    loss_t = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return (loss_i + loss_t).mean() / 2


def one_side(a, b, scale):
    @jax.checkpoint
    def part(total, rows):
        a, labels = rows
        logits = scale * (a @ b.T).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return total + loss.sum(), None

    rows = a.reshape(PARTS, -1, WIDTH), jnp.arange(BATCH).reshape(PARTS, -1)
    return jax.lax.scan(part, jnp.float32(0), rows)[0] / BATCH


def loss_in_parts(image, text, scale):
    return (one_side(image, text, scale) + one_side(text, image, scale)) / 2


def train(loss):
    def train_step(state, batch):
        def loss_fn(params):
            towers = state.apply_fn({"params": params}, batch["image"], batch["text"])
            return loss(*towers)  # caller

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), value

    return jax.jit(train_step, donate_argnums=0)


step, good = train(clip_loss), train(loss_in_parts)


def inputs():
    def make():
        one = jnp.ones((1, FEATURES))
        params = CLIP().init(jax.random.key(0), one, one)["params"]
        return TrainState.create(apply_fn=CLIP().apply, params=params, tx=optax.adamw(5e-4))

    x = jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.bfloat16)
    return jax.eval_shape(make), {"image": x, "text": x}
