"""Layers of several kinds, and numbers of layers that do not divide, beside a plain loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, float_rows, mesh_of
from test_foreign_layers import BATCH, LENGTH, WIDTH, Form, loss_of
from test_layer_state import numbers, state_of

from nnx_pipeline import (
    CircularPipeline,
    LayerPlace,
    LayerState,
    Max,
    Mean,
    PipelineConfig,
    Sum,
    abstract,
    lab,
)
from nnx_pipeline.pipeline import MicrobatchMean, ModelEnds, WeightOptions
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline.stage.layers import takes_place

pytestmark = pytest.mark.numbers

MICROBATCHES = 4
WEIGHTS = {"sum": 0.1, "mean": 0.7, "balance": 0.9, "max": 0.0}
Kinds = Sequence[Callable[[nnx.Rngs], nnx.Module]]

FORMS = {
    "no stages": Form("fsdp=2", {"num_repeats": 2}),
    "circular": Form("stage=2,fsdp=2", {}),
    "repeats": Form("stage=2", {"num_repeats": 2}),
    "gathered once": Form("stage=2,fsdp=2", {"fsdp_gather": "step"}),
    "prefetch": Form("stage=2,fsdp=2", {"num_repeats": 2, "fsdp_gather": "prefetch"}),
    "1F1B": Form("stage=2,data=2", {"schedule": "1f1b"}),
    "1F1B, gathered once": Form(
        "stage=2,fsdp=2", {"schedule": "1f1b", "num_repeats": 2, "fsdp_gather": "step"}
    ),
    "ZeRO-1": Form("stage=2,data=2", {"num_repeats": 2}),
    "ZeRO-1, no stages": Form("data=2", {}),
    "auto": Form("stage=2,fsdp=2", {"sharding": "auto", "remat": "none"}),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def reported(x: jax.Array) -> dict[str, Any]:
    """One metric of each class; that of `MicrobatchMean` is not linear in what it is a mean of."""
    each = jnp.mean(jnp.abs(x), axis=(1, 2))
    return {
        "sum": Sum(jnp.sum(each)),
        "mean": Mean(jnp.mean(each)),
        "max": Max(jnp.max(x)),
        "balance": MicrobatchMean(each, lambda mean: mean**3),
    }


class Dense(nnx.Module):
    """A dense layer, which reports metrics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Any]:
        return x + 0.5 * jnp.tanh(self.mix(x)), reported(x)


class Calls(LayerState):
    """How often a layer was called."""


class Experts(nnx.Module):
    """A mixture of two experts, whose router reports metrics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, 2, rngs=rngs)
        self.experts = nnx.Param(0.5 * jax.random.normal(rngs.params(), (2, WIDTH, WIDTH)))

    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, Any]:
        share = jax.nn.softmax(self.router(x))
        each = jnp.tanh(jnp.einsum("bsw,ewv->bsev", x, self.experts[...]))
        scale = 1.0 + 0.1 * jnp.asarray(place.layer, jnp.float32)
        return x + scale * jnp.einsum("bse,bsev->bsv", share, each), reported(share)


class Counting(Experts):
    """The same, which counts its calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.calls = Calls(jnp.zeros(()))

    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, Any]:
        self.calls[...] += 1.0
        return super().__call__(x, place)


