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
    qk_norm: bool = False
    biased: bool = False  # query, key and value
    has: str = ""  # beside a plain decoder, in a few words

    @property
    def scaled(self) -> bool:
        """Whether queries are multiplied by head_dim^-0.5, which other kernels contain."""
        return self.qk_norm or self.biased


BLOCKS = {
    "mixtral": Block(routed=True, has="experts"),
    "llama2": Block(routed=False, has="angles of Llama 3.1"),
    "mistral": Block(routed=False),
    "qwen2": Block(routed=False, biased=True, has="biases of q, k, v"),
    "qwen3": Block(routed=False, qk_norm=True, has="norms of q, k"),
    "qwen3_moe": Block(routed=True, qk_norm=True, has="experts, norms of q, k"),
    deepseek.BLOCK: Block(
        routed=True, has="experts, shared experts, dense first layers, latent attention"
    ),
}
_IN_TURNS = "its layers take turns, for which a MaxText checkpoint has no names here"
# MaxText's other blocks, and why their checkpoints and configs are not read.
OTHER_BLOCKS = {
    **dict.fromkeys(("gemma2", "gemma3", "gpt_oss"), _IN_TURNS),
    **dict.fromkeys(("gemma4", "gemma4_small", "llama4", "olmo3"), "no such decoder is here"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_custom_moe"), "no such decoder is here"),
    **dict.fromkeys(("deepseek4", "envy", "gemma", "gpt3"), "no such decoder is here"),
    **dict.fromkeys(("default", "simple", "simple_mlp"), "it is for MaxText's own tests"),
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
# What models of this project may have, and no model that is read from MaxText has.
_NOT_IN_MAXTEXT = {
    "attention_sinks": False,
    "router_logits_bias": False,
    "expert_bias": False,
    "rope_amplitude": 1.0,
    "rope_truncate": True,
    "rope_window_theta": None,
    "latent_norm_epsilon": None,
    "norm_placement": "before",
    "qk_norm_over_heads": False,
    "activation": "silu",
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logits_divisor": 1.0,
}
# How the routers of all blocks but DeepSeek's work.
_ROUTER = {
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_groups": 1,
    "router_bias": False,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
}


def check_block(name: str) -> None:
    """Raises InputError for a decoder block that is not read, and says why."""
    if name in OTHER_BLOCKS:
        raise InputError(
            f"decoder_block={name!r} is not supported ({OTHER_BLOCKS[name]}), only "
            f"{', '.join(BLOCKS)}; a Hugging Face folder of the model may be read, which "
            "linen-compat formats lists"
        )
    one_of("decoder_block", name, BLOCKS)


def keys_of_preset(name: str, model: ModelConfig) -> Fields:
    """The keys that MaxText's file for a named model has beside its sizes."""
    if name in deepseek.NAMED:
        return deepseek.keys_of_named(name, model)
    same = Block(model.num_experts > 1, model.qk_norm)
    blocks = [
        block
        for block, kind in BLOCKS.items()
        if (kind.routed, kind.qk_norm, kind.biased) == (same.routed, same.qk_norm, False)
    ]
    # Two blocks compute the same; MaxText's models have that of their own name.
    block = next((block for block in blocks if name.startswith(block)), blocks[0])
    norms = {"use_qk_norm": True} if same.qk_norm else {}
    return {"decoder_block": block, **norms}


def fields_of_block(values: Values) -> Fields:
    """The fields of the model's config that its decoder block and other keys decide."""
    name, experts = values["decoder_block"], values["num_experts"]
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
    for key, only in {"use_qk_norm": block.qk_norm, "attention_bias": block.biased}.items():
        if values[key] != only:
            raise InputError(
                f"{key}={values[key]} with decoder_block={name!r} is not supported; this project "
                f"computes {name} with {key}={only}"
            )
    return {
        "head_dim": values["head_dim"],
        "mlp_dim": _mlp_dim(values, block),
        **({"qk_norm": True} if block.qk_norm else {}),
        **({"attention_bias": "qkv"} if block.biased else {}),
        **({"attention_scale": values["head_dim"] ** -0.5} if block.scaled else {}),
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
    for field, plain in _NOT_IN_MAXTEXT.items():
        if getattr(model, field) != plain:
            raise InputError(
                f"model.{field}={getattr(model, field)!r} is of no model that is read from MaxText "
                "or written for it; save it as nnx or huggingface"
            )
    if model.kv_lora_rank is not None:
        deepseek.check_deepseek(model)
        return
    for field, only in _ROUTER.items():
        if getattr(model, field) != only:
            raise InputError(
                f"model.{field}={getattr(model, field)!r} without kv_lora_rank does not exist in "
                f"MaxText; set it to {only!r}"
            )
    if model.attention_bias == "all" or (
        model.attention_bias and (model.qk_norm or model.num_experts > 1 or model.rope_interleaved)
    ):
        raise InputError(
            f"model.attention_bias={model.attention_bias!r} is of no model that is read from "
            "MaxText or written for it, but for Qwen2's biases of q, k and v; save it as nnx or "
            "huggingface"
        )
    if model.rope_head_dim is not None:
        raise InputError(
            f"model.rope_head_dim={model.rope_head_dim} without kv_lora_rank is of no model that "
            "is read from MaxText or written for it; save it as nnx or huggingface"
        )
    check_rotary(model.rope_interleaved, model.rope_scaling)


def check_rotary(interleaved: bool, scaling: str | None) -> None:
    """Raises InputError unless MaxText has this order of query and key with this scaling."""
    if scaling in ((None, "llama3") if interleaved else (None, "linear")):
        return
    raise InputError(
        f"model.rope_scaling={scaling!r} with model.rope_interleaved={interleaved} does not exist "
        "in MaxText, which scales as Llama 3.1 where it rotates neighbours, else linearly; "
        f"set model.rope_interleaved to {not interleaved}, as in the config.yml of MaxText "
        "(convert: --config), with which a Hugging Face folder is reordered where it is read, and "
        "no other checkpoint is"
    )
