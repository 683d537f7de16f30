"""Mixtral-class models as Flax NNX modules, pipelined over a mesh with explicit shardings."""

from nnx_pipeline.config import Config, ModelConfig, TrainConfig
from nnx_pipeline.decoder import Mixtral
from nnx_pipeline.errors import InputError
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.modules import MLP, Attention, DecoderLayer, Embed, RMSNorm, RoutedMoE
from nnx_pipeline.pipeline import CircularPipeline, Pipeline, create_pipeline, run_pipeline
from nnx_pipeline.pipeline_config import PipelineConfig
from nnx_pipeline.presets import preset
from nnx_pipeline.sharding import Layout

__all__ = [
    "MLP",
    "Attention",
    "CircularPipeline",
    "Config",
    "DecoderLayer",
    "Embed",
    "InputError",
    "Layout",
    "MeshConfig",
    "Mixtral",
    "ModelConfig",
    "Pipeline",
    "PipelineConfig",
    "RMSNorm",
    "RoutedMoE",
    "TrainConfig",
    "create_pipeline",
    "make_mesh",
    "preset",
    "run_pipeline",
]
