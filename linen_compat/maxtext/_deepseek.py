"""MaxText's decoder block `deepseek`: its keys, and the fields of `ModelConfig` they become."""

import math
from typing import NamedTuple

from linen_compat.maxtext._values import Fields, Values
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.lab.errors import one_of

BLOCK = "deepseek"


class Named(NamedTuple):
    """The preset of a model that MaxText has a file for, and that file's number for its scores."""

    preset: str
    mscale: float


class FixedValue(NamedTuple):
    """The only value of a key that this project computes with, and why there is no other."""

    value: object
    reason: str


# By MaxText's names.
NAMED = {
    "deepseek2-16b": Named("deepseek-v2-lite", 0.707),
    "deepseek3-671b": Named("deepseek-v3", 1.0),
}
_LONGEST, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
# The keys that MaxText's files of DeepSeek models set, with the field of each that is a plain copy.
_COPIED = {
    "first_num_dense_layers": "num_dense_layers",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
    "shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scale",
    "routed_score_func": "router_score",
    "routed_bias": "router_bias",
}
RENAMED = {key: field for key, field in _COPIED.items() if key != field} | {
    "qk_nope_head_dim + qk_rope_head_dim": "head_dim",
    "base_moe_mlp_dim": "mlp_dim",
    "base_mlp_dim": "dense_mlp_dim",
    "n_routing_groups": "router_groups",
    "topk_routing_group": "router_groups_per_token",
    _ORIGINAL: "rope_original_length",
    "beta_fast": "rope_high_frequency",
    "beta_slow": "rope_low_frequency",
}
NEEDED = (
    *_COPIED,
    *("base_moe_mlp_dim", "q_lora_rank", "qk_nope_head_dim", "mscale", "rope_type", "rope_factor"),
    *(_LONGEST, _ORIGINAL),
)
# What each key must be in a model of another block.
ELSEWHERE: dict[str, object] = {
    "attention_type": "global",
    "first_num_dense_layers": 0,
    "q_lora_rank": 0,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "routed_bias": False,
    "routed_scaling_factor": 1.0,
    "routed_score_func": "",
    "shared_experts": 0,
}
_HERE: dict[str, FixedValue] = {
    "attention_type": FixedValue("mla", "its layers have latent attention"),
    "use_qk_norm": FixedValue(False, "it normalises latent vectors instead"),
    "attention_bias": FixedValue(False, "its projections have no bias"),
    "routed_bias_update_rate": FixedValue(0.0, "a step leaves the bias as it is, or trains it"),
    "load_balance_loss_weight": FixedValue(0.0, "MaxText balances the softmax of the scores"),
}
_OF_YARN: dict[str, FixedValue] = {
    "rope_truncate": FixedValue(True, "the pairs at the limits are rounded outwards"),
    "rope_attention_scaling": FixedValue(False, "the rotary embedding here only rotates"),
}


def keys_of_named(name: str, model: ModelConfig) -> Fields:
    """The keys that MaxText's file for a named model has beside those of `maxtext.config`."""
    assert model.rope_head_dim is not None, "the preset has latent attention"
    return {
        "decoder_block": BLOCK,
        "attention_type": "mla",
        # MaxText's DeepSeek-V3 chooses experts from all groups, unlike the published model.
        **{key: getattr(model, field) for key, field in _COPIED.items()},
        "base_mlp_dim": model.dense_mlp_dim,
        "base_moe_mlp_dim": model.mlp_dim,
        "q_lora_rank": model.q_lora_rank or 0,
        "qk_nope_head_dim": model.head_dim - model.rope_head_dim,
        "mscale": NAMED[name].mscale,
        "rope_type": "yarn",
        "rope_factor": model.rope_factor,
        _LONGEST: 163_840,
        _ORIGINAL: model.rope_original_length,
    }


