"""Converts `config.json` of Hugging Face's models to this project's config and back.

A key that changes what a model computes is never ignored.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from linen_compat.formats._intact import Json
from linen_compat.formats.huggingface import _rope as ropes
from linen_compat.formats.huggingface import _windows as windows
from linen_compat.formats.huggingface._architecture import (
    CONFIG_FILE,
    FURTHER,
    LONGEST,
    Allowed,
    Architecture,
    Keys,
    Only,
)
from linen_compat.formats.huggingface._architectures import ARCHITECTURES, written_as
from linen_compat.formats.huggingface._first_classes import GROUP_METHODS, LLAMA
from linen_compat.formats.huggingface._quantized import check_quantization
from linen_compat.formats.huggingface._rope import agreed
from nnx_pipeline import Config, InputError, ModelConfig
from nnx_pipeline.config.model import DTYPES, Activation
from nnx_pipeline.lab._files import place, read_regular
from nnx_pipeline.lab.errors import divides, note, once, one_of, unparsed

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# The activations of transformers with the same of this project; the first is written.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_OPTIONAL = {"rms_norm_eps": "norm_epsilon"}
# Keys of any class that have supported values only. None stands for null.
_ONLY: Only = {
    "mlp_bias": Allowed((False, None), "the MLP has no bias here"),
    "attention_dropout": Allowed(
        (0.0, None), "attention weights have no dropout here; set it to 0 to go on"
    ),
    "router_jitter_noise": Allowed(
        (0.0, None), "the router adds no noise here; set it to 0 to go on"
    ),
    "is_encoder_decoder": Allowed((False, None), "the model here is a decoder"),
    # transformers takes null for false.
    "is_causal": Allowed((True,), "a token reads those before it alone here"),
    "compression_config": Allowed((None,), "save the model with plain float weights"),
}
_READ_ELSEWHERE = {
    *("architectures", "model_type", "num_key_value_heads", "head_dim", LONGEST),
    *(
        *ropes.KEYS,
        *windows.KEYS,
        "hidden_act",
        "torch_dtype",
        "dtype",
        "tie_word_embeddings",
        "attention_bias",
        "quantization_config",
    ),
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
# transformers does not read these either, though they sound as if they said what is computed.
UNREAD = {"is_llama_config", "activation", "use_qk_norm"}


def config_from_huggingface(source: str | Path | Keys) -> Config:
    """The config of a Hugging Face model.

    - `source`: the folder of the model, its `config.json`, or the contents of that file.

    `attention_scale` is head_dim^-0.5, for DeepSeek times the factor that `mscale_all_dim` and the
    factor of yarn give. `dtype` and `param_dtype` are both the dtype of the weights,
    float32 where none is named. Training and pipeline keep their defaults.

    Raises InputError, with the key and its value, for what is not supported, missing or unknown,
    and warns of unknown keys whose value is false, 0, null or empty.
    """
    values = source if isinstance(source, Mapping) else read_config_json(source)
    architecture = architecture_of(values)
    values = _renamed(values, architecture)
    _refuse_unknown(values, architecture)
    _refuse_values(values, architecture)
    absent = architecture.absent
    fields: Json = {ours: _whole_or_missing(values, key) for key, ours in _REQUIRED.items()}
    fields |= {ours: values.get(key, absent[key]) for key, ours in _OPTIONAL.items()}
    fields |= {ours: values.get(key, absent[key]) for key, ours in architecture.keys.items()}
    fields["attention_bias"] = _biases(values, architecture)
    if architecture.is_routed and fields["num_experts"] == 1:
        key = next(key for key, ours in architecture.keys.items() if ours == "num_experts")
        raise InputError(
            f"{CONFIG_FILE}: {key}=1 is not supported, because a model with one "
            f"expert has no router here; choose 2 or more, or the architecture {LLAMA.name}"
        )
    groups = values.get("num_key_value_heads", absent["num_key_value_heads"])
    rope = ropes.fields_of_rope(values, architecture)
    if architecture.latent:
        head_dim, scale = ropes.latent_head_dim(values, absent), ropes.attention_scale_in(values)
        if fields["norm_epsilon"] != ropes.LATENT_EPSILON:
            fields["latent_norm_epsilon"] = ropes.LATENT_EPSILON
    else:
        head_dim = _head_dim(values, absent, fields["embed_dim"], fields["num_heads"])
        scale = 1.0
        rope |= ropes.partial_rotary(values, architecture, head_dim)
    fields["activation"] = _activation(values, architecture)
    if fields.get("num_dense_layers"):
        fields["dense_mlp_dim"] = values["intermediate_size"]
    if architecture.root_embedding:
        fields["embedding_scale"] = fields["embed_dim"] ** 0.5
    dtype, longest = _dtype(values), _longest(values, absent)
    model = ModelConfig(
        **{**fields, **architecture.fixed, **rope},
        **windows.fields_of_windows(values, architecture, longest),
        num_kv_heads=fields["num_heads"] if groups is None else groups,
        head_dim=head_dim,
        tied_embeddings=bool(values.get("tie_word_embeddings", absent.get("tie_word_embeddings"))),
        attention_scale=_attention_scale(values, architecture, head_dim**-0.5 * scale),
        dtype=dtype,
        param_dtype=dtype,
        max_position_embeddings=longest,
    )
    return Config(model=model)


def config_to_huggingface(config: Config) -> Json:
    """The contents of `config.json`, for transformers 4 and 5, of a model.

    Its class is the first of `_architectures.ARCHITECTURES` that can say all that the model
    computes, such as Mixtral, or with one expert Llama. The longest sequence is
    that of the model where the config has it, and otherwise that of training. `attention_scale` has
    no key: it is part of the query kernel or head_dim^-0.5, and for DeepSeek from `mscale_all_dim`.

    Raises InputError for a model that does not exist in transformers.
    """
    model = config.model
    architecture = written_as(model)
    if model.tied_head_dtype is not None:
        raise InputError(
            f"model.tied_head_dtype={model.tied_head_dtype!r} has no place in a Hugging Face "
            "model, which does not round the table of tied embeddings; set it to None to save the "
            "model without rounding (it is None of a MaxText YAML with dtype: bfloat16)"
        )
    ropes.check_savable_latent(model, architecture)
    if architecture.heads_divide:
        divides(
            model.num_heads,
            model.embed_dim,
            rule=f"model.embed_dim={model.embed_dim} is not a multiple of "
            f"model.num_heads={model.num_heads}, as transformers asks of a "
            f"{architecture.name}",
        )
    keys = {**_REQUIRED, **_OPTIONAL, **architecture.keys}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{key: getattr(model, ours) for key, ours in keys.items()},
        **{key: allowed[0] for key, (allowed, _) in architecture.only.items() if allowed},
        "num_key_value_heads": model.num_kv_heads,
        architecture.activation: _activation_key(model, architecture),
        **_scale_keys(model, architecture),
        **(ropes.latent_keys(model) if architecture.latent else {"head_dim": model.head_dim}),
        **_dense_keys(model, architecture),
        **ropes.rope_keys(model, architecture),
        LONGEST: model.max_position_embeddings or config.train.sequence_length,
        **windows.keys_of_windows(model, architecture),
        **({"attention_bias": model.attention_bias is not None} if architecture.biases else {}),
        "tie_word_embeddings": model.tied_embeddings,
        "pad_token_id": None,  # some classes have one by default, which must be below vocab_size
        "torch_dtype": model.param_dtype,
    }


def read_config_json(path: str | Path) -> Json:
    """The contents of the `config.json` of a folder, or of the file itself."""
    file = place(path)
    if file.is_dir():
        file = file / CONFIG_FILE
    if not file.is_file():
        raise InputError(f"{path} holds no {CONFIG_FILE}; give the folder of a Hugging Face model")
    return read_json(file)


def read_json(file: Path) -> Json:
    """The object in a JSON file. Raises InputError, with the file's name, when there is none."""
    try:
        values = json.loads(read_regular(file), object_pairs_hook=once)
    except PermissionError as error:
        raise InputError(
            f"{file} may not be read by this user; change its permissions, or run this as its owner"
        ) from error
    except (ValueError, OSError, RecursionError) as error:  # undecodable text is a ValueError too
        raise InputError(f"{file} cannot be read as JSON: {unparsed(error)}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file} holds {type(values).__name__} where a JSON object is expected")
    return values


