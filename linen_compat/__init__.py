"""Linen-style modules, wrappers and checkpoint formats for models of `nnx_pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linen_compat.bridge.to_linen import to_linen as to_linen
    from linen_compat.bridge.to_nnx import to_nnx as to_nnx
    from linen_compat.formats.huggingface.config import (
        config_from_huggingface as config_from_huggingface,
    )
    from linen_compat.formats.huggingface.config import (
        config_to_huggingface as config_to_huggingface,
    )
    from linen_compat.loading import load as load
    from linen_compat.maxtext.config import config_from_maxtext as config_from_maxtext
    from linen_compat.modules import Attention as Attention
    from linen_compat.modules import CircularPipeline as CircularPipeline
    from linen_compat.modules import Decoder as Decoder
    from linen_compat.modules import DeepSeekDenseLayer as DeepSeekDenseLayer
    from linen_compat.modules import DeepSeekMoeBlock as DeepSeekMoeBlock
    from linen_compat.modules import DeepSeekMoELayer as DeepSeekMoELayer
    from linen_compat.modules import Embed as Embed
    from linen_compat.modules import LatentAttention as LatentAttention
    from linen_compat.modules import LlamaDecoderLayer as LlamaDecoderLayer
    from linen_compat.modules import MixtralDecoderLayer as MixtralDecoderLayer
    from linen_compat.modules import MlpBlock as MlpBlock
    from linen_compat.modules import MoeBlock as MoeBlock
    from linen_compat.modules import Pipeline as Pipeline
    from linen_compat.modules import Qwen3MoeDecoderLayer as Qwen3MoeDecoderLayer
    from linen_compat.modules import RMSNorm as RMSNorm
    from linen_compat.modules import Transformer as Transformer
    from linen_compat.modules import logical_axis_rules as logical_axis_rules
    from linen_compat.saving import save as save
    from linen_compat.train_state import load_train_state as load_train_state
    from linen_compat.train_state import save_train_state as save_train_state

# Each public name and the module that holds it. Modules are imported at the first access, so that
# `linen-compat --help` does not wait for imports that it does not need.
_PUBLIC = {
    "Attention": "modules",
    "CircularPipeline": "modules",
    "Decoder": "modules",
    "DeepSeekDenseLayer": "modules",
    "DeepSeekMoELayer": "modules",
    "DeepSeekMoeBlock": "modules",
    "Embed": "modules",
    "LatentAttention": "modules",
    "LlamaDecoderLayer": "modules",
    "MixtralDecoderLayer": "modules",
    "MlpBlock": "modules",
    "MoeBlock": "modules",
    "Pipeline": "modules",
    "Qwen3MoeDecoderLayer": "modules",
    "RMSNorm": "modules",
    "Transformer": "modules",
    "logical_axis_rules": "modules",
    "config_from_maxtext": "maxtext.config",
    "config_from_huggingface": "formats.huggingface.config",
    "config_to_huggingface": "formats.huggingface.config",
    "load": "loading",
    "load_train_state": "train_state",
    "save": "saving",
    "save_train_state": "train_state",
    "to_linen": "bridge",
    "to_nnx": "bridge",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'linen_compat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"linen_compat.{_PUBLIC[name]}"), name)
