"""Values of YAML files, their types, and MaxText's defaults for mapped keys that are left out."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from yaml.composer import ComposerError

from nnx_pipeline import InputError
from nnx_pipeline.lab.errors import shown

Number = TypeVar("Number", int, float)
Values = Mapping[str, Any]  # of a configuration, by its keys
Fields = dict[str, Any]  # values of fields of `Config`, or of keys of MaxText

DEFAULTS: Fields = {
    "model_name": "default",
    "decoder_block": "llama2",
    "vocab_size": 32_000,
    "base_emb_dim": 2048,
    "base_mlp_dim": 7168,
    "base_moe_mlp_dim": -1,
    "base_num_decoder_layers": 16,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "head_dim": 128,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "dtype": "bfloat16",
    "weight_dtype": "float32",
    "normalization_layer_epsilon": 1e-5,
    "rope_max_timescale": 10_000,
    "rope_type": "default",
    "rope_use_scale": True,
    "rope_linear_scaling_factor": 1.0,
    "use_qk_norm": False,
    "attention_bias": False,
    "attention_type": "global",
    "first_num_dense_layers": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "shared_experts": 0,
    "routed_score_func": "",
    "routed_scaling_factor": 1.0,
    "routed_bias": False,
    "routed_bias_update_rate": 0.0,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "max_position_embeddings": 163_840,
    "original_max_position_embeddings": 4096,
    "rope_factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "rope_interleave": True,
    "rope_truncate": True,
    "rope_attention_scaling": False,
    "logits_via_embedding": False,
    "normalize_embedding_logits": True,
    "num_pipeline_microbatches": -1,
    "num_pipeline_repeats": -1,
    "num_layers_per_pipeline_stage": 1,
    "pipeline_parallel_layers": -1,
    "pipeline_delay_activation_forwarding": False,
    "pipeline_fsdp_ag_once": False,
    "pipeline_fsdp_ag_per_repeat": False,
    "remat_policy": "full",
    "shard_mode": "explicit",  # MaxText's default is auto; this one is this project's own
    "ici_pipeline_parallelism": 1,
    "dcn_pipeline_parallelism": 1,
    "per_device_batch_size": 12.0,
    "max_target_length": 2048,
    "learning_rate": 3e-5,
    "lr_schedule_type": "cosine",
    "learning_rate_final_fraction": 0.1,
    "learning_rate_schedule_steps": -1,
    "steps": 150_001,
    "warmup_steps_fraction": 0.1,
    "wsd_decay_steps_fraction": 0.1,
    "wsd_decay_style": "linear",
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_weight_decay": 0.1,
    "gradient_clipping_threshold": 1.0,
    "load_balance_loss_weight": 0.0,
    "grad_dtype": None,
    "skip_step_on_spikes": False,
    "skip_step_interval": 128,
    "skip_step_scaling_factor": 6.0,
    "shard_optimizer_over_data": False,
    "enable_dropout": True,
    "dropout_rate": 0.0,
}


def typed(values: Values) -> Fields:
    """Every mapped value in the type of its default, since YAML reads 3e-5 as text."""
    result = dict(values)
    for key, default in DEFAULTS.items():
        value = values[key]
        kind = type(default)
        if default is None and value in (None, ""):
            result[key] = None
        elif kind is bool or isinstance(value, bool) or value is None:
            if kind is not bool or not isinstance(value, bool):
                raise wrong_type(key, value, kind)
        elif kind in (int, float):
            result[key] = as_number(key, value, kind)
        elif not isinstance(value, str):
            raise wrong_type(key, value, str)
    return result


def as_number(key: str, value: Any, kind: type[Number]) -> Number:
    """Raises InputError where a value is no whole number or float, or not a finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong_type(key, value, kind) from error
    if not math.isfinite(number) or (kind is int and number != int(number)):
        raise wrong_type(key, value, kind)
    return kind(number)


def wrong_type(key: str, value: object, kind: type) -> InputError:
    """The error for a value that is not of the type of its default."""
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
    return InputError(f"{key}={shown(value)} must be {wanted}, such as {DEFAULTS[key]!r}")


def load_yaml(text: str) -> object:
    """The plain value of a YAML text, in which no key of a mapping stands twice."""
    loader = yaml.SafeLoader(text)
    compose = loader.compose_mapping_node
    loader.compose_mapping_node = lambda anchor: _with_keys_once(compose(anchor))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _with_keys_once(mapping: yaml.MappingNode) -> yaml.MappingNode:
    seen = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (key.tag, key.value) in seen:
            rule = f"the key {key.value!r} stands there twice; keep one of the two"
            raise ComposerError(None, None, rule, key.start_mark)
        seen.add((key.tag, key.value))
    return mapping
