"""Classes of `transformers` whose layers are those of Llama, Mixtral and DeepSeek."""

from linen_compat.formats.huggingface._architecture import (
    FURTHER,
    LONGEST,
    WINDOW,
    Allowed,
    Architecture,
    Keys,
    Only,
)

_OF_QWEN: Keys = {"use_sliding_window": False, WINDOW: 4096, "max_window_layers": 28}
_OF_QWEN3_MOE: Keys = {"use_sliding_window": False, WINDOW: 4096}
_ROUTED_EVERYWHERE = "every layer is routed here"
ABSENT: Keys = {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, LONGEST: 131_072},
    },
    keys={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    windows="all",
)
LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    absent={**ABSENT, "num_key_value_heads": None, LONGEST: 2048},
    biases="all",
    heads_divide=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    absent={**ABSENT, "num_key_value_heads": 8, WINDOW: 4096, LONGEST: 131_072},
    windows="all",
)
QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    absent={**ABSENT, **_OF_QWEN, "num_key_value_heads": 32, LONGEST: 32_768},
    only={"attention_bias": Allowed((), "query, key and value always have one")},
    fixed={"attention_bias": "qkv"},
    windows="some",
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    absent={**ABSENT, **_OF_QWEN, "num_key_value_heads": 32, "head_dim": 128, LONGEST: 32_768},
    fixed={"qk_norm": True},
    biases="all",
    windows="some",
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    absent={
        **{**ABSENT, **_OF_QWEN3_MOE, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768, "norm_topk_prob": False, LONGEST: 32_768},
    },
    keys={
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "moe_intermediate_size": "mlp_dim",
        "norm_topk_prob": "router_normalize",
    },
    other_names={"num_local_experts": "num_experts"},  # of transformers 5
    only={
        "max_window_layers": Allowed((), "transformers gives all layers the same window"),
        "decoder_sparse_step": Allowed((1, None), _ROUTED_EVERYWHERE),
        "mlp_only_layers": Allowed(([], None), _ROUTED_EVERYWHERE),
    },
    fixed={"qk_norm": True},
    biases="all",
    windows="all",
)
OF_LATENT_VECTORS = ("kv_lora_rank", "q_lora_rank", "rope_head_dim", "value_head_dim")
GROUP_METHODS = ("greedy", "group_limited_greedy")  # of DeepSeek-V2: from all groups, or some
LATENT_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "mlp_dim",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scale",
    "first_k_dense_replace": "num_dense_layers",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "n_group": "router_groups",
    "topk_group": "router_groups_per_token",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
}
_ABSENT_IN_LATENT: Keys = {
    **{**ABSENT, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
_OF_LATENT: Only = {
    "moe_layer_freq": Allowed((1, None), "all layers after the dense ones are routed here"),
    "aux_loss_alpha": Allowed((), "the load-balance loss is chosen in TrainConfig"),
    "seq_aux": Allowed((), "the load-balance loss is chosen in TrainConfig"),
    "ep_size": Allowed((), "it only places experts on devices"),
    "auto_map": Allowed((), "it names code that transformers does not need"),
    **dict.fromkeys(FURTHER, Allowed((), "it has no effect on the other layers")),
}
DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    absent={
        **_ABSENT_IN_LATENT,
        **{"num_key_value_heads": None, "n_routed_experts": 64, "num_experts_per_tok": None},
        **{"moe_intermediate_size": 1407, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        **{"first_k_dense_replace": 0, "topk_method": "greedy", LONGEST: 2048},
        **{"n_group": 1, "topk_group": 1},
    },
    keys=LATENT_KEYS,
    other_names={"num_experts": "n_routed_experts"},
    only={
        **_OF_LATENT,
        "topk_method": Allowed(GROUP_METHODS, "experts are chosen so here"),
        "scoring_func": Allowed(("softmax", None), "transformers takes a softmax of the logits"),
        "norm_topk_prob": Allowed((False, None), "transformers divides no weights by their sum"),
    },
    heads_divide=True,
    latent=True,
    fixed={
        "router_score": "softmax",
        "router_normalize": False,
        "rope_interleaved": True,
    },
)
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    absent={
        **_ABSENT_IN_LATENT,
        **{"num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        **{"first_k_dense_replace": 3, "norm_topk_prob": True, "n_group": 8, "topk_group": 4},
        **{"rope_interleave": True, LONGEST: 4096},
    },
    keys={
        **LATENT_KEYS,
        "norm_topk_prob": "router_normalize",
        "rope_interleave": "rope_interleaved",
    },
    other_names={"num_local_experts": "n_routed_experts"},
    other_types=("kimi_k2",),
    only={
        **_OF_LATENT,
        "topk_method": Allowed(("noaux_tc", None), "a bias corrects which experts are chosen"),
        "scoring_func": Allowed(("sigmoid", None), "transformers takes a sigmoid of the logits"),
    },
    latent=True,
    fixed={"router_score": "sigmoid", "router_bias": True},
)
