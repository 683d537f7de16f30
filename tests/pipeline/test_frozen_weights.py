"""Weights whose gradient is not asked for have no buffer in a loop that adds up gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, equations, float_rows, mesh_of

from nnx_pipeline import CircularPipeline, PipelineConfig
from nnx_pipeline.pipeline import ModelEnds

pytestmark = pytest.mark.jax_alone

WIDTH, STAGES = 24, 2


class Adapter(nnx.Param):
    """What is trained beside frozen weights."""


class Adapted(nnx.Module):
    """A frozen matrix with a low-rank one beside it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(rngs.params(), shape) / 16

        self.frozen = nnx.Param(normal(WIDTH, WIDTH), logical_axes=("embed", None))
        self.down, self.up = Adapter(normal(WIDTH, 2)), Adapter(normal(2, WIDTH))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ self.frozen[...] + x @ self.down[...] @ self.up[...]), None


def _same(_: None, x: jax.Array) -> jax.Array:
    return x


def _loss(_: None, y: jax.Array, __: Any) -> jax.Array:
    return jnp.sum(jnp.sin(y) ** 2)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"backward": "accumulate", "fsdp_gather": "step", "num_repeats": 3},
        {"backward": "accumulate", "fsdp_gather": "prefetch", "num_repeats": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_frozen_weights_have_no_gradient_buffers(options: dict[str, Any], mode: str) -> None:
    config = PipelineConfig(num_microbatches=4, sharding=mode, **options)
    layers, x = STAGES * config.num_repeats, float_rows(8, WIDTH)
    with jax.set_mesh(mesh_of("stage=2,fsdp=2", mode)):
        pipeline = CircularPipeline(config, Adapted, num_layers=layers, rngs=nnx.Rngs(0))

        def loss(pipeline: CircularPipeline) -> jax.Array:
            if config.schedule == "circular":
                return _loss(None, pipeline(x)[0], None)
            return pipeline.loss(ModelEnds(_same, None, _loss, None), (x, x), {})[0]

        def step(kind: type) -> tuple[Any, int]:
            graph, trained, frozen = nnx.split(pipeline, kind, ...)

            def gradients(trained: Any, frozen: Any) -> Any:
                return jax.grad(lambda trained: loss(nnx.merge(graph, trained, frozen)))(trained)

            found = jax.jit(gradients)(trained, frozen)
            carried = [
                variable.aval.shape[-2:]
                for equation in equations(jax.make_jaxpr(gradients)(trained, frozen))
                if equation.primitive.name == "scan"
                for variable in equation.outvars
            ]
            return nnx.to_pure_dict(found)["layers"], carried.count((WIDTH, WIDTH))

        (found, buffers), (everything, buffers_of_all) = step(Adapter), step(nnx.Param)
    values = {name: np.asarray(everything[name]) for name in ("down", "up")}
    assert_close(found, values, 1e-6)
    assert all(np.any(leaf) for leaf in values.values())
    assert buffers < buffers_of_all
    # Gathered ahead, the weights themselves pass from repeat to repeat.
    assert buffers == 0 or config.fsdp_gather == "prefetch"
