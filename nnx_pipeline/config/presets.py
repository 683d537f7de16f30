"""Named configs (presets).

The sizes are those of the published configurations (`config.json` on Hugging Face): of
mistralai/Mixtral-8x7B-v0.1, mistralai/Mixtral-8x22B-v0.1, meta-llama/Llama-2-7b-hf,
meta-llama/Llama-3.1-8B (8,030,261,248 parameters), mistralai/Mistral-7B-v0.2 (7,241,732,096),
Qwen/Qwen3-8B (8,190,735,360) and Qwen/Qwen3-30B-A3B-Instruct-2507 (30,532,122,624; the first
Qwen3-30B-A3B has a rope_theta of 1e6), deepseek-ai/DeepSeek-V2-Lite
(15,706,484,224; 2.4 billion active without the embedding table) and deepseek-ai/DeepSeek-V3 (671
billion, 37 active, without the module for multi-token prediction). The numbers are the parameter
counts published there.
"""

import math

from nnx_pipeline.config.config import Config, TrainConfig
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.errors import InputError, nearest


def _yarn_scale(head_dim: int, factor: float, all_dim: float) -> float:
    """DeepSeek's attention scale: head_dim^-0.5 · (0.1 · mscale_all_dim · ln(factor) + 1)²."""
    return head_dim**-0.5 * (0.1 * all_dim * math.log(factor) + 1.0) ** 2


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
    "deepseek-small": Config(
        model=ModelConfig(
            vocab_size=32_000,
            embed_dim=512,
            mlp_dim=512,
            num_layers=9,
            num_dense_layers=1,
            dense_mlp_dim=1024,
            num_heads=8,
            num_kv_heads=8,
            head_dim=96,
            kv_lora_rank=64,
            q_lora_rank=128,
            rope_head_dim=32,
            value_head_dim=64,
            num_experts=16,
            num_experts_per_token=4,
            num_shared_experts=1,
            router_score="sigmoid",
            router_scale=2.5,
            router_bias=True,
            norm_epsilon=1e-6,
            rope_theta=1e4,
            rope_interleaved=True,
            attention_scale=96**-0.5,
        ),
        train=TrainConfig(global_batch=16, sequence_length=1024),
    ),
    "deepseek-v2-lite": Config(
        model=ModelConfig(
            vocab_size=102_400,
            embed_dim=2048,
            mlp_dim=1408,
            num_layers=27,
            num_dense_layers=1,
            dense_mlp_dim=10_944,
            num_heads=16,
            num_kv_heads=16,
            head_dim=192,
            kv_lora_rank=512,
            rope_head_dim=64,
            value_head_dim=128,
            num_experts=64,
            num_experts_per_token=6,
            num_shared_experts=2,
            router_normalize=False,
            norm_epsilon=1e-6,
            rope_theta=1e4,
            rope_interleaved=True,
            rope_scaling="yarn",
            rope_factor=40.0,
            rope_original_length=4096,
            rope_low_frequency=1.0,
            rope_high_frequency=32.0,
            attention_scale=_yarn_scale(192, 40.0, 0.707),
        ),
        train=TrainConfig(global_batch=64, sequence_length=4096, loss_chunks=32),
    ),
    "deepseek-v3": Config(
        model=ModelConfig(
            vocab_size=129_280,
            embed_dim=7168,
            mlp_dim=2048,
            num_layers=61,
            num_dense_layers=3,
            dense_mlp_dim=18_432,
            num_heads=128,
            num_kv_heads=128,
            head_dim=192,
            kv_lora_rank=512,
            q_lora_rank=1536,
            rope_head_dim=64,
            value_head_dim=128,
            num_experts=256,
            num_experts_per_token=8,
            num_shared_experts=1,
            router_score="sigmoid",
            router_scale=2.5,
            router_bias=True,
            router_groups=8,
            router_groups_per_token=4,
            norm_epsilon=1e-6,
            rope_theta=1e4,
            rope_interleaved=True,
            rope_scaling="yarn",
            rope_factor=40.0,
            rope_original_length=4096,
            rope_low_frequency=1.0,
            rope_high_frequency=32.0,
            attention_scale=_yarn_scale(192, 40.0, 1.0),
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
