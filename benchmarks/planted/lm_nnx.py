"""A language model in Flax NNX with AdamW; the step that nnx.jit compiles donates nothing."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

VOCAB, WIDTH, LAYERS, HEADS, BATCH, LENGTH = 16384, 1536, 3, 12, 2, 256
CURE = r"donate_argnums=\(0, 1"


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.ln1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class TransformerLM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch["inputs"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return loss.mean(), logits


def train_step(model, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch):  # planted
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["targets"])
    optimizer.update(model, grads)


step = nnx.jit(train_step)  # caller
good = nnx.jit(train_step, donate_argnums=(0, 1))


def make():
    model = TransformerLM(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def inputs():
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return *nnx.eval_shape(make), {"inputs": tokens, "targets": tokens}
