"""Classes of `transformers` with other norms, activations, multipliers or tensors than Llama's."""

from dataclasses import replace

from linen_compat.formats.huggingface._architecture import (
    FURTHER,
    LOCAL_THETA,
    LONGEST,
    WINDOW,
    Allowed,
    Architecture,
    Keys,
    Only,
)
from linen_compat.formats.huggingface._first_classes import ABSENT, LATENT_KEYS, OF_LATENT_VECTORS

OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": None, LONGEST: 2048},
    },
    fixed={"qk_norm": True, "qk_norm_over_heads": True, "norm_placement": "after"},
    biases="all",
    heads_divide=True,
)
OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": None, LONGEST: 4096},
        **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    },
    keys={
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "norm_topk_prob": "router_normalize",
    },
    other_names={"num_local_experts": "num_experts"},
    only={"clip_qkv": Allowed((None,), "queries, keys and values are not clipped here")},
    fixed={"qk_norm": True, "qk_norm_over_heads": True},
    biases="all",
    heads_divide=True,
)
_OF_GEMMA: Only = {
    "use_bidirectional_attention": Allowed((False, None), "a token reads those before it alone"),
    "hidden_act": Allowed((), "transformers reads hidden_activation"),
    "cache_implementation": Allowed((), "it is about generation"),
    "sliding_window_size": Allowed((), "transformers reads sliding_window"),
    "_sliding_window_pattern": Allowed((), "layer_types says it"),
}
_CAPS = {
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
}
_NORMS_OF_GEMMA = {"feed_forward_norm.scale": "pre_feedforward_layernorm.weight"}
_ABSENT_IN_GEMMA: Keys = {
    **{"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 256, WINDOW: 4096},
    **{"tie_word_embeddings": True, "query_pre_attn_scalar": 256},
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    absent={
        **{**_ABSENT_IN_GEMMA, "rope_theta": 1e4, LONGEST: 8192, "sliding_window_pattern": 2},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    keys=_CAPS,
    only=_OF_GEMMA,
    fixed={"norm_placement": "both", "norm_scale_offset": 1.0},
    biases="all",
    windows="some",
    scale="query_pre_attn_scalar",
    tensors=_NORMS_OF_GEMMA,
    activation="hidden_activation",
    root_embedding=True,
    heads_divide=True,
)
GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    absent={
        **{**_ABSENT_IN_GEMMA, "rope_theta": 1e6, LONGEST: 131_072, "sliding_window_pattern": 6},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
        LOCAL_THETA: 1e4,
    },
    keys={"final_logit_softcapping": "logits_soft_cap", LOCAL_THETA: "rope_window_theta"},
    only={
        **_OF_GEMMA,
        "attn_logit_softcapping": Allowed((None,), "transformers stores it and does not apply it"),
    },
    fixed={"norm_placement": "both", "norm_scale_offset": 1.0, "qk_norm": True},
)
GLM4_MOE = Architecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": 8, LONGEST: 131_072},
        **{"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1},
        **{"n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False},
    },
    keys={
        **{key: ours for key, ours in LATENT_KEYS.items() if ours not in OF_LATENT_VECTORS},
        "norm_topk_prob": "router_normalize",
        "use_qk_norm": "qk_norm",
    },
    other_names={"num_local_experts": "n_routed_experts"},
    only=dict.fromkeys(FURTHER, Allowed((), "it has no effect on the other layers")),
    fixed={"router_score": "sigmoid", "router_bias": True},
    biases="qkv",
    partial_rotary=0.5,
)
_OF_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
}
_ABSENT_IN_GRANITE: Keys = {
    **{**ABSENT, "num_key_value_heads": None, LONGEST: 2048, "attention_multiplier": 1.0},
    **dict.fromkeys(_OF_GRANITE, 1.0),
}
GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    absent=_ABSENT_IN_GRANITE,
    keys=_OF_GRANITE,
    biases="all",
    scale="attention_multiplier",
    heads_divide=True,
)
_INTO, _OF_EXPERTS = "block_sparse_moe.input_linear.weight", "block_sparse_moe"
GRANITE_MOE = Architecture(
    name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    absent={**_ABSENT_IN_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
    keys={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        **_OF_GRANITE,
    },
    biases="all",
    scale="attention_multiplier",
    tensors={
        "feed_forward.router": f"{_OF_EXPERTS}.router.layer.weight",
        **{"feed_forward.gate": _INTO, "feed_forward.up": _INTO},
        "feed_forward.down": f"{_OF_EXPERTS}.output_linear.weight",
    },
    heads_divide=True,
)
_QKV, _GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "num_key_value_heads": None, LONGEST: 4096},
        WINDOW: None,
    },
    only={
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), Allowed((0.0, None), "it is chosen here")),
        "original_max_position_embeddings": Allowed((), "it has no effect without longrope"),
        "auto_map": Allowed((), "it names code that transformers does not need"),
    },
    windows="all",
    tensors={
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), _QKV),
        **dict.fromkeys(("feed_forward.gate", "feed_forward.up"), _GATE_UP),
    },
    partial_rotary=1.0,
    heads_divide=True,
)
_COLUMNS = "mlp.experts.gate_up_proj"
GPT_OSS = Architecture(
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    needs_rope=True,
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1.5e5, "num_key_value_heads": 8, "head_dim": 64},
        **{"num_local_experts": 128, "num_experts_per_tok": 4, LONGEST: 131_072},
        **{WINDOW: 128, "sliding_window_pattern": 2, "attention_bias": True},
    },
    keys={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    only={
        "swiglu_alpha": Allowed((1.702, None), "it is the slope of the clamped swish here"),
        "swiglu_limit": Allowed((7.0, None), "it is the limit of the clamped swish here"),
        "experts_per_token": Allowed((), "transformers reads num_experts_per_tok"),
        "initial_context_length": Allowed((), "transformers reads rope_scaling"),
    },
    fixed={
        **{"activation": "clamped_swish", "attention_sinks": True, "expert_bias": True},
        **{"router_logits_bias": True},
    },
    biases="all",
    windows="some",
    by_columns=True,
    tensors={
        "feed_forward.router": "mlp.router.weight",
        **{"feed_forward.gate": _COLUMNS, "feed_forward.up": _COLUMNS},
        **dict.fromkeys(("feed_forward.gate_bias", "feed_forward.up_bias"), f"{_COLUMNS}_bias"),
        "feed_forward.down": "mlp.experts.down_proj",
        "feed_forward.down_bias": "mlp.experts.down_proj_bias",
    },
)
