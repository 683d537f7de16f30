"""Creates the pipeline that a config describes."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
from flax import nnx

from nnx_pipeline.config.config import Config
from nnx_pipeline.pipeline.layers import MakeLayer
from nnx_pipeline.pipeline.module import CircularPipeline, Pipeline
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.sharding.layout import Layout


def create_pipeline(
    config: Config,
    layers: MakeLayer | Sequence[MakeLayer],
    mesh: jax.sharding.Mesh | None = None,
    *,
    rngs: nnx.Rngs,
    layout: Layout = Layout(),
) -> CircularPipeline:
    """Creates a `Pipeline`, or a `CircularPipeline` if the config has more than one repeat.

    - `config`: of the whole model. It gives the number of layers, without those that run before the
      pipeline (`num_dense_layers`), the dtype in which gradients add up, how they are sharded, and
      the settings of `pipeline`.
    - `mesh`: on which parameters are created; None for the mesh of `jax.set_mesh`. Call the
      pipeline under the same mesh.
    - `layers`, `rngs`, `layout`: as for `CircularPipeline`.

    Weights that are gathered ahead of their use are gathered in their own dtype.
    `CircularPipeline(…, weights=WeightOptions(dtype="bfloat16"))` gathers them in fewer bits.
    """
    weights = dataclasses.replace(weight_options(config), dtype=None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return pipeline_of(config, layers, weights, rngs=rngs, layout=layout)


def pipeline_of(
    config: Config,
    layers: MakeLayer | Sequence[MakeLayer],
    weights: WeightOptions,
    *,
    rngs: nnx.Rngs,
    layout: Layout,
) -> CircularPipeline:
    kind = Pipeline if config.pipeline.num_repeats == 1 else CircularPipeline
    return kind(
        config.pipeline,
        layers,
        num_layers=config.model.num_pipeline_layers,
        rngs=rngs,
        layout=layout,
        weights=weights,
    )


def weight_options(config: Config) -> WeightOptions:
    return WeightOptions(
        dtype=config.model.dtype,
        grad_dtype=config.train.grad_dtype,
        zero1=("data",) if config.train.shard_optimizer_over_data else (),
        cast_at_use=config.model.experts == "grouped",
    )
