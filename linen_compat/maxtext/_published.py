"""MaxText's keys of models that it has files for, beside the presets of this project."""

from linen_compat.maxtext._values import Fields

_LLAMA: Fields = {
    **{"decoder_block": "llama2", "normalization_layer_epsilon": 1e-5, "head_dim": 128},
    **{"vocab_size": 128_256, "rope_max_timescale": 500_000},
}
_LLAMA2: Fields = {**_LLAMA, "vocab_size": 32_000, "rope_max_timescale": 10_000}
_QWEN: Fields = {
    **{"normalization_layer_epsilon": 1e-6, "head_dim": 128, "rope_max_timescale": 1_000_000},
    **{"normalize_embedding_logits": False, "vocab_size": 151_936},
}
_QWEN2: Fields = {**_QWEN, "decoder_block": "qwen2", "attention_bias": True}
_QWEN3: Fields = {**_QWEN, "decoder_block": "qwen3", "use_qk_norm": True}
_QWEN3_MOE: Fields = {
    **{**_QWEN3, "decoder_block": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8},
    "normalize_embedding_logits": True,  # MaxText's default; this head is not tied
}


def _sized(family: Fields, layers: int, embed: int, mlp: int, heads: int, groups: int) -> Fields:
    routed = {"base_moe_mlp_dim": mlp} if "num_experts" in family else {}
    return {
        **{**family, **routed, "base_num_decoder_layers": layers, "base_emb_dim": embed},
        **{"base_mlp_dim": mlp, "base_num_query_heads": heads, "base_num_kv_heads": groups},
    }


def _tied(keys: Fields) -> Fields:
    return {**keys, "logits_via_embedding": True}


_QWEN3_4B = _tied(_sized(_QWEN3, 36, 2560, 9728, 32, 8))
_OF_QWEN3 = {
    "qwen3-0.6b": _tied(_sized(_QWEN3, 28, 1024, 3072, 16, 8)),
    "qwen3-1.7b": _tied(_sized(_QWEN3, 28, 2048, 6144, 16, 8)),
    "qwen3-4b": _QWEN3_4B,
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 12_288, 32, 8),
    "qwen3-14b": _sized(_QWEN3, 40, 5120, 17_408, 40, 8),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 48, 2048, 768, 32, 4),
}
_WITH_BASE = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")
SIZES: dict[str, Fields] = {
    "llama2-13b": _sized(_LLAMA2, 40, 5120, 13_824, 40, 40),
    "llama2-70b": _sized(_LLAMA2, 80, 8192, 28_672, 64, 8),
    "llama3-8b": _sized(_LLAMA, 32, 4096, 14_336, 32, 8),
    **dict.fromkeys(
        ("llama3-70b", "llama3.1-70b", "llama3.3-70b"), _sized(_LLAMA, 80, 8192, 28_672, 64, 8)
    ),
    **dict.fromkeys(("llama3-405b", "llama3.1-405b"), _sized(_LLAMA, 126, 16_384, 53_248, 128, 8)),
    "qwen2.5-1.5b": _tied(_sized(_QWEN2, 28, 1536, 8960, 12, 2)),
    "qwen2.5-7b": {**_sized(_QWEN2, 28, 3584, 18_944, 28, 4), "vocab_size": 152_064},
    "qwen2.5-14b": {**_sized(_QWEN2, 48, 5120, 13_824, 40, 8), "vocab_size": 152_064},
    **_OF_QWEN3,
    **{f"{name}-base": _OF_QWEN3[name] for name in _WITH_BASE},
    "qwen3-4b-thinking-2507": {**_QWEN3_4B, "rope_max_timescale": 5_000_000},
    "qwen3-32b": _sized(_QWEN3, 64, 5120, 25_600, 64, 8),
    "qwen3-235b-a22b": {
        **_sized(_QWEN3_MOE, 94, 4096, 1536, 64, 4),
        **{"rope_max_timescale": 5_000_000, "load_balance_loss_weight": 0.001},
    },
    "qwen3-480b-a35b": {
        **_sized(_QWEN3_MOE, 62, 6144, 2560, 96, 8),
        **{"rope_max_timescale": 10_000_000, "num_experts": 160},
    },
}
