"""The Linen model against the NNX model, scanned, in a loop and pipelined over a mesh."""

import dataclasses
import functools
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import linen as nn
from flax import nnx
from helpers import (
    arrays_by_path,
    assert_close,
    float_rows,
    fusions_of_a_user,
    mesh_of,
    model_on_mesh,
    new_model,
    packed_batch,
    replace,
    small_config,
)
from linen_helpers import as_linen, assert_same_bits, nested, put_on, stage_of_layers

from linen_compat import CircularPipeline, Pipeline, Transformer
from nnx_pipeline import CircularPipeline as NNXPipeline
from nnx_pipeline import Config, InputError, Layout, Mixtral, PipelineConfig, Sum
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.pipeline._runner import Runner
from nnx_pipeline.pipeline.metrics import declared, over_layers, values
from nnx_pipeline.sharding.dropout import dropout
from nnx_pipeline.sharding.layout import P
from nnx_pipeline.train import Batch, loss_of
from nnx_pipeline.train.step import batch_sharding

pytestmark = pytest.mark.numbers

SPARSE = small_config(
    train={"load_balance_weight": 0.1, "global_batch": 16}, pipeline={"num_microbatches": 4}
)
KEY = jax.random.key(7)


class Case(NamedTuple):
    """Where and how both models run."""

    mesh: str = ""
    mode: str = "explicit"
    pipeline: Any = MappingProxyType({})
    model: Any = MappingProxyType({})
    layout: str | None = None
    dropout: bool = False

    def __str__(self) -> str:
        changes = {**self.pipeline, **self.model}
        words = [f"{name}={value}" for name, value in changes.items()]
        return "-".join([self.mesh or "one device", self.mode, *words])

    @property
    def config(self) -> Config:
        config = replace(SPARSE, "pipeline", **self.pipeline)
        if self.model is LLAMA:
            config = replace(config, "train", load_balance_weight=0.0)
        return replace(config, "model", **self.model)


LLAMA = {"num_experts": 1, "num_experts_per_token": 1}
BFLOAT16 = {"dtype": "bfloat16"}
DROPOUT = {"dropout_rate": 0.3}
REPEATED = {"num_repeats": 2}
ODD = {"vocab_size": 37, "embedding": "gather"}

SCANNED = [
    Case(pipeline={"remat": "minimal"}, model=DROPOUT, dropout=True),
    Case("fsdp=2,tensor=2,expert=2"),
]
PIPELINED = [
    Case("stage=2,tensor=2,expert=2", pipeline=REPEATED, model={"num_layers": 8}),
    Case("stage=2,fsdp=2", "auto", pipeline=REPEATED, model=BFLOAT16),
    Case("stage=2,fsdp=2", "explicit", {**REPEATED, "schedule": "1f1b"}, DROPOUT, dropout=True),
    Case("fsdp=2", "auto", {"schedule": "1f1b"}, LLAMA, layout="pipelined"),
    Case("stage=2,tensor=2", "auto", model=ODD),
    Case("stage=2,tensor=2", pipeline={"schedule": "1f1b"}, model=ODD),
]


@functools.cache
def weights(model: tuple[tuple[str, Any], ...]) -> Mixtral:
    """On one device; scales away from one, as after training."""
    made = new_model(Config(model=dataclasses.replace(SPARSE.model, **dict(model))))

    def shake(path: Any, leaf: jax.Array) -> jax.Array:
        scale = "scale" in jax.tree_util.keystr(path)
        return leaf + 0.1 * float_rows(*leaf.shape) if scale else leaf

    return jax.tree_util.tree_map_with_path(shake, made)


def source(case: Case) -> Mixtral:
    return weights(tuple(case.model.items()))


class Found(NamedTuple):
    """What a model computes of a batch; gradients under the names of the Linen tree."""

    loss: Any  # and its parts
    gradients: Any


def evaluate_nnx(model: Mixtral, batch: Batch, key: Any) -> Found:
    return Found(*jax.value_and_grad(loss_of, has_aux=True)(model, batch, key))


def side_of(batch: Batch) -> dict[str, Any]:
    return {"positions": batch.positions, "segment_ids": batch.segment_ids}


