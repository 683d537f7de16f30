"""Mixtral-class models as Flax NNX modules, pipelined over a mesh with explicit shardings."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx_pipeline.config.config import Config, TrainConfig
    from nnx_pipeline.config.model import ModelConfig
    from nnx_pipeline.config.pipeline import PipelineConfig
    from nnx_pipeline.config.presets import preset
    from nnx_pipeline.decoder import Mixtral
    from nnx_pipeline.errors import InputError
    from nnx_pipeline.mesh import MeshConfig, make_mesh
    from nnx_pipeline.modules import (
        MLP,
        Attention,
        DecoderLayer,
        Embed,
        LatentAttention,
        RMSNorm,
        RoutedMoE,
    )
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
    from nnx_pipeline.sharding import Layout, abstract

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

# Where each name comes from when it is first asked for. Importing the package alone must not import
# JAX: pytest does so for the plugin in it before any conftest.py can set JAX's flags.
_HOME = {
    "config.config": ("Config", "TrainConfig"),
    "config.model": ("ModelConfig",),
    "config.pipeline": ("PipelineConfig",),
    "config.presets": ("preset",),
    "decoder": ("Mixtral",),
    "errors": ("InputError",),
    "mesh": ("MeshConfig", "make_mesh"),
    "modules": (
        "MLP",
        "Attention",
        "DecoderLayer",
        "Embed",
        "LatentAttention",
        "RMSNorm",
        "RoutedMoE",
    ),
    "pipeline": (
        "CircularPipeline",
        "LayerPlace",
        "LayerState",
        "Max",
        "Mean",
        "Pipeline",
        "Shared",
        "Sum",
        "create_pipeline",
        "run_pipeline",
    ),
    "sharding": ("Layout", "abstract"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(f"nnx_pipeline.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