def architecture_of(values: Keys) -> Architecture:
    """The class of the model, from `architectures` or else from `model_type`."""
    names, kind = values.get("architectures"), values.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if names is None:
        classes = [each for each in ARCHITECTURES.values() if each.model_type == kind]
        if not classes:
            raise InputError(f"{CONFIG_FILE}: model_type={kind!r} is not supported, only {known}")
        return classes[0]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in [*ARCHITECTURES]:
        raise InputError(f"{CONFIG_FILE}: architectures={names!r} is not supported, only {known}")
    known_as = (ARCHITECTURES[names[0]].model_type, *ARCHITECTURES[names[0]].other_types)
    if kind not in (None, *known_as):
        raise InputError(
            f"{CONFIG_FILE}: model_type={kind!r} contradicts architectures={names!r}; "
            "correct one of them"
        )
    return ARCHITECTURES[names[0]]


def _renamed(values: Keys, architecture: Architecture) -> Json:
    """The values with every key under the name that `architecture` gives it."""
    by_name: dict[str, Json] = {}
    for key, value in values.items():
        by_name.setdefault(architecture.other_names.get(key, key), {})[key] = value
    found = {key: agreed(same, None) for key, same in by_name.items()}
    if {**architecture.absent, **found}.get("topk_method") == GROUP_METHODS[0]:
        found |= {"n_group": 1, "topk_group": 1}  # it does not read them
    return found


