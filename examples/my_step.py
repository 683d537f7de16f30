"""A training step for which yours can stand: a function, and one that returns its arguments.

    nnx-pipeline memory examples/my_step.py:step --inputs examples/my_step.py:inputs

No array of these sizes is ever made: the arguments are shapes.
"""

import jax
import jax.numpy as jnp

from nnx_pipeline import lab

VOCABULARY, WIDTH, SEQUENCE = 32_000, 2048, 1024


def loss(weights, tokens, targets):
    x = weights["embed"][tokens]
    x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    logits = x @ weights["embed"].T
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets])


def step(weights, tokens, targets):
    gradients = jax.grad(loss)(weights, tokens, targets)
    return jax.tree.map(lambda w, gradient: w - 1e-3 * gradient, weights, gradients)


def inputs(batch=8):
    shapes = {"embed": (VOCABULARY, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((batch * SEQUENCE,), "int32")
    return weights, ids, ids


if __name__ == "__main__":
    table = lab.memory(step, *inputs(), platform="cpu", top=3)
    print(table)
    assert table.measurement.memory.heap_bytes > 4 * 8 * SEQUENCE * VOCABULARY  # the logits