class Silent(nnx.Module):
    """A layer without metrics that attends to all tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, 3, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(WIDTH, 3, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.einsum("bqd,bkd->bqk", self.query(x), self.key(x))
        return x + 0.3 * jax.nn.softmax(scores) @ x, None


def in_pipeline(kinds: Kinds, layers: int, form: Form, x: Any) -> Any:
    """Loss, metrics and gradients of a step, the state after it, and the layers before."""
    options = {"stage_layers": "auto", **form.options}
    config = Form(form.mesh, options).config

    def loss(pipeline: CircularPipeline, x: Any) -> Any:
        if config.schedule == "1f1b":
            ends = ModelEnds(lambda _, x: x, None, lambda _, y, __: loss_of(y), None)
            total, (_, metrics) = pipeline.loss(ends, (x, x), {}, metric_weights=WEIGHTS)
            return total, metrics
        y, metrics = pipeline(x)
        return loss_of(y) + sum(
            WEIGHTS[name] * metrics[name] for name in WEIGHTS if WEIGHTS[name]
        ), metrics

    @nnx.jit
    def step(pipeline: CircularPipeline, x: Any) -> Any:
        return nnx.value_and_grad(loss, has_aux=True)(pipeline, x)

    with jax.set_mesh(mesh_of(form.mesh, config.sharding)):
        one = kinds[0] if len(kinds) == 1 else kinds
        zero1 = WeightOptions(zero1=("data",) if "data" in form.mesh else ())
        pipeline = CircularPipeline(config, one, num_layers=layers, rngs=nnx.Rngs(0), weights=zero1)
        before = nnx.clone(pipeline.layers)
        found, gradients = step(pipeline, x)
    stack = pipeline.runner.stack
    after, gradients, before = (
        ordered(each, stack, len(kinds)) for each in (pipeline.layers, gradients.layers, before)
    )
    return numbers(found), numbers(gradients), state_of(nnx.List(after)), before


def ordered(layers: Any, stack: Stack, kinds: int) -> Any:
    """For each kind `[layers, …]`, then padding, of `[repeats, stages, layers per stage, …]`."""

    def flat(kind: int, of_kind: Any) -> Any:
        order = np.argsort(stack.numbers(kind).reshape(-1))
        return jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf).reshape(-1, *leaf.shape[3:])[order]), of_kind
        )

    if kinds == 1:
        return [flat(0, layers)]
    return [flat(kind, layers[kind]) for kind in range(kinds)]


@functools.cache
def plain_step(kinds: int, layers: int) -> Callable[..., Any]:
    """Loss, metrics and gradients by a loop that knows nothing of pipelines, compiled once."""

    def layer(flat: Any, number: int) -> Any:
        at, kind = divmod(number, kinds)
        return jax.tree.map(lambda leaf: leaf[at], flat[kind])

    def loss(flat: Any, x: jax.Array) -> Any:
        total, found = jnp.zeros(()), []
        for microbatch in jnp.split(x, MICROBATCHES):
            y = microbatch
            for number in range(layers):
                one = layer(flat, number)
                own = {"place": LayerPlace(number, 0, 0)} if takes_place(one) else {}
                y, metrics = one(y, **own)
                if metrics is not None:
                    found.append(metrics)
            total += loss_of(y)
        balance = [one["balance"].function(jnp.mean(one["balance"].rows)) for one in found]
        metrics = {
            "sum": sum(one["sum"].value for one in found),
            "mean": jnp.mean(jnp.stack([one["mean"].value for one in found])),
            "max": jnp.max(jnp.stack([one["max"].value for one in found])),
            "balance": jnp.mean(jnp.stack(balance)),
        }
        return total + sum(WEIGHTS[name] * metrics[name] for name in WEIGHTS), metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def one_after_the_other(kinds: int, stacks: Any, layers: int, x: Any) -> Any:
    """The same of `plain_step`, from the layers of a pipeline."""
    found, gradients = plain_step(kinds, layers)(stacks, x)
    return numbers(found), numbers(gradients)


def check(kinds: Kinds, layers: int, form: Form) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    found, gradients, state, before = in_pipeline(kinds, layers, form, x)
    want, want_gradients = one_after_the_other(len(kinds), before, layers, x)
    assert_close(found, want, 2e-5)
    got = jax.tree.leaves([nnx.state(each, nnx.Param) for each in gradients])
    plain = jax.tree.leaves(nnx.state(nnx.List(want_gradients), nnx.Param))
    assert_close(got, plain, 2e-5)
    for path, calls in state.items():
        kind = path[0]
        real = np.arange(calls.size) * len(kinds) + kind < layers
        np.testing.assert_array_equal(calls.reshape(-1), np.where(real, MICROBATCHES, 0))


@pytest.mark.slow
@every_form
def test_kinds_and_padding(form: Form) -> None:
    """A dense layer and a mixture of experts in turn; in most forms some places are padding."""
    check([Dense, Experts], 6, form)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["circular", "1F1B"])
def test_kinds_without_padding(name: str) -> None:
    check([Dense, Experts], 8, FORMS[name])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [[Counting], [Silent, Counting], [Dense, Silent, Counting]])
@pytest.mark.parametrize("layers", [5, 12])
def test_with_state(layers: int, kinds: Kinds) -> None:
    check(kinds, layers, FORMS["repeats"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no stages", "auto"])
def test_with_state_in_other_forms(name: str) -> None:
    check([Dense, Silent, Counting], 5, FORMS[name])


UNEVEN = {
    # The first repeat has more places with layers than the second, or the other way round.
    "repeats": ("3,2,1,1", FORMS["repeats"]),
    "in a loop": ("auto", Form("stage=2", {"num_repeats": 2, "unrolled_layers": 1})),
    "accumulate": ("1,0,1,3", Form("stage=2", {"num_repeats": 2, "backward": "accumulate"})),
    "prefetch": ("auto", FORMS["prefetch"]),
    "ZeRO-1": ("auto", FORMS["ZeRO-1"]),
    "auto": (
        "1,1,0,3",
        Form("stage=2,fsdp=2", {"num_repeats": 2, "sharding": "auto", "remat": "minimal"}),
    ),
    "1F1B": ("1,4", FORMS["1F1B"]),
    "1F1B, gathered once": ("2,1,0,2", FORMS["1F1B, gathered once"]),
    "no stages": ("1,3,0,1", FORMS["no stages"]),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("stage_layers", "form"), UNEVEN.values(), ids=UNEVEN)
def test_uneven_stages(stage_layers: str, form: Form) -> None:
    layers = sum(map(int, stage_layers.split(","))) if stage_layers != "auto" else 5
    check([Experts], layers, Form(form.mesh, {**form.options, "stage_layers": stage_layers}))


def products(layers: int, options: dict[str, Any]) -> int:
    """The operations of all products of a compiled step on one device."""
    config = PipelineConfig(num_microbatches=MICROBATCHES, **options)
    mesh = mesh_of("stage=2")

    def make() -> tuple[CircularPipeline]:
        return (CircularPipeline(config, Dense, num_layers=layers, rngs=nnx.Rngs(0)),)

    def step(pipeline: CircularPipeline, x: jax.Array) -> Any:
        return jax.grad(lambda pipeline: loss_of(pipeline(x)[0]))(pipeline)

    with jax.set_mesh(mesh):
        pipeline = abstract(make)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32")
    return lab.measure(step, *pipeline, x, mesh=mesh, platform="cpu").flops


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["autodiff", "accumulate"])
def test_ticks_leave_out_places(backward: str) -> None:
    """6 layers: of 9 ticks 5 have a visit of 2 layers, and 4 have visits of 1 alone."""
    options = {"num_repeats": 2, "backward": backward}
    whole, uneven = products(8, options), products(6, {"stage_layers": "auto", **options})
    assert uneven * 9 * 2 == whole * (5 * 2 + 4)


class Deep(nnx.Module):
    """A layer whose scale depends on how many layers follow, and is infinite after the last."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, Any]:
        scale = 1 / jnp.sqrt(jnp.asarray(5 - place.layer, x.dtype))
        y = x + scale * jnp.tanh(self.mix(x))
        return y, reported(y)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("form", [FORMS[name] for name in ("circular", "1F1B")], ids=str)
@pytest.mark.parametrize("kinds", [1, 2])
def test_padding_is_in_the_place_of_a_layer_of_the_model(kinds: int, form: Form) -> None:
    check([Deep] * kinds, 5, form)
