"""`config.json` as published, of further models: sizes, and the keys that their publishers write.

A number of parameters is that which the publishers give, without modules for further tokens.
"""

from typing import Any

Json = dict[str, Any]


def sizes(
    name: str, kind: str, layers: int, embed: int, mlp: int, heads: int, groups: int, vocab: int
) -> Json:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
    }


def qwen2(layers: int, embed: int, mlp: int, heads: int, groups: int, *, tied: bool) -> Json:
    return {
        **sizes("Qwen2", "qwen2", layers, embed, mlp, heads, groups, 151_936 if tied else 152_064),
        **{"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": layers},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied},
        "max_position_embeddings": 32_768,
    }


OF_QWEN3 = {
    **{"head_dim": 128, "attention_bias": False, "rms_norm_eps": 1e-6, "rope_scaling": None},
    **{"sliding_window": None, "use_sliding_window": False},
}


def qwen3(layers: int, embed: int, mlp: int, heads: int, *, tied: bool = False) -> Json:
    return {
        **sizes("Qwen3", "qwen3", layers, embed, mlp, heads, 8, 151_936),
        **{**OF_QWEN3, "max_window_layers": layers, "tie_word_embeddings": tied},
        **{"max_position_embeddings": 40_960, "rope_theta": 1_000_000},
    }


def qwen3_moe(layers: int, embed: int, mlp: int, heads: int, groups: int, expert: int) -> Json:
    return {
        **sizes("Qwen3Moe", "qwen3_moe", layers, embed, mlp, heads, groups, 151_936),
        **{**OF_QWEN3, "max_window_layers": layers, "tie_word_embeddings": False},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.001},
        **{"max_position_embeddings": 262_144, "rope_theta": 5_000_000},
    }


def llama(layers: int, embed: int, mlp: int, heads: int, groups: int, vocab: int) -> Json:
    return {
        **sizes("Llama", "llama", layers, embed, mlp, heads, groups, vocab),
        **{"rms_norm_eps": 1e-5, "pretraining_tp": 1, "tie_word_embeddings": False},
        **{"rope_scaling": None, "attention_bias": False},
    }


