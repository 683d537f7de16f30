"""Training steps that change NNX modules in place, measured whole."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import optax_promotion
from lint_examples import SIZE, one_by_one

from nnx_pipeline import InputError, lab
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.lint import lint

ROWS, WIDTH = 16, 8
X = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")


class Model(nnx.Module):
    """Two layers of one weight or of two, with a variable that no step changes."""

    def __init__(self, rngs: nnx.Rngs, *, shared: bool = False) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.frozen = nnx.BatchStat(jnp.ones((WIDTH, WIDTH)))
        if shared:
            self.second.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)) @ self.frozen[...])


def made(shared: bool = False) -> tuple[Model, nnx.Optimizer]:
    def make() -> tuple[Model, nnx.Optimizer]:
        model = Model(nnx.Rngs(0), shared=shared)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    with optax_promotion():
        return nnx.eval_shape(make)


def loss_of(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def by_hand(model: Model, optimizer: nnx.Optimizer, **options: Any) -> tuple[Any, ...]:
    """The step as a function of states, which returns those that it changes, and its arguments."""
    graph, *states = nnx.split((model, optimizer), nnx.BatchStat, ...)

    @functools.partial(jax.jit, **options)
    def function(kept: nnx.State, state: nnx.State, x: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, kept, state)
        loss = step(model, optimizer, x)
        return loss, nnx.state((model, optimizer), nnx.Not(nnx.BatchStat))

    return function, *states


def figures(result: Measurement) -> dict[str, Any]:
    memory = result.memory
    names = ("argument", "output", "alias", "temp")
    return {
        "flops": result.flops,
        **{name: getattr(memory, f"{name}_bytes") for name in names},
    }


@pytest.fixture(autouse=True)
def promotion() -> Any:
    with optax_promotion():
        yield


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "tree"])
def test_a_plain_step_is_measured_with_its_updates(graph: bool) -> None:
    """As a step by hand that returns the states it changes, without those that it does not."""
    with nnx.set_graph_mode(graph):
        model, optimizer = made()
        result = lab.measure(step, model, optimizer, X)
        function, *states = by_hand(model, optimizer)
        expected = lab.measure(function, *states, X)
    assert figures(result) == figures(expected)
    # Three forward; backward two for `second`, one through `frozen`, one for the first weight.
    assert result.flops == 7 * 2 * ROWS * WIDTH**2
    kept = 4 * WIDTH**2
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((model, optimizer)))
    assert result.memory.argument_bytes == whole + 4 * X.size
    assert result.memory.output_bytes >= whole - kept
    assert result.memory.output_bytes < whole
    assert result.memory.alias_bytes == 0


def test_weights_that_modules_share_are_one() -> None:
    model, optimizer = made(shared=True)
    result = lab.measure(step, model, optimizer, X)
    function, *states = by_hand(model, optimizer)
    assert figures(result) == figures(lab.measure(function, *states, X))
    apart = lab.measure(step, *made(), X)
    saved = apart.memory.argument_bytes - result.memory.argument_bytes
    assert saved == 3 * 4 * WIDTH**2  # the weight and its two moments


@pytest.mark.parametrize("updates", [True, False], ids=["all state", "changed state"])
def test_what_nnx_jit_made_is_measured_as_it_jits(updates: bool) -> None:
    """With the donation that it declares; a donated module comes out whole."""
    model, optimizer = made()
    options = {"graph_updates": updates}
    plain = lab.measure(nnx.jit(step, **options), model, optimizer, X)
    donating = lab.measure(nnx.jit(step, donate_argnums=(0, 1), **options), model, optimizer, X)
    assert plain.flops == donating.flops == lab.measure(step, model, optimizer, X).flops
    assert plain.memory.alias_bytes == 0
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((model, optimizer)))
    assert donating.memory.alias_bytes == whole
    assert plain.attribution is not None
    if not updates:
        assert figures(plain) == figures(lab.measure(step, model, optimizer, X))


def test_a_jitted_method_and_a_partial_are_taken_apart() -> None:
    class Trained(Model):
        @nnx.jit
        def train(self, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
            return step(self, optimizer, x)

    def make() -> Any:
        model = Trained(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    expected = figures(lab.measure(nnx.jit(step), *made(), X))
    assert figures(lab.measure(model.train, optimizer, X)) == expected
    bound = functools.partial(nnx.jit(step), model, x=X)
    assert figures(lab.measure(bound, optimizer)) == expected


def test_a_module_that_is_returned_too_is_one_result() -> None:
    def returning(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
        loss = step(model, optimizer, x)
        return loss, model, optimizer

    model, optimizer = made()
    result, plain = (lab.measure(one, model, optimizer, X) for one in (returning, step))
    extra = result.memory.output_bytes - plain.memory.output_bytes
    assert 4 * WIDTH**2 <= extra < 4 * WIDTH**2 + 64  # what no step changes, returned all the same


def test_new_variables_of_a_module_are_results() -> None:
    def sowing(model: Model, x: jax.Array) -> jax.Array:
        model.kept = nnx.Intermediate(jnp.tanh(x))
        return jnp.sum(model(x))

    result = lab.measure(sowing, made()[0], X)
    assert 4 * X.size < result.memory.output_bytes < 4 * X.size + 64


def test_what_jax_jit_drops_is_refused() -> None:
    model, optimizer = made()
    message = "step changes .* in place, which jax.jit drops; use nnx.jit, or return"
    with pytest.raises(InputError, match=message):
        lab.measure(jax.jit(step), model, optimizer, X)
    with pytest.raises(InputError, match=message):
        lint(jax.jit(step), model, optimizer, X)


def jitted_inside(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    return jax.jit(step)(model, optimizer, x)


def checkpointed(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    return jax.checkpoint(step)(model, optimizer, x)


def by_one_weight(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    @jax.jit
    def inside(model: Model, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        model.first.kernel[...] -= gradients.first.kernel[...]
        return loss

    return inside(model, x)


def by_update(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    @jax.jit
    def inside(model: Model, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        weights = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda weight, grad: weight - grad, weights, gradients))
        return loss

    return inside(model, x)


def inside_a_scan(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def body(model: Model, x: jax.Array) -> Any:
        return model, by_one_weight(model, optimizer, x)

    axes = (nnx.Carry, 0)
    return nnx.scan(body, in_axes=axes, out_axes=axes)(model, x[None])[1].sum()


@pytest.mark.parametrize(
    "function",
    [
        jitted_inside,
        lambda *arguments: jitted_inside(*arguments),
        jax.jit(jitted_inside),
        checkpointed,
        nnx.jit(jitted_inside),
        by_one_weight,
        by_update,
        inside_a_scan,
    ],
    ids=[
        *("jit", "lambda", "jit of jit", "checkpoint", "nnx.jit of jit", "by hand", "by update"),
        "in a scan of NNX",
    ],
)
def test_what_a_transformation_inside_drops_is_refused(function: Any) -> None:
    """Today it would be measured as its forward pass, without the moments."""
    place = r"\[0\].first.kernel.value"
    changed = place if function in (by_one_weight, inside_a_scan) else rf"\[0\].*{place}, .*"
    message = rf"changes {changed} of its arguments in place inside of a transformation such as"
    for tool in (lab.measure, lint):
        with pytest.raises(InputError, match=message):
            tool(function, *made(), X)
    with pytest.raises(InputError, match=message):
        lab.compare(step, function, *made(), X)


def test_what_a_function_inside_gives_out_is_not_dropped() -> None:
    """Modules or their states, also those that the function around it does not keep."""

    @jax.jit
    def inside(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> Any:
        loss = step(model, optimizer, x)
        return loss, nnx.state(model), nnx.state(optimizer)

    def kept(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, *states = inside(model, optimizer, x)
        nnx.update(model, states[0])
        nnx.update(optimizer, states[1])
        return loss

    def looked_ahead(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        nnx.update(model, inside(model, optimizer, x)[1])
        return loss_of(model, x)

    def unchanged(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        return jax.jit(lambda model, x: model(x))(model, x)

    products = {function: lab.measure(function, *made(), X).flops for function in (kept, unchanged)}
    assert products[kept] == lab.measure(step, *made(), X).flops
    assert products[unchanged] == 3 * 2 * ROWS * WIDTH**2
    assert lint(looked_ahead, *made(), X) == []


def test_marks_on_variables_change_nothing_that_the_function_sees() -> None:
    """Trees of marked and of new variables stay equal; Flax's methods are as before afterwards.

    `__setattr__` and `from_metadata` are all of Flax that `nnx_copies` takes the place of.
    """
    before = nnx.Variable.__setattr__, nnx.Variable.from_metadata
    model, optimizer = made()
    graph = nnx.graphdef(model)
    held = model.first.kernel.get_metadata()

    def mixed(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        assert nnx.Variable.__setattr__ is not before[0]
        assert nnx.graphdef(model) == graph
        new = nnx.Param(jnp.zeros((WIDTH, WIDTH)), **held)
        added = jax.tree.map(jnp.add, model.first.kernel, new)
        turned, _ = jax.lax.scan(lambda carry, _: (new, None), added, length=2)
        return x @ turned[...]

    lab.measure(mixed, model, optimizer, X)
    assert (nnx.Variable.__setattr__, nnx.Variable.from_metadata) == before
    assert type(model.first.kernel.get_metadata("eager_sharding")) is bool


def test_two_threads_measure_at_once() -> None:
    """Neither sees the other's modules, and Flax is afterwards as it was."""
    before = nnx.Variable.__setattr__, nnx.Variable.from_metadata
    both = threading.Barrier(2)

    def waiting(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        both.wait(60)
        loss = step(model, optimizer, x)
        both.wait(60)
        return loss

    def measured(_: int) -> int:
        with optax_promotion():
            return lab.measure(waiting, *made(), X).memory.output_bytes

    with ThreadPoolExecutor(2) as threads:
        found = set(threads.map(measured, range(2)))
    assert found == {lab.measure(step, *made(), X).memory.output_bytes}
    assert (nnx.Variable.__setattr__, nnx.Variable.from_metadata) == before
    with pytest.raises(InputError, match="inside of a transformation"):
        lab.measure(jitted_inside, *made(), X)


def test_a_name_that_begins_as_another_one_is_not_changed_with_it() -> None:
    class Heads(nnx.Module):
        def __init__(self) -> None:
            for name in ("w", "w_q", "w_k"):
                setattr(self, name, nnx.Param(jnp.ones((WIDTH, WIDTH))))

    def scaled(heads: Heads, x: jax.Array) -> jax.Array:
        @jax.jit
        def inside(heads: Heads, x: jax.Array) -> Any:
            heads.w[...] = 2 * heads.w[...]
            return x @ heads.w_q[...] @ heads.w_k[...], heads.w[...]

        y, heads.w[...] = inside(heads, x)
        return y

    result = lab.measure(scaled, nnx.eval_shape(Heads), X)
    assert result.flops == 2 * 2 * ROWS * WIDTH**2


def test_counters_of_random_numbers_may_be_dropped() -> None:
    """They are in every module with dropout, and dropping them drops no work."""
    layer = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    result = lab.measure(jax.jit(lambda layer, x: layer(x)), layer, X)
    assert result.memory.output_bytes == 4 * X.size


def test_state_that_is_no_argument_is_refused() -> None:
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def counting(x: jax.Array) -> jax.Array:
        model.kernel[...] = model.kernel[...] + 1
        return model(x)

    def trained(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        return step(model, optimizer, x)

    held = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(held, optax.adam(1e-3), wrt=nnx.Param)
    bound = functools.partial(trained, held, optimizer)
    cached = nnx.cached_partial(nnx.jit(trained), held, optimizer)
    message = (
        "changes NNX state that is not among its arguments, or not among those of a transformation"
    )
    for function in (counting, bound, lambda x: bound(x), cached):
        for tool in (lab.measure, lint):
            with pytest.raises(InputError, match=message):
                tool(function, X)


def test_a_module_that_holds_itself_is_refused() -> None:
    class Circle(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(4))
            self.itself = self

    for tool in (lab.measure, lint):
        with pytest.raises(
            InputError, match="a module that contains itself, which JAX cannot flatten"
        ):
            tool(lambda circle: circle.weight[...], Circle())


def test_modules_taken_apart_return_what_they_keep() -> None:
    """Who merges a state inside says with the results what is kept; nothing is added."""
    model, _ = made()
    graph, state = nnx.split(model)

    def evaluated(state: nnx.State, x: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, state)
        merged.frozen[...] = merged.frozen[...] + 1
        return loss_of(merged, x)

    for function in (evaluated, jax.jit(evaluated)):
        assert lab.measure(function, state, X).memory.output_bytes == 4


def test_the_arms_of_compare_are_measured_whole() -> None:
    def without_update(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        return nnx.value_and_grad(loss_of)(model, x)[0]

    outcome = lab.compare(step, without_update, *made(), X)
    assert outcome.a is not None
    assert outcome.b is not None
    assert outcome.a.flops > outcome.b.flops
    assert "warning: what is changed in place differs: [0].first.bias.value is float32[8] and " in (
        outcome.note
    )
    jitted, bound = nnx.jit(step), functools.partial(nnx.jit(step), x=X)
    assert "warning" not in lab.compare(step, jitted, *made(), X).note
    unlike = lab.compare(jitted, without_update, *made(), X)
    assert "warning: what is changed in place differs: [0].first.bias.value is " in unlike.note
    assert "warning" not in lab.compare(bound, functools.partial(step, x=X), *made()).note


def test_lint_sees_the_gradients_of_a_step_in_place() -> None:
    """Those that a scan keeps one by one, in a step that returns nothing but what it changes."""

    def trained(layer: nnx.Param, microbatches: jax.Array) -> None:
        layer[...] = one_by_one(layer[...], microbatches)

    weight = nnx.eval_shape(lambda: nnx.Param(jnp.zeros((SIZE, SIZE))))
    microbatches = jax.ShapeDtypeStruct((4, 64, SIZE), "float32")
    for function in (trained, nnx.jit(trained)):
        found = {finding.rule for finding in lint(function, weight, microbatches)}
        assert found == {"gradient-per-microbatch", "not-donated"}
    (finding,) = lint(nnx.jit(trained, donate_argnums=0), weight, microbatches)
    assert finding.rule == "gradient-per-microbatch"
