"""State and random numbers through the wrappers: handled or refused, never dropped."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from linen_compat.bridge import to_linen, to_nnx
from linen_compat.bridge._paths import flatten
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


ADDED = {"reduce_fn": lambda a, b: a + b, "init_fn": lambda: jnp.float32(0)}


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        self.sow("losses", "one", jnp.float32(1), **ADDED)
        self.sow("losses", "of_x", jnp.sum(x))
        return nn.Dense(x.shape[-1])(x), None


COMPILED = nn.jit(Inner)


class Sowing(nn.Module):
    """Sows through a transform, beside state in the same collection and a perturbation."""

    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.variable("losses", "count", lambda: jnp.zeros(())).value += 1
        axes, keys = {"params": 0, "losses": 0}, {"params": True}
        inner = {
            "plain": Inner,
            "jit": COMPILED,
            "remat": nn.remat(Inner),
            "scan": nn.scan(Inner, variable_axes=axes, split_rngs=keys, length=3),
            "vmap": nn.vmap(Inner, variable_axes=axes, split_rngs=keys),
        }[self.kind]
        return self.perturb("change", inner(name="inner")(x)[0])


@pytest.mark.parametrize("kind", ["plain", "jit", "remat", "scan", "vmap"])
def test_what_is_sown_is_of_one_call_and_the_call_is_traced_once(kind: str) -> None:
    """Against `apply` of Linen without the collection, which is how Linen begins it anew."""
    x = x_of()
    module = Sowing(kind)
    made = module.init(jax.random.key(0), x)
    wanted = module.apply({"params": made["params"]}, x, mutable=["losses"])[1]["losses"]["inner"]
    for given in ({"rngs": jax.random.key(0)}, {"variables": made}):
        model = to_nnx(module, x, **given)
        traced = []

        @nnx.jit
        def call(model: nnx.Module, x: jax.Array, traced: list[int] = traced) -> jax.Array:
            traced.append(1)
            return model(x)

        start = float(model.count[...])
        for turn in range(1, 4):
            call(model, x)
            assert model.count[...] == start + turn, "state goes on"
            np.testing.assert_array_equal(model.inner.one[...], wanted["one"])
            (of_x,) = model.inner.of_x.get_value()
            np.testing.assert_allclose(of_x, wanted["of_x"][0], rtol=1e-5, atol=1e-5)
        assert len(traced) == 1
        assert isinstance(model.change, nnx.Perturbation), "what a call reads is not sown"


def test_given_variables_may_lack_what_is_sown() -> None:
    variables = Inner().init(jax.random.key(0), x_of())
    model = to_nnx(Inner(), x_of(), variables={"params": variables["params"]})
    assert model.one[...] == 0
    model(x_of())
    assert model.one[...] == 1
    with pytest.raises(InputError, match=r"losses/two is not a variable of Inner"):
        to_nnx(Inner(), x_of(), variables={**variables, "losses": {"two": 1.0}})


class SowsForChild(nn.Module):
    """A parent that sows for its child before it calls it, and by keywords after that."""

    def setup(self) -> None:
        self.child = nn.Dense(16)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.child.sow("losses", "before", jnp.float32(1), **ADDED)
        y = self.child(x)
        self.child.sow(col="losses", name="after", value=jnp.float32(2), **ADDED)
        return y


def test_what_a_parent_sows_for_a_child_is_of_one_call() -> None:
    params = {"params": SowsForChild().init(jax.random.key(0), x_of())["params"]}
    for given in ({"rngs": 0}, {"variables": params}):
        model = to_nnx(SowsForChild(), x_of(), **given)
        for _ in range(3):
            model(x_of())
            assert (model.child.before[...], model.child.after[...]) == (1, 2)


def test_sowing_in_several_threads() -> None:
    """While one thread makes a wrapper others do too, and others sow what is no part of it."""
    plain, told, ended = nn.Module.sow, threading.Event(), threading.Event()

    class Waiting(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            told.set()
            assert ended.wait(60)
            self.variable("losses", "one", lambda: jnp.float32(5))  # state, as `Inner` sows it
            self.sow("losses", "own", jnp.float32(1), **ADDED)
            return x

    def beside() -> None:
        assert told.wait(60)
        Inner().init(jax.random.key(0), x_of())
        ended.set()

    with ThreadPoolExecutor(4) as threads:
        other = threads.submit(beside)
        first = threads.submit(to_nnx, Waiting(), x_of(), rngs=0)
        assert told.wait(60)
        more = [threads.submit(to_nnx, SowsForChild(), x_of(), rngs=0) for _ in range(2)]
        other.result(60)
        model, *models = (one.result(60) for one in (first, *more))
    for _ in range(2):
        model(x_of())
        assert (model.one[...], model.own[...]) == (5, 1)
        for one in models:
            one(x_of())
            assert one.child.before[...] == 1
    assert model.linen_sown == {("losses", "own")}
    assert nn.Module.sow is plain


def test_a_method_that_sows_itself() -> None:
    def both(module: Inner, x: jax.Array) -> jax.Array:
        module.sow("losses", "outer", jnp.float32(1), **ADDED)
        return module(x)

    model = to_nnx(Inner(), x_of(), rngs=0, method=both)
    for _ in range(2):
        model(x_of(), method=both)
        assert model.outer[...] == 1


def test_state_of_nnx_within_linen_is_not_taken_for_sown() -> None:
    """Flax's own wrapper writes its state where the collection is mutable, as `sow` does."""
    model = to_nnx(nnx.bridge.to_linen(nnx.BatchNorm, 16, momentum=0.5), x_of(), rngs=0)
    start = np.asarray(model.mean[...])
    for turn in (1, 2):
        model(x_of())
        part = 0.5**turn
        wanted = part * start + (1 - part) * np.mean(np.asarray(x_of(), np.float64), axis=(0, 1))
        np.testing.assert_allclose(model.mean[...], wanted, rtol=1e-5, atol=1e-6)


