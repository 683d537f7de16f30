"""What this project takes for granted of `transformers`, held against the library itself.

Each rule once was true of some version. The values are such that it shows where it no longer is.
"""

import contextlib
import importlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_reference import EXPERTS, SIZES, YARN, logits_of, random_model, random_tokens
from safetensors.numpy import load_file, save_file
from test_huggingface import logits

from linen_compat import config_from_huggingface, load
from linen_compat.formats.huggingface._architecture import LONGEST, Architecture
from linen_compat.formats.huggingface._architectures import ARCHITECTURES
from linen_compat.formats.huggingface.config import IGNORED, UNREAD
from nnx_pipeline import InputError
from nnx_pipeline.lab.errors import Note

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
# Later classes are compared with stored logits alone, see `huggingface_reference.KEPT`.
FIRST = ("Mixtral", "Llama", "Mistral", "Qwen3", "Qwen3Moe", "DeepseekV2", "DeepseekV3")
KINDS = {name: ARCHITECTURES[f"{name}ForCausalLM"] for name in FIRST}
each_class = pytest.mark.parametrize("kind", KINDS)
TOKENS = random_tokens(seed=3)
# Values other than the usual ones; where they are absent `True` is one.
ODD: dict[str, Any] = {
    "transformers_version": "1.0",
    "tokenizer_class": "Other",
    "initializer_range": 0.5,
    "pretraining_tp": 2,
    "use_cache": False,
    "max_sequence_length": 3,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 5),
    **dict.fromkeys(("unk_token_id", "sep_token_id"), 6),
    "chunk_size_feed_forward": 3,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": False,  # only shapes of an output differ with True
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "task_specific_params": {"a": 1},
    "activation": "gelu",
    "use_qk_norm": False,
    # Keys of single classes that have supported values only, or no effect.
    "max_window_layers": 1,
    "aux_loss_alpha": 0.5,
    "seq_aux": True,
    "ep_size": 2,
    "auto_map": {"AutoConfig": "other.Other"},
    "num_nextn_predict_layers": 2,
    "num_mtp_layers": 2,
    "n_group": 2,
    "topk_group": 1,
}
# Keys of values that are refused or whose other values are, because a class does not read them.
NOT_READ = {
    "Llama": {"sliding_window": 5},
    "Qwen3": {"sliding_window": 5, "use_sliding_window": False},
    "Qwen3Moe": {"sliding_window": 5, "use_sliding_window": False},
    "Mistral": {"layer_types": ["full_attention"] * 4},
    "Mixtral": {"layer_types": ["full_attention"] * 4},
    "DeepseekV2": {"scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 2},
    "DeepseekV3": {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2},
}


def config_of(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**changes)


def saved(kind: str, folder: Path, **changes: Any) -> Any:
    """A random model of `transformers`, after it was saved."""
    model = random_model(kind, seed=2, **changes)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, *without: str, **changes: Any) -> None:
    file = folder / "config.json"
    values = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if k not in without}))


