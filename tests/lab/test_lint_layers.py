"""No rule of the linter fires on the standard layers of Flax and Equinox, in half."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from lint_examples import array, half

from nnx_pipeline.lab.lint import Limits, lint

WIDTH, BATCH, LENGTH = 256, 4, 128
# A hundredth of the limit of the command, so that small arrays stand for large ones.
SMALL = Limits(large=1e4)
TEXT, IMAGE = half(BATCH, LENGTH, WIDTH), half(8, 32, 32, 32)
IDS = array(BATCH, LENGTH, dtype=jnp.int32)
DTYPES = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}


def check(loss: Callable[..., Any], params: Any, *inputs: Any) -> None:
    """Neither the function, nor its gradient, nor a step of an optimizer that is donated."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, *inputs: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, *inputs), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    with jax.numpy_dtype_promotion("standard"):
        assert lint(jax.jit(loss), params, *inputs, limits=SMALL) == []
        assert lint(jax.jit(jax.value_and_grad(loss)), params, *inputs, limits=SMALL) == []
        donated = jax.jit(step, donate_argnums=(0, 1))
        assert lint(donated, params, state, *inputs, limits=SMALL) == []


def squares(result: Any) -> jax.Array:
    return sum(jnp.mean(one.astype(jnp.float32) ** 2) for one in jax.tree.leaves(result))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = linen.LayerNorm(**DTYPES)(x)
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        hidden = linen.MultiHeadDotProductAttention(8, **DTYPES)(hidden, hidden, mask=mask)
        x = x + linen.Dropout(0.1, deterministic=False)(hidden)
        hidden = linen.gelu(linen.Dense(4 * WIDTH, **DTYPES)(linen.RMSNorm(**DTYPES)(x)))
        return x + linen.Dense(WIDTH, **DTYPES)(hidden)


LINEN: dict[str, tuple[Any, Any]] = {
    "Dense": (linen.Dense(WIDTH, **DTYPES), TEXT),
    "LayerNorm": (linen.LayerNorm(**DTYPES), TEXT),
    "RMSNorm": (linen.RMSNorm(**DTYPES), TEXT),
    "GroupNorm": (linen.GroupNorm(8, **DTYPES), IMAGE),
    "BatchNorm": (linen.BatchNorm(use_running_average=False, **DTYPES), IMAGE),
    "BatchNorm in use": (linen.BatchNorm(use_running_average=True, **DTYPES), IMAGE),
    "Embed": (linen.Embed(2048, WIDTH, **DTYPES), IDS),
    "Conv": (linen.Conv(64, (3, 3), **DTYPES), IMAGE),
    "block": (LinenBlock(), TEXT),
    "block with remat": (linen.remat(LinenBlock)(), TEXT),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name: str) -> None:
    layer, x = LINEN[name]
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with jax.numpy_dtype_promotion("standard"):
        variables = dict(jax.eval_shape(layer.init, keys, x))
    params = variables.pop("params")

    def loss(params: Any, others: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        given = {"params": params, **others}
        return squares(layer.apply(given, x, rngs={"dropout": key}, mutable=["batch_stats"])[0])

    check(loss, params, variables, jax.eval_shape(lambda: jax.random.key(0)), x)


def recurrent(cell: Any) -> Callable[..., Any]:
    def made(rngs: nnx.Rngs) -> nnx.RNN:
        start = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
        carry = {"carry_init": lambda key, shape, dtype: start(shape)}
        return nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs, **carry, **DTYPES))

    return made


