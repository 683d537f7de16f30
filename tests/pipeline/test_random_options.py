"""Random models, meshes and options: loss, its parts and gradients are those of plain `jnp`.

`--draws 300` draws so many cases instead of a few; case n is the same in every run.
"""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from helpers import assert_close, fresh_model, mesh_of, packed_batch, small_config

from nnx_pipeline import (
    Config,
    InputError,
    MeshConfig,
    Mixtral,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
)
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.train import Batch, loss_and_gradients
from nnx_pipeline.train.step import batch_sharding

pytestmark = pytest.mark.numbers

MODEL: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32",),
    "vocab_size": (32,),
    "embed_dim": (16,),
    "mlp_dim": (16,),
    "num_layers": (3, 4, 6, 8, 12),
    "num_heads": (4,),
    "num_kv_heads": (2, 4),
    "head_dim": (4, 6),
    "num_experts": (1, 4, 4, 4),
    "norm_scale_offset": (0.0, 1.0),
    "rope_theta": (1e6, 50.0),
    "rope_interleaved": (False, True),
    "qk_norm": (False, True),
    "attention_bias": (None, "qkv", "all"),
    "attention_soft_cap": (None, 1.5),
    "logits_soft_cap": (None, 2.0),
    "dropout_rate": (0.0, 0.3),
    "attention": ("dot_product", "chunked", "auto"),
    "attention_block": (None, 3, 4),
    "sliding_window": (None, 3, 5),
    "embedding": ("gather", "one_hot"),
}
ROUTED: dict[str, tuple[Any, ...]] = {  # of a model with several experts
    "num_experts_per_token": (1, 2, 3),
    "experts": ("dense", "grouped", "capacity"),
    "router_score": ("softmax", "sigmoid"),
    "router_normalize": (True, False),
    "router_scale": (1.0, 1.5),
    "router_bias": (False, True),
    "router_groups": (1, 2),
    "router_groups_per_token": (1, 2),
    "num_shared_experts": (0, 2),
}
OF_EXPERTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dense": {"expert_group": (None, 1, 2, 4)},
    "grouped": {"expert_group": (None, 1, 2, 4)},
    "capacity": {"capacity_factor": (None, 0.8, 4.0)},
}
# Fields that belong together, of which each case has one set of either kind.
LLAMA3 = {
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_original_length": 16,
    "rope_low_frequency": 0.5,
    "rope_high_frequency": 2.0,
}
ROPE: tuple[dict[str, Any], ...] = ({}, {"rope_scaling": "linear", "rope_factor": 4.0}, LLAMA3)
HEAD: tuple[dict[str, Any], ...] = (
    {},
    {"tied_embeddings": True},
    {"tied_embeddings": True, "tied_head_dtype": "bfloat16"},
)
PIPELINE: dict[str, tuple[Any, ...]] = {
    "num_microbatches": (1, 2, 4, 8),
    "num_repeats": (1, 2, 3),
    "stage_layers": (None, "auto"),
    "schedule": ("circular", "1f1b"),
    "forwarding_delay": (1, 2),
    "shift": ("ppermute", "slice", "pad"),
    "unrolled_layers": (1, 4),
    "sharding": ("explicit", "auto"),
    "remat": tuple(POLICIES),
    "save_decoder_layer_input": (True, False),
    "fsdp_gather": ("use", "step", "prefetch"),
    "backward": (None, "autodiff", "accumulate"),
}
TRAIN: dict[str, tuple[Any, ...]] = {
    "global_batch": (8, 16),
    "sequence_length": (8,),
    "loss_chunks": (1, 2, 4),
    "shard_optimizer_over_data": (False, True),
}
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "load_balance_weight": (0.0, 0.1),
    "router_z_loss_weight": (0.0, 0.01),
}
AXES = ("data", "stage", "fsdp", "tensor", "expert")


class Case(NamedTuple):
    """A config, a mesh that it fits, and whether rows hold several documents."""

    config: Config
    mesh: str
    packed: bool

    @property
    def batch(self) -> Batch:
        batch = packed_batch(self.config)
        if self.packed:
            return batch
        return Batch(tokens=batch.tokens, targets=batch.targets, weights=batch.weights)

    @property
    def microbatches(self) -> int:
        return self.config.pipeline.microbatches_on(MeshConfig.parse(self.mesh).stage)


