"""Converts `config.json` of Hugging Face's Mixtral and Llama to this project's config and back.

Every key is mapped, allowed with a single value, or ignored on purpose; all others are refused. A
key that changes what a model computes is never ignored.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_pipeline import Config, InputError, ModelConfig
from nnx_pipeline.config.model import DTYPES
from nnx_pipeline.errors import divides, one_of

CONFIG_FILE = "config.json"
MIXTRAL, LLAMA = "MixtralForCausalLM", "LlamaForCausalLM"
MODEL_TYPES = {MIXTRAL: "mixtral", LLAMA: "llama"}
# Without this key config.json means transformers' default, up to version 5 the longest sequence.
LONGEST = "max_position_embeddings"

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_OPTIONAL = {"rms_norm_eps": "norm_epsilon"}
# What a model must have to be one of these two; there is no key for another value.
_FIXED = {
    "norm_scale_offset": 0.0,
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "router_groups": 1,
    "num_shared_experts": 0,
}
_OF_EXPERTS = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
# The values that transformers assumes for absent keys.
_ABSENT: dict[str, dict[str, Any]] = {
    MIXTRAL: {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        LONGEST: 131_072,
    },
    LLAMA: {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_key_value_heads": None,
        LONGEST: 2048,
    },
}
# The only supported value of each key, and the reason; null counts as that value.
_ONLY: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the gated MLP here has no other activation"),
    "tie_word_embeddings": (False, "embedding and head are two arrays here"),
    "attention_bias": (False, "attention has no bias here"),
    "mlp_bias": (False, "the MLP has no bias here"),
    "partial_rotary_factor": (1.0, "every dimension of a head is rotated here"),
    "attention_dropout": (0.0, "attention weights have no dropout here; set it to 0 to go on"),
    "router_jitter_noise": (0.0, "the router adds no noise here; set it to 0 to go on"),
    "is_encoder_decoder": (False, "the model here is a decoder"),
    "quantization_config": (None, "save the model with plain float weights"),
    "compression_config": (None, "save the model with plain float weights"),
}
_READ_APART = {
    *("architectures", "model_type", "num_key_value_heads", "head_dim", "sliding_window", LONGEST),
    *("rope_theta", "rope_scaling", "rope_parameters", "torch_dtype", "dtype"),
}
# A key like these may always affect how weights are stored, so no error advises to remove it.
_OF_STORED_FORM = re.compile("quant|compress|pack|spars|prun|bits|adapter|lora", re.IGNORECASE)
# These are about initialisation, generation, tokens, outputs and bookkeeping. The load-balance loss
# is chosen in `TrainConfig` instead, and `pretraining_tp` only cuts products into pieces.
IGNORED = {
    *("transformers_version", "_name_or_path", "_attn_implementation_autoset", "tokenizer_class"),
    *("initializer_range", "pretraining_tp", "use_cache", "torchscript", "max_sequence_length"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("output_router_logits", "router_aux_loss_coef"),
    *("id2label", "label2id", "problem_type", "task_specific_params"),
}


def config_from_huggingface(source: str | Path | Mapping[str, Any]) -> Config:
    """The config of a Hugging Face model.

    - `source`: the folder of the model, its `config.json`, or the contents of that file.

    `attention_scale` is head_dim^-0.5. `dtype` and `param_dtype` are both the dtype of the weights,
    float32 where none is named. Training and pipeline keep their defaults.

    Raises InputError, with the key and its value, for what is not supported, missing or unknown.
    """
    values = source if isinstance(source, Mapping) else read_config(source)
    architecture = _architecture(values)
    _refuse_unknown(values, architecture)
    for key, (only, reason) in _ONLY.items():
        if values.get(key) not in (only, None):
            raise InputError(
                f"{CONFIG_FILE}: {key}={values[key]!r} is not supported, only {only!r}: {reason}"
            )
    absent = _ABSENT[architecture]
    fields = {ours: _whole_or_missing(values, key) for key, ours in _REQUIRED.items()}
    fields |= {ours: values.get(key, absent[key]) for key, ours in _OPTIONAL.items()}
    if architecture == MIXTRAL:
        fields |= {ours: values.get(key, absent[key]) for key, ours in _OF_EXPERTS.items()}
        if fields["num_experts"] == 1:
            raise InputError(
                f"{CONFIG_FILE}: num_local_experts=1 is not supported, because a model with one "
                f"expert has no router here; choose 2 or more, or the architecture {LLAMA}"
            )
    groups = values.get("num_key_value_heads", absent["num_key_value_heads"])
    head_dim = _head_dim(values, fields["embed_dim"], fields["num_heads"])
    dtype = _dtype(values)
    model = ModelConfig(
        **fields,
        num_kv_heads=fields["num_heads"] if groups is None else groups,
        head_dim=head_dim,
        rope_theta=_rope_theta(values, absent["rope_theta"]),
        attention_scale=head_dim**-0.5,
        dtype=dtype,
        param_dtype=dtype,
        max_position_embeddings=_longest(values, absent),
        sliding_window=_window(values, absent, architecture),
    )
    return Config(model=model)


def config_to_huggingface(config: Config) -> dict[str, Any]:
    """The contents of `config.json` for a model: a Mixtral, or with one expert a Llama.

    transformers 4 and 5 both read these keys. The longest sequence is that of the model where the
    config has it, and otherwise that of training. `attention_scale` has no key, as it is either
    part of the query kernel or head_dim^-0.5.

    Raises InputError for a model that does not exist in transformers.
    """
    model = config.model
    for name, only in _FIXED.items():
        if getattr(model, name) != only:
            raise InputError(
                f"model.{name}={getattr(model, name)!r} has no place in a Hugging Face "
                f"{MIXTRAL} or {LLAMA}; only a model with {only!r} can be saved in this format"
            )
    architecture = MIXTRAL if model.num_experts > 1 else LLAMA
    if architecture == LLAMA:
        if model.sliding_window is not None:
            raise InputError(
                f"model.sliding_window={model.sliding_window} has no place in a {LLAMA} of "
                "transformers; only a model without a window, or with experts, can be saved in "
                "this format"
            )
        divides(
            model.num_heads,
            model.embed_dim,
            rule=f"model.embed_dim={model.embed_dim} is not a multiple of "
            f"model.num_heads={model.num_heads}, as transformers asks of a Llama",
        )
    keys = {**_REQUIRED, **_OPTIONAL, **(_OF_EXPERTS if architecture == MIXTRAL else {})}
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **{key: getattr(model, ours) for key, ours in keys.items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        LONGEST: model.max_position_embeddings or config.train.sequence_length,
        **({} if architecture == LLAMA else {"sliding_window": model.sliding_window}),
        "tie_word_embeddings": False,
        "torch_dtype": model.param_dtype,
    }


def read_config(path: str | Path) -> dict[str, Any]:
    """The contents of `config.json`.

    - `path`: the folder of a model, or the file itself.

    Raises InputError when there is no such file, or no JSON object in it.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_FILE
    if not file.is_file():
        raise InputError(f"{path} holds no {CONFIG_FILE}; give the folder of a Hugging Face model")
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InputError, with the file's name, when there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except PermissionError as error:
        raise InputError(
            f"{file} may not be read by this user; change its permissions, or run this as its owner"
        ) from error
    except (ValueError, OSError, RecursionError) as error:  # undecodable text is a ValueError too
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} holds {type(values).__name__} where a JSON object is expected")
    return values


