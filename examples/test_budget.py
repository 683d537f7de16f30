"""A budget for the memory of a training step, held by pytest with the plugin of this package.

    pytest test_budget.py --update-memory-budgets   once; commit the memory-budgets.toml it writes
    pytest test_budget.py                           in CI; fails when the step needs more memory

The step is compiled and never run. With the extra `tpu` the platform may be `tpu:v5p:2x2x1`.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

WIDTH, LAYERS, BATCH = 512, 8, 128


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


# Without donation the new weights and moments are beside the old ones, and both tests fail.
@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def make():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def measured(compile_memory):
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")  # shapes are enough, here and of the model
    return compile_memory(train_step, (*nnx.eval_shape(make), x, x), platform="cpu")


def test_the_step_stays_within_its_budget(compile_memory):
    assert measured(compile_memory).within_budget()


def test_the_state_is_there_once_and_the_gradients_too(compile_memory):
    weights, activations = 4 * LAYERS * WIDTH**2, 4 * LAYERS * BATCH * WIDTH  # bytes
    step = measured(compile_memory)
    step.assert_at_most(account_bytes=int(4.2 * weights) + 3 * activations)