attention = functools.partial(nnx.MultiHeadAttention, 8, WIDTH, decode=False, **DTYPES)
NNX: dict[str, tuple[Callable[..., Any], Any]] = {
    "Linear": (lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs, **DTYPES), TEXT),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs, **DTYPES), TEXT),
    "RMSNorm": (lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs, **DTYPES), TEXT),
    "BatchNorm": (lambda rngs: nnx.BatchNorm(32, rngs=rngs, **DTYPES), IMAGE),
    "Embed": (lambda rngs: nnx.Embed(2048, WIDTH, rngs=rngs, **DTYPES), IDS),
    "Conv": (lambda rngs: nnx.Conv(32, 64, (3, 3), rngs=rngs, **DTYPES), IMAGE),
    "attention": (lambda rngs: attention(rngs=rngs), TEXT),
    "LSTM": (recurrent(nnx.OptimizedLSTMCell), TEXT),
    "GRU": (recurrent(nnx.GRUCell), TEXT),
}


@pytest.mark.filterwarnings("ignore:carry_init is provided")
@pytest.mark.parametrize("name", NNX)
def test_nnx(name: str) -> None:
    make, x = NNX[name]

    def made() -> tuple[Any, Any]:
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, gradient = nnx.value_and_grad(lambda model: squares(model(x)))(model)
        optimizer.update(model, gradient)
        return loss

    with jax.numpy_dtype_promotion("standard"):
        model, optimizer = nnx.eval_shape(made)
        assert lint(nnx.jit(lambda model, x: model(x)), model, x, limits=SMALL) == []
        donated = nnx.jit(step, donate_argnums=(0, 1))
        assert lint(donated, model, optimizer, x, limits=SMALL) == []


KEY = jax.random.key(0)
EQUINOX: dict[str, tuple[Callable[[], Any], Any]] = {
    "Linear": (lambda: eqx.nn.Linear(WIDTH, WIDTH, key=KEY), TEXT),
    "LayerNorm": (lambda: eqx.nn.LayerNorm(WIDTH), TEXT),
    "RMSNorm": (lambda: eqx.nn.RMSNorm(WIDTH), TEXT),
    "Embedding": (lambda: eqx.nn.Embedding(2048, WIDTH, key=KEY), IDS),
    "MLP": (lambda: eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=KEY), TEXT),
    "LSTM": (lambda: eqx.nn.LSTMCell(WIDTH, WIDTH, key=KEY), TEXT),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name: str) -> None:
    """With the parameters in float32, which the loss casts."""
    make, x = EQUINOX[name]
    params, static = eqx.partition(eqx.filter_eval_shape(make), lambda leaf: hasattr(leaf, "shape"))

    def unrolled(layer: Any, row: jax.Array) -> Any:
        start = (jnp.zeros(WIDTH, jnp.bfloat16),) * 2
        return jax.lax.scan(lambda carry, x: (layer(x, carry), None), start, row)[0]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        layer = eqx.combine(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), static)
        over = functools.partial(unrolled, layer) if name == "LSTM" else jax.vmap(layer)
        return squares(jax.vmap(over)(x))

    check(loss, params, x)


def test_a_transformer_as_haiku_has_it() -> None:
    """Its mask is made by NumPy, its names are those of modules, and it multiplies by a choice."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    params = {f"block/~/{name}": {"w": array(*shape)} for name, shape in shapes.items()}
    params["block/~/down"] = {"w": array(4 * WIDTH, WIDTH)}
    params["block/~/norm"] = {"scale": array(WIDTH), "offset": array(WIDTH)}

    def norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        mean, spread = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return scale.astype(x.dtype) * (x - mean) * jax.lax.rsqrt(spread + 1e-5) + offset.astype(
            x.dtype
        )

    def loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        dense = lambda name, x: x @ weights[f"block/~/{name}"]["w"]  # noqa: E731
        hidden = dense("qkv", norm(x, **weights["block/~/norm"]))
        q, k, v = jnp.split(hidden.reshape(*x.shape[:2], 8, -1), 3, axis=-1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.2
        mask = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        x = x + dense("out", jnp.einsum("bhts,bshd->bthd", scores, v).reshape(x.shape))
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return squares(x + kept * dense("down", jax.nn.gelu(dense("up", x))) / 0.9)

    check(loss, params, jax.eval_shape(lambda: jax.random.key(0)), TEXT)
