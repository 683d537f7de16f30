"""A layer of your own, with dropout, trained through the pipeline by a plain NNX step.

    python examples/own_layer_with_dropout.py

Eight layers run on four stages of a mesh of eight devices, which here are virtual ones.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_pipeline import CircularPipeline, MeshConfig, PipelineConfig, make_mesh

WIDTH, LAYERS, MICROBATCHES = 16, 8, 8


class Block(nnx.Module):
    """An ordinary module of Flax; nothing in it knows of the pipeline."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.linear(self.norm(x)))), None  # None: no metrics


def loss_of(pipeline, x, y):
    return jnp.mean((pipeline(x)[0] - y) ** 2)


@nnx.jit(donate_argnames=("pipeline", "optimizer"))
def train_step(pipeline, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(loss_of)(pipeline, x, y)
    optimizer.update(pipeline, gradients)
    return loss


jax.config.update("jax_platforms", "cpu")  # on real devices leave out both lines
jax.config.update("jax_num_cpu_devices", 8)
with jax.set_mesh(make_mesh(MeshConfig(stage=4, fsdp=2))):
    config = PipelineConfig(num_microbatches=MICROBATCHES)
    pipeline = CircularPipeline(config, Block, num_layers=LAYERS, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(pipeline, optax.adam(3e-3), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (32, 8, WIDTH))
    y = jnp.roll(x, 1, axis=-1)
    losses = [float(train_step(pipeline, optimizer, x, y)) for _ in range(40)]

    pipeline.eval()  # dropout off, as in any module of Flax
    without = float(nnx.jit(loss_of)(pipeline, x, y))

print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step 40, {without:.3f} without dropout")
assert losses[-1] < losses[0] / 2
# Each microbatch of each step had a mask of its own.
assert (pipeline.layers.dropout.rngs.count[...] == 40 * MICROBATCHES).all()
