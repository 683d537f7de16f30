"""Other kinds of models, each in a pipeline and as a plain loop over microbatches and layers."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, float_rows, mesh_of
from test_foreign_layers import BATCH, FORMS, LAYERS, LENGTH, WIDTH, Form, loss_of
from test_kinds_of_layers import Dense, Experts
from test_layer_state import Around, check

from nnx_pipeline import CircularPipeline, LayerPlace, run_pipeline
from nnx_pipeline.pipeline import CircularSchedule, ModelEnds

some_forms = pytest.mark.parametrize(
    "form", [FORMS[name] for name in ("circular", "repeats", "1F1B", "auto")], ids=str
)


class UpAndDown(nnx.Module):
    """A layer of a U-Net: the first half puts its output aside, the second half adds it again."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.skip = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, place: LayerPlace) -> tuple[Any, None]:
        down = place.layer < LAYERS // 2
        at = jnp.where(down, place.layer, LAYERS - 1 - place.layer)
        own = (jnp.arange(LAYERS // 2) == at)[:, None, None]
        kept = jnp.sum(jnp.where(own, x["skips"], 0), 1)
        y = jnp.tanh(self.mix(x["image"]) + jnp.where(down, 0, self.skip(kept)))
        skips = jnp.where(down & own, y[:, None], x["skips"])
        return {"image": x["image"] + 0.5 * y, "skips": skips}, None


class EncoderDecoder(nnx.Module):
    """The first half of the layers makes the memory, which the second half attends to."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, place: LayerPlace) -> tuple[Any, None]:
        encodes = place.layer < LAYERS // 2
        memory = x["memory"] + jnp.where(encodes, jnp.tanh(self.mix(x["memory"])), 0)
        scores = jnp.einsum("bqd,bkd->bqk", self.query(x["text"]), memory)
        read = jax.nn.softmax(scores) @ memory
        return {"memory": memory, "text": x["text"] + jnp.where(encodes, 0, 0.5 * read)}, None


class Adapted(nnx.Module):
    """`nnx.LoRALinear`: a linear layer with an adapter of low rank."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.5)
        self.mix = nnx.LoRALinear(
            WIDTH, WIDTH, lora_rank=2, b_initializer=normal, rngs=rngs, use_bias=False
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + 0.3 * jnp.tanh(self.mix(x)), None


def with_skips(x: jax.Array) -> dict[str, jax.Array]:
    return {"image": x, "skips": jnp.zeros((x.shape[0], LAYERS // 2, *x.shape[1:]), x.dtype)}


MODELS = {
    "skip connections": (UpAndDown, Around(with_skips, lambda y: loss_of(y["image"]))),
    "encoder and decoder": (
        EncoderDecoder,
        Around(lambda x: {"memory": x, "text": jnp.cos(x)}, lambda y: loss_of(y["text"])),
    ),
    "adapters on weights that are not trained": (Adapted, Around(trained=nnx.LoRAParam)),
}


@pytest.mark.slow(but=3)
@some_forms
@pytest.mark.parametrize(("layer", "around"), MODELS.values(), ids=MODELS)
def test_models(layer: Any, around: Around, form: Form) -> None:
    check(layer, form, around)


@pytest.mark.parametrize("repeats", [1, 2])
def test_tied_embeddings_in_one_f_one_b(repeats: int) -> None:
    """One table at both ends: its gradient is the sum of both, here of a mean over the tokens."""
    form = Form("stage=2,fsdp=2", {"schedule": "1f1b", "num_repeats": repeats})
    tokens = jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 11
    table = jnp.asarray(float_rows(11, WIDTH))

    def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.nn.one_hot(tokens, 11) @ table

    def entropy(table: jax.Array, y: jax.Array, tokens: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(y @ table.T)
        return -jnp.sum(jnp.where(jnp.arange(11) == tokens[..., None], log, 0))

    with jax.set_mesh(mesh_of(form.mesh)):
        pipeline = CircularPipeline(form.config, Adapted, num_layers=LAYERS, rngs=nnx.Rngs(0))

        def loss(table: jax.Array) -> jax.Array:
            ends = ModelEnds(embed, table, entropy, table)
            return pipeline.loss(ends, (tokens, tokens), {})[0] / tokens.size

        got = jax.jit(jax.value_and_grad(loss))(table)
    flat = jax.tree.map(
        lambda leaf: jnp.asarray(jax.device_get(leaf)).reshape(LAYERS, *leaf.shape[3:]),
        pipeline.layers,
    )

    def plain(table: jax.Array) -> jax.Array:
        y = embed(table, tokens)
        for number in range(LAYERS):
            y, _ = jax.tree.map(lambda leaf, number=number: leaf[number], flat)(y)
        return entropy(table, y, tokens) / tokens.size

    assert_close(got, jax.value_and_grad(plain)(table), 2e-5)


class Reads(nnx.Module):
    """A layer of a decoder, which attends to what an encoder made."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, memory: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.einsum("bqd,bkd->bqk", self.query(x), memory)
        scores += at.astype(x.dtype)[:, None, None]
        return x + 0.5 * jax.nn.softmax(scores) @ memory, None


def score(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
    targets, weights = inputs
    return jnp.sum(weights[..., None, None] * jnp.sin(y - targets) ** 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "form",
    [
        Form("stage=2", {"schedule": "1f1b", "num_repeats": 2}),
        Form("stage=2,data=2", {"schedule": "1f1b", "sharding": "auto"}),
    ],
    ids=["repeats", "auto"],
)
def test_encoder_and_decoder_in_two_rings(form: Form) -> None:
    """1F1B gives gradients to all that its microbatches bring: also to what another ring made."""
    at, layers = np.arange(BATCH), 4
    given = float_rows(3, BATCH, LENGTH, WIDTH), float_rows(BATCH, seed=1)
    with jax.set_mesh(mesh_of(form.mesh, form.config.sharding)):
        first = dataclasses.replace(form.config, schedule="circular")
        encoder = CircularPipeline(first, Adapted, num_layers=layers, rngs=nnx.Rngs(0))
        decoder = CircularPipeline(form.config, Reads, num_layers=layers, rngs=nnx.Rngs(1))

        def loss(rings: Any, given: Any) -> jax.Array:
            (encoder, decoder), (texts, weights) = rings, given
            memory, _ = encoder(texts[0])
            ends = ModelEnds(
                lambda _, x: x["text"], None, lambda _, y, inputs: score(y, inputs), None
            )
            inputs = {"text": texts[1], "at": at}, (texts[2], weights)
            return decoder.loss(ends, inputs, {"memory": memory, "at": at})[0]

        rings = encoder, decoder
        value, (d_rings, d_given) = jax.jit(jax.value_and_grad(loss, (0, 1)))(rings, given)

    def stacks(rings: Any) -> Any:
        return jax.tree.map(np.asarray, [nnx.state(ring.layers) for ring in rings])

    graphs = [nnx.graphdef(ring.layers) for ring in rings]

    def plain(weights: Any, given: Any) -> jax.Array:
        texts, scale = jax.tree.map(jnp.asarray, given)
        flat = jax.tree.map(lambda leaf: leaf.reshape(layers, *leaf.shape[3:]), weights)

        def layer(ring: int, number: int) -> Any:
            one = jax.tree.map(lambda leaf: leaf[number], flat[ring])
            return nnx.merge(graphs[ring], one)

        memory, y = texts[0], texts[1]
        for number in range(layers):
            memory, _ = layer(0, number)(memory)
        for number in range(layers):
            y, _ = layer(1, number)(y, memory, at)
        return score(y, (texts[2], scale))

    want = jax.jit(jax.value_and_grad(plain, (0, 1)))(stacks(rings), given)
    assert_close((value, (stacks(d_rings), d_given)), want, 2e-5)


class DenseThenExperts(nnx.Module):
    """The first layers are dense and outside of the pipeline; a mixture of experts follows."""

    def __init__(self, form: Form, rngs: nnx.Rngs) -> None:
        self.first = nnx.List([Dense(rngs) for _ in range(2)])
        self.pipeline = CircularPipeline(form.config, Experts, num_layers=LAYERS, rngs=rngs)

    def loss(self, x: Any) -> jax.Array:
        if self.pipeline.config.schedule != "1f1b":
            return loss_of(self.pipeline(self.dense(self.first, x))[0])
        ends = ModelEnds(self.dense, self.first, lambda _, y, __: loss_of(y), None)
        return self.pipeline.loss(ends, (x, x), {})[0]

    @staticmethod
    def dense(first: Any, x: Any) -> Any:
        for layer in first:
            x, _ = layer(x)
        return x


@pytest.mark.slow(but=2)
@some_forms
def test_dense_then_experts(form: Form) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    with jax.set_mesh(mesh_of(form.mesh, form.config.sharding)):
        model = DenseThenExperts(form, nnx.Rngs(0))
        value, gradients = nnx.jit(nnx.value_and_grad(DenseThenExperts.loss))(model, x)
    got = value, nnx.state(gradients.first), nnx.state(gradients.pipeline.layers)
    weights = jax.tree.map(np.asarray, (model.first, model.pipeline.layers))

    def plain(weights: Any) -> jax.Array:
        first, stack = jax.tree.map(jnp.asarray, weights)
        flat = jax.tree.map(lambda leaf: leaf.reshape(LAYERS, *leaf.shape[3:]), stack)
        y = DenseThenExperts.dense(first, x)
        for number in range(LAYERS):
            layer = jax.tree.map(lambda leaf, number=number: leaf[number], flat)
            y, _ = layer(y, place=LayerPlace(number, 0, 0))
        return loss_of(y)

    value, (first, stack) = jax.jit(jax.value_and_grad(plain))(weights)
    assert_close(got, (value, nnx.state(first), nnx.state(stack)), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["stage=4", "stage=2,data=2"])
def test_equinox(mesh: str) -> None:
    """Modules of Equinox as stages of `run_pipeline`."""
    stages = 4 if "4" in mesh else 2

    def make(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(WIDTH, WIDTH, 8, depth=2, activation=jax.nn.gelu, key=key)

    keys = jax.random.split(jax.random.key(0), 2 * stages).reshape(2, stages)
    model = eqx.filter_vmap(eqx.filter_vmap(make))(keys)
    params, static = eqx.partition(model, eqx.is_array)
    x = jnp.asarray(float_rows(4, 2, WIDTH))

    def apply_stage(params: Any, x: jax.Array, side: None) -> tuple[jax.Array, None]:
        del side
        return x + jax.vmap(eqx.combine(params, static))(x), None

    def loss(params: Any) -> jax.Array:
        schedule = CircularSchedule(stages=stages, microbatches=4, repeats=2)
        return loss_of(run_pipeline(apply_stage, params, x, schedule=schedule)[0])

    def plain(params: Any) -> jax.Array:
        y = x
        for number in range(2 * stages):
            at = divmod(number, stages)
            one = jax.tree.map(lambda leaf, at=at: leaf[at], params)
            y = jax.vmap(lambda y, one=one: apply_stage(one, y, None)[0])(y)
        return loss_of(y)

    with jax.set_mesh(mesh_of(mesh)):
        got = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(got, jax.value_and_grad(plain)(params), 2e-5)