def evaluate_linen(model: Transformer, params: Any, batch: Batch, key: Any) -> Found:
    share = batch.weights / (jnp.sum(batch.weights) + 1e-8)

    def loss_of(params: Any) -> Any:
        inputs = (batch.tokens, batch.targets, share)
        return model.apply({"params": params}, *inputs, **side_of(batch), key=key, method="loss")

    return Found(*jax.value_and_grad(loss_of, has_aux=True)(params))


def renamed(found: Found, layout: str) -> Found:
    return found._replace(gradients=as_linen(jax.tree.map(np.asarray, found.gradients), layout))


def layout_of(case: Case) -> str:
    return case.layout or ("pipelined" if "stage" in case.mesh else "scanned")


def placed(case: Case) -> tuple[Mixtral, Transformer, Any, Batch]:
    """Both models with the same weights, and a batch, on the mesh."""
    config, mesh = case.config, mesh_of(case.mesh, case.mode)
    model, linen = model_on_mesh(source(case), config, mesh), Transformer(config, case.layout)
    with jax.set_mesh(mesh):
        batch = jax.device_put(packed_batch(config), batch_sharding(mesh, model.layout))
        abstract = jax.eval_shape(linen.init, jax.random.key(0), batch.tokens)["params"]
    params = as_linen(jax.tree.map(np.asarray, model), layout_of(case))
    with jax.set_mesh(mesh):
        layout = Layout().for_vocabulary(config.model.vocab_size, config.model.embed_dim)
    params = put_on(params, abstract, mesh, layout)
    return runs_as(model, layout_of(case)), linen, params, batch


def runs_as(model: Mixtral, layout: str) -> Mixtral:
    """The model, with all microbatches at once where Linen's layers do so."""
    at_once = layout != "pipelined"
    model.pipeline.runner = dataclasses.replace(model.pipeline.runner, at_once=at_once)
    return model


def run_both(case: Case) -> tuple[Found, Found]:
    """What Linen and NNX compute."""
    model, linen, params, batch = placed(case)
    key = KEY if case.dropout else None
    with jax.set_mesh(mesh_of(case.mesh, case.mode)):
        compiled = functools.partial(jax.jit, compiler_options=fusions_of_a_user())
        got = compiled(functools.partial(evaluate_linen, linen))(params, batch, key)
        want = compiled(evaluate_nnx)(model, batch, key)
    return got, renamed(want, layout_of(case))


@functools.cache
def one_device() -> Found:
    """The sequential NNX model."""
    batch = jax.tree.map(jnp.asarray, packed_batch(SPARSE))
    mesh = mesh_of("")
    with jax.set_mesh(mesh):
        return jax.jit(evaluate_nnx)(model_on_mesh(weights(()), SPARSE, mesh), batch, None)


def assert_same(got: Found, want: Found) -> None:
    """To the bit; what routers report is zero without experts."""
    assert_same_bits(got.gradients, want.gradients)
    (loss, (entropy, router)), (want_loss, (want_entropy, want_router)) = got.loss, want.loss
    assert_same_bits((loss, entropy), (want_loss, want_entropy))
    jax.tree.map(np.testing.assert_array_equal, router, want_router)


def assert_near_one_device(got: Found, case: Case) -> None:
    alone = one_device()
    assert_close(got.loss, alone.loss, 1e-5)
    mesh = mesh_of(case.mesh, case.mode)
    gradients = renamed(
        alone._replace(gradients=model_on_mesh(alone.gradients, case.config, mesh)), layout_of(case)
    ).gradients
    by_path = [dict(sorted(arrays_by_path(x).items())) for x in (got.gradients, gradients)]
    assert_close(*by_path, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SCANNED, *PIPELINED], ids=str)
def test_equals_nnx(case: Case) -> None:
    """To the bit to NNX in the same place; nearly to the sequential model."""
    got, want = run_both(case)
    assert_same(got, want)
    if not case.model:
        assert_near_one_device(got, case)


