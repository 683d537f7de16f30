"""`config.json` as published, of models of every family: what is read, and what is refused by name.

A number of parameters is that which the publishers give, where it is known, so that no size is read
wrongly.
"""

import json
from typing import Any

import published_configs as published
import pytest
from helpers import ROOT
from published_configs import sizes

from linen_compat import config_from_huggingface, config_to_huggingface
from linen_compat.formats.huggingface._architectures import ARCHITECTURES
from linen_compat.maxtext._families import BLOCKS, OTHER_BLOCKS
from nnx_pipeline import InputError
from nnx_pipeline.config.parameter_count import count_parameters

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_8192 = {"original_max_position_embeddings": 8192}
OF_QWEN = {"use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3_8B = {
    **sizes("Qwen3", "qwen3", 36, 4096, 12288, 32, 8, 151_936),
    **OF_QWEN,
    **{"head_dim": 128, "attention_bias": False, "max_window_layers": 36, "sliding_window": None},
    **{"max_position_embeddings": 40_960, "rope_scaling": None, "tie_word_embeddings": False},
}
LATENT = {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"moe_layer_freq": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001},
    **{"attention_bias": False, "tie_word_embeddings": False, "pretraining_tp": 1},
}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
DEEPSEEK_V2 = {
    **sizes("DeepseekV2", "deepseek_v2", 60, 5120, 12_288, 128, 128, 102_400),
    **LATENT,
    **{"q_lora_rank": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "n_group": 8},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1536, "topk_group": 3},
    **{"topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    **{"routed_scaling_factor": 16.0, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 163_840, "rope_theta": 10_000},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707},
        **{"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    },
}
MOONLIGHT = {
    **sizes("DeepseekV3", "deepseek_v3", 27, 2048, 11_264, 16, 16, 163_840),
    **LATENT,
    **SIGMOID,
    **{"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "topk_group": 1},
    **{"routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 8192, "rope_theta": 50_000.0, "num_nextn_predict_layers": 0},
}
KIMI_K2 = {
    **sizes("DeepseekV3", "kimi_k2", 61, 7168, 18_432, 64, 64, 163_840),
    **LATENT,
    **SIGMOID,
    **{"q_lora_rank": 1536, "n_routed_experts": 384, "n_shared_experts": 1, "n_group": 1},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "topk_group": 1},
    **{"routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 131_072, "rope_theta": 50_000.0, "num_nextn_predict_layers": 0},
    "rope_scaling": {
        **{"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    },
}
FP8 = {
    "quantization_config": {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [128, 128],
    }
}
OF_OLMO = {"attention_bias": False, "rope_scaling": None, "tie_word_embeddings": False}
OF_GEMMA = {
    **{"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "rms_norm_eps": 1e-6},
    **{"attention_bias": False, "cache_implementation": "hybrid", "query_pre_attn_scalar": 256},
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
OF_GEMMA2 = {**OF_GEMMA, **CAPS, "max_position_embeddings": 8192, "sliding_window": 4096}
GPT_OSS = {
    **sizes("GptOss", "gpt_oss", 24, 2880, 2880, 64, 8, 201_088),
    **{"attention_bias": True, "head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4},
    **{"initial_context_length": 4096, "max_position_embeddings": 131_072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 150_000, "tie_word_embeddings": False},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"truncate": False, "original_max_position_embeddings": 4096},
    },
}
GLM_AIR = {
    **sizes("Glm4Moe", "glm4_moe", 46, 4096, 10_944, 96, 8, 151_552),
    **{"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "n_group": 1},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "max_position_embeddings": 131_072},
    **{"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False},
    **{"num_nextn_predict_layers": 1, "tie_word_embeddings": False},
}
GRANITE = {
    **{"attention_bias": False, "mlp_bias": False, "rope_scaling": None, "rms_norm_eps": 1e-5},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True},
}
PHI3 = {
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0},
    **{"original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "a.B"}},
    **{"attention_bias": False, "tie_word_embeddings": False, "rope_scaling": None},
}
PHI3_MINI = {
    **sizes("Phi3", "phi3", 32, 3072, 8192, 32, 32, 32_064),
    **PHI3,
    **{"max_position_embeddings": 4096, "sliding_window": 2047},
}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
# With the number of parameters; of a mixture of experts without modules for further tokens.
READ: dict[str, tuple[int | None, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            **sizes("Qwen2", "qwen2", 24, 896, 4864, 14, 2, 151_936),
            **OF_QWEN,
            **{"max_window_layers": 24, "sliding_window": 32_768, "tie_word_embeddings": True},
            **{"max_position_embeddings": 32_768},
        },
    ),
    "Qwen2.5-7B-Instruct": (
        7_615_616_512,
        {
            **sizes("Qwen2", "qwen2", 28, 3584, 18_944, 28, 4, 152_064),
            **OF_QWEN,
            **{"max_window_layers": 28, "sliding_window": 131_072, "tie_word_embeddings": False},
            **{"max_position_embeddings": 32_768},
        },
    ),
    "Qwen3-8B": (8_190_735_360, QWEN3_8B),
    "Qwen3-8B with YaRN, as its page says": (
        8_190_735_360,
        {
            **QWEN3_8B,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 4.0},
                "original_max_position_embeddings": 32_768,
            },
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            **sizes("Llama", "llama", 16, 2048, 8192, 32, 8, 128_256),
            **{"head_dim": 64, "mlp_bias": False, "attention_bias": False, "rms_norm_eps": 1e-5},
            **{"rope_theta": 500_000.0, "tie_word_embeddings": True, "pretraining_tp": 1},
            **{"max_position_embeddings": 131_072, "rope_scaling": {**LLAMA3, "factor": 32.0}},
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            **sizes("Mistral", "mistral", 32, 4096, 14_336, 32, 8, 32_768),
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
            **{"max_position_embeddings": 32_768, "tie_word_embeddings": False},
        },
    ),
    "DeepSeek-V2": (235_741_434_880, DEEPSEEK_V2),
    "Moonlight-16B-A3B": (None, MOONLIGHT),
    "Kimi-K2-Instruct": (1_026_408_232_448, {**KIMI_K2, **FP8}),
    "OLMo-2-1124-7B": (
        7_298_617_344,
        {
            **sizes("Olmo2", "olmo2", 32, 4096, 11_008, 32, 32, 100_352),
            **OF_OLMO,
            **{"rms_norm_eps": 1e-6, "rope_theta": 500_000, "max_position_embeddings": 4096},
        },
    ),
    "OLMoE-1B-7B-0924": (
        6_919_161_856,
        {
            **sizes("Olmoe", "olmoe", 16, 2048, 1024, 16, 16, 50_304),
            **OF_OLMO,
            **{"clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8},
            **{"norm_topk_prob": False, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0},
            **{"max_position_embeddings": 4096, "router_aux_loss_coef": 0.01},
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {**sizes("Gemma2", "gemma2", 26, 2304, 9216, 8, 4, 256_000), **OF_GEMMA2},
    ),
    "gemma-2-27b": (
        27_227_128_320,
        {
            **sizes("Gemma2", "gemma2", 46, 4608, 36_864, 32, 16, 256_000),
            **OF_GEMMA2,
            **{"head_dim": 128, "query_pre_attn_scalar": 144},
        },
    ),
    "gemma-3-1b-it": (
        999_885_952,
        {
            **sizes("Gemma3", "gemma3_text", 26, 1152, 6912, 4, 1, 262_144),
            **OF_GEMMA,
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
            **{"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1_000_000},
            **{"rope_local_base_freq": 10_000, "rope_scaling": None},
            **{"max_position_embeddings": 32_768},
        },
    ),
    "gpt-oss-20b": (20_914_757_184, GPT_OSS),
    "GLM-4.5-Air": (None, GLM_AIR),
    "granite-3.1-8b-instruct": (
        8_170_848_256,
        {
            **sizes("Granite", "granite", 40, 4096, 12_800, 32, 8, 49_155),
            **GRANITE,
            **{"attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 1e7},
            **{"max_position_embeddings": 131_072},
        },
    ),
    "granite-3.1-3b-a800m-instruct": (
        None,
        {
            **sizes("GraniteMoe", "granitemoe", 32, 1536, 512, 24, 8, 49_155),
            **{key: value for key, value in GRANITE.items() if key != "mlp_bias"},
            **{"attention_multiplier": 0.015625, "logits_scaling": 6.0, "rms_norm_eps": 1e-6},
            **{"num_local_experts": 40, "num_experts_per_tok": 8, "rope_theta": 1e7},
            **{"max_position_embeddings": 131_072},
        },
    ),
    "Phi-3-mini-4k-instruct": (3_821_079_552, PHI3_MINI),
    "phi-4": (
        14_659_507_200,
        {
            **sizes("Phi3", "phi3", 40, 5120, 17_920, 40, 10, 100_352),
            **{**PHI3, "rope_theta": 250_000.0, "sliding_window": None},
            **{"max_position_embeddings": 16_384, "original_max_position_embeddings": 16_384},
        },
    ),
}
READ["Llama-3.2-1B"][1]["rope_scaling"] |= OF_8192
GEMMA3_1B = READ["gemma-3-1b-it"][1]
READ |= published.READ
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Kimi-K2 in 4 bits": (
        r"quantization_config=.*awq.* plain float weights",
        {**KIMI_K2, "quantization_config": {"quant_method": "awq", "bits": 4}},
    ),
    "Phi-3-mini-128k-instruct": (
        r"rope_scaling.type='longrope' is not supported",
        {**PHI3_MINI, "max_position_embeddings": 131_072, "rope_scaling": LONG},
    ),
    "Qwen1.5-MoE-A2.7B": (
        r"architectures=\['Qwen2MoeForCausalLM'\] is not supported",
        sizes("Qwen2Moe", "qwen2_moe", 24, 2048, 5632, 16, 16, 151_936),
    ),
    "gemma-3-4b-it": (
        r"architectures=\['Gemma3ForConditionalGeneration'\] is not supported",
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
    ),
    "OLMoE with clipped queries": (
        "clip_qkv=8.0 is not supported, only None",
        {**READ["OLMoE-1B-7B-0924"][1], "clip_qkv": 8.0},
    ),
    "Granite with biases of the MLP": (
        "mlp_bias=True is not supported",
        {**READ["granite-3.1-8b-instruct"][1], "mlp_bias": True},
    ),
    "GLM with an odd part of a head": (
        "partial_rotary_factor=0.3 .* it must give an even number",
        {**GLM_AIR, "partial_rotary_factor": 0.3, "head_dim": 70},
    ),
    "Mistral with a window that no layer has": (
        "layer_types says that no layer has a window, and sliding_window=64",
        {
            **READ["Mistral-7B-v0.3"][1],
            **{"sliding_window": 64, "layer_types": ["full_attention"] * 32},
        },
    ),
    "GPT-OSS without a word on its angles": (
        "has no rope_parameters, and transformers then takes a yarn of its own",
        {**GPT_OSS, "rope_scaling": None},
    ),
    "Gemma 3 with one kind of angles": (
        "rope_parameters=.* does not say which layers it is for",
        {**GEMMA3_1B, "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
    ),
    "Gemma 3 with angles of one kind of layers": (
        "rope_parameters.sliding_attention=None is not a dictionary",
        {**GEMMA3_1B, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ),
    "Gemma 3 with a cap that transformers leaves out": (
        "attn_logit_softcapping=50.0 is not supported",
        {**GEMMA3_1B, "attn_logit_softcapping": 50.0},
    ),
    "an activation in a list": (
        r"hidden_act=\['silu'\] is not supported",
        {**READ["granite-3.1-8b-instruct"][1], "hidden_act": ["silu"]},
    ),
    "Gemma that reads both ways": (
        "use_bidirectional_attention=True is not supported",
        {**READ["gemma-2-2b"][1], "use_bidirectional_attention": True},
    ),
    **published.REFUSED,
}


@pytest.mark.parametrize("name", READ)
def test_read_and_written(name: str) -> None:
    parameters, values = READ[name]
    config = config_from_huggingface(values)
    assert parameters in (None, count_parameters(config.model).total)
    written = config_to_huggingface(config)
    assert config_from_huggingface(written) == config
    # Without a window these are written as the first class that can say all of them.
    as_others = values["model_type"] in ("mistral", "phi3")
    assert as_others or written["architectures"] == values["architectures"]


def test_a_base_of_windows_stays_where_no_sequence_is_longer_than_they_are() -> None:
    wide = {"max_position_embeddings": 512, "layer_types": ["sliding_attention"] * 26}
    model = config_from_huggingface({**GEMMA3_1B, **wide}).model
    assert (model.sliding_window, model.rope_window_theta) == (512, 10_000)
    assert model.full_attention_every is None


def test_an_activation_that_is_null_is_that_of_the_class() -> None:
    values = {**READ["gemma-2-2b"][1], "hidden_activation": None}
    assert config_from_huggingface(values).model.activation == "gelu_tanh"


@pytest.mark.parametrize("name", published.OTHER_CLASSES)
def test_a_class_that_is_not_in_the_table_is_refused_by_name(name: str) -> None:
    kind, model_type = published.OTHER_CLASSES[name]
    assert kind not in ARCHITECTURES
    values = {**READ["Llama-3.1-8B"][1], "architectures": [kind], "model_type": model_type}
    for given in (values, {**values, "architectures": None}):
        with pytest.raises(InputError, match=f"'{kind}'|model_type='{model_type}'"):
            config_from_huggingface(given)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    message, values = REFUSED[name]
    with pytest.raises(InputError, match=message):
        config_from_huggingface(values)


def test_the_documents_have_the_table() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text("utf-8")
    for one in ARCHITECTURES.values():
        has = ", ".join(one.features) or "a plain decoder"
        assert f"| `{one.name}` | `{one.model_type}` | {has} |\n" in text
    for block in (*BLOCKS, *OTHER_BLOCKS):
        assert f"`{block}`" in text


def test_the_command_lists_them(bridge: Any) -> None:
    found = json.loads(bridge("formats", "--json", "-").out)
    assert [one["class"] for one in found["huggingface"]] == [*ARCHITECTURES]
    assert [one["decoder_block"] for one in found["maxtext"]] == [*BLOCKS]
    assert [one["decoder_block"] for one in found["refused"]] == [*OTHER_BLOCKS]
    assert "soft caps" in found["huggingface"][[*ARCHITECTURES].index("Gemma2ForCausalLM")]["has"]
