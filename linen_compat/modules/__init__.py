"""Linen modules that compute with `nnx_pipeline` under MaxText's names and metadata boxes."""

from linen_compat.modules.attention import Attention
from linen_compat.modules.decoder import Decoder, Transformer
from linen_compat.modules.decoder_layers import (
    DeepSeekDenseLayer,
    DeepSeekMoELayer,
    LlamaDecoderLayer,
    MixtralDecoderLayer,
    Qwen3MoeDecoderLayer,
)
from linen_compat.modules.embedding import Embed
from linen_compat.modules.feed_forward import DeepSeekMoeBlock, MlpBlock, MoeBlock
from linen_compat.modules.latent_attention import LatentAttention
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import logical_axis_rules
from linen_compat.modules.pipeline import CircularPipeline, Pipeline

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
    "logical_axis_rules",
]
