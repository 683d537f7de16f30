"""Training steps with a loop over layers, in the styles of several frameworks, and their cures."""

import functools
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

LAYERS, ROWS, SIZE, WIDE = 3, 64, 16, 48
X = jax.ShapeDtypeStruct((ROWS, SIZE), "float32")
ADAM = optax.adam(1e-3)
NONE, NOTHING = (
    jax.checkpoint_policies.everything_saveable,
    jax.checkpoint_policies.nothing_saveable,
)


# Plain JAX.
def plain_made() -> Any:
    w = 0.1 * jax.random.normal(jax.random.key(0), (2, LAYERS, SIZE, WIDE))
    parameters = {"up": w[0], "down": w[1].swapaxes(1, 2)}
    return parameters, ADAM.init(parameters), jnp.ones(X.shape)


def plain_layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"], None


def plain_step(parameters: Any, state: Any, x: Any, layer: Any = plain_layer) -> Any:
    def loss(parameters: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, parameters)[0] ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    updates, state = ADAM.update(gradients, state)
    return optax.apply_updates(parameters, updates), state, value


def plain_cured(parameters: Any, state: Any, x: Any) -> Any:
    layer = jax.checkpoint(plain_layer, prevent_cse=False)
    return plain_step(parameters, state, x, layer)


# Plain JAX whose layer is decorated where it is defined, with a policy that is of no use.
def named_layer(x: Any, w: Any) -> Any:
    hidden = checkpoint_name(jnp.sin(x @ w["up"]), "hidden")
    return x + jnp.tanh(hidden) @ w["down"], None


decorated_layer = jax.checkpoint(named_layer, prevent_cse=False, policy=NONE)
decorated_step = functools.partial(plain_step, layer=decorated_layer)
decorated_cured = functools.partial(
    plain_step, layer=jax.checkpoint(named_layer, prevent_cse=False, policy=NOTHING)
)


# NNX.
class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(SIZE, WIDE, rngs=rngs), nnx.Linear(WIDE, SIZE, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jnp.tanh(jnp.sin(self.up(x))))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda key: Block(nnx.Rngs(key)), in_axes=0, out_axes=0)
        self.layers = make(jax.random.split(rngs.params(), LAYERS))

    def __call__(self, x: Any) -> Any:
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.layers, x)


def nnx_made() -> Any:
    model = Stack(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), jnp.ones(X.shape)


def nnx_plain(model: Any, optimizer: Any, x: Any) -> Any:
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return value


nnx_step = nnx.jit(nnx_plain)
nnx_donating = nnx.jit(nnx_plain, donate_argnums=(0, 1))


# Equinox.
class Layer(equinox.Module):
    up: equinox.nn.Linear
    down: equinox.nn.Linear

    def __init__(self, key: Any) -> None:
        self.up = equinox.nn.Linear(SIZE, WIDE, key=key)
        self.down = equinox.nn.Linear(WIDE, SIZE, key=key)

    def __call__(self, x: Any) -> Any:
        return x + jax.vmap(self.down)(jnp.tanh(jnp.sin(jax.vmap(self.up)(x))))


def equinox_made() -> Any:
    layers = equinox.filter_vmap(Layer)(jax.random.split(jax.random.key(0), LAYERS))
    return layers, ADAM.init(equinox.filter(layers, equinox.is_inexact_array)), jnp.ones(X.shape)


def equinox_plain(layers: Any, state: Any, x: Any) -> Any:
    def loss(layers: Any) -> Any:
        arrays, static = equinox.partition(layers, equinox.is_array)
        body = lambda x, own: (equinox.combine(own, static)(x), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, x, arrays)[0] ** 2)

    value, gradients = equinox.filter_value_and_grad(loss)(layers)
    updates, state = ADAM.update(gradients, state, layers)
    return equinox.apply_updates(layers, updates), state, value


equinox_step = equinox.filter_jit(equinox_plain)
equinox_donating = equinox.filter_jit(equinox_plain, donate="all")


# Linen.
class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + nn.Dense(SIZE)(jnp.tanh(jnp.sin(nn.Dense(WIDE)(x)))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Dense, length=LAYERS, **axes)()(x, None)[0]


def linen_made() -> Any:
    model = Scanned()
    parameters = model.init(jax.random.key(0), jnp.ones(X.shape))["params"]
    state = TrainState.create(apply_fn=model.apply, params=parameters, tx=ADAM)
    # Of Python's numbers, as the step is one, a jit makes arguments.
    return state.replace(step=jnp.zeros((), "int32")), jnp.ones(X.shape)


@jax.jit
def linen_step(state: TrainState, x: Any) -> Any:
    def loss(parameters: Any) -> Any:
        return jnp.mean(state.apply_fn({"params": parameters}, x) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def plain_inputs() -> Any:
    return jax.eval_shape(plain_made)
