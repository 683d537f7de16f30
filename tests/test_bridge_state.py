"""State and random numbers through the wrappers: handled or refused, never dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from linen_compat.bridge import to_linen, to_nnx
from linen_compat.bridge.paths import flatten
from nnx_pipeline import InputError
from tests.helpers import float_rows


class Counter(nnx.Module):
    """Keeps a running mean, drops out, and takes a note."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        if train:
            self.mean.set_value(0.5 * self.mean[...] + 0.5 * jnp.mean(x))
            self.largest = nnx.Intermediate((jnp.max(x),))
        return self.dropout(x, deterministic=not train)


class Stateful(nn.Module):
    """A running mean, dropout and a note."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(()))
        if train:
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x)
            self.sow("intermediates", "largest", jnp.max(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def x_of() -> jax.Array:
    return float_rows(2, 3, 16)


def assert_mean(found: jax.Array, share: float) -> None:
    """The mean, in which the 96 summands cancel: as far off as rounding each sum can bring it."""
    x = np.asarray(x_of(), np.float64)
    rounding = x.size * np.finfo(np.float32).eps * np.abs(x).mean()
    np.testing.assert_allclose(found, share * x.mean(), rtol=0, atol=share * rounding)


def test_state_is_written_where_it_is_mutable_and_refused_where_it_is_not() -> None:
    module = to_linen(Counter)
    variables = module.init({"params": jax.random.key(0)}, x_of())
    assert flatten(variables).keys() == {("batch_stats", "mean")}
    rngs = {"dropout": jax.random.key(1)}
    with pytest.raises(
        InputError, match=r"changed Counter\.mean .* 'batch_stats' is not mutable; "
    ):
        module.apply(variables, x_of(), train=True, rngs=rngs)
    out, changed = module.apply(
        variables, x_of(), train=True, rngs=rngs, mutable=["batch_stats", "intermediates"]
    )
    assert_mean(changed["batch_stats"]["mean"], 0.5)
    assert changed["intermediates"]["largest"] == (jnp.max(x_of()),)
    assert 0 < jnp.sum(out == 0) < out.size
    np.testing.assert_array_equal(module.apply(variables, x_of()), x_of())


def test_random_numbers_are_a_function_of_linens_key_and_missed_only_where_they_are_drawn() -> None:
    module = to_linen(Counter)
    variables = module.init(jax.random.key(0), x_of())

    def out(**rngs: jax.Array) -> jax.Array:
        return module.apply(variables, x_of(), train=True, rngs=rngs, mutable=["batch_stats"])[0]

    first, other = jax.random.key(1), jax.random.key(2)
    np.testing.assert_array_equal(out(dropout=first), out(dropout=first))
    np.testing.assert_array_equal(out(dropout=jax.random.PRNGKey(1)), out(dropout=first))
    assert not np.array_equal(out(dropout=first), out(dropout=other))
    with pytest.raises(InputError, match=r"drew random numbers from the stream 'dropout' and"):
        out()


def test_two_streams_of_one_name_draw_different_numbers() -> None:
    class Two(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.a(x), self.b(x)

    a, b = to_linen(Two).apply({}, x_of(), rngs={"dropout": jax.random.key(0)})
    assert not np.array_equal(a, b)


def test_state_is_updated_by_the_calls_that_change_it() -> None:
    rngs = nnx.Rngs(params=0, dropout=1)
    model = to_nnx(Stateful(), x_of(), rngs=rngs, collect=["intermediates"])
    assert isinstance(model.mean, nnx.BatchStat)
    np.testing.assert_array_equal(model(x_of()), x_of())
    assert model.mean[...] == 0

    @nnx.jit
    def step(model: nnx.Module, x: jax.Array) -> jax.Array:
        return model(x, train=True)

    first, second = step(model, x_of()), step(model, x_of())
    assert_mean(model.mean[...], 0.75)
    assert isinstance(model.largest, nnx.Intermediate)
    assert model.largest.get_value() == (jnp.max(x_of()),)
    assert not np.array_equal(first, second), "the stream of dropout goes on"


def test_random_numbers_without_a_stream_are_refused_and_can_be_given_to_a_call() -> None:
    model = to_nnx(Stateful(), x_of(), rngs=0)
    with pytest.raises(InputError, match=r"Stateful draws random numbers from a stream .*dropout"):
        model(x_of(), train=True)
    keys = {"dropout": jax.random.key(3)}
    out = model(x_of(), train=True, rngs=keys)
    np.testing.assert_array_equal(out, model(x_of(), train=True, rngs=keys))
    assert np.any(out != model(x_of(), train=True, rngs=nnx.Rngs(dropout=4)))
