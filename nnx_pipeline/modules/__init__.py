"""NNX modules: they hold the parameters, their names and shardings, and call `nnx_pipeline.ops`."""

from nnx_pipeline.modules.attention import Attention
from nnx_pipeline.modules.decoder_layer import DecoderLayer
from nnx_pipeline.modules.embedding import Embed
from nnx_pipeline.modules.latent_attention import LatentAttention
from nnx_pipeline.modules.mlp import MLP
from nnx_pipeline.modules.moe import RoutedMoE
from nnx_pipeline.modules.norm import RMSNorm

__all__ = ["MLP", "Attention", "DecoderLayer", "Embed", "LatentAttention", "RMSNorm", "RoutedMoE"]