def theirs(folder: Path) -> np.ndarray:
    """The logits that transformers computes from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return logits_of(model, TOKENS)


def assert_same_logits(folder: Path) -> None:
    np.testing.assert_allclose(logits(load(folder), TOKENS), theirs(folder), rtol=0, atol=1e-4)


@each_class
def test_values_of_absent_keys(kind: str) -> None:
    known = config_of(kind)
    rope = known.rope_parameters
    for key, value in KINDS[kind].absent.items():
        found = rope["rope_theta"] if key == "rope_theta" else _read(known, key, KINDS[kind])
        if key == "num_key_value_heads" and value is None:
            value = known.num_attention_heads
        assert found == value, key
    assert (known.tie_word_embeddings, known.hidden_act) == (False, "silu")
    assert not getattr(known, "attention_bias", False)
    assert LONGEST in KINDS[kind].absent


def _read(config: Any, key: str, architecture: Architecture) -> Any:
    """The value of a key, which another version may call otherwise."""
    names = [key, *(old for old, new in architecture.other_names.items() if new == key)]
    return next((getattr(config, name) for name in names if hasattr(config, name)), "no such key")


@each_class
def test_which_classes_ask_that_heads_divide_the_width(kind: str) -> None:
    sizes = {**SIZES, **EXPERTS.get(kind, {}), "hidden_size": 18}
    if KINDS[kind].heads_divide:
        with pytest.raises(Exception, match="not a multiple of the number of attention"):
            config_of(kind, **sizes)
    else:
        config_of(kind, **sizes)


@each_class
def test_keys_without_an_effect(kind: str, tmp_path: Path) -> None:
    """Those that are ignored here, all at once, and those that a class is said not to read."""
    architecture = KINDS[kind]
    model = saved(kind, tmp_path)
    without_values = {key for key, (allowed, _) in architecture.only.items() if not allowed}
    keys = (IGNORED | UNREAD | without_values) - {*architecture.keys}
    change_config(tmp_path, **{key: ODD.get(key, True) for key in keys}, **NOT_READ[kind])
    np.testing.assert_array_equal(theirs(tmp_path), logits_of(model, TOKENS))


@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3"])
def test_the_norms_of_latent_vectors_have_an_epsilon_of_their_own(kind: str) -> None:
    attention = random_model(kind, seed=2, q_lora_rank=11, rms_norm_eps=0.5).model.layers[0]
    assert attention.input_layernorm.variance_epsilon == 0.5
    for norm in (attention.self_attn.q_a_layernorm, attention.self_attn.kv_a_layernorm):
        assert norm.variance_epsilon == 1e-6


@pytest.mark.parametrize("kind", [kind for kind, one in KINDS.items() if one.is_routed])
def test_experts_in_two_tensors(kind: str, tmp_path: Path) -> None:
    random_model(kind, seed=2).save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 8.0},  # another ratio than that of the two longest sequences
        {"beta_fast": None, "beta_slow": 0.0},  # so that the defaults of both count
        {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0},
        {"mscale": 0.5, "mscale_all_dim": 2.0, "attention_factor": 1.0},
        {"type": "yarn", "rope_type": "yarn"},
    ],
)
@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3"])
def test_yarn(kind: str, changes: dict, tmp_path: Path) -> None:
    """As in published files, with keys of transformers 4."""
    saved(kind, tmp_path)
    rope = {**YARN, "original_max_position_embeddings": 32, **changes}
    change_config(tmp_path, "rope_parameters", rope_scaling=rope, rope_theta=50.0)
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": None},
        {
            "rope_parameters": None,
            "rope_theta": 50.0,
            "rope_scaling": {"type": "linear", "factor": 3},
        },
        {"rope_parameters": {"rope_theta": 50.0, "rope_type": "linear", "factor": 3.0}},
    ],
)
def test_null_and_keys_of_transformers_4(changes: dict, tmp_path: Path) -> None:
    saved("Llama", tmp_path, num_key_value_heads=4, head_dim=4)
    change_config(tmp_path, **changes)
    assert_same_logits(tmp_path)


def test_which_file_is_read_where_there_are_both(tmp_path: Path) -> None:
    """That of the whole model, beside an index of several with other values."""
    saved("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(other, tmp_path / "a.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_logits(tmp_path)


def test_buffers_of_old_versions_have_no_effect(tmp_path: Path) -> None:
    model = saved("Llama", tmp_path)
    file = tmp_path / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.full(3, 7.0, np.float32)}
    save_file({**load_file(file), **buffer}, file, metadata={"format": "pt"})
    np.testing.assert_array_equal(theirs(tmp_path), logits_of(model, TOKENS))
    assert_same_logits(tmp_path)


def test_the_head_and_the_table_where_only_one_is_there(tmp_path: Path) -> None:
    """A tied head that is stored once more is the table; and saving does not store it."""
    saved("Llama", tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    again = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    save_file(again, file, metadata={"format": "pt"})
    assert load(tmp_path).head is None
    assert_same_logits(tmp_path)


def test_saving_keeps_keys_that_are_unknown(tmp_path: Path) -> None:
    """So that it is no cure for one of them."""
    saved("Llama", tmp_path / "a")
    change_config(tmp_path / "a", other_key=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["other_key"] == 3


@each_class
def test_what_is_on_unless_a_config_says_otherwise_is_known(kind: str) -> None:
    """An unknown key that is false passes, so that none may switch something off."""
    name = f"transformers.models.{KINDS[kind].model_type}.modeling_{KINDS[kind].model_type}"
    on = {key for key, value in config_of(kind).to_dict().items() if value is True}
    for module in (name, "transformers.masking_utils", "transformers.modeling_rope_utils"):
        source = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
        on |= {*re.findall(r'getattr\((?:self\.)?config, "(\w+)", True\)', source)}
    own = random_model(kind, seed=2).config.to_dict()
    for key in on - IGNORED:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Note)
            with contextlib.suppress(InputError):
                config_from_huggingface({**own, key: False})


@pytest.mark.parametrize("value", [False, None, 0])
def test_attention_that_is_not_causal(value: object, tmp_path: Path) -> None:
    """transformers reads the key in its masks alone, and takes null for false."""
    saved("Llama", tmp_path, num_key_value_heads=4, head_dim=4)
    before = theirs(tmp_path)
    change_config(tmp_path, is_causal=value)
    assert np.max(np.abs(theirs(tmp_path) - before)) > 1e-3
    with pytest.raises(InputError, match=f"is_causal={value} is not supported, only True"):
        load(tmp_path)
    change_config(tmp_path, is_causal=True)
    assert_same_logits(tmp_path)


def test_a_deepseek_predicts_further_tokens_unless_it_says_otherwise() -> None:
    assert config_of("DeepseekV3").num_nextn_predict_layers > 0


def test_the_window_of_the_longest_sequence_is_none(tmp_path: Path) -> None:
    """What is read of one that no sequence leaves, and of one that some do."""
    saved("Mistral", tmp_path, sliding_window=5)
    assert config_from_huggingface(tmp_path).model.sliding_window == 5
    assert_same_logits(tmp_path)
    wide = Path(shutil.copytree(tmp_path, tmp_path / "wide"))
    change_config(wide, sliding_window=SIZES[LONGEST])
    assert config_from_huggingface(wide).model.sliding_window is None
    assert_same_logits(wide)
