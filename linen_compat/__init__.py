"""Linen-style classes and checkpoints beside `nnx_pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linen_compat.modules import Attention as Attention
    from linen_compat.modules import CircularPipeline as CircularPipeline
    from linen_compat.modules import Decoder as Decoder
    from linen_compat.modules import Embed as Embed
    from linen_compat.modules import LlamaDecoderLayer as LlamaDecoderLayer
    from linen_compat.modules import MixtralDecoderLayer as MixtralDecoderLayer
    from linen_compat.modules import MlpBlock as MlpBlock
    from linen_compat.modules import MoeBlock as MoeBlock
    from linen_compat.modules import Pipeline as Pipeline
    from linen_compat.modules import RMSNorm as RMSNorm
    from linen_compat.modules import Transformer as Transformer
    from linen_compat.modules import logical_axis_rules as logical_axis_rules

# Public names and where they are; imported when they are asked for, so that `linen-compat --help`
# does not wait for what it does not need.
_PUBLIC = {
    "Attention": "modules",
    "CircularPipeline": "modules",
    "Decoder": "modules",
    "Embed": "modules",
    "LlamaDecoderLayer": "modules",
    "MixtralDecoderLayer": "modules",
    "MlpBlock": "modules",
    "MoeBlock": "modules",
    "Pipeline": "modules",
    "RMSNorm": "modules",
    "Transformer": "modules",
    "logical_axis_rules": "modules",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'linen_compat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"linen_compat.{_PUBLIC[name]}"), name)
