"""MaxText's configurations: mapped, knowingly ignored, or refused by name."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from maxtext_data import DATA, KEPT, config_of

import linen_compat
from linen_compat.maxtext import _keys as maxtext_keys
from linen_compat.maxtext._families import OTHER_BLOCKS
from linen_compat.maxtext._published import SIZES
from linen_compat.maxtext._values import DEFAULTS
from linen_compat.maxtext.config import (
    PRESETS_OF_MAXTEXT,
    config_from_maxtext,
    config_from_yaml,
    mesh_from_yaml,
)
from nnx_pipeline import Config, InputError, MeshConfig, preset
from nnx_pipeline.config.parameter_count import count_parameters

ONE = {"per_device_batch_size": 1}
MIXTRAL = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", KEPT)
def test_kept_files(name):
    config = config_of(name)
    model, train = config.model, config.train
    assert (model.vocab_size, model.embed_dim, model.mlp_dim, model.num_layers) == (128, 32, 64, 4)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 8)
    assert (model.num_experts, model.num_experts_per_token) == (4, 2)
    assert (model.dtype, model.param_dtype) == ("float32", "float32")
    assert (model.norm_epsilon, model.rope_theta, model.attention_scale) == (1e-5, 1e6, 1.0)
    assert (config.pipeline.num_repeats, config.pipeline.num_microbatches) == (1, None)
    assert (train.global_batch, train.sequence_length, train.learning_rate) == (4, 16, 1e-3)
    assert (train.adam_b1, train.adam_b2, train.weight_decay, train.clip_norm) == (
        0.9,
        0.95,
        0.1,
        1,
    )
    text = (DATA / name / "config.yml").read_text(encoding="utf-8")
    assert linen_compat.config_from_maxtext(yaml.safe_load(text)) == config


def configs_of_maxtext():
    """The folder of the configs of an installed MaxText."""
    found = importlib.util.find_spec("maxtext")
    if found is None:
        pytest.skip("maxtext is not installed")
    return Path(found.submodule_search_locations[0]) / "configs"


def test_defaults_and_keys_are_those_of_maxtext():
    """Its own file of defaults is read, and means the same as no key at all."""
    base = yaml.safe_load((configs_of_maxtext() / "base.yml").read_text())
    assert [key for key in base if maxtext_keys.kind(key) is None] == []
    assert [key for key in maxtext_keys.FIXED if not maxtext_keys.is_accepted(key, base[key])] == []
    other = {key for key, value in DEFAULTS.items() if base[key] != value}
    assert other == {"shard_mode", "grad_dtype"}  # this project's own, and another word for it
    own = {"shard_mode": "explicit"}
    found = linen_compat.config_from_maxtext({**base, **own})
    assert found == linen_compat.config_from_maxtext(own)


@pytest.mark.parametrize("name", sorted({**PRESETS_OF_MAXTEXT, **SIZES}))
def test_named_models_are_those_of_maxtext(name):
    file = configs_of_maxtext() / "models" / f"{name}.yml"
    if not file.is_file():
        pytest.skip("maxtext has no such file")
    given = yaml.safe_load(file.read_text())
    given |= {"model_name": name, "override_model_config": True}
    found = linen_compat.config_from_maxtext(given)
    named = linen_compat.config_from_maxtext({"model_name": name})
    assert found.model == named.model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3.3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b-base", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b-base", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen3-480b-a35b", 480_154_875_392),
    ],
)
def test_named_models_have_the_published_number_of_parameters(name, parameters):
    """Also where a file spells the sizes out, as MaxText's own does (1e-06 is text in YAML)."""
    keys = {**SIZES[name], "model_name": name, "normalization_layer_epsilon": "1e-06"}
    if name.startswith("llama"):
        keys["normalization_layer_epsilon"] = 1e-5
    for given in ({"model_name": name}, keys):
        model = linen_compat.config_from_maxtext(given).model
        assert count_parameters(model).total == parameters


@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_other_decoder_blocks_are_refused_by_name(name):
    with pytest.raises(InputError, match=rf"decoder_block='{name}' is not supported \(.*\), only"):
        linen_compat.config_from_maxtext({"decoder_block": name, "mlp_activations": ["gelu"]})


def test_gradients_in_float32_are_those_of_the_parameters():
    """MaxText casts those that are in float32 alone, so that this dtype changes nothing."""
    for given, found in (("float32", None), ("bfloat16", "bfloat16")):
        values = {"grad_dtype": given, "weight_dtype": "bfloat16"}
        assert linen_compat.config_from_maxtext(values).train.grad_dtype == found


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "llama2-7b", "qwen3-8b"])
def test_model_names_bring_their_sizes(name):
    config = linen_compat.config_from_maxtext({"model_name": name})
    assert config.model == preset(name).model


