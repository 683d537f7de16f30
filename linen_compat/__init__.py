"""Linen-style modules, wrappers and checkpoint formats for models of `nnx_pipeline`."""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from linen_compat.bridge.to_linen import to_linen
    from linen_compat.bridge.to_nnx import to_nnx
    from linen_compat.checkpoints.loading import load
    from linen_compat.checkpoints.saving import save
    from linen_compat.checkpoints.train_state import load_train_state, save_train_state
    from linen_compat.formats.huggingface.config import (
        config_from_huggingface,
        config_to_huggingface,
    )
    from linen_compat.maxtext.config import config_from_maxtext
    from linen_compat.modules import (
        Attention,
        CircularPipeline,
        Decoder,
        DeepSeekDenseLayer,
        DeepSeekMoeBlock,
        DeepSeekMoELayer,
        Embed,
        LatentAttention,
        LlamaDecoderLayer,
        MixtralDecoderLayer,
        MlpBlock,
        MoeBlock,
        Pipeline,
        Qwen3MoeDecoderLayer,
        RMSNorm,
        Transformer,
        logical_axis_rules,
    )

__all__ = [
    "Attention",
    "CircularPipeline",
    "Decoder",
    "DeepSeekDenseLayer",
    "DeepSeekMoELayer",
    "DeepSeekMoeBlock",
    "Embed",
    "LatentAttention",
    "LlamaDecoderLayer",
    "MixtralDecoderLayer",
    "MlpBlock",
    "MoeBlock",
    "Pipeline",
    "Qwen3MoeDecoderLayer",
    "RMSNorm",
    "Transformer",
    "config_from_huggingface",
    "config_from_maxtext",
    "config_to_huggingface",
    "load",
    "load_train_state",
    "logical_axis_rules",
    "save",
    "save_train_state",
    "to_linen",
    "to_nnx",
]

__getattr__, __dir__ = lazy(__name__)