def _architecture(values: Mapping[str, Any]) -> str:
    """The class of the model, from `architectures` or else from `model_type`."""
    names, kind = values.get("architectures"), values.get("model_type")
    known = ", ".join(MODEL_TYPES)
    if names is None:
        by_type = {model_type: name for name, model_type in MODEL_TYPES.items()}
        if not isinstance(kind, str) or kind not in by_type:
            raise InputError(f"{CONFIG_FILE}: model_type={kind!r} is not supported, only {known}")
        return by_type[kind]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in [*MODEL_TYPES]:
        raise InputError(f"{CONFIG_FILE}: architectures={names!r} is not supported, only {known}")
    if kind not in (None, MODEL_TYPES[names[0]]):
        raise InputError(
            f"{CONFIG_FILE}: model_type={kind!r} contradicts architectures={names!r}; "
            "correct one of them"
        )
    return names[0]


def _refuse_unknown(values: Mapping[str, Any], architecture: str) -> None:
    """Raises InputError for a key that is neither mapped nor ignored on purpose."""
    of_experts = set(_OF_EXPERTS) if architecture == MIXTRAL else set()
    known = {*_REQUIRED, *_OPTIONAL, *of_experts, *_ONLY, *_READ_APART, *IGNORED}
    for key, value in values.items():
        if key not in known:
            cure = f"save the model with transformers as a plain {architecture} of float weights"
            if not _OF_STORED_FORM.search(key):
                cure += ", or remove the key if the model does not depend on it"
            raise InputError(
                f"{CONFIG_FILE}: {key}={value!r} is not a known key of a {architecture}; {cure}"
            )


