"""What layers of other families compute, through a pipeline, against plain `jnp`, and in Linen."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    arrays_by_path,
    mesh_of,
    model_on_mesh,
    new_model,
    packed_batch,
    replace,
    small_config,
)
from linen_helpers import as_linen, put_on
from test_random_options import Case, check

from linen_compat import Transformer, load, save
from nnx_pipeline import Config, InputError
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.experiments import floor
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import Batch

pytestmark = pytest.mark.numbers

DENSE = {"num_experts": 1, "num_experts_per_token": 1}
YARN = {
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_length": 16,
    "rope_low_frequency": 0.25,
    "rope_high_frequency": 2.0,
    "rope_theta": 10.0,
    "head_dim": 8,
}
ALTERNATE = {"sliding_window": 2, "full_attention_every": 2}
# What each family has that Mixtral has not, two or more at a time.
FORMULAS: dict[str, dict[str, Any]] = {
    "qwen2": {**DENSE, "attention_bias": "qkv", "sliding_window": 3},
    "yarn": {**YARN, "rope_amplitude": 1.3, "rope_truncate": False, "qk_norm": True},
    "groups": {"router_groups": 2, "router_normalize": False, "router_scale": 1.5},
    "olmo2": {**DENSE, "norm_placement": "after", "qk_norm": True, "qk_norm_over_heads": True},
    "olmoe": {"qk_norm": True, "qk_norm_over_heads": True, "router_normalize": False},
    "gemma": {
        **{**DENSE, **ALTERNATE, "norm_placement": "both", "norm_scale_offset": 1.0},
        **{"activation": "gelu_tanh", "embedding_scale": 4.0, "tied_embeddings": True},
        **{"rope_window_theta": 30.0, "rope_scaling": "linear", "rope_factor": 2.0},
        **{"attention_soft_cap": 1.5, "logits_soft_cap": 2.0},
    },
    "gelu experts": {"activation": "gelu_tanh", "experts": "grouped", "rope_head_dim": 2},
    "glm": {
        **{"router_score": "sigmoid", "router_bias": True, "num_shared_experts": 1},
        **{"rope_head_dim": 2, "attention_bias": "qkv", "qk_norm": True},
    },
    "gpt-oss": {
        **{"attention_sinks": True, "expert_bias": True, "router_logits_bias": True},
        **{"activation": "clamped_swish", "attention_bias": "all", "sliding_window": 3},
    },
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.5, "logits_divisor": 3.0},
}
each_formula = pytest.mark.parametrize("name", FORMULAS)


def config_of(name: str, **pipeline: Any) -> Config:
    return small_config(model=FORMULAS[name], pipeline=pipeline)


@pytest.mark.slow
@each_formula
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_equals_plain_jnp_in_a_pipeline(name: str, schedule: str) -> None:
    check(Case(config_of(name, schedule=schedule), "stage=2,fsdp=2", packed=True))


@pytest.mark.slow(but=5)
@each_formula
def test_counts_and_floors(name: str) -> None:
    """The number of parameters is that of the arrays, and a floor is found on a mesh."""
    config = config_of(name)
    sizes = [leaf.size for leaf in jax.tree.leaves(new_model(Config(model=config.model)))]
    assert count_parameters(config.model).total == sum(sizes)
    least = floor(config, "stage=2,fsdp=2", "tpu:v5p:2x2x1")
    assert least.time is not None
    assert least.time.useful_flops > 0
    assert sum(term.bytes for term in least.arguments) > 0


@each_formula
def test_a_checkpoint_holds_every_parameter(name: str, tmp_path: Path) -> None:
    """In this project's own format; MaxText's refuse what no model read from it has."""
    config = config_of(name)
    model = new_model(Config(model=config.model))
    if len(config.model.of_kinds) > 1:
        with pytest.raises(InputError, match="makes layers of several kinds"):
            save(model, tmp_path / "nnx", "nnx")
        return
    save(model, tmp_path / "nnx", "nnx")
    loaded = load(tmp_path / "nnx", Config(model=config.model))
    found, expected = arrays_by_path(loaded), arrays_by_path(model)
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(expected[path]), path)
    if name == "qwen2":  # whose biases MaxText has
        save(model, tmp_path / "maxtext", "maxtext:scanned")
        scaled = replace(config, "model", attention_scale=0.5).model  # as MaxText's kernels are
        again = arrays_by_path(load(tmp_path / "maxtext", Config(model=scaled)))
        assert again.keys() == expected.keys()
        for path in expected:
            ratio = 2.0 if "attention/query" in path else 1.0
            np.testing.assert_array_equal(again[path], expected[path] * ratio, path)
        return
    with pytest.raises(InputError, match=r"of no model that|does not exist in MaxText"):
        save(model, tmp_path / "maxtext", "maxtext:scanned")


OF_LINEN = [name for name in FORMULAS if name != "gemma"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_LINEN, "gemma"])
@pytest.mark.parametrize(("mesh", "layout"), [("", "scanned"), ("stage=2,fsdp=2", "pipelined")])
def test_linen_computes_the_same(name: str, mesh: str, layout: str) -> None:
    """To the bit on one device: the same functions on the same arrays."""
    config = config_of(name)
    if name == "gemma":  # layers of two kinds have no names in Linen
        config = replace(config, "model", full_attention_every=None)
    source = new_model(Config(model=config.model))
    given = packed_batch(config)
    batch = Batch(**jax.tree.map(jnp.asarray, vars(given)))
    linen = Transformer(config, layer_layout=layout)  # type: ignore[arg-type]
    side = {"positions": batch.positions, "segment_ids": batch.segment_ids}
    if not mesh:
        found = linen.apply({"params": as_linen(source, layout)}, batch.tokens, **side)
        np.testing.assert_allclose(found, source(batch.tokens, **side), rtol=0, atol=1e-6)
        return
    with jax.set_mesh(mesh_of(mesh)) as _:
        model = model_on_mesh(source, config, mesh_of(mesh))
        abstract = jax.eval_shape(linen.init, jax.random.key(0), batch.tokens, **side)["params"]
        params = put_on(as_linen(model, layout), abstract, mesh_of(mesh))

        def loss(params: Any) -> jax.Array:
            args = (batch.tokens, batch.targets, batch.weights / jnp.sum(batch.weights))
            return linen.apply({"params": params}, *args, **side, method="loss")[0]

        value, gradients = jax.jit(jax.value_and_grad(loss))(params)
        (wanted, _), d_wanted = jax.jit(loss_and_gradients)(model, batch)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6),
        jax.tree.map(np.asarray, gradients),
        jax.tree.map(np.asarray, as_linen(d_wanted, layout)),
    )
