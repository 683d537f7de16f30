"""Creates the pipeline that a config describes."""

import contextlib
from collections.abc import Sequence

import jax
from flax import nnx

from nnx_pipeline.config.config import Config
from nnx_pipeline.pipeline.layers import MakeLayer
from nnx_pipeline.pipeline.module import CircularPipeline, Pipeline
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.pipeline.parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.sharding import Layout


def create_pipeline(
    config: Config,
    layers: MakeLayer | Sequence[MakeLayer],
    mesh: jax.sharding.Mesh | None = None,
    *,
    rngs: nnx.Rngs,
    layout: Layout = Layout(),
    parts: LoopParts = DEFAULT_PARTS,
) -> CircularPipeline:
    """Creates a `Pipeline`, or a `CircularPipeline` if the config has more than one repeat.

    - `config`: of the whole model. It gives the number of layers, without those that run before
      the pipeline (`num_dense_layers`), how gradients are sharded, the settings of `pipeline`, and
      two dtypes: `model.dtype` is that of the activations, in which weights are gathered ahead of
      their use, and `train.grad_dtype` that in which gradients add up.
    - `layers`: makes one layer, or a list for layers of several kinds, as for `CircularPipeline`.
    - `mesh`: the mesh on which parameters are created; None for the mesh of `jax.set_mesh`. Call
      the pipeline under the same mesh.
    - `rngs`, `layout`, `parts`: as for `CircularPipeline`.
    """
    kind = Pipeline if config.pipeline.num_repeats == 1 else CircularPipeline
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return kind(
            config.pipeline,
            layers,
            num_layers=config.model.num_pipeline_layers,
            rngs=rngs,
            layout=layout,
            weights=weight_options(config),
            parts=parts,
        )


def weight_options(config: Config) -> WeightOptions:
    """The options for the weights of the layers that a config describes."""
    return WeightOptions(
        dtype=config.model.dtype,
        grad_dtype=config.train.grad_dtype,
        zero1=("data",) if config.train.shard_optimizer_over_data else (),
        cast_at_use=config.model.experts == "grouped",
    )
