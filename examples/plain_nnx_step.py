"""A plain Flax NNX training step: which line its memory is of, and the step with that line mended.

    python examples/plain_nnx_step.py

The steps are compiled for shapes, here for the CPU; no array of these sizes is ever made.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_pipeline import lab

VOCABULARY, WIDTH, TOKENS, PARTS = 8192, 128, 4096, 16


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def features(self, tokens):
        return nnx.gelu(self.hidden(self.embed(tokens)))


def plain_loss(model, tokens, targets):
    logits = model.head(model.features(tokens))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def mended_loss(model, tokens, targets):
    """The logits of a sixteenth of the tokens at a time; the backward pass makes them again."""

    @jax.checkpoint
    def add(total, part):
        logits = part[0] @ model.head.kernel[...]
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, part[1]).sum(), None

    parts = model.features(tokens).reshape(PARTS, -1, WIDTH), targets.reshape(PARTS, -1)
    return jax.lax.scan(add, jnp.zeros(()), parts)[0] / targets.size


def step_of(loss):
    @nnx.jit(donate_argnames=("model", "optimizer"))
    def train_step(model, optimizer, tokens, targets):
        value, gradients = nnx.value_and_grad(loss)(model, tokens, targets)
        optimizer.update(model, gradients)
        return value

    return train_step


def make():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


ids = jax.ShapeDtypeStruct((TOKENS,), "int32")
arguments = (*nnx.eval_shape(make), ids, ids)
plain, mended = step_of(plain_loss), step_of(mended_loss)

before = lab.measure(plain, *arguments, platform="cpu")
print(f"the plain step holds {before.memory.heap_bytes / 1e6:.0f} MB at its peak; most of it:")
for buffer in before.attribution.buffers[:2]:
    print(f"{buffer.bytes / 1e6:5.0f} MB, {buffer.shape}, {buffer.role}, {buffer.source}")

outcome = lab.compare(plain, mended, *arguments, platform="cpu")
print(f"the mended one {outcome.b.memory.heap_bytes / 1e6:.0f} MB; less memory: {outcome.verdict}")
assert outcome.verdict == "holds"
assert outcome.b.memory.heap_bytes < before.memory.heap_bytes / 2

tokens = jax.random.randint(jax.random.key(0), (64,), 0, VOCABULARY)
losses = [float(step(*make(), tokens, tokens)) for step in (plain, mended)]
print("their losses on 64 tokens:", *losses)
assert abs(losses[0] - losses[1]) < 1e-5