def fields_of_deepseek(values: Values) -> Fields:
    """The fields of a model whose `decoder_block` is `deepseek`.

    The weights of a token's experts are their scores, divided by their sum after a sigmoid. With a
    `model_name` that begins with `deepseek3` the router's bias takes part in the choice alone, and
    experts are chosen from groups. With any other name, MaxText's default among them, the weights
    are made of score and bias, and groups are not looked at.

    Raises InputError for what MaxText would compute and this project does not.
    """
    _refuse_others(values, _HERE)
    one_of("routed_score_func", values["routed_score_func"], ("softmax", "sigmoid"))
    if values["shared_experts"] < 1:
        _refuse_others(values, {"shared_experts": FixedValue(1, "its layers have one or more")})
    dense = values["first_num_dense_layers"]
    routed = values["base_moe_mlp_dim"]
    return {
        **{field: values[key] for key, field in _COPIED.items()},
        "mlp_dim": values["base_mlp_dim"] if routed == -1 else routed,
        "dense_mlp_dim": values["base_mlp_dim"] if dense else None,
        "q_lora_rank": values["q_lora_rank"] or None,
        "head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        "attention_scale": _attention_scale(values),
        "router_normalize": values["routed_score_func"] == "sigmoid",
        **_routing(values),
        **_rope(values),
    }


def _attention_scale(values: Values) -> float:
    """head_dim^-0.5; for lengthened sequences times (0.1 · mscale · ln(factor) + 1)²."""
    head_dim: int = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    factor, mscale = float(values["rope_factor"]), float(values["mscale"])
    if head_dim < 1 or factor < 1:
        raise InputError(
            f"qk_nope_head_dim + qk_rope_head_dim={head_dim} and rope_factor={factor}: both must "
            "be at least 1"
        )
    if values[_LONGEST] <= values[_ORIGINAL]:
        return float(head_dim**-0.5)
    return float(head_dim**-0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2)


def _routing(values: Values) -> Fields:
    """The fields about the router's bias and groups, which depend on the model's name."""
    if not values["model_name"].startswith("deepseek3"):
        return {"router_bias_in_weights": values["routed_bias"]}
    groups, some = values["n_routing_groups"], values["topk_routing_group"]
    if groups > 1 and values["routed_score_func"] != "sigmoid":
        raise InputError(
            f"n_routing_groups={groups} with routed_score_func={values['routed_score_func']!r} is "
            "not supported; MaxText chooses groups by two experts, and a softmax here by one"
        )
    if groups == -1:
        return {}
    return {"router_groups": groups, "router_groups_per_token": some}


def _rope(values: Values) -> Fields:
    kind = values["rope_type"]
    one_of("rope_type", kind, ("default", "yarn"))
    if kind == "default":
        return linear_rope(values)
    _refuse_others(values, _OF_YARN)
    return {
        "rope_interleaved": values["rope_interleave"],
        "rope_scaling": "yarn",
        "rope_factor": values["rope_factor"],
        "rope_original_length": values[_ORIGINAL],
        "rope_low_frequency": values["beta_slow"],
        "rope_high_frequency": values["beta_fast"],
        "max_position_embeddings": values[_LONGEST],
    }


def check_deepseek(model: ModelConfig) -> None:
    """Raises InputError for a model with latent attention that MaxText does not compute."""
    wrong: dict[str, str] = {}
    if model.num_shared_experts < 1:
        wrong["num_shared_experts"] = "set it to 1 or more"
    if model.router_normalize != (model.router_score == "sigmoid"):
        wrong["router_normalize"] = "MaxText divides by the sum after a sigmoid alone"
    if model.router_bias_in_weights and model.router_groups > 1:
        wrong["router_groups"] = "MaxText ignores groups where weights contain the bias"
    if model.router_groups > 1 and model.router_score != "sigmoid":
        wrong["router_groups"] = "MaxText chooses groups by two experts, and a softmax here by one"
    if model.rope_scaling != "yarn" and model.rope_interleaved:
        wrong["rope_interleaved"] = "MaxText rotates neighbours with yarn alone"
    if model.rope_scaling not in (None, "linear", "yarn"):
        wrong["rope_scaling"] = "MaxText scales linearly or by yarn"
    for name, why in wrong.items():
        raise InputError(
            f"model.{name}={getattr(model, name)!r} with kv_lora_rank does not exist in MaxText; "
            f"{why}"
        )


def linear_rope(values: Values) -> Fields:
    """The fields of a rotary embedding that is slowed down evenly, or not at all."""
    factor = values["rope_linear_scaling_factor"]
    return {} if factor == 1.0 else {"rope_scaling": "linear", "rope_factor": factor}


def _refuse_others(values: Values, only: dict[str, FixedValue]) -> None:
    for key, (value, reason) in only.items():
        if values[key] != value:
            raise InputError(
                f"{key}={values[key]!r} with decoder_block={BLOCK!r} is not supported, only "
                f"{value!r}: {reason}"
            )
