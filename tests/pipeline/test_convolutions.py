"""Convolutions in a pipeline: where their gradients are right, and where they are refused."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, float_rows, mesh_of

from nnx_pipeline import CircularPipeline, InputError, PipelineConfig
from nnx_pipeline.pipeline import ModelEnds

pytestmark = pytest.mark.jax_alone


class Convolution(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(8, 8, kernel_size=(3,), padding="CAUSAL", rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(self.conv(x)), None


def by_call(pipeline: CircularPipeline, x: jax.Array) -> jax.Array:
    return jnp.sum(pipeline(x)[0] ** 2)


def by_1f1b(pipeline: CircularPipeline, x: jax.Array) -> jax.Array:
    ends = ModelEnds(lambda _, x: x, None, lambda _, y, x: jnp.sum(y**2), None)
    return pipeline.loss(ends, (x, x), {})[0]


LOSSES = {"circular": by_call, "1f1b": by_1f1b}


def gradients_on(mesh: str, schedule: Literal["circular", "1f1b"]) -> np.ndarray:
    """The gradient of all kernels, one layer after the other."""
    config = PipelineConfig(num_microbatches=4, schedule=schedule)
    with jax.set_mesh(mesh_of(mesh, "auto")):
        pipeline = CircularPipeline(config, Convolution, num_layers=4, rngs=nnx.Rngs(0))
        gradients = jax.jit(jax.grad(LOSSES[schedule]))(pipeline, float_rows(16, 6, 8))
        return np.asarray(gradients.layers.conv.kernel[...]).reshape(4, 3, 8, 8)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("schedule", LOSSES)
@pytest.mark.parametrize("mesh", ["stage=2,fsdp=2,expert=2", "stage=2,tensor=2", "fsdp=2,tensor=2"])
def test_gradients_are_those_of_one_device(mesh: str, schedule: Any) -> None:
    assert_close(gradients_on(mesh, schedule), gradients_on("", "circular"), 1e-5)


@pytest.mark.parametrize("schedule", LOSSES)
@pytest.mark.parametrize("mesh", ["stage=2,fsdp=2,tensor=2", "stage=2,data=2,context=2"])
def test_a_convolution_is_refused_where_xla_is_wrong(mesh: str, schedule: Any) -> None:
    with pytest.raises(InputError, match=r"gets the gradient of its kernel wrong.* is 1, or write"):
        gradients_on(mesh, schedule)


def test_xla_is_still_wrong() -> None:
    """Without this package: if this fails, convolutions need not be refused any more."""

    def loss(kernels: jax.Array, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
            axes = ("NHC", "HIO", "NHC")
            return jax.lax.conv_general_dilated(x, kernel, (1,), [(2, 0)], dimension_numbers=axes)

        return jnp.mean(jax.vmap(conv)(x, kernels) ** 2)

    kernels, x = float_rows(2, 3, 8, 8), float_rows(2, 4, 6, 8)
    with jax.set_mesh(mesh_of("stage=2,fsdp=2,tensor=2", "auto")):
        spread = jax.device_put((kernels, x), (jax.P("stage"), jax.P("stage", "fsdp")))
        got = jax.jit(jax.grad(loss))(*spread)
    assert_close(np.asarray(got), 2 * np.asarray(jax.grad(loss)(kernels, x)), 1e-5)
