"""What MaxText's decoder blocks compute, beyond sizes, as fields of `nnx_pipeline.ModelConfig`."""

from dataclasses import dataclass

from linen_compat.maxtext import _deepseek as deepseek
from linen_compat.maxtext._values import Fields, Values
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.lab.errors import one_of


@dataclass(frozen=True)
class Block:
    """One of MaxText's kinds of decoder layers."""

    routed: bool
    qk_norm: bool  # queries are then multiplied by head_dim^-0.5, which other kernels contain


BLOCKS = {
    "mixtral": Block(routed=True, qk_norm=False),
    "llama2": Block(routed=False, qk_norm=False),
    "mistral": Block(routed=False, qk_norm=False),
    "qwen3": Block(routed=False, qk_norm=True),
    "qwen3_moe": Block(routed=True, qk_norm=True),
    deepseek.BLOCK: Block(routed=True, qk_norm=False),
}
_LLAMA3_1 = "llama3.1"  # the rotary embedding of `rope_type`, and of models whose name begins so
# MaxText has these numbers in its code, for any size of model.
_ROPE_OF_LLAMA3_1 = {
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_original_length": 8192,
    "rope_low_frequency": 1.0,
    "rope_high_frequency": 4.0,
}
# How the routers of all blocks but DeepSeek's work.
_ROUTER = {
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_groups": 1,
}


def keys_of_preset(name: str, model: ModelConfig) -> Fields:
    """The keys that MaxText's file for a named model has beside its sizes."""
    if name in deepseek.NAMED:
        return deepseek.keys_of_named(name, model)
    same = Block(routed=model.num_experts > 1, qk_norm=model.qk_norm)
    blocks = [block for block, kind in BLOCKS.items() if kind == same]
    # Two blocks compute the same; MaxText's models have that of their own name.
    block = next((block for block in blocks if name.startswith(block)), blocks[0])
    norms = {"use_qk_norm": True} if same.qk_norm else {}
    return {"decoder_block": block, **norms}


def fields_of_block(values: Values) -> Fields:
    """The fields of the model's config that its decoder block and other keys decide."""
    name, experts = values["decoder_block"], values["num_experts"]
    one_of("decoder_block", name, BLOCKS)
    block = BLOCKS[name]
    if block.routed != (experts != 1):
        needs = "two experts or more" if block.routed else "one expert"
        raise InputError(
            f"decoder_block={name!r} with num_experts={experts} is not supported; {name} has "
            f"{needs}"
        )
    if name == deepseek.BLOCK:
        return {**deepseek.fields_of_deepseek(values), **_head(values)}
    for key, only in deepseek.ELSEWHERE.items():
        if values[key] != only:
            raise InputError(
                f"{key}={values[key]!r} with decoder_block={name!r} is not supported; this project "
                f"computes with {key}={only!r}"
            )
    if block.qk_norm != values["use_qk_norm"]:
        raise InputError(
            f"use_qk_norm={values['use_qk_norm']} with decoder_block={name!r} is not supported; "
            f"this project computes {name} with use_qk_norm={block.qk_norm}"
        )
    scale = {"qk_norm": True, "attention_scale": values["head_dim"] ** -0.5}
    return {
        "head_dim": values["head_dim"],
        "mlp_dim": _mlp_dim(values, block),
        **(scale if block.qk_norm else {}),
        **_rope(values),
        **_head(values),
    }


def _mlp_dim(values: Values, block: Block) -> int:
    """The hidden size of the MLP or of each expert: MaxText has a key for each."""
    dense: int = values["base_mlp_dim"]
    routed: int = values["base_moe_mlp_dim"]
    if not block.routed or routed in (-1, dense):
        return dense
    if values["decoder_block"] == "mixtral":  # whose experts have the size of the other key
        raise InputError(
            f"base_moe_mlp_dim={routed} differs from base_mlp_dim={dense}, but both are the size "
            "of an expert here, where every layer is routed; make them equal"
        )
    return routed


def _rope(values: Values) -> Fields:
    one_of("rope_type", values["rope_type"], ("default", _LLAMA3_1))
    if values["rope_type"] == _LLAMA3_1 or values["model_name"].startswith(_LLAMA3_1):
        # MaxText rotates neighbours in these models alone.
        return {"rope_interleaved": True, **(_ROPE_OF_LLAMA3_1 if values["rope_use_scale"] else {})}
    return deepseek.linear_rope(values)


def _head(values: Values) -> Fields:
    if not values["logits_via_embedding"]:
        return {}
    if values["normalize_embedding_logits"]:
        raise InputError(
            "logits_via_embedding=True with normalize_embedding_logits=True, MaxText's default, is "
            "not supported, as logits are not divided here; set normalize_embedding_logits to false"
        )
    # MaxText rounds the table to bfloat16 for this product whatever its dtype is.
    rounded = None if values["dtype"] == "bfloat16" else "bfloat16"
    return {"tied_embeddings": True, "tied_head_dtype": rounded}


def check_maxtext(model: ModelConfig) -> None:
    """Raises InputError for a model that MaxText does not compute from its checkpoint's arrays."""
    if model.kv_lora_rank is not None:
        deepseek.check_deepseek(model)
        return
    for field, only in _ROUTER.items():
        if getattr(model, field) != only:
            raise InputError(
                f"model.{field}={getattr(model, field)!r} without kv_lora_rank does not exist in "
                f"MaxText; set it to {only!r}"
            )
    scaling, interleaved = model.rope_scaling, model.rope_interleaved
    if scaling in ((None, "llama3") if interleaved else (None, "linear")):
        return
    raise InputError(
        f"model.rope_scaling={scaling!r} with model.rope_interleaved={interleaved} does not exist "
        "in MaxText, which scales as Llama 3.1 where it rotates neighbours, else linearly; "
        f"set model.rope_interleaved to {not interleaved} (a Hugging Face model is then reordered "
        "where it is read)"
    )