class Trained(nn.Module):
    """Dropout and running statistics, which its argument switches off."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class Around(nnx.Module):
    def __init__(self, linen: nn.Module) -> None:
        self.inner = to_nnx(linen, x_of(), rngs=nnx.Rngs(params=0, dropout=1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, **options: bool) -> jax.Array:
        return self.dropout(self.inner(x, **options))


def test_eval_is_never_without_effect() -> None:
    """A call that still draws or changes statistics is refused, and the cures of the error work."""
    model = Around(Trained())
    model.eval()
    before = np.asarray(model.inner.BatchNorm_0.mean[...])
    with pytest.raises(InputError, match=r"Trained changes .*; call it .*train=False .* train\(\)"):
        model(x_of())
    once = model(x_of(), train=False)
    np.testing.assert_array_equal(once, model(x_of(), train=False))
    np.testing.assert_array_equal(model.inner.BatchNorm_0.mean[...], before)
    model.train()
    assert np.any(model(x_of()) != model(x_of()))
    assert np.any(model.inner.BatchNorm_0.mean[...] != before)

    drops = Around(nn.Dropout(0.5, deterministic=False))
    drops.eval()
    for seen in (drops, nnx.view(Around(drops.inner.linen_module), deterministic=True)):
        with pytest.raises(InputError, match=r"Dropout draws random numbers after eval\(\)"):
            seen(x_of())
    inside = Around(to_linen(nnx.Dropout, 0.5))
    assert np.any(inside(x_of()) != inside(x_of()))
    inside.eval()
    with pytest.raises(InputError, match=r"draws .* after eval\(\) .*deterministic=True") as caught:
        inside(x_of())
    assert "rngs=" not in str(caught.value)
    np.testing.assert_array_equal(inside(x_of(), deterministic=True), x_of())
    plain = Around(nn.Dense(16))
    plain.eval()
    np.testing.assert_array_equal(plain(x_of()), plain.inner(x_of()))
