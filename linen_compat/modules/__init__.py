"""Linen modules that compute with `nnx_pipeline` under MaxText's names and metadata boxes."""

from linen_compat.modules.attention import Attention
from linen_compat.modules.decoder import Decoder, Transformer
from linen_compat.modules.decoder_layers import (
    LlamaDecoderLayer,
    MixtralDecoderLayer,
    Qwen3MoeDecoderLayer,
)
from linen_compat.modules.embedding import Embed
from linen_compat.modules.feed_forward import MlpBlock, MoeBlock
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import logical_axis_rules
from linen_compat.modules.pipeline import CircularPipeline, Pipeline

__all__ = [
    "Attention",
    "CircularPipeline",
    "Decoder",
    "Embed",
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
