"""The pipeline that a config asks for."""

import functools
from typing import Any

import jax
from flax import nnx

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.pipeline.layers import MakeLayer
from nnx_pipeline.pipeline.module import CircularPipeline
from nnx_pipeline.pipeline_config import PipelineConfig


class Pipeline(CircularPipeline):
    """The plain pipeline: a circular one in which each microbatch passes every stage once."""

    def __init__(self, config: PipelineConfig, layers: MakeLayer, **options: Any) -> None:
        if config.num_repeats != 1:
            raise InputError(
                f"pipeline.num_repeats={config.num_repeats} is for a CircularPipeline; "
                "set it to 1 or use CircularPipeline (create_pipeline chooses)"
            )
        super().__init__(config, layers, **options)


def create_pipeline(
    config: Config,
    layers: MakeLayer,
    mesh: jax.sharding.Mesh | None = None,
    *,
    rngs: nnx.Rngs,
    **options: Any,
) -> CircularPipeline:
    """The pipeline that a config asks for: `Pipeline`, or with repeats `CircularPipeline`.

    mesh: where its parameters are born; None for the mesh of `jax.set_mesh`. Call the pipeline
    under the same mesh. options: further arguments of `CircularPipeline`.
    """
    kind = Pipeline if config.pipeline.num_repeats == 1 else CircularPipeline
    make = functools.partial(
        kind,
        config.pipeline,
        layers,
        num_layers=config.model.num_layers,
        dtype=config.model.dtype,
        grad_dtype=config.train.grad_dtype,
        own=("data",) if config.train.shard_optimizer_over_data else (),
        rngs=rngs,
        **options,
    )
    if mesh is None:
        return make()
    with jax.set_mesh(mesh):
        return make()