def _refuse_unknown(values: Keys, architecture: Architecture) -> None:
    """Raises InputError for a key that is neither mapped nor ignored on purpose.

    Such a key passes with a note where its value switches nothing on, or where it is in `UNREAD`.
    """
    name, specific = architecture.name, {*architecture.keys, *architecture.only}
    specific |= {*architecture.absent}
    specific |= {*ropes.READ_ELSEWHERE} if architecture.latent else set()
    known = {*_REQUIRED, *_OPTIONAL, *specific, *_ONLY, *_READ_ELSEWHERE, *IGNORED}
    unknown = {key: value for key, value in values.items() if key not in known}
    for key, value in unknown.items():
        if value and key not in UNREAD:
            cure = f"remove the key if the {name} of transformers does not read it"
            if _OF_STORED_FORM.search(key):  # transformers saves unknown keys too
                cure = f"save the model as a plain {name} of float weights, without the key"
            raise InputError(
                f"{CONFIG_FILE}: {key}={value!r} is not a known key of a {name}; {cure}"
            )
    if unknown:
        said = ", ".join(f"{key}={value!r}" for key, value in unknown.items())
        note(f"{CONFIG_FILE}: {said}: not read here, and taken to change nothing in a {name}")


def _refuse_values(values: Keys, architecture: Architecture) -> None:
    """Raises InputError for keys whose value is not computed here."""
    check_quantization(values)
    for key, (allowed, reason) in {**_ONLY, **architecture.only}.items():
        absent = architecture.absent.get(key, *allowed[:1])
        value = values.get(key, absent)
        if allowed and value not in allowed:
            raise InputError(
                f"{CONFIG_FILE}: {key}={value!r} is not supported, only {allowed[0]!r}: {reason}"
            )
    if (tied := values.get("tie_word_embeddings")) not in (None, True, False):
        raise InputError(f"{CONFIG_FILE}: tie_word_embeddings={tied!r} is not true or false")