@pytest.mark.parametrize(
    "case",
    [Case(), Case("stage=2,tensor=2"), Case("stage=2,fsdp=2", "auto", REPEATED)],
    ids=str,
)
def test_logits_equal_nnx(case: Case) -> None:
    model, linen, params, batch = placed(case)
    with jax.set_mesh(mesh_of(case.mesh, case.mode)):
        got = jax.jit(linen.apply)({"params": params}, batch.tokens, **side_of(batch))
        want = jax.jit(lambda model: model(batch.tokens, **side_of(batch)))(model)
    assert_same_bits(got, want)
    assert got.dtype == jnp.float32
    assert got.sharding == want.sharding


# One layer per visit.
CAPACITY = {"experts": "capacity", "capacity_factor": 0.7, "num_layers": 2}
GROUPED = {"experts": "grouped", "num_layers": 2}
PADDED = [
    Case(model=CAPACITY),
    Case("stage=2,expert=2", "auto", {}, CAPACITY),
    Case(model=GROUPED),
    Case("stage=2,fsdp=2", pipeline={"schedule": "1f1b"}, model=GROUPED),
    Case("stage=2,fsdp=2", pipeline=REPEATED, model={"router_score": "sigmoid"}),
]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_counts_in_nothing(case: Case) -> None:
    """Not in logits, losses, gradients or what routers report; these are those of a plain model."""
    model, linen, params, batch = placed(case)
    padding = np.asarray(batch.segment_ids) == 0
    assert 0.2 < padding.mean() < 0.8
    config = replace(case.config, "train", router_z_loss_weight=0.1)
    model.config, linen = config, linen.clone(config=config)

    @jax.jit
    def evaluate(model: Mixtral, params: Any, batch: Batch) -> Any:
        sides = side_of(batch)
        logits = (
            model(batch.tokens, **sides),
            linen.apply({"params": params}, batch.tokens, **sides),
        )
        return logits, evaluate_nnx(model, batch, None), evaluate_linen(linen, params, batch, None)

    found = []
    with jax.set_mesh(mesh_of(case.mesh, case.mode)):
        for token in (None, 3, 17):
            tokens = batch.tokens if token is None else jnp.where(padding, token, batch.tokens)
            found.append(evaluate(model, params, dataclasses.replace(batch, tokens=tokens)))
    (logits, *first), *others = found
    real = np.asarray(logits[0])[~padding]
    np.testing.assert_array_equal(np.asarray(logits[1])[~padding], real)
    for (by_nnx, by_linen), *losses in others:
        np.testing.assert_array_equal(np.asarray(by_nnx)[~padding], real)
        np.testing.assert_array_equal(np.asarray(by_linen)[~padding], real)
        for now, before in zip(losses, first, strict=True):
            jax.tree.map(np.testing.assert_array_equal, now.loss, before.loss)
            # Grouped experts add gradients up in another order where padding chooses others.
            assert_close(now.gradients, before.gradients, 1e-6)
    plain = jax.tree.map(np.asarray, batch)
    want, want_gradients = jax.value_and_grad(plain_model.loss, has_aux=True)(
        plain_model.weights_of(model), plain, config, microbatches=4
    )
    assert_close(first[0].loss, want, 1e-5)
    assert_close(plain_model.weights_of(first[0].gradients), want_gradients, 1e-4)


