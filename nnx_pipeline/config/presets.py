"""Named configs (presets), and how many parameters a model has.

The sizes are those of the published configurations (`config.json` on Hugging Face): of
mistralai/Mixtral-8x7B-v0.1, mistralai/Mixtral-8x22B-v0.1, meta-llama/Llama-2-7b-hf,
meta-llama/Llama-3.1-8B (8,030,261,248 parameters), mistralai/Mistral-7B-v0.2 (7,241,732,096),
Qwen/Qwen3-8B (8,190,735,360) and Qwen/Qwen3-30B-A3B-Instruct-2507 (30,532,122,624; the first
Qwen3-30B-A3B has a rope_theta of 1e6). The numbers are the parameter counts published there.
"""

from dataclasses import dataclass

from nnx_pipeline.config.config import Config, TrainConfig
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.errors import InputError, nearest

PRESETS: dict[str, Config] = {
    "tiny": Config(
        model=ModelConfig(
            vocab_size=128,
            embed_dim=64,
            mlp_dim=128,
            num_layers=8,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_token=2,
            dtype="float32",
        ),
        pipeline=PipelineConfig(),
        train=TrainConfig(
            global_batch=16, sequence_length=64, learning_rate=3e-3, loss_chunks=4, weight_decay=0.0
        ),
    ),
    "mixtral-small": Config(
        model=ModelConfig(
            vocab_size=32_000,
            embed_dim=512,
            mlp_dim=1024,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            num_experts=8,
            num_experts_per_token=2,
        ),
        train=TrainConfig(global_batch=16, sequence_length=1024),
    ),
    "mixtral-8x7b": Config(
        model=ModelConfig(
            vocab_size=32_000,
            embed_dim=4096,
            mlp_dim=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            num_experts=8,
            num_experts_per_token=2,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "mixtral-8x22b": Config(
        model=ModelConfig(
            vocab_size=32_768,
            embed_dim=6144,
            mlp_dim=16_384,
            num_layers=56,
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            num_experts=8,
            num_experts_per_token=2,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "llama2-7b": Config(
        model=ModelConfig(
            vocab_size=32_000,
            embed_dim=4096,
            mlp_dim=11_008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            rope_theta=1e4,
        ),
        train=TrainConfig(global_batch=48, sequence_length=2048, loss_chunks=16),
    ),
    "llama3.1-8b": Config(
        model=ModelConfig(
            vocab_size=128_256,
            embed_dim=4096,
            mlp_dim=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=5e5,
            rope_scaling="llama3",
            rope_factor=8.0,
            rope_original_length=8192,
            rope_low_frequency=1.0,
            rope_high_frequency=4.0,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "mistral-7b": Config(
        model=ModelConfig(
            vocab_size=32_000,
            embed_dim=4096,
            mlp_dim=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "qwen3-8b": Config(
        model=ModelConfig(
            vocab_size=151_936,
            embed_dim=4096,
            mlp_dim=12_288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            norm_epsilon=1e-6,
            rope_theta=1e6,
            qk_norm=True,
            attention_scale=128**-0.5,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "qwen3-30b-a3b": Config(
        model=ModelConfig(
            vocab_size=151_936,
            embed_dim=2048,
            mlp_dim=768,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_token=8,
            norm_epsilon=1e-6,
            rope_theta=1e7,
            qk_norm=True,
            attention_scale=128**-0.5,
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
}


def preset(name: str) -> Config:
    """The preset config called `name`.

    Raises InputError, naming the nearest preset, when there is none of that name.
    """
    if name not in PRESETS:
        raise InputError(f"model {name!r} is not a preset; {nearest(name, PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters a model has."""

    total: int
    """All parameters."""

    active: int
    """Parameters that one token passes through: all but the experts it is not sent to."""


def count_parameters(model: ModelConfig) -> ParameterCount:
    """The number of parameters of a model, computed from its config alone.

    A test holds it equal to the size of the real parameter tree.
    """
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    if model.attention_bias:
        attention += model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
        attention += model.embed_dim if model.attention_bias == "all" else 0
    expert = 3 * model.embed_dim * model.mlp_dim
    router = model.embed_dim * model.num_experts if model.num_experts > 1 else 0
    router += model.num_experts if model.router_bias else 0
    norms = 2 * model.embed_dim + (2 * model.head_dim if model.qk_norm else 0)
    shared = attention + router + model.num_shared_experts * expert + norms
    tables = 1 if model.tied_embeddings else 2
    outside = tables * model.vocab_size * model.embed_dim + model.embed_dim

    def with_experts(experts: int) -> int:
        return outside + model.num_layers * (shared + experts * expert)

    return ParameterCount(
        with_experts(model.num_experts), with_experts(model.num_experts_per_token)
    )