def test_the_model_name_wins_over_defaults_and_not_over_an_override():
    """MaxText's own base.yml names all sizes beside `model_name`, and those are left aside."""
    sizes = {"base_emb_dim": 2048, "base_num_decoder_layers": 16, "decoder_block": "llama2"}
    config = linen_compat.config_from_maxtext({"model_name": "mixtral-8x7b", **sizes})
    assert (config.model.embed_dim, config.model.num_layers) == (4096, 32)
    assert config.model.num_experts == 8
    given = {"model_name": "llama2-7b", "vocab_size": 100}
    with pytest.raises(
        InputError, match=r"vocab_size=100 contradicts model_name='llama2-7b'.*has 32000"
    ):
        linen_compat.config_from_maxtext(given)
    config = linen_compat.config_from_maxtext({**given, "override_model_config": True})
    assert (config.model.vocab_size, config.model.embed_dim) == (100, 4096)


ROPE_OF_LLAMA3_1 = {
    "rope_interleaved": True,
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_original_length": 8192,
    "rope_low_frequency": 1.0,
    "rope_high_frequency": 4.0,
}
QWEN3 = {"decoder_block": "qwen3", "use_qk_norm": True, "head_dim": 64}
TIED = {"logits_via_embedding": True, "normalize_embedding_logits": False}


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"rope_type": "llama3.1"}, ROPE_OF_LLAMA3_1),
        (
            {"model_name": "llama3.1-8b"},
            {**ROPE_OF_LLAMA3_1, "embed_dim": 4096, "rope_theta": 5e5, "vocab_size": 128_256},
        ),
        (
            {"rope_type": "llama3.1", "rope_use_scale": False},
            {"rope_interleaved": True, "rope_scaling": None},
        ),
        (
            {"rope_linear_scaling_factor": 8.0},
            {"rope_interleaved": False, "rope_scaling": "linear", "rope_factor": 8.0},
        ),
        (QWEN3, {"qk_norm": True, "attention_scale": 64**-0.5, "num_experts": 1}),
        (
            {**QWEN3, "decoder_block": "qwen3_moe", "num_experts": 4, "base_moe_mlp_dim": 24},
            {"qk_norm": True, "mlp_dim": 24, "num_experts": 4},
        ),
        ({**TIED}, {"tied_embeddings": True, "tied_head_dtype": None}),  # dtype is bfloat16
        ({**TIED, "dtype": "float32"}, {"tied_embeddings": True, "tied_head_dtype": "bfloat16"}),
        (
            {"model_name": "mistral-7b", "decoder_block": "mistral"},
            {"mlp_dim": 14_336, "qk_norm": False},
        ),
    ],
)
def test_families(given, fields):
    model = linen_compat.config_from_maxtext(given).model
    assert {name: getattr(model, name) for name in fields} == fields


STAGES = {"ici_pipeline_parallelism": 2, "base_num_decoder_layers": 8}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        # Without stages MaxText reads no option of the pipeline.
        ({"num_pipeline_microbatches": 6}, "num_microbatches", None),
        ({"num_pipeline_repeats": 2}, "num_repeats", 1),
        ({"pipeline_fsdp_ag_once": True}, "fsdp_gather", "use"),
        ({**STAGES, "num_pipeline_microbatches": 6}, "num_microbatches", 6),
        ({**STAGES, "num_layers_per_pipeline_stage": 2}, "num_repeats", 2),
        ({**STAGES, "ici_pipeline_parallelism": 4}, "num_repeats", 2),
        ({**STAGES, "pipeline_delay_activation_forwarding": True}, "forwarding_delay", 2),
        ({**STAGES, "pipeline_fsdp_ag_once": True}, "fsdp_gather", "step"),
        ({**STAGES, "pipeline_fsdp_ag_per_repeat": True}, "fsdp_gather", "prefetch"),
        ({"remat_policy": "minimal"}, "remat", "minimal"),
        ({"remat_policy": "save_dot_with_context_except_mlp"}, "remat", "full"),
        ({"shard_mode": "auto"}, "sharding", "auto"),
    ],
)
def test_pipeline(given, field, value):
    config = linen_compat.config_from_maxtext(given)
    assert getattr(config.pipeline, field) == value


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"per_device_batch_size": 3, "ici_fsdp_parallelism": 4, "dcn_data_parallelism": 2}, 24),
        ({"per_device_batch_size": 0.5, "ici_fsdp_parallelism": 4}, 2),
        ({"per_device_batch_size": 0.5, "ici_fsdp_parallelism": -1}, 1),
        (
            {
                "per_device_batch_size": 1,
                "ici_data_parallelism": -1,
                "num_pipeline_microbatches": 8,
            },
            8,
        ),
    ],
)
def test_global_batch(given, batch):
    assert linen_compat.config_from_maxtext(given).train.global_batch == batch


