"""`config.json`: every key mapped, ignored on purpose, or refused by name."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_reference import FOLDER
from hypothesis import given, settings
from hypothesis import strategies as st

from linen_compat import config_from_huggingface, config_to_huggingface
from linen_compat.checkpoints._named_config import read_config
from nnx_pipeline import Config, InputError, ModelConfig, TrainConfig
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.lab.errors import Note

# As published for Mixtral 8x7B and for Llama 2 7B, by versions of transformers before 5.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}


# As Qwen/Qwen3-30B-A3B has them; but for sizes and names the dense ones have no others.
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 262144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_1_8B: dict[str, Any] = {
    **LLAMA_2_7B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# As published for DeepSeek-V3 and DeepSeek-V2-Lite, the first without its `quantization_config`.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
ROPE_OF_LLAMA3_1: dict[str, Any] = {
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_original_length": 8192,
    "rope_low_frequency": 1.0,
    "rope_high_frequency": 4.0,
}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize(
    ("values", "preset", "dtype"),
    [
        (MIXTRAL_8X7B, "mixtral-8x7b", "bfloat16"),
        (LLAMA_2_7B, "llama2-7b", "float16"),
        (LLAMA_3_1_8B, "llama3.1-8b", "bfloat16"),
        (QWEN3_MOE, "qwen3-30b-a3b", "bfloat16"),
    ],
)
def test_published_configs_are_the_presets(values: dict, preset: str, dtype: str) -> None:
    expected = dataclasses.replace(
        PRESETS[preset].model,
        dtype=dtype,
        param_dtype=dtype,
        attention_scale=128**-0.5,
        max_position_embeddings=values["max_position_embeddings"],
    )
    assert config_from_huggingface(values).model == expected


def test_a_folder_a_file_or_a_dictionary(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_2_7B))
    expected = config_from_huggingface(LLAMA_2_7B)
    assert config_from_huggingface(tmp_path) == expected
    assert config_from_huggingface(str(file)) == expected


def test_what_transformers_takes_where_a_key_is_absent() -> None:
    absent = ("rms_norm_eps", "rope_theta", "num_key_value_heads", "torch_dtype")
    experts = ("num_local_experts", "num_experts_per_tok")
    mixtral = config_from_huggingface(without(MIXTRAL_8X7B, *absent, *experts)).model
    assert (mixtral.norm_epsilon, mixtral.rope_theta, mixtral.num_kv_heads) == (1e-5, 1e6, 8)
    assert (mixtral.num_experts, mixtral.num_experts_per_token) == (8, 2)
    llama = config_from_huggingface(without(LLAMA_2_7B, *absent)).model
    assert (llama.norm_epsilon, llama.rope_theta, llama.num_kv_heads) == (1e-6, 1e4, 32)
    assert (llama.dtype, llama.param_dtype) == ("float32", "float32")


def test_absent_keys_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for name, values in (("Mixtral", MIXTRAL_8X7B), ("Llama", LLAMA_2_7B)):
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        given = {key: values[key] for key in (*sizes, "vocab_size")}
        theirs = getattr(transformers, f"{name}Config")(**given).to_dict()
        ours = config_from_huggingface({**given, "model_type": values["model_type"]})
        theirs = {**theirs, "dtype": "float32", "architectures": [f"{name}ForCausalLM"]}
        assert config_from_huggingface(theirs) == ours


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_rotary_base_in_old_and_new_places(rope: dict) -> None:
    values = {**without(MIXTRAL_8X7B, "rope_theta"), **rope}
    assert config_from_huggingface(values).model.rope_theta == 5e5


@pytest.mark.parametrize(
    ("values", "name"), [(DEEPSEEK_V3, "deepseek-v3"), (DEEPSEEK_V2_LITE, "deepseek-v2-lite")]
)
def test_published_configs_of_deepseek(values: dict, name: str) -> None:
    """They are the presets, and are written so that transformers computes the same."""
    expected = dataclasses.replace(
        PRESETS[name].model, param_dtype="bfloat16", max_position_embeddings=163_840
    )
    config = config_from_huggingface(values)
    assert config.model == expected
    written = config_to_huggingface(config)
    scores = {"mscale", "mscale_all_dim", "beta_fast", "beta_slow", "factor"}
    for key in scores:
        assert written["rope_scaling"][key] == values["rope_scaling"][key]
    for key in {*written} & {*values} - {"rope_scaling", "num_nextn_predict_layers"}:
        assert written[key] == values[key], key
    assert config_from_huggingface(written) == config


YARN = DEEPSEEK_V3["rope_scaling"]


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "only 'greedy': experts are"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob=True .* only False"),
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' .* softmax"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy' .* only 'noaux_tc'"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' .* only 'sigmoid'"),
        (DEEPSEEK_V3, {"n_group": 7}, "num_experts=256 does not split into router_groups=7"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 .* only 1"),
        (DEEPSEEK_V3, {"head_dim": 128}, "head_dim=128 contradicts .* make it 64"),
        (DEEPSEEK_V3, {"qk_nope_head_dim": 0}, "qk_nope_head_dim=0 is not a whole number"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_kv_heads=8 differs from num_heads=128"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "num_dense_layers=61 leaves no layer"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config=.*fp8.* plain float weights",
        ),
        (DEEPSEEK_V3, {"rope_scaling": {**YARN, "truncate": 1}}, "truncate=1 is not"),
        (DEEPSEEK_V3, {"rope_scaling": {**YARN, "mscale": "1"}}, "mscale='1' is not a number"),
        (DEEPSEEK_V3, {"index_topk": 3}, "index_topk=3 is not a known key of a DeepseekV3"),
    ],
)
def test_what_is_not_computed_of_deepseek(values: dict, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_huggingface({**values, **changes})


def test_yarn_that_multiplies_nothing_has_the_plain_scale() -> None:
    rope = {**without(YARN, "mscale", "mscale_all_dim"), "attention_factor": 1.0}
    config = config_from_huggingface({**DEEPSEEK_V3, "rope_scaling": rope})
    assert config.model.attention_scale == 192**-0.5
    assert config_to_huggingface(config)["rope_scaling"]["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("changes", "amplitude"),
    [
        ({}, 1.0),
        ({"mscale": 0.5}, (0.1 * 0.5 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 3.0, "truncate": False}, 3.0),
    ],
)
def test_yarn_that_multiplies_rotated_numbers(changes: dict, amplitude: float) -> None:
    config = config_from_huggingface({**DEEPSEEK_V3, "rope_scaling": {**YARN, **changes}})
    assert config.model.rope_amplitude == pytest.approx(amplitude, rel=1e-15)
    assert config.model.rope_truncate == ("truncate" not in changes)
    assert config_from_huggingface(config_to_huggingface(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_epsilon": 1e-5}, "norm_epsilon=1e-05 has no place in a DeepSeek"),
        ({"latent_norm_epsilon": 1e-5}, "latent_norm_epsilon=1e-05 has no place in a DeepSeek"),
        ({"num_shared_experts": 0}, "num_shared_experts=0 has no place in a Deepseek"),
        ({"router_bias": False}, "router_bias=False has no place in a DeepseekV3ForCausalLM"),
        ({"router_bias_in_weights": True}, "router_bias_in_weights=True has no place"),
        ({"attention_scale": 0.01}, "attention_scale=0.01 has no place .* with yarn more"),
        ({"sliding_window": 8}, "sliding_window=8 has no place in a DeepseekV3ForCausalLM"),
    ],
)
def test_what_transformers_has_no_deepseek_for(changes: dict, message: str) -> None:
    config = config_from_huggingface(DEEPSEEK_V3)
    model = dataclasses.replace(config.model, **changes)
    with pytest.raises(InputError, match=message):
        config_to_huggingface(dataclasses.replace(config, model=model))


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_under_both_names(key: str) -> None:
    values = {**without(MIXTRAL_8X7B, "torch_dtype"), key: "bfloat16"}
    assert config_from_huggingface(values).model.param_dtype == "bfloat16"


def test_a_window_that_no_sequence_leaves_is_fine() -> None:
    values = {**MIXTRAL_8X7B, "sliding_window": 32768}
    assert config_from_huggingface(values) == config_from_huggingface(MIXTRAL_8X7B)


def test_a_window_that_is_read_and_written() -> None:
    config = config_from_huggingface({**MIXTRAL_8X7B, "sliding_window": 4096})
    assert config.model.sliding_window == 4096
    assert config_to_huggingface(config)["sliding_window"] == 4096


def test_the_window_of_a_llama_is_refused() -> None:
    """Its class in transformers reads the whole sequence, whatever the key says."""
    with pytest.raises(InputError, match=r"sliding_window=512 is smaller than .*set it to null"):
        config_from_huggingface({**LLAMA_2_7B, "sliding_window": 512})
    config = config_from_huggingface(LLAMA_2_7B)
    windowed = dataclasses.replace(config.model, sliding_window=512)
    written = config_to_huggingface(dataclasses.replace(config, model=windowed))
    assert written["architectures"] == ["MistralForCausalLM"]
    assert config_from_huggingface(written).model.sliding_window == 512
    normed = dataclasses.replace(windowed, qk_norm=True)
    written = config_to_huggingface(dataclasses.replace(config, model=normed))
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert config_from_huggingface(written).model == normed


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        r"rope_scaling of rope_type='llama3' has no original_max_position_embeddings; add it",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
        r"rope_scaling.low_freq_factor=1.0 is not supported with rope_type='linear'",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling.type='dynamic' is not"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, r"type='linear' disagree"),
    ({"rope_parameters": {"rope_type": "yarn"}}, r"of rope_type='yarn' has no factor; add it"),
    ({"rope_parameters": {"rope_type": "longrope"}}, r"rope_type='longrope' is not supported"),
    ({"rope_parameters": {"factor": 2.0}}, r"rope_parameters.factor=2.0 is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0.5"),
    ({"rope_parameters": "default"}, r"rope_parameters='default' is not a dictionary"),
    ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_theta=1000000.0, rope_parameters.rope_th"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes' is not true or false"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 16}, r"layer_types has 'sliding_at"),
    ({"attention_bias": True}, r"attention_bias=True is not supported"),
    ({"mlp_bias": True}, r"mlp_bias=True is not supported"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported, only 'silu'"),
    (
        {"layer_types": ["sliding_attention"]},
        r"layer_types=\['sliding_attention'\] is not one kind",
    ),
    ({"attention_dropout": 0.1}, r"attention_dropout=0.1 is not supported.*set it to 0"),
    ({"router_jitter_noise": 0.01}, r"router_jitter_noise=0.01 is not supported.*set it to 0"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5 is not supported"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\}.*plain float"),
    ({"compression_config": {"format": "pack"}}, r"compression_config=.*only None: save the model"),
    (
        {"quant_method": "awq"},
        r"quant_method='awq' is not a known key .*plain Mixtral\S+ of float weights, without",
    ),
    ({"model_type": ["mixtral"], "architectures": None}, r"model_type=\['mixtral'\] is not suppor"),
    ({"architectures": [{}]}, r"architectures=\[\{\}\] is not supported"),
    ({"sliding_window": "4k"}, r"sliding_window='4k' is not a whole number"),
    ({"num_local_experts": 1}, r"num_local_experts=1 is not supported"),
    ({"torch_dtype": "float64"}, r"torch_dtype='float64' is not known"),
    ({"dtype": "float32"}, r"torch_dtype='bfloat16', dtype='float32' disagree"),
    ({"architectures": ["Qwen2MoeForCausalLM"]}, r"architectures=\['Qwen2MoeForCausalLM'\] is"),
    ({"architectures": ["LlamaForCausalLM"]}, r"model_type='mixtral' contradicts"),
    (
        {"architectures": None, "model_type": "qwen2_moe"},
        r"model_type='qwen2_moe' is not supported",
    ),
    ({"hidden_size": None}, r"hidden_size is missing"),
    ({"hidden_size": 4096.0}, r"hidden_size=4096.0 is not a whole number"),
    ({"num_attention_heads": 33}, r"hidden_size=4096 does not split over num_attention_heads=33"),
    ({"head_dim": 0}, r"head_dim=0 is not a whole number"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_token=9 exceeds num_experts=8"),
    ({"auto_map": {"AutoModel": "x"}}, r"auto_map=.* is not a known key of a Mixtral"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": None}, "router_normalize=None is not known"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported, only 1: every layer"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] is not supported"),
        ({"use_sliding_window": 1, "sliding_window": "9"}, "sliding_window='9' is not a whole"),
        ({"attention_bias": "yes"}, "attention_bias='yes' is not supported"),
    ],
)
def test_what_is_not_computed_of_qwen3(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_huggingface({**QWEN3_MOE, **changes})
    # as transformers assumes
    model = config_from_huggingface(without(QWEN3_MOE, "norm_topk_prob")).model
    assert not model.router_normalize


def test_the_number_of_experts_under_both_names() -> None:
    values = {**without(QWEN3_MOE, "num_experts"), "num_local_experts": 128}
    assert config_from_huggingface(values) == config_from_huggingface(QWEN3_MOE)
    with pytest.raises(InputError, match="num_experts=128, num_local_experts=8 disagree"):
        config_from_huggingface({**QWEN3_MOE, "num_local_experts": 8})


def test_a_mistral_has_a_window_unless_it_says_none() -> None:
    values = {**LLAMA_2_7B, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert config_from_huggingface({**values, "sliding_window": None}).model.sliding_window is None
    longer = config_from_huggingface({**values, "max_position_embeddings": 8192})
    assert longer.model.sliding_window == 4096


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        ({"type": "linear", "factor": 2.0}, {"rope_scaling": "linear", "rope_factor": 2.0}),
        (LLAMA_3_1_8B["rope_scaling"], {"rope_scaling": "llama3", "rope_original_length": 8192}),
    ],
)
def test_rope_scaling(scaling: dict, fields: dict) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        config = config_from_huggingface({**MIXTRAL_8X7B, "rope_scaling": None, name: scaling})
        assert {ours: getattr(config.model, ours) for ours in fields} == fields
        kind = {"rope_type": scaling.get("rope_type", "linear")}
        assert config_to_huggingface(config)["rope_scaling"] == {**without(scaling, "type"), **kind}


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused_by_name_and_value(changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_huggingface({**MIXTRAL_8X7B, **changes})


@pytest.mark.parametrize(
    ("values", "more"),
    [
        # As in Qwen/Qwen3-Coder-30B-A3B-Instruct and in HuggingFaceTB/SmolLM2-135M.
        (
            QWEN3_MOE,
            {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
        ),
        (LLAMA_2_7B, {"is_llama_config": True, "rope_interleaved": False}),
        (MIXTRAL_8X7B, {"activation": "gelu", "none": None, "empty": [], "quant_method": None}),
    ],
)
def test_unknown_keys_that_change_nothing(values: dict, more: dict) -> None:
    said = ", ".join(f"{key}={value!r}" for key, value in more.items())
    with pytest.warns(Note, match=rf"^config.json: {re.escape(said)}: not read here, and taken"):
        assert config_from_huggingface({**values, **more}) == config_from_huggingface(values)
    with pytest.raises(InputError, match=r"other=1 is not a known key of a \S+; remove the key if"):
        config_from_huggingface({**values, **more, "other": 1})


def test_the_cure_for_an_unknown_key_works() -> None:
    """What transformers saves has the unknown keys of what it loaded, so that is no cure."""
    values = {**LLAMA_2_7B, "of_another_library": 8}
    with pytest.raises(InputError, match="key of a LlamaForCausalLM; remove the key if the Llama"):
        config_from_huggingface(values)
    del values["of_another_library"]
    assert config_from_huggingface(values) == config_from_huggingface(LLAMA_2_7B)


def test_keys_of_experts_are_unknown_of_a_llama() -> None:
    with pytest.raises(InputError, match="num_local_experts=8 is not a known key"):
        config_from_huggingface({**LLAMA_2_7B, "num_local_experts": 8})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ('{"a": 1, "a": 2}', "cannot be read as JSON: 'a' stands there twice"),
        ("[]", "holds list where a JSON object is expected"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"config.json {message}"):
        config_from_huggingface(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path} holds no config.json"):
        config_from_huggingface(tmp_path)


@settings(max_examples=40)
@given(data=st.data())
def test_there_and_back(data: st.DataObject) -> None:
    def draw(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    experts, heads, head_dim = draw(1, 2, 8), draw(4, 8), draw(2, 64, 96)
    dtype = draw("float32", "bfloat16", "float16")
    model = ModelConfig(
        vocab_size=draw(7, 32_000),
        embed_dim=draw(64, 4096),
        mlp_dim=draw(1, 11_008),
        num_layers=draw(1, 32),
        num_heads=heads,
        num_kv_heads=draw(1, 2, heads),
        head_dim=head_dim,
        num_experts=experts,
        num_experts_per_token=min(experts, 2),
        dtype=dtype,
        param_dtype=dtype,
        norm_epsilon=draw(1e-6, 1e-5),
        rope_theta=draw(1e4, 1e6),
        qk_norm=draw(False, True),
        tied_embeddings=draw(False, True),
        **draw({}, {"rope_scaling": "linear", "rope_factor": 4.0}, ROPE_OF_LLAMA3_1),
        attention_scale=head_dim**-0.5,
        max_position_embeddings=draw(1, 131_072),
    )
    config = Config(model=model)
    values = json.loads(json.dumps(config_to_huggingface(config)))
    assert config_from_huggingface(values) == config


def test_the_longest_sequence_is_that_of_training_where_the_model_says_none() -> None:
    model = config_from_huggingface(LLAMA_2_7B).model
    train = TrainConfig(sequence_length=512)
    for said, written in ((None, 512), (4096, 4096)):
        of_model = dataclasses.replace(model, max_position_embeddings=said)
        values = config_to_huggingface(Config(model=of_model, train=train))
        assert values["max_position_embeddings"] == written


@pytest.mark.parametrize("absent", [None, "left out"])
def test_the_longest_sequence_is_that_of_transformers_where_it_is_absent(absent: Any) -> None:
    for values, longest in ((MIXTRAL_8X7B, 131_072), (LLAMA_2_7B, 2048)):
        given = {**values, "max_position_embeddings": None}
        if absent:
            del given["max_position_embeddings"]
        assert config_from_huggingface(given).model.max_position_embeddings == longest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tied_embeddings": True, "tied_head_dtype": "bfloat16"},
            "tied_head_dtype='bfloat16' has no place in a Hugging Face model.* set it to None",
        ),
        ({"norm_scale_offset": 1.0}, "norm_scale_offset=1.0 has no place in a LlamaForCausalLM"),
        ({"attention_soft_cap": 50.0}, "attention_soft_cap=50.0 has no place in a LlamaForCausal"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 has no place in a LlamaForCausalLM"),
        ({"norm_placement": "both"}, "norm_placement='both' has no place in a LlamaForCausalLM"),
        ({"residual_scale": 0.5, "rope_head_dim": 8}, "rope_head_dim=8 has no place in a Granite"),
        ({"num_experts": 8, "router_scale": 2.5}, "router_scale=2.5 has no place in a Mixtral"),
        ({"num_heads": 7, "num_kv_heads": 7}, "embed_dim=4096 is not a multiple of model.num_h"),
    ],
)
def test_models_that_transformers_has_not(changes: dict, message: str) -> None:
    model = dataclasses.replace(config_from_huggingface(LLAMA_2_7B).model, **changes)
    with pytest.raises(InputError, match=message):
        config_to_huggingface(Config(model=model))


def test_configs_written_by_transformers_5() -> None:
    model = config_from_huggingface(FOLDER / "mixtral").model
    assert (model.head_dim, model.rope_theta, model.num_experts) == (6, 100.0, 4)
    assert model.attention_scale == 6**-0.5


def test_a_command_takes_it_as_its_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL_8X7B))
    assert read_config(str(file)) == config_from_huggingface(MIXTRAL_8X7B)