def _window(values: Mapping[str, Any], absent: Mapping[str, Any], architecture: str) -> int | None:
    """The sliding window; None for one that the longest sequence does not leave.

    Raises InputError for the window of a Llama, which transformers does not read.
    """
    if values.get("sliding_window") is None:
        return None
    window: int = _whole_or_missing(values, "sliding_window")
    longest = _longest(values, absent)
    if window >= longest:
        return None
    if architecture == LLAMA:
        raise InputError(
            f"{CONFIG_FILE}: sliding_window={window} is smaller than {LONGEST}={longest}, and a "
            f"{LLAMA} of transformers reads the whole sequence; set it to null"
        )
    return window


def _longest(values: Mapping[str, Any], absent: Mapping[str, Any]) -> int:
    """The longest sequence, by default that of transformers."""
    given = values.get(LONGEST)
    return _whole_or_missing({LONGEST: absent[LONGEST] if given is None else given}, LONGEST)


def _whole_or_missing(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key. Raises InputError unless it is there and a whole number above 0."""
    if values.get(key) is None:
        raise InputError(f"{CONFIG_FILE}: {key} is missing")
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{CONFIG_FILE}: {key}={value!r} is not a whole number of 1 or more")
    return value


def _head_dim(values: Mapping[str, Any], embed_dim: int, heads: int) -> int:
    """The size of a head, which without its own key is hidden_size / num_attention_heads."""
    if values.get("head_dim") is not None:
        return _whole_or_missing(values, "head_dim")
    rule = f"{CONFIG_FILE}: hidden_size={embed_dim} does not split over num_attention_heads={heads}"
    divides(heads, embed_dim, rule=f"{rule} and there is no head_dim")
    return embed_dim // heads


def _dtype(values: Mapping[str, Any]) -> str:
    """The dtype of the weights, under its older or its newer key."""
    named = {key: values[key] for key in ("torch_dtype", "dtype") if values.get(key) is not None}
    for key, value in named.items():
        one_of(f"{CONFIG_FILE}: {key}", value, DTYPES)
    return _agreed(named, "float32")


def _rope_theta(values: Mapping[str, Any], absent: float) -> float:
    """The base of the rotary angles, from its own key or from the newer dictionaries."""
    found = {}
    if values.get("rope_theta") is not None:
        found["rope_theta"] = values["rope_theta"]
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"{CONFIG_FILE}: {name}={rope!r} is not a dictionary")
        for key, value in rope.items():
            _check_rope(name, key, value)
        if rope.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = rope["rope_theta"]
    return _agreed(found, absent)


def _agreed(found: Mapping[str, Any], absent: Any) -> Any:
    """The one value of several keys that mean the same, or `absent` if none of them is there."""
    first, *others = found.values() or (absent,)
    if any(other != first for other in others):
        said = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise InputError(f"{CONFIG_FILE}: {said} disagree; remove all but one of them")
    return first


def _check_rope(name: str, key: str, value: Any) -> None:
    """Raises InputError for an entry of a rope dictionary unless it leaves the angles unscaled."""
    allowed = {
        "rope_theta": lambda: True,
        "rope_type": lambda: value in (None, "default"),
        "type": lambda: value in (None, "default"),
        "partial_rotary_factor": lambda: value in (None, 1.0),
    }
    if key not in allowed or not allowed[key]():
        raise InputError(
            f"{CONFIG_FILE}: {name}.{key}={value!r} is not supported, only rope_type='default': "
            "rotary angles here are not scaled"
        )
