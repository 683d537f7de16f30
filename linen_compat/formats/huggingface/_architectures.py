"""All classes of `transformers` that this project computes, and which a model is written as."""

from linen_compat.formats.huggingface._architecture import Architecture
from linen_compat.formats.huggingface._first_classes import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)
from linen_compat.formats.huggingface._later_classes import (
    GEMMA2,
    GEMMA3,
    GLM4_MOE,
    GPT_OSS,
    GRANITE,
    GRANITE_MOE,
    OLMO2,
    OLMOE,
    PHI3,
)
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import InputError

ARCHITECTURES = {
    one.name: one
    for one in (
        *(MIXTRAL, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3),
        *(OLMO2, OLMOE, GEMMA2, GEMMA3, GPT_OSS, GLM4_MOE, GRANITE, GRANITE_MOE, PHI3),
    )
}


def written_as(model: ModelConfig) -> Architecture:
    """The class that a model is written as: the first that can say all that it computes."""
    nearest = min(ARCHITECTURES.values(), key=lambda one: len(one.misfits(model)))
    for name, only in nearest.misfits(model).items():
        raise InputError(
            f"model.{name}={getattr(model, name)!r} has no place in a {nearest.name}, which of the "
            f"Hugging Face models is nearest to it; only a model with {only!r} can be saved so"
        )
    return nearest