@pytest.mark.parametrize(
    ("given", "devices", "slices", "mesh", "dcn"),
    [
        ({}, 8, 1, "fsdp=8", ""),
        ({"ici_pipeline_parallelism": 4}, 8, 1, "stage=4,fsdp=2", ""),
        ({"ici_fsdp_parallelism": 4}, None, 1, "fsdp=4", ""),
        ({"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 4}, 8, 1, "fsdp=4,tensor=2", ""),
        ({}, 16, 2, "data=2,fsdp=8", "data=2"),
        (
            {"dcn_data_parallelism": 1, "dcn_pipeline_parallelism": 2},
            16,
            2,
            "stage=2,fsdp=8",
            "stage=2",
        ),
    ],
)
def test_mesh(tmp_path, given, devices, slices, mesh, dcn):
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(given))
    found = mesh_from_yaml(str(path), devices, slices)
    assert found == MeshConfig.parse(mesh, dcn=dcn)
    # However the file spells its parallelisms, each device has its own part of the batch.
    batch = config_from_yaml(str(path), found).train.global_batch
    assert batch == 12 * found.num_devices


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "ici_fsdp_parallelism=-1 is what is left of the devices; name the mesh by --mesh"),
        ({"ici_data_parallelism": -1}, "ici_fsdp_parallelism and ici_data_parallelism are both -1"),
        (
            {"ici_fsdp_parallelism": 1, "ici_sequence_parallelism": 2},
            "ici_sequence_parallelism=2: this project has no such mesh axis",
        ),
    ],
)
def test_mesh_that_cannot_be_made(tmp_path, given, message):
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(given))
    with pytest.raises(InputError, match=message):
        mesh_from_yaml(str(path), None, 1)


def test_the_example_is_the_preset_of_the_figures():
    """But for a number of the model and the learning rate, which change no time."""
    file = str(ROOT / "examples" / "maxtext.yml")
    mesh = mesh_from_yaml(file, 8, 1)
    assert mesh == MeshConfig(stage=4, fsdp=2)
    found, known = config_from_yaml(file, mesh), preset("mixtral-small")
    pipeline = dataclasses.replace(known.pipeline, num_microbatches=8, num_repeats=2)
    model = dataclasses.replace(known.model, rope_theta=found.model.rope_theta)
    of_rate = ["learning_rate", "warmup_steps", "learning_rate_decay", "schedule_steps"]
    train = dataclasses.replace(
        known.train, **{name: getattr(found.train, name) for name in of_rate}
    )
    assert found == Config(model=model, pipeline=pipeline, train=train)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"base_emb_dimm": 3},
            "base_emb_dimm=3 is not a MaxText key .* did you mean 'base_emb_dim'",
        ),
        ({"ici_pipeline_paralelism": 3}, "did you mean 'ici_pipeline_parallelism'"),
        ({"qqqq": 1}, "qqqq=1 is not a MaxText key that this project knows; remove it"),
        ({"decoder_block": "gemma2"}, "decoder_block='gemma2' is not supported .its layers take"),
        ({"decoder_block": "gema2"}, "decoder_block='gema2' is not known"),
        ({"decoder_block": ["gemma2"]}, "decoder_block=.* must be text"),
        ({"decoder_block": "qwen2"}, "attention_bias=False with decoder_block='qwen2' is not"),
        ({"attention_bias": True}, "attention_bias=True with decoder_block='llama2' is not"),
        ({"decoder_block": "mixtral"}, "decoder_block='mixtral' with num_experts=1"),
        ({"num_experts": 8}, "decoder_block='llama2' with num_experts=8"),
        ({"scan_layers_per_stage": True}, "scan_layers_per_stage=True is not supported"),
        ({"pipeline_parallel_layers": 8}, "pipeline_parallel_layers=8 .* outside the pipeline"),
        ({"param_scan_axis": 0}, "param_scan_axis=0 is not supported; .* param_scan_axis=1"),
        ({"capacity_factor": 1.25}, "capacity_factor=1.25 is not supported; .*capacity_factor=-1"),
        ({"final_logits_soft_cap": 30.0}, "final_logits_soft_cap=30.0 is not supported"),
        ({"attn_logits_soft_cap": 50.0}, "attn_logits_soft_cap=50.0 is not supported"),
        (
            {"logits_via_embedding": True},
            "normalize_embedding_logits=True, MaxText's default, .* set normalize_embedding_logits",
        ),
        ({"decoder_block": "qwen3"}, "use_qk_norm=False with decoder_block='qwen3' is not"),
        ({"use_qk_norm": True}, "use_qk_norm=True with decoder_block='llama2' is not supported"),
        ({**MIXTRAL, "use_qk_norm": True}, "computes mixtral with use_qk_norm=False"),
        (
            {"decoder_block": "qwen3_moe", "use_qk_norm": True},
            "decoder_block='qwen3_moe' with num_experts=1 .* qwen3_moe has two experts or more",
        ),
        ({"qk_norm_with_scale": False}, "qk_norm_with_scale=False is not supported"),
        (
            {"rope_linear_scaling_factor": 0.5},
            "rope_factor=0.5 .* rope_factor is rope_linear_scaling_factor",
        ),
        ({"mlp_activations": ["gelu"]}, r"mlp_activations=\['gelu'\] is not supported"),
        ({"mlp_activations": "['gelu','linear']"}, "mlp_activations=.* is not supported"),
        ({"float32_logits": True}, "float32_logits=True is not supported"),
        ({"quantization": "int8"}, "quantization='int8' is not supported"),
        ({"rope_type": "yarn"}, "rope_type='yarn' is not known; choose one of: default, llama3.1"),
        ({"opt_type": "sgd"}, "opt_type='sgd' is not supported"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 with enable_dropout"),
        ({"gradient_clipping_threshold": -1}, "clip_norm=-1.0 .* is gradient_clipping_threshold"),
        ({"base_num_decoder_layers": 0}, "num_layers=0 .* num_layers is base_num_decoder_layers"),
        ({"learning_rate": "fast"}, "learning_rate='fast' must be a number, such as 3e-05"),
        ({"max_target_length": None}, "max_target_length=None must be a whole number"),
        ({"max_target_length": 16.5}, "max_target_length=16.5 must be a whole number"),
        ({"adam_eps": None}, "adam_eps=None must be a number"),
        ({"pipeline_fsdp_ag_once": "false"}, "pipeline_fsdp_ag_once='false' must be true or false"),
        ({"dtype": 16}, "dtype=16 must be text"),
        ({"model_name": ["a"]}, r"model_name=\['a'\] must be text"),
        ({"model_name": "gemma2-9b"}, "model_name='gemma2-9b' is not among .* base_emb_dim"),
        ({"base_config": "base.yml"}, "base_config=.* put its keys into this one"),
        ({"remat_policy": "banana"}, "remat_policy='banana' is not known"),
        ({"ici_bogus_parallelism": 2}, "ici_bogus_parallelism=2 is not a MaxText key"),
        (
            {"pipeline_fsdp_ag_once": True, "pipeline_fsdp_ag_per_repeat": True},
            "are both true; keep one of them",
        ),
        (
            {"ici_pipeline_parallelism": 2, "num_pipeline_repeats": 3},
            "2 stages × num_pipeline_repeats=3 × num_layers_per_pipeline_stage=1 are not",
        ),
        ({**MIXTRAL, "base_moe_mlp_dim": 5}, "base_moe_mlp_dim=5 differs from base_mlp_dim"),
        ({"shard_mode": "manual"}, "shard_mode='manual' is not known"),
        ({"ici_pipeline_parallelism": -1}, "num_pipeline_repeats=-1 cannot be worked out"),
    ],
)
def test_what_this_project_does_not_compute_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        linen_compat.config_from_maxtext(given)


