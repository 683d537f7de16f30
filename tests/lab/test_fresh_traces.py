"""Two measurements in one process with something changed between them: each says what is there now.

JAX finds a trace again by the function alone, whatever the function reads besides its arguments.
"""

import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lint_examples import SIZE, array, half

from nnx_pipeline import lab
from nnx_pipeline.lab.lint import lint

ROWS = 8
X = jax.ShapeDtypeStruct((ROWS, ROWS), "float32")
Function = Callable[[jax.Array], jax.Array]
Change = Callable[[int], None]


def products(x: jax.Array, turns: int) -> jax.Array:
    for _ in range(turns):
        x = jnp.tanh(x @ x)
    return x


def by_flag() -> tuple[Function, Change]:
    settings = types.SimpleNamespace(turns=1)
    return lambda x: products(x, settings.turns), lambda turns: vars(settings).update(turns=turns)


def by_helper() -> tuple[Function, Change]:
    module = types.ModuleType("helpers_of_somebody")
    module.helper = lambda x: products(x, 1)
    return lambda x: module.helper(x), lambda turns: setattr(
        module, "helper", lambda x: products(x, turns)
    )


def by_jitted_helper() -> tuple[Function, Change]:
    """The helper that is changed is called by one that JAX has a trace of, too."""
    inner, change = by_helper()
    return jax.jit(inner), change


def by_closure() -> tuple[Function, Change]:
    turns = 1

    def change(new: int) -> None:
        nonlocal turns
        turns = new

    return lambda x: products(x, turns), change


def by_default() -> tuple[Function, Change]:
    def function(x: jax.Array, turns: int = 1) -> jax.Array:
        return products(x, turns)

    return function, lambda turns: setattr(function, "__defaults__", (turns,))


def by_class() -> tuple[Function, Change]:
    class Layer:
        turns = 1

        def __call__(self, x: jax.Array) -> jax.Array:
            return products(x, self.turns)

    layer = Layer()
    return lambda x: layer(x), lambda turns: setattr(Layer, "turns", turns)


def by_module() -> tuple[Function, Change]:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.turns = 1

        def __call__(self, x: jax.Array) -> jax.Array:
            return products(x, self.turns)

    layer = Layer()
    return lambda x: layer(x), lambda turns: setattr(layer, "turns", turns)


def scanned(function: Function) -> Function:
    def turn(x: jax.Array, _: None) -> Any:
        return function(x), None

    return lambda x: jax.lax.scan(turn, x, length=1)[0]


def with_own_derivative(function: Function) -> Function:
    made = jax.custom_vjp(lambda x: function(x))
    made.defvjp(lambda x: (function(x), None), lambda _, given: (given,))
    return made


SOURCES = (by_flag, by_helper, by_jitted_helper, by_closure, by_default, by_class, by_module)
WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda function: function,
    "jit": jax.jit,
    "nnx.jit": nnx.jit,
    "calls a jit": lambda function: lambda x, inner=jax.jit(function): inner(x) + 1,
    "jit of a jit": lambda function: jax.jit(jax.jit(function)),
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "custom_vjp": with_own_derivative,
    "vmap": lambda function: lambda x, each=jax.vmap(function): each(x[None])[0],
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_change_between_two_measurements_counts(source: Any, wrapper: str) -> None:
    function, change = source()
    measured = WRAPPERS[wrapper](function)
    for turns in (1, 3, 2):
        change(turns)
        assert lab.measure(measured, X).flops == turns * 2 * ROWS**3


@pytest.mark.parametrize("wrapper", ["plain", "jit", "calls a jit"])
def test_a_change_between_two_lints_counts(wrapper: str) -> None:
    settings = types.SimpleNamespace(dtype="bfloat16")

    def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.tanh(x * scale.astype(settings.dtype))

    inner = jax.jit(scaled)
    linted = {"plain": scaled, "jit": inner, "calls a jit": lambda x, scale: inner(x, scale)}
    given = (half(512, SIZE), array(SIZE))
    with jax.numpy_dtype_promotion("standard"):
        for dtype, count in (("bfloat16", 0), ("float32", 1), ("bfloat16", 0)):
            settings.dtype = dtype
            assert len(lint(linted[wrapper], *given)) == count


def test_the_arms_of_compare_are_traced_afresh() -> None:
    function, change = by_helper()
    figures = []
    for turns in (1, 2):
        change(turns)
        outcome = lab.compare(function, function, X)
        assert outcome.note == "both arms compile to the same program"
        figures.append((outcome.a.flops, outcome.b.flops))
    assert figures == [(turns * 2 * ROWS**3,) * 2 for turns in (1, 2)]


def test_what_a_process_has_traced_itself_stays() -> None:
    """A measurement costs others nothing: their functions are not traced again."""
    traces = itertools.count()

    @jax.jit
    def own(x: jax.Array) -> jax.Array:
        next(traces)
        return x + 1

    own(1.0)
    lab.measure(own, X)
    own(1.0)
    assert next(traces) == 2
