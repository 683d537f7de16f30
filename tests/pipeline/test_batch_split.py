"""Layers whose batch goes through them in parts compute what they do at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, mesh_of, packed_batch, replace, small_config

from nnx_pipeline import (
    CircularPipeline,
    InputError,
    Mean,
    MeshConfig,
    Mixtral,
    PipelineConfig,
    Shared,
    Sum,
)
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import Batch

pytestmark = pytest.mark.numbers

CONFIG = small_config(
    model={"num_layers": 2, "num_shared_experts": 1, "dropout_rate": 0.3},
    train={"load_balance_weight": 0.1, "global_batch": 16},
)


def results(mesh: str, split: int, **pipeline: Any) -> tuple[Any, Any]:
    config = replace(CONFIG, "pipeline", num_microbatches=2, batch_split=split, **pipeline)
    with jax.set_mesh(mesh_of(mesh, config.pipeline.sharding)):
        model = jax.jit(lambda: Mixtral(config, rngs=nnx.Rngs(0)))()
        batch = Batch(**jax.tree.map(jnp.asarray, vars(packed_batch(config))))
        step = jax.jit(loss_and_gradients)
        found = step(model, batch, jax.random.key(1))
        jaxpr = str(jax.make_jaxpr(loss_and_gradients)(model, batch, jax.random.key(1)))
    return jax.tree.map(np.asarray, jax.tree.leaves(found)), jaxpr.count("top_k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("stage=2,fsdp=2", {}),
        ("stage=2,expert=2", {"schedule": "1f1b", "sharding": "auto"}),
        ("data=2,fsdp=2", {"fsdp_gather": "step"}),
    ],
    ids=str,
)
def test_parts_compute_what_the_whole_does(mesh: str, pipeline: dict[str, Any]) -> None:
    whole, once = results(mesh, 1, **pipeline)
    parts, twice = results(mesh, 2, **pipeline)
    assert twice == 2 * once, "each part has a router of its own"
    assert_close(parts, whole, 2e-5)


class Own(nnx.Module):
    """Reports a sum and a mean over its sequences, and reads what all of them share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array, own: jax.Array, bias: jax.Array, place: Any) -> Any:
        y = x + own * self.linear(x) + bias * place.layer.astype(x.dtype)
        return y, {"sum": Sum(jnp.sum(y)), "mean": Mean(jnp.mean(y))}


def test_own_layers_report_the_same() -> None:
    x, own, bias = jnp.arange(48.0).reshape(12, 4) / 9, jnp.ones((12, 1)), jnp.arange(4.0)
    found = []
    for split in (1, 3):
        config = PipelineConfig(num_microbatches=2, batch_split=split)
        pipeline = CircularPipeline(config, Own, num_layers=2, rngs=nnx.Rngs(0))
        found.append(pipeline(x, own=own, bias=Shared(bias)))
    # Beside the largest element: a sum that cancels has the rounding of its summands.
    assert_close(found[1], found[0], 1e-6)


def test_what_does_not_split_is_refused() -> None:
    config = replace(CONFIG, "pipeline", num_microbatches=8, batch_split=2)
    with pytest.raises(InputError, match=r"has 1 sequence of .*\.batch_split=2 does not divide"):
        config.check_mesh(MeshConfig(stage=2, fsdp=2))
    odd = PipelineConfig(num_microbatches=4, batch_split=2)
    pipeline = CircularPipeline(odd, Own, num_layers=2, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="a device has 3 sequences of a call"):
        pipeline(jnp.ones((12, 4)), own=jnp.ones((12, 1)), bias=Shared(jnp.ones(4)))
