"""Programs as their authors write them in other projects, each with what it takes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

ROWS, SIZE = 16, 32
X = jax.ShapeDtypeStruct((ROWS, SIZE), "float32")
ADAM = optax.adam(1e-3)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), ADAM)


# Plain JAX on a mesh with names of its own.
@jax.jit
def by_hand_sharded(x: Any, w1: Any, w2: Any) -> Any:
    def body(x: Any, w1: Any, w2: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x @ w1) @ w2, "tp")

    specs = (P("dp"), P(None, "tp"), P("tp", None))
    mlp = jax.shard_map(body, in_specs=specs, out_specs=P("dp"))
    gradient = jax.grad(lambda w: jnp.mean(mlp(x, w, w2) ** 2))(w1)
    return w1 - 0.1 * gradient


# Equinox: a module has functions among its leaves, also where it is returned.
def equinox_made() -> Any:
    model = equinox.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0))
    return model, ADAM.init(equinox.filter(model, equinox.is_inexact_array))


def equinox_step(model: Any, state: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    value, gradients = equinox.filter_value_and_grad(loss)(model)
    updates, state = ADAM.update(gradients, state, model)
    return equinox.apply_updates(model, updates), state, value


equinox_donating = equinox.filter_jit(equinox_step, donate="all")


def equinox_abstract() -> Any:
    return *equinox.filter_eval_shape(equinox_made), X


def equinox_concrete() -> Any:
    return *equinox_made(), jnp.ones(X.shape)


# Linen: a TrainState, with its batch by name.
class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(SIZE)(nn.relu(nn.Dense(SIZE)(x)))


def linen_made() -> TrainState:
    parameters = Dense().init(jax.random.key(0), jnp.ones((1, SIZE)))["params"]
    return TrainState.create(apply_fn=Dense().apply, params=parameters, tx=optax.adamw(1e-3))


@functools.partial(jax.jit, donate_argnames="state")
def linen_step(state: TrainState, batch: Any) -> TrainState:
    def loss(parameters: Any) -> Any:
        return jnp.mean(state.apply_fn({"params": parameters}, batch["x"]) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def linen_in_order() -> Any:
    return jax.eval_shape(linen_made), {"x": X}


def linen_by_name() -> Any:
    return {"state": jax.eval_shape(linen_made), "batch": {"x": X}}


def linen_both() -> Any:
    return (jax.eval_shape(linen_made),), {"batch": {"x": X}}


# NNX, taken apart and put together.
class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(nnx.relu(self.linear(x)))


def nnx_step(definition: Any, state: Any, x: Any) -> Any:
    model = nnx.merge(definition, state)
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    lower = jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), gradients)
    nnx.update(model, lower)
    return nnx.state(model), value


nnx_jitted = jax.jit(nnx_step, static_argnums=0, donate_argnums=1)


def nnx_inputs() -> Any:
    return *nnx.split(nnx.eval_shape(lambda: Layers(nnx.Rngs(0)))), X


# As with Haiku: nested dicts of parameters, a state beside them, a key, NumPy for the batch.
class Training(NamedTuple):
    parameters: Any
    state: Any
    optimizer: Any
    key: Any


def haiku_made(key: Any) -> Training:
    parameters = {"linear": {"w": jax.random.normal(key, (SIZE, SIZE)), "b": jnp.zeros(SIZE)}}
    return Training(parameters, {"calls": jnp.zeros((), "int32")}, CHAIN.init(parameters), key)


def haiku_step(training: Training, batch: Any) -> Training:
    key, mask_key = jax.random.split(training.key)

    def loss(parameters: Any) -> Any:
        y = batch["x"] @ parameters["linear"]["w"] + parameters["linear"]["b"]
        return jnp.mean(jnp.where(jax.random.bernoulli(mask_key, 0.9, y.shape), y, 0.0) ** 2)

    gradients = jax.grad(loss)(training.parameters)
    updates, optimizer = CHAIN.update(gradients, training.optimizer, training.parameters)
    parameters = optax.apply_updates(training.parameters, updates)
    return Training(parameters, {"calls": training.state["calls"] + 1}, optimizer, key)


def haiku_inputs() -> Any:
    return jax.eval_shape(haiku_made, jax.random.key(0)), {"x": np.ones(X.shape, "float32")}


def haiku_raw() -> Any:
    return jax.eval_shape(haiku_made, jax.random.PRNGKey(0)), {"x": np.ones(X.shape, "float32")}


# A plain tuple and a dict, which are two arguments in order.
def optax_step(state: Any, parameters: Any) -> Any:
    updates, state = CHAIN.update(jax.tree.map(jnp.sin, parameters), state, parameters)
    return state, optax.apply_updates(parameters, updates)


def optax_inputs() -> Any:
    parameters = {"w": X, "b": jax.ShapeDtypeStruct((SIZE,), "float32")}
    return jax.eval_shape(CHAIN.init, parameters), parameters


# Keyword-only arguments, some of which decide what is computed.
def attention(q: Any, k: Any, *, bias: Any = None, heads: int, causal: bool = False) -> Any:
    q, k = (one.reshape(ROWS, heads, SIZE // heads) for one in (q, k))
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    if bias is not None:
        scores += bias
    return jnp.tril(scores) if causal else scores


attention_jitted = jax.jit(attention, static_argnames=("heads", "causal"))


def scaled(x: Any, *, by: Any) -> Any:
    return x * by


scaled_jitted = jax.jit(scaled)


# A configuration that is no pytree, with classes and functions.
FLOAT = np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Settings:
    layers: int = 3
    dtype: Any = np.float32
    param_dtype: Any = FLOAT
    activation: Any = jnp.tanh


def configured(settings: Settings, weights: Any, x: Any) -> Any:
    for layer in range(settings.layers):
        x = settings.activation(x.astype(settings.dtype) @ weights[layer])
    return x


def configured_inputs() -> Any:
    return Settings(), [jax.ShapeDtypeStruct((SIZE, SIZE), "float32")] * 3, X


# A key of random numbers.
def sampled(key: Any, x: Any) -> Any:
    key, own = jax.random.split(key)
    return key, x + jax.random.normal(own, x.shape, x.dtype)
