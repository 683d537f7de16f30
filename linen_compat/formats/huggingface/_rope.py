"""Keys of `config.json` for the rotary embedding and for latent attention, and their fields."""

import math
from collections.abc import Mapping
from typing import TypeVar

from linen_compat.formats._intact import Json
from linen_compat.formats.huggingface._architectures import CONFIG_FILE, Keys
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.config._model_rules import ROPE_SCALINGS

# The entries of a rope dictionary of each type, besides its type and its base, with their fields.
_LONGER = {"factor": "rope_factor", "original_max_position_embeddings": "rope_original_length"}
_LIMITS = ("rope_low_frequency", "rope_high_frequency")
_FIELDS = {
    "linear": {"factor": "rope_factor"},
    "llama3": _LONGER | dict(zip(("low_freq_factor", "high_freq_factor"), _LIMITS, strict=True)),
    "yarn": _LONGER | dict(zip(("beta_slow", "beta_fast"), _LIMITS, strict=True)),
}
# transformers' defaults for entries of yarn; some other entries are about the scores alone.
_ABSENT_IN_YARN = {"beta_slow": 1.0, "beta_fast": 32.0}
_OF_SCORES = ("mscale", "mscale_all_dim", "attention_factor")
Value = TypeVar("Value")
DICTIONARIES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
READ_ELSEWHERE = ("qk_nope_head_dim", "qk_head_dim")
KEYS = ("rope_theta", *DICTIONARIES)


def fields_of_rope(values: Keys, absent_theta: float, *, latent: bool) -> Json:
    """The fields `rope_…` of a model; `absent_theta` is the base where no key names one."""
    bases, scalings = {}, {}
    if values.get("rope_theta") is not None:
        bases["rope_theta"] = values["rope_theta"]
    for name in DICTIONARIES:
        rope = values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"{CONFIG_FILE}: {name}={rope!r} is not a dictionary")
        scalings[name] = _scaling(rope, f"{CONFIG_FILE}: {name}", latent=latent)
        if rope.get("rope_theta") is not None:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    return {"rope_theta": agreed(bases, absent_theta), **agreed(scalings, {})}


