"""What this project's own programs may take; the budgets stand in memory-budgets.toml."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import mesh_of, optax_promotion, small_config

from nnx_pipeline import Config, create_pipeline
from nnx_pipeline.lab.pytest_plugin.fixture import CompileMemory

TPU, CUDA = "tpu:v5p:2x2x2", "cuda:h100:8"
MESH = "stage=4,fsdp=2"
MODEL = {"num_layers": 8, "embed_dim": 64, "mlp_dim": 128, "head_dim": 16, "dtype": "bfloat16"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fsdp_gather": "step", "num_repeats": 2},
    {"remat": "save_qkv_proj"},
]


def config(microbatches: int = 8, **pipeline: Any) -> Config:
    """Eight layers; microbatches of two sequences, however many there are."""
    return small_config(
        model=MODEL,
        pipeline={"num_microbatches": microbatches, **pipeline},
        train={"global_batch": 2 * microbatches, "sequence_length": 64},
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "default"))
def test_a_training_step(compile_memory: CompileMemory, options: dict[str, Any]) -> None:
    with optax_promotion():
        assert compile_memory.step(config(**options), MESH, TPU).within_budget()


@pytest.mark.slow
def test_1f1b_does_not_grow(compile_memory: CompileMemory) -> None:
    """Twice the microbatches of the same size take the same memory, but for the batch itself."""
    with optax_promotion():
        few, many = (
            compile_memory.step(config(count, schedule="1f1b"), MESH, TPU) for count in (8, 16)
        )
    assert few.within_budget("8 microbatches")
    assert many.within_budget("16 microbatches")
    batch = many.argument_bytes - few.argument_bytes
    many.assert_at_most(temp_bytes=int(1.02 * few.temp_bytes) + batch)


class Block(nnx.Module):
    """A layer that is not this project's."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + self.down(nnx.relu(self.up(x))), None


@pytest.fixture(scope="module")
def pipeline() -> nnx.Module:
    """The blocks in a pipeline of two rounds."""
    return create_pipeline(config(num_repeats=2), Block, mesh_of(MESH), rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("platform", [TPU, CUDA, "cpu"])
def test_gradients_of_other_layers(
    compile_memory: CompileMemory, pipeline: nnx.Module, platform: str
) -> None:
    @jax.jit
    @jax.grad
    def gradients(pipeline: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(pipeline(x)[0])

    x = jax.ShapeDtypeStruct((64, 32, 64), "float32")
    result = compile_memory(gradients, (pipeline, x), mesh=mesh_of(MESH), platform=platform)
    assert result.within_budget()
