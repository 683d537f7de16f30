"""Mixtral-class models as Flax NNX modules, pipelined over a mesh with explicit shardings."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.config.config import Config
    from nnx_pipeline.config.model import ModelConfig
    from nnx_pipeline.config.pipeline import PipelineConfig
    from nnx_pipeline.config.presets import preset
    from nnx_pipeline.config.train import TrainConfig
    from nnx_pipeline.lab.errors import InputError
    from nnx_pipeline.lab.mesh import MeshConfig, make_mesh
    from nnx_pipeline.modules import (
        MLP,
        Attention,
        DecoderLayer,
        Embed,
        LatentAttention,
        RMSNorm,
        RoutedMoE,
    )
    from nnx_pipeline.modules.decoder import Mixtral
    from nnx_pipeline.pipeline import (
        CircularPipeline,
        LayerPlace,
        LayerState,
        Max,
        Mean,
        Pipeline,
        Shared,
        Sum,
        create_pipeline,
        run_pipeline,
    )
    from nnx_pipeline.sharding.layout import Layout, abstract

__all__ = [
    "MLP",
    "Attention",
    "CircularPipeline",
    "Config",
    "DecoderLayer",
    "Embed",
    "InputError",
    "LatentAttention",
    "LayerPlace",
    "LayerState",
    "Layout",
    "Max",
    "Mean",
    "MeshConfig",
    "Mixtral",
    "ModelConfig",
    "Pipeline",
    "PipelineConfig",
    "RMSNorm",
    "RoutedMoE",
    "Shared",
    "Sum",
    "TrainConfig",
    "abstract",
    "create_pipeline",
    "make_mesh",
    "preset",
    "run_pipeline",
]

__getattr__, __dir__ = lazy(__name__)