def _biases(values: Keys, architecture: Architecture) -> str | None:
    """Which projections of attention have a bias."""
    found = values.get("attention_bias", architecture.absent.get("attention_bias"))
    wrong = found not in (True, False, None) or (found and not architecture.biases)
    if wrong and "attention_bias" not in architecture.only:
        raise InputError(
            f"{CONFIG_FILE}: attention_bias={found!r} is not supported, only False: attention "
            f"of a {architecture.name} has no bias here"
        )
    return architecture.biases if found else None


def _activation(values: Keys, architecture: Architecture) -> Activation:
    key = architecture.activation
    found = values.get(key)
    found = architecture.absent.get(key, "silu") if found is None else found
    if not isinstance(found, str) or found not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise InputError(f"{CONFIG_FILE}: {key}={found!r} is not supported, only {known}")
    return _ACTIVATIONS[found]


def _activation_key(model: ModelConfig, architecture: Architecture) -> str:
    """The inverse of `_activation`; a class with an activation of its own says `silu`."""
    if "activation" in architecture.fixed:
        return "silu"
    return next(key for key, ours in _ACTIVATIONS.items() if ours == model.activation)


def _attention_scale(values: Keys, architecture: Architecture, usual: float) -> float:
    """The factor on scores, where the class has a key for it."""
    key = architecture.scale
    if key is None:
        return usual
    found = values.get(key, architecture.absent[key])
    if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
        raise InputError(f"{CONFIG_FILE}: {key}={found!r} is not a number above 0")
    return float(found) if key == "attention_multiplier" else float(found**-0.5)


def _scale_keys(model: ModelConfig, architecture: Architecture) -> Json:
    """The inverse of `_attention_scale`."""
    if architecture.scale is None:
        return {}
    if architecture.scale == "attention_multiplier":
        return {architecture.scale: model.attention_scale}
    exact = model.attention_scale**-2
    whole = round(exact)  # such as 144, which two roots have rounded
    same = whole > 0 and whole**-0.5 == model.attention_scale
    return {architecture.scale: whole if same else exact}


def _dense_keys(model: ModelConfig, architecture: Architecture) -> Json:
    """The keys for layers without experts, and for modules that are not there."""
    if "num_dense_layers" not in architecture.keys.values():
        return {}
    # Without this key transformers takes it that some models predict several tokens.
    ahead = {FURTHER[0]: 0} if model.router_score == "sigmoid" else {}
    method = {"topk_method": GROUP_METHODS[model.router_groups > 1]}
    groups = method if architecture.only.get("topk_method", ((),))[0] == GROUP_METHODS else {}
    return {**ahead, **groups, "intermediate_size": model.dense_mlp_dim or model.mlp_dim}


def _longest(values: Keys, absent: Keys) -> int:
    """The longest sequence, by default that of transformers."""
    longest = values.get(LONGEST)
    return _whole_or_missing({LONGEST: absent[LONGEST] if longest is None else longest}, LONGEST)


def _whole_or_missing(values: Keys, key: str) -> int:
    """Raises InputError unless the key is there with a whole number above 0."""
    if values.get(key) is None:
        raise InputError(f"{CONFIG_FILE}: {key} is missing")
    return ropes.whole_number(key, values[key])


def _head_dim(values: Keys, absent: Keys, embed_dim: int, heads: int) -> int:
    """The size of a head: from its key, from transformers' default, or hidden_size / heads."""
    explicit = {"head_dim": values.get("head_dim", absent.get("head_dim"))}
    if explicit["head_dim"] is not None:
        return _whole_or_missing(explicit, "head_dim")
    rule = f"{CONFIG_FILE}: hidden_size={embed_dim} does not split over num_attention_heads={heads}"
    divides(heads, embed_dim, rule=f"{rule} and there is no head_dim")
    return embed_dim // heads


def _dtype(values: Keys) -> str:
    named = {key: values[key] for key in ("torch_dtype", "dtype") if values.get(key) is not None}
    for key, value in named.items():
        one_of(f"{CONFIG_FILE}: {key}", value, DTYPES)
    return str(agreed(named, "float32"))