def run_in_a_loop(runner: Runner, layers: Any, x: Any, side: Any, *, keys: None) -> Any:
    """`Runner.run` on one stage, with its layers in a Python loop."""
    del keys
    side = jax.tree.map(runner.batches.arrange, side)

    def visit(layer: Any, x: Any) -> Any:
        x, metrics = layer(x, **side)
        return x, declared(metrics, microbatches=runner.batches.microbatches)

    apply, found = POLICIES[runner.config.remat].checkpoint(visit), []
    for number in range(runner.stack.layers):
        x, metrics = apply(jax.tree.map(lambda leaf, at=number: leaf[0, 0, at], layers), x)
        found.append(metrics)
    return x, values(over_layers(jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2"])
def test_layers_apart_equal_nnx_layers_in_a_loop(mesh: str, monkeypatch: Any) -> None:
    """To the bit against the same loop, and nearly against the scanned one.

    Both are traced from the start: what JAX keeps of functions that other tests traced decides what
    XLA fuses where the layers are written one after the other, and with it the last bit.
    """
    jax.clear_caches()
    case = Case(mesh, layout="unscanned")
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", run_in_a_loop)
        got, want = run_both(case)
    assert_same(got, want)
    assert_near_one_device(got, case)


# ---- layers of one's own -------------------------------------------------------------------------


class Dense(nn.Module):
    """A Linen layer of one's own: weights in boxes and without, dropout."""

    width: int = 4

    @nn.compact
    def __call__(self, x: Any, *, keys: Any = None, shift: Any = None) -> Any:
        normal = nn.initializers.normal(0.3)
        boxed = nn.with_logical_partitioning(normal, ("embed", "mlp"))
        y = jnp.tanh(x @ self.param("kernel", boxed, (self.width, self.width)))
        y = y * self.param("scale", nn.initializers.ones, (self.width,))
        if shift is not None:
            y = y + shift[..., None]
        y = y if keys is None else dropout(y, keys, rate=0.5, spec=P())
        return x + y, {"sum": Sum(jnp.sum(y))}


class DenseNNX(nnx.Module):
    """The same as an NNX module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 4)))
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x: Any, **side: Any) -> Any:
        params = {"kernel": self.kernel[...], "scale": self.scale[...]}
        return Dense().apply({"params": params}, x, **side)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_pipeline_of_other_layers(repeats: int, mode: str) -> None:
    """Values, metrics and gradients of `Pipeline` and `CircularPipeline` alone."""
    mesh, config = mesh_of("stage=2", mode), PipelineConfig(num_microbatches=4, num_repeats=repeats)
    kind = Pipeline if repeats == 1 else CircularPipeline
    linen, x, shift = kind(config, Dense(), 4), float_rows(8, 6, 4), float_rows(8, 6, seed=2)

    def evaluate(run: Any, weights: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            y, metrics = run(weights, x)
            return jnp.sum(y**2), (y, metrics)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(weights, x)

    with jax.set_mesh(mesh):
        native = NNXPipeline(config, DenseNNX, num_layers=4, rngs=nnx.Rngs(0))
        born = jax.jit(linen.init)(jax.random.key(0), x, shift=shift)["params"]

        def as_params(pipeline: Any) -> Any:
            layers, flat = pipeline.layers, {}
            for name in ("kernel", "scale"):
                flat |= stage_of_layers(getattr(layers, name).get_value(), name)
            return nested(flat)

        params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), as_params(native), nn.unbox(born)
        )
        got = evaluate(lambda p, x: linen.apply({"params": p}, x, key=KEY, shift=shift), params)
        want = evaluate(lambda model, x: model(x, key=KEY, shift=shift), native)
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1][0], as_params(SimpleNamespace(layers=want[1][0].layers)))
    assert_same_bits(got[1][1], want[1][1])
    kernel = born["layers"]["kernel"] if repeats == 2 else born["layers"]["layers_0"]["kernel"]
    leading = ("circular_repeats", "layers") if repeats == 2 else ("layers",)
    assert kernel.names == (*leading, "embed", "mlp")


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(x), None


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        boxed = nn.with_logical_partitioning(nn.initializers.ones, ("embd",))
        return x * self.param("scale", boxed, (4,)), None


@pytest.mark.parametrize(
    ("kind", "config", "layer", "message"),
    [
        (
            Pipeline,
            PipelineConfig(),
            Noisy(),
            "Noisy holds the collection 'batch_stats'; in a pipe",
        ),
        (
            Pipeline,
            PipelineConfig(),
            Odd(),
            "logical axis 'embd' is not known; did you mean 'embed'",
        ),
        (CircularPipeline, PipelineConfig(num_repeats=3), Dense(), "4 layers do not split into 2"),
        (
            Pipeline,
            PipelineConfig(num_repeats=2),
            Dense(),
            "num_repeats=2 is for a CircularPipeline",
        ),
    ],
)
def test_layers_that_a_pipeline_refuses(
    kind: Any, config: PipelineConfig, layer: nn.Module, message: str
) -> None:
    with jax.set_mesh(mesh_of("stage=2", "auto")), pytest.raises(InputError, match=message):
        kind(config, layer, 4).init(jax.random.key(0), float_rows(4, 6, 4))
