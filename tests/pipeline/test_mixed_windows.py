"""Layers with a sliding window in turn with layers without one, against a plain model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from helpers import mesh_of, packed_batch, replace, small_config

from nnx_pipeline import InputError, Mixtral
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import Batch

pytestmark = pytest.mark.numbers

CONFIG = small_config(model={"num_layers": 8, "sliding_window": 2, "full_attention_every": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [("stage=2,fsdp=2", {"num_repeats": 2}), ("stage=4,fsdp=2", {"schedule": "1f1b"})],
    ids=str,
)
def test_equals_a_plain_model(mesh: str, pipeline: dict[str, Any]) -> None:
    config = replace(CONFIG, "pipeline", num_microbatches=4, **pipeline)
    given = packed_batch(config)
    with jax.set_mesh(mesh_of(mesh)):
        model = jax.jit(lambda: Mixtral(config, rngs=nnx.Rngs(0)))()
        batch = Batch(**jax.tree.map(jnp.asarray, vars(given)))
        (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch)
    weights = jax.tree.map(jnp.asarray, plain_model.weights_of(model))

    def plain(weights: plain_model.Weights) -> jax.Array:
        return plain_model.loss(weights, given, config, microbatches=4)[0]

    wanted, d_wanted = jax.value_and_grad(plain)(weights)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        plain_model.weights_of(gradients),
        d_wanted,
    )
    alike = replace(config, "model", sliding_window=None, full_attention_every=None)
    without, _ = plain_model.loss(weights, given, alike, microbatches=4)
    assert abs(float(without) - float(wanted)) > 1e-4  # the windows matter


def test_a_stage_has_a_multiple_of_the_kinds() -> None:
    config = replace(CONFIG, "model", full_attention_every=3)
    with (
        jax.set_mesh(mesh_of("stage=4,fsdp=2")),
        pytest.raises(InputError, match="on a stage 2 layers do not split by"),
    ):
        Mixtral(config, rngs=nnx.Rngs(0))