def test_dropout_that_is_off_and_lists_as_text():
    given = {"dropout_rate": 0.1, "enable_dropout": False, "mlp_activations": "['silu','linear']"}
    assert linen_compat.config_from_maxtext(given).model.dropout_rate == 0.0


def test_every_key_has_one_meaning():
    fixed, mapped = set(maxtext_keys.FIXED), set(maxtext_keys.MAPPED)
    assert not fixed & mapped
    for key in ("enable_checkpointing", "ici_fsdp_parallelism", "megablox", "sa_block_q"):
        assert maxtext_keys.kind(key) == "ignored"
    for key, values in maxtext_keys.FIXED.items():
        assert maxtext_keys.is_accepted(key, values[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {vocab_sizes: 3}", "no such config field model.vocab_sizes; did you mean"),
        ("model: {vocab_size: 3}", "missing .* required keyword"),
        ("model: 3", "model is not a mapping from fields"),
        ("- 1", "is not a YAML file of keys and values"),
        ("a: [", "cannot be read as YAML"),
        ("model: {vocab_size: 3, vocab_size: 4}", "key 'vocab_size' stands there twice; .*line 1"),
        ("train: {}\nmodel: {}\ntrain: {}", "the key 'train' stands there twice; .*line 3"),
        ("emb_dim: 3\n'emb_dim': 3", "the key 'emb_dim' stands there twice; .*line 2"),
    ],
)
def test_own_files_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "config.yml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        config_from_yaml(str(path))


def test_neither_a_file_nor_a_preset():
    with pytest.raises(InputError, match=r"no\.yml is neither a file nor a preset"):
        config_from_yaml("no.yml")
    assert config_from_yaml("tiny") == preset("tiny")
    with pytest.raises(
        InputError, match=r"no\.yml cannot be read: No such file or directory; name another file"
    ):
        config_from_maxtext("no.yml")