def drawn(number: int) -> Case:
    """Case `number`: the first of its random choices that do not contradict each other."""
    source = random.Random(number)

    def chosen(options: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: source.choice(values) for name, values in options.items()}

    while True:
        sizes = dict.fromkeys(AXES, 1)
        for axis in source.choices(AXES, weights=(1, 2, 1, 1, 1), k=3):
            sizes[axis] *= 2
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        mesh = source.choice((mesh, mesh, mesh, "stage=2", "fsdp=2", ""))
        model, train = chosen(MODEL), chosen(TRAIN)
        if model["num_experts"] > 1:
            model |= chosen(ROUTED)
            model |= chosen(OF_EXPERTS[model["experts"]])
            train |= chosen(WEIGHTS)
        try:
            config = Config(
                model=ModelConfig(**model, **source.choice(ROPE), **source.choice(HEAD)),
                pipeline=PipelineConfig(**chosen(PIPELINE)),
                train=TrainConfig(**train),
            )
            config.check_mesh(MeshConfig.parse(mesh))
        except InputError:
            continue
        if not _router_matters(config):
            continue
        return Case(config, mesh, packed=source.random() < 0.7)


def _router_matters(config: Config) -> bool:
    """Whether a router, where there is one, has a gradient that is not zero but for rounding.

    The weight of a single expert is 1 once it is normalized, whatever the router says; then only
    its own losses depend on it.
    """
    model, train = config.model, config.train
    decides = model.num_experts_per_token > 1 or not model.router_normalize
    return (
        model.num_experts == 1
        or decides
        or bool(train.load_balance_weight or train.router_z_loss_weight)
    )


def in_pipeline(case: Case, key: Any) -> tuple[Any, Any, Mixtral]:
    """Loss and parts, gradients, and the model."""
    mesh = mesh_of(case.mesh, case.config.pipeline.sharding)
    model = fresh_model(case.config, mesh)
    kinds = (
        model.pipeline.layers if len(case.config.model.of_kinds) > 1 else [model.pipeline.layers]
    )
    biases = [getattr(part.attention, name) for part in kinds for name in plain_model.BIASES]
    for name in ("router_bias", "router_logits_bias", "gate_bias", "up_bias", "down_bias"):
        biases += [getattr(part.feed_forward, name, None) for part in kinds]
    biases += [part.attention.sinks for part in kinds if hasattr(part.attention, "sinks")]
    for bias in (bias for bias in biases if bias is not None):
        values = 0.3 * np.sin(np.arange(bias.get_value().size, dtype=np.float32))
        bias[...] = jax.device_put(values.reshape(bias.shape), bias.get_value().sharding)
    with jax.set_mesh(mesh):
        batch = jax.tree.map(
            lambda x: jax.device_put(jnp.asarray(x), batch_sharding(mesh, model.layout)), case.batch
        )
        found, gradients = jax.jit(loss_and_gradients)(model, batch, key)
    return found, gradients, model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("draws")))


@pytest.mark.slow
def test_equals_plain_jnp(number: int) -> None:
    try:
        check(drawn(number))
    finally:
        jax.clear_caches()  # the programs of 300 cases take more than 16 GB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule"), [("stage=2,tensor=2", "circular"), ("stage=2,fsdp=2", "1f1b")]
)
def test_biases_and_soft_caps_in_a_pipeline(mesh: str, schedule: str) -> None:
    layers = {"num_layers": 2, "num_experts": 1, "num_experts_per_token": 1}
    caps = {"attention_soft_cap": 1.5, "logits_soft_cap": 2.0}
    config = small_config(
        model={**layers, "attention_bias": "all", **caps}, pipeline={"schedule": schedule}
    )
    check(Case(config, mesh, packed=True))


def check(case: Case) -> None:
    """Compares loss, its parts and gradients with those of plain `jnp`."""
    key = jax.random.key(7)
    found, gradients, model = in_pipeline(case, key)

    @jax.jit
    def plain(weights: plain_model.Weights) -> Any:
        return jax.value_and_grad(plain_model.loss, has_aux=True)(
            weights, case.batch, case.config, microbatches=case.microbatches, key=key
        )

    want, want_gradients = plain(plain_model.weights_of(model))
    assert_close(found, want, 1e-5)
    assert_close(plain_model.weights_of(gradients), want_gradients, 1e-4)
