"""Small training steps whose inputs take a number, for benchmarks/fit.py."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

WIDTH = 512
Weights = dict[str, jax.Array]


def shaped(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def updated(weights: Weights, gradients: Weights) -> Weights:
    return jax.tree.map(lambda weight, gradient: weight - 1e-3 * gradient, weights, gradients)


def mlp_step(weights: Weights, x: jax.Array) -> Weights:
    """Memory grows with the number of rows."""

    def loss(weights: Weights) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2)

    return updated(weights, jax.grad(loss)(weights))


def mlp_inputs(batch: int = 64) -> tuple[object, ...]:
    """Rows of 999 make no tile whole."""
    weights = shaped(up=(WIDTH, 4 * WIDTH), down=(4 * WIDTH, WIDTH))
    return weights, jax.ShapeDtypeStruct((batch * 999, WIDTH), "float32")


def attention_step(weights: Weights, x: jax.Array) -> Weights:
    """Memory grows with the square of the sequence: all scores of 64 heads are there."""

    def loss(weights: Weights) -> jax.Array:
        queries, keys = (x @ weights[name] for name in ("query", "key"))
        shares = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", queries, keys))
        return jnp.mean(jnp.einsum("hqk,hkd->hqd", shares, x) ** 2)

    return updated(weights, jax.grad(loss)(weights))


def attention_inputs(sequence: int = 1024) -> tuple[object, ...]:
    return shaped(query=(128, 128), key=(128, 128)), jax.ShapeDtypeStruct(
        (64, sequence, 128), "float32"
    )


def scores(x: jax.Array) -> jax.Array:
    """Two products, for a scan of all values: memory grows with the square of the rows."""
    return jnp.tanh(x @ x.T) @ x


def scores_inputs(rows: int = 1024) -> tuple[object, ...]:
    return (jax.ShapeDtypeStruct((rows, 256), "bfloat16"),)


def mlp(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    """Two products and a nonlinearity, for a scan of all values: memory grows with the rows."""
    return jax.nn.gelu(x @ up) @ down


def mlp_scan_inputs(batch: int = 64) -> tuple[object, ...]:
    up, down, x = ((256, 1024), (1024, 256), (batch * 999, 256))
    return tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in (up, down, x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)


def nnx_inputs(batch: int = 64, layers: int = 2) -> tuple[object, ...]:
    def made() -> tuple[object, ...]:
        model = Model(layers, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(made)
    return model, optimizer, jax.ShapeDtypeStruct((batch, 1000, WIDTH), "float32")