def rope_keys(model: ModelConfig) -> Json:
    """The keys of `config.json` for a model's rotary embedding; transformers 4 and 5 read both."""
    keys: Json = {"rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        numbers = {key: getattr(model, ours) for key, ours in _FIELDS[model.rope_scaling].items()}
        if model.rope_scaling == "yarn":
            if model.kv_lora_rank is None:
                raise InputError(
                    "model.rope_scaling='yarn' has no place in a Hugging Face model without "
                    "latent attention, of which it would multiply the scores too; only one with "
                    "kv_lora_rank can be saved in this format"
                )
            if mscale := _mscale_of(model):
                numbers |= {"mscale": mscale, "mscale_all_dim": mscale}
            else:
                numbers["attention_factor"] = 1.0
        keys["rope_scaling"] = {"rope_type": model.rope_scaling, **numbers}
    return keys


def agreed(values: Mapping[str, Value], absent: Value, where: str = CONFIG_FILE) -> Value:
    """The one value of several keys that mean the same, or `absent` if none of them is there."""
    first, *others = values.values() or (absent,)
    if any(other != first for other in others):
        said = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise InputError(f"{where}: {said} disagree; remove all but one of them")
    return first


def whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{CONFIG_FILE}: {key}={value!r} is not a whole number of 1 or more")
    return value


def _scaling(rope: Keys, name: str, *, latent: bool) -> Json:
    """The fields of one rope dictionary, without its base."""
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    kind = agreed(kinds, "default", name)
    known = ("default", *(each for each in ROPE_SCALINGS if latent or each != "yarn"))
    if kind not in known:
        raise InputError(
            f"{name}.{next(iter(kinds))}={kind!r} is not supported, only {', '.join(known)}"
        )
    read, yarn = _FIELDS.get(kind, {}), kind == "yarn"
    for key, value in rope.items():
        known_key = key in ("rope_type", "type", "rope_theta", *read)
        whole = key == "partial_rotary_factor" and value in (None, 1.0)
        of_yarn = yarn and (key in _OF_SCORES or (key == "truncate" and value in (None, True)))
        if not known_key and not whole and not of_yarn:
            raise InputError(
                f"{name}.{key}={value!r} is not supported with rope_type={kind!r}: the angles "
                "here do not depend on it; remove it if those of the model do not either"
            )
    if not read:
        return {}
    absent = _ABSENT_IN_YARN if yarn else {}
    rope = {**rope, **{key: value for key, value in absent.items() if not rope.get(key)}}
    missing = [key for key in read if rope.get(key) is None]
    if missing:
        raise InputError(f"{name} of rope_type={kind!r} has no {missing[0]}; add it")
    if yarn:
        if isinstance(rope["factor"], bool) or not isinstance(rope["factor"], int | float):
            raise InputError(f"{name}.factor={rope['factor']!r} is not a number")
        _check_turns_alone(rope, name)
    return {"rope_scaling": kind, **{ours: rope[key] for key, ours in read.items()}}


def latent_head_dim(values: Keys, absent: Keys) -> int:
    """The width of a whole query; the key `head_dim` has that of the rotated part."""
    plain, rotated = (
        whole_number(key, values.get(key, absent[key]))
        for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    whole = plain + rotated
    for key, wanted in {"head_dim": rotated, "qk_head_dim": whole}.items():
        if values.get(key) not in (None, wanted):
            raise InputError(
                f"{CONFIG_FILE}: {key}={values[key]!r} contradicts the sizes of the parts of a "
                f"head, which make it {wanted}; remove it, or correct one of them"
            )
    return whole


def attention_scale_in(values: Keys) -> float:
    """The factor of scores beside head_dim^-0.5: (0.1 · mscale_all_dim · ln(factor) + 1)²."""
    for name in DICTIONARIES:
        rope = values.get(name) or {}
        if rope.get("mscale_all_dim"):
            return _mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return 1.0


def _check_turns_alone(rope: Keys, name: str) -> None:
    """Raises InputError where yarn also multiplies the rotated numbers by a factor."""
    # Only a part of a head is rotated, so that such a factor is not one of the scores.
    for key in _OF_SCORES:
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise InputError(f"{name}.{key}={value!r} is not a number")
    factor, both = rope["factor"], (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    scale = rope.get("attention_factor")
    if scale is None and all(both):
        scale = _mscale(factor, both[0]) / _mscale(factor, both[1])
    elif scale is None:
        scale = _mscale(factor, 1.0)
    if scale != 1.0:
        raise InputError(
            f"{name} multiplies the rotated part of each head by {scale:.6g} (attention_factor="
            f"{rope.get('attention_factor')!r}, mscale={both[0]!r}, mscale_all_dim={both[1]!r}), "
            "which is not computed here; only mscale=mscale_all_dim or attention_factor=1.0 is"
        )


def check_savable_latent(model: ModelConfig) -> None:
    if model.norm_epsilon != 1e-6:
        raise InputError(
            f"model.norm_epsilon={model.norm_epsilon} has no place in a DeepSeek of transformers, "
            "which normalises latent vectors with 1e-06; only such a model can be saved"
        )
    if model.num_shared_experts < 1:
        raise InputError(
            "model.num_shared_experts=0 has no place in a DeepSeek of transformers, whose layers "
            "have one or more; only such a model can be saved"
        )
    _mscale_of(model)


def latent_keys(model: ModelConfig) -> Json:
    """The keys of `config.json` for the parts of a head, and for layers without experts."""
    assert model.rope_head_dim is not None, "the model has latent attention"
    # Without this key transformers takes it that a DeepSeek-V3 predicts several tokens.
    ahead = {"num_nextn_predict_layers": 0} if model.router_score == "sigmoid" else {}
    return {
        **ahead,
        "intermediate_size": model.dense_mlp_dim or model.mlp_dim,
        "qk_nope_head_dim": model.head_dim - model.rope_head_dim,
    }


def _mscale_of(model: ModelConfig) -> float:
    """The `mscale` that gives `attention_scale`; 0 where that is head_dim^-0.5."""
    whole = model.attention_scale * model.head_dim**0.5
    if math.isclose(whole, 1.0, rel_tol=1e-9):
        return 0.0
    if model.rope_scaling != "yarn" or model.rope_factor == 1.0 or whole < 1.0:
        raise InputError(
            f"model.attention_scale={model.attention_scale} has no place in a DeepSeek of "
            f"transformers with rope_scaling={model.rope_scaling!r}; only head_dim^-0.5="
            f"{model.head_dim**-0.5}, or with yarn more, can be saved"
        )
    assert model.rope_factor is not None, "yarn has one"
    long: float = (whole**0.5 - 1.0) / (0.1 * math.log(model.rope_factor))
    short = round(long, 9)  # such as 0.707, which a product and a root have rounded
    exact = model.head_dim**-0.5 * _mscale(model.rope_factor, short) ** 2
    return short if math.isclose(exact, model.attention_scale, rel_tol=1e-14) else long


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
