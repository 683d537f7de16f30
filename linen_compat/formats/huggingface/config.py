"""Converts `config.json` of Hugging Face's models to this project's config and back.

A key that changes what a model computes is never ignored.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from linen_compat.formats._intact import Json
from linen_compat.formats.huggingface import _rope as ropes
from linen_compat.formats.huggingface._architectures import (
    ARCHITECTURES,
    CONFIG_FILE,
    LLAMA,
    LONGEST,
    WINDOW,
    Allowed,
    Architecture,
    Keys,
    Only,
    written_as,
)
from linen_compat.formats.huggingface._rope import agreed
from nnx_pipeline import Config, InputError, ModelConfig
from nnx_pipeline.config.model import DTYPES
from nnx_pipeline.lab._files import local, read_regular
from nnx_pipeline.lab.errors import divides, note, once, one_of, unparsed

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_OPTIONAL = {"rms_norm_eps": "norm_epsilon"}
# What a model of any class must have; there is no key for another value.
_FIXED = {
    "norm_scale_offset": 0.0,
    "attention_bias": None,
    "attention_soft_cap": None,
    "logits_soft_cap": None,
    "full_attention_every": None,
}
# Keys of any class that have supported values only. None stands for null.
_ONLY: Only = {
    "hidden_act": Allowed(("silu", None), "the gated MLP here has no other activation"),
    "attention_bias": Allowed((False, None), "it is not read yet, and attention has no bias here"),
    "mlp_bias": Allowed((False, None), "the MLP has no bias here"),
    "partial_rotary_factor": Allowed((1.0, None), "every dimension of a head is rotated here"),
    "attention_dropout": Allowed(
        (0.0, None), "attention weights have no dropout here; set it to 0 to go on"
    ),
    "router_jitter_noise": Allowed(
        (0.0, None), "the router adds no noise here; set it to 0 to go on"
    ),
    "is_encoder_decoder": Allowed((False, None), "the model here is a decoder"),
    # transformers takes null for false.
    "is_causal": Allowed((True,), "a token reads those before it alone here"),
    "quantization_config": Allowed((None,), "save the model with plain float weights"),
    "compression_config": Allowed((None,), "save the model with plain float weights"),
}
_READ_ELSEWHERE = {
    *("architectures", "model_type", "num_key_value_heads", "head_dim", WINDOW, LONGEST),
    *(*ropes.KEYS, "torch_dtype", "dtype", "tie_word_embeddings", "layer_types"),
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
    architecture = _architecture(values)
    values = _renamed(values, architecture)
    _refuse_unknown(values, architecture)
    _refuse_values(values, architecture)
    absent = architecture.absent
    fields: Json = {ours: _whole_or_missing(values, key) for key, ours in _REQUIRED.items()}
    fields |= {ours: values.get(key, absent[key]) for key, ours in _OPTIONAL.items()}
    fields |= {ours: values.get(key, absent[key]) for key, ours in architecture.experts.items()}
    if architecture.is_routed and fields["num_experts"] == 1:
        key = next(iter(architecture.experts))
        raise InputError(
            f"{CONFIG_FILE}: {key}=1 is not supported, because a model with one "
            f"expert has no router here; choose 2 or more, or the architecture {LLAMA.name}"
        )
    groups = values.get("num_key_value_heads", absent["num_key_value_heads"])
    rope = ropes.fields_of_rope(values, absent["rope_theta"], latent=architecture.latent)
    if architecture.latent:
        head_dim, scale = ropes.latent_head_dim(values, absent), ropes.attention_scale_in(values)
        if fields["num_dense_layers"]:
            fields["dense_mlp_dim"] = values["intermediate_size"]
    else:
        head_dim = _head_dim(values, absent, fields["embed_dim"], fields["num_heads"])
        scale = 1.0
    dtype = _dtype(values)
    model = ModelConfig(
        **{**architecture.fixed, **fields},
        **rope,
        num_kv_heads=fields["num_heads"] if groups is None else groups,
        head_dim=head_dim,
        qk_norm=architecture.qk_norm,
        tied_embeddings=bool(values.get("tie_word_embeddings")),
        attention_scale=head_dim**-0.5 * scale,
        dtype=dtype,
        param_dtype=dtype,
        max_position_embeddings=_longest(values, absent),
        sliding_window=_window(values, architecture),
    )
    return Config(model=model)


def config_to_huggingface(config: Config) -> Json:
    """The contents of `config.json`, for transformers 4 and 5, of a model.

    It is a Mixtral, or with one expert a Llama; a Qwen3 with QK norm, with experts or without; with
    latent attention a DeepSeek-V2 or, with sigmoid scores, a DeepSeek-V3. The longest sequence is
    that of the model where the config has it, and otherwise that of training. `attention_scale` has
    no key: it is part of the query kernel or head_dim^-0.5, and for DeepSeek from `mscale_all_dim`.

    Raises InputError for a model that does not exist in transformers.
    """
    model = config.model
    architecture = written_as(model)
    for name, only in {**_FIXED, **architecture.fixed}.items():
        if getattr(model, name) != only:
            what = architecture.name if architecture.latent else "Hugging Face model"
            raise InputError(
                f"model.{name}={getattr(model, name)!r} has no place in a {what}; only "
                f"a model with {only!r} can be saved in this format"
            )
    if model.tied_head_dtype is not None:
        raise InputError(
            f"model.tied_head_dtype={model.tied_head_dtype!r} has no place in a Hugging Face "
            "model, which does not round the table of tied embeddings; set it to None to save the "
            "model without rounding (it is None of a MaxText YAML with dtype: bfloat16)"
        )
    if architecture.latent:
        ropes.check_savable_latent(model)
    if architecture.heads_divide:
        divides(
            model.num_heads,
            model.embed_dim,
            rule=f"model.embed_dim={model.embed_dim} is not a multiple of "
            f"model.num_heads={model.num_heads}, as transformers asks of a "
            f"{'DeepSeek-V2' if architecture.latent else 'Llama'}",
        )
    keys = {**_REQUIRED, **_OPTIONAL, **architecture.experts}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{key: getattr(model, ours) for key, ours in keys.items()},
        **{key: allowed[0] for key, (allowed, _) in architecture.only.items() if allowed},
        "num_key_value_heads": model.num_kv_heads,
        "hidden_act": "silu",
        **(ropes.latent_keys(model) if architecture.latent else {"head_dim": model.head_dim}),
        **ropes.rope_keys(model),
        LONGEST: model.max_position_embeddings or config.train.sequence_length,
        **({WINDOW: model.sliding_window} if architecture.reads_window else {}),
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": model.param_dtype,
    }


def read_config_json(path: str | Path) -> Json:
    """The contents of the `config.json` of a folder, or of the file itself."""
    file = local(path)
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


def _architecture(values: Keys) -> Architecture:
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
    if kind not in (None, ARCHITECTURES[names[0]].model_type):
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
    return {key: agreed(same, None) for key, same in by_name.items()}


def _refuse_unknown(values: Keys, architecture: Architecture) -> None:
    """Raises InputError for a key that is neither mapped nor ignored on purpose.

    Such a key passes with a note where its value switches nothing on, or where it is in `UNREAD`.
    """
    name, specific = architecture.name, {*architecture.experts, *architecture.only}
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
    for key, (allowed, reason) in {**_ONLY, **architecture.only}.items():
        absent = architecture.absent.get(key, *allowed[:1])
        value = values.get(key, absent)
        if allowed and value not in allowed:
            raise InputError(
                f"{CONFIG_FILE}: {key}={value!r} is not supported, only {allowed[0]!r}: {reason}"
            )
    if (tied := values.get("tie_word_embeddings")) not in (None, True, False):
        raise InputError(f"{CONFIG_FILE}: tie_word_embeddings={tied!r} is not true or false")
    kinds = values.get("layer_types") or []
    others = [kind for kind in kinds if kind != "full_attention"]
    if others:
        raise InputError(
            f"{CONFIG_FILE}: layer_types has {others[0]!r}, which is not supported, only "
            "'full_attention'; convert another model"
        )


def _window(values: Keys, architecture: Architecture) -> int | None:
    """The sliding window; None where no sequence is longer."""
    absent = architecture.absent
    # Qwen3's window has no effect: it needs use_sliding_window, which is refused.
    if "use_sliding_window" in architecture.only or values.get(WINDOW, absent.get(WINDOW)) is None:
        return None
    window = _whole_or_missing({**absent, **values}, WINDOW)
    longest = _longest(values, absent)
    if window >= longest:
        return None
    if not architecture.reads_window:
        raise InputError(
            f"{CONFIG_FILE}: {WINDOW}={window} is smaller than {LONGEST}={longest}, and a "
            f"{architecture.name} of transformers reads the whole sequence; set it to null"
        )
    return window


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