OF_LLAMA2 = {"max_position_embeddings": 4096}
OF_LLAMA3 = {"max_position_embeddings": 8192, "rope_theta": 500_000.0}
LONG_LLAMA3 = {
    **{"max_position_embeddings": 131_072, "mlp_bias": False, "rope_theta": 500_000.0},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


def mistral(layers: int, embed: int, mlp: int, heads: int, vocab: int, theta: float) -> Json:
    return {
        **sizes("Mistral", "mistral", layers, embed, mlp, heads, 8, vocab),
        **{"rms_norm_eps": 1e-5, "rope_theta": theta, "sliding_window": None, "head_dim": 128},
        **{"max_position_embeddings": 32_768, "tie_word_embeddings": False},
    }


def mixtral(layers: int, embed: int, mlp: int, heads: int, vocab: int, longest: int) -> Json:
    return {
        **sizes("Mixtral", "mixtral", layers, embed, mlp, heads, 8, vocab),
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        **{"max_position_embeddings": longest, "tie_word_embeddings": False},
        "router_aux_loss_coef": 0.02,
    }


OF_DEEPSEEK: Json = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"moe_layer_freq": 1, "attention_bias": False, "tie_word_embeddings": False},
    **{"max_position_embeddings": 163_840, "rope_theta": 10_000, "rms_norm_eps": 1e-6},
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}
YARN_OF_DEEPSEEK = {
    **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1},
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V2_LITE: Json = {
    **sizes("DeepseekV2", "deepseek_v2", 27, 2048, 10_944, 16, 16, 102_400),
    **OF_DEEPSEEK,
    **{"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "topk_group": 1},
    **{"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "aux_loss_alpha": 0.001},
    "seq_aux": True,
    "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK_V3: Json = {
    **sizes("DeepseekV3", "deepseek_v3", 61, 7168, 18_432, 128, 128, 129_280),
    **OF_DEEPSEEK,
    **{"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "topk_group": 4},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "ep_size": 1},
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**YARN_OF_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [128, 128],
    },
}


def olmo2(layers: int, embed: int, mlp: int, heads: int, groups: int) -> Json:
    return {
        **sizes("Olmo2", "olmo2", layers, embed, mlp, heads, groups, 100_352),
        **{"attention_bias": False, "rope_scaling": None, "tie_word_embeddings": False},
        **{"rms_norm_eps": 1e-6, "rope_theta": 500_000, "max_position_embeddings": 4096},
    }


GEMMA2_9B: Json = {
    **sizes("Gemma2", "gemma2", 42, 3584, 14_336, 16, 8, 256_000),
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
    **{"sliding_window_size": 4096, "attention_bias": False, "cache_implementation": "hybrid"},
    "max_position_embeddings": 8192,
}
GEMMA3_270M: Json = {
    **sizes("Gemma3", "gemma3_text", 18, 640, 2048, 4, 1, 262_144),
    **{"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": False},
    **{"_sliding_window_pattern": 6, "sliding_window": 512, "rope_local_base_freq": 10_000.0},
    **{"rope_theta": 1_000_000.0, "rope_scaling": None, "rms_norm_eps": 1e-6},
    **{"use_bidirectional_attention": False, "max_position_embeddings": 32_768},
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
}
del GEMMA3_270M["hidden_act"]
GPT_OSS_120B: Json = {
    **sizes("GptOss", "gpt_oss", 36, 2880, 2880, 64, 8, 201_088),
    **{"attention_bias": True, "head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4},
    **{"initial_context_length": 4096, "max_position_embeddings": 131_072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 150_000, "tie_word_embeddings": False},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.9},
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"truncate": False, "original_max_position_embeddings": 4096},
    },
}
GLM_4_5: Json = {
    **sizes("Glm4Moe", "glm4_moe", 92, 5120, 12_288, 96, 8, 151_552),
    **{"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "n_group": 1},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "max_position_embeddings": 131_072},
    **{"moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "topk_group": 1, "use_qk_norm": True, "rope_scaling": None},
    **{"num_nextn_predict_layers": 1, "tie_word_embeddings": False},
}
GRANITE_2B: Json = {
    **sizes("Granite", "granite", 40, 2048, 8192, 32, 8, 49_155),
    **{"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "rms_norm_eps": 1e-5},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True},
    **{"attention_multiplier": 0.015625, "logits_scaling": 8.0, "rope_theta": 5_000_000.0},
    "max_position_embeddings": 131_072,
}
PHI3_MEDIUM: Json = {
    **sizes("Phi3", "phi3", 40, 5120, 17_920, 40, 10, 32_064),
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0},
    **{"original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
    **{"sliding_window": 2047, "attention_bias": False, "tie_word_embeddings": False},
    **{"rope_scaling": None, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
}
# By name: the number of parameters and the keys.
READ: dict[str, tuple[int | None, Json]] = {
    "Qwen2-7B": (7_615_616_512, qwen2(28, 3584, 18_944, 28, 4, tied=False)),
    "Qwen2.5-1.5B": (1_543_714_304, qwen2(28, 1536, 8960, 12, 2, tied=True)),
    "Qwen2.5-3B": (3_085_938_688, qwen2(36, 2048, 11_008, 16, 2, tied=True)),
    "Qwen2.5-14B": (14_770_033_664, qwen2(48, 5120, 13_824, 40, 8, tied=False)),
    "Qwen2.5-32B": (32_763_876_352, qwen2(64, 5120, 27_648, 40, 8, tied=False)),
    "Qwen2.5-72B-Instruct": (72_706_203_648, qwen2(80, 8192, 29_568, 64, 8, tied=False)),
    "Qwen3-0.6B": (596_049_920, qwen3(28, 1024, 3072, 16, tied=True)),
    "Qwen3-4B": (4_022_468_096, qwen3(36, 2560, 9728, 32, tied=True)),
    "Qwen3-32B": (32_762_123_264, qwen3(64, 5120, 25_600, 64)),
    "Qwen3-30B-A3B": (30_532_122_624, qwen3_moe(48, 2048, 6144, 32, 4, 768)),
    "Qwen3-235B-A22B": (235_093_634_560, qwen3_moe(94, 4096, 12_288, 64, 4, 1536)),
    "Qwen3-Coder-480B-A35B-Instruct": (
        480_154_875_392,
        {
            **qwen3_moe(62, 6144, 8192, 96, 8, 2560),
            **{"num_experts": 160, "rope_theta": 10_000_000, "router_aux_loss_coef": 0.0},
            **{"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        },
    ),
    "Llama-2-7b-hf": (6_738_415_616, {**llama(32, 4096, 11_008, 32, 32, 32_000), **OF_LLAMA2}),
    "Llama-2-70b-hf": (68_976_648_192, {**llama(80, 8192, 28_672, 64, 8, 32_000), **OF_LLAMA2}),
    "Meta-Llama-3-8B": (8_030_261_248, {**llama(32, 4096, 14_336, 32, 8, 128_256), **OF_LLAMA3}),
    "Llama-3.1-8B": (8_030_261_248, {**llama(32, 4096, 14_336, 32, 8, 128_256), **LONG_LLAMA3}),
    "Llama-3.1-405B": (
        405_853_388_800,
        {**llama(126, 16_384, 53_248, 128, 8, 128_256), **LONG_LLAMA3},
    ),
    "Llama-3.2-3B": (
        3_212_749_824,
        {
            **{**llama(28, 3072, 8192, 24, 8, 128_256), **LONG_LLAMA3, "head_dim": 128},
            **{"rope_scaling": {**LONG_LLAMA3["rope_scaling"], "factor": 32.0}},
            "tie_word_embeddings": True,
        },
    ),
    "TinyLlama-1.1B": (1_100_048_384, {**llama(22, 2048, 5632, 32, 4, 32_000), **OF_LLAMA2}),
    "SmolLM2-135M": (
        134_515_008,
        {
            **llama(30, 576, 1536, 9, 3, 49_152),
            **{"max_position_embeddings": 8192, "rope_theta": 100_000, "is_llama_config": True},
            **{"tie_word_embeddings": True, "rope_interleaved": False},
        },
    ),
    "deepseek-coder-6.7b-base": (
        6_740_512_768,
        {
            **llama(32, 4096, 11_008, 32, 32, 32_256),
            **{"rms_norm_eps": 1e-6, "rope_theta": 100_000, "max_position_embeddings": 16_384},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {**mistral(32, 4096, 14_336, 32, 32_000, 10_000.0), "sliding_window": 4096},
    ),
    "Mistral-Nemo-Base-2407": (
        12_247_782_400,
        {**mistral(40, 5120, 14_336, 32, 131_072, 1e6), "max_position_embeddings": 128_000},
    ),
    "Mistral-Small-24B-Base-2501": (23_572_403_200, mistral(40, 5120, 32_768, 32, 131_072, 1e8)),
    "Ministral-8B-Instruct-2410": (
        8_019_808_256,
        {**mistral(36, 4096, 12_288, 32, 131_072, 1e8), "sliding_window": 32_768},
    ),
    "Mixtral-8x7B-v0.1": (46_702_792_704, mixtral(32, 4096, 14_336, 32, 32_000, 32_768)),
    "Mixtral-8x22B-v0.1": (140_620_634_112, mixtral(56, 6144, 16_384, 48, 32_000, 65_536)),
    "DeepSeek-V2-Lite": (15_706_484_224, DEEPSEEK_V2_LITE),
    "DeepSeek-V3": (671_026_419_200, DEEPSEEK_V3),
    "OLMo-2-1124-13B": (13_716_198_400, olmo2(40, 5120, 13_824, 40, 40)),
    "OLMo-2-0325-32B": (32_234_279_936, olmo2(64, 5120, 27_648, 40, 8)),
    "gemma-2-9b": (9_241_705_984, GEMMA2_9B),
    "gemma-3-270m": (268_098_176, GEMMA3_270M),
    "gpt-oss-120b": (116_829_156_672, GPT_OSS_120B),
    "GLM-4.5": (None, GLM_4_5),
    "granite-3.1-2b-instruct": (2_533_531_648, GRANITE_2B),
    "Phi-3-medium-4k-instruct": (13_960_238_080, PHI3_MEDIUM),
}
# Classes that are not computed here, with the type of each.
OTHER_CLASSES = {
    "gemma-7b": ("GemmaForCausalLM", "gemma"),
    "Llama-4-Scout-17B-16E": ("Llama4ForConditionalGeneration", "llama4"),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", "deepseek_v32"),
    "Qwen3-Next-80B-A3B-Instruct": ("Qwen3NextForCausalLM", "qwen3_next"),
    "Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
    "Olmo-3-7B": ("Olmo3ForCausalLM", "olmo3"),
    "Mistral-Small-3.1-24B-Base-2503": ("Mistral3ForConditionalGeneration", "mistral3"),
    "Phi-3.5-MoE-instruct": ("PhiMoEForCausalLM", "phimoe"),
    "phi-2": ("PhiForCausalLM", "phi"),
    "glm-4-9b-chat-hf": ("GlmForCausalLM", "glm"),
    "granite-4.0-h-small": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "c4ai-command-r-v01": ("CohereForCausalLM", "cohere"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
}
# Published with something that is not computed here: the message and the keys.
REFUSED: dict[str, tuple[str, Json]] = {
    "Phi-4-mini-instruct": (
        r"type='longrope' is not supported, only default, linear, llama3, yarn",
        {
            **sizes("Phi3", "phi3", 32, 3072, 8192, 24, 8, 200_064),
            **{
                "partial_rotary_factor": 0.75,
                "tie_word_embeddings": True,
                "sliding_window": 262_144,
            },
            **{"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072},
            "rope_scaling": {
                **{"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            },
        },
    ),
    "Mistral-7B-Instruct-v0.2-GPTQ": (
        r"quantization_config=.*gptq.* plain float weights",
        {
            **mistral(32, 4096, 14_336, 32, 32_000, 1e6),
            "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
        },
    ),
    "llama-3-8b-bnb-4bit": (
        r"quantization_config=.*bitsandbytes.* plain float weights",
        {
            **{**llama(32, 4096, 14_336, 32, 8, 128_256), **OF_LLAMA3},
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        },
    ),
}
