"""Keys of `config.json` for the rotary embedding and for latent attention, and their fields."""

import math
from collections.abc import Mapping
from typing import TypeVar

from linen_compat.formats._intact import Json
from linen_compat.formats.huggingface._architecture import (
    CONFIG_FILE,
    LOCAL_THETA,
    Architecture,
    Keys,
)
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
LATENT_EPSILON = 1e-6  # of the norms of latent vectors in transformers, whatever the key says
DICTIONARIES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
READ_ELSEWHERE = ("qk_nope_head_dim", "qk_head_dim")
SHARE = "partial_rotary_factor"
KEYS = ("rope_theta", SHARE, *DICTIONARIES)


def fields_of_rope(values: Keys, architecture: Architecture) -> Json:
    """The fields `rope_…` of a model."""
    bases, scalings, local = {}, {}, {}
    if values.get("rope_theta") is not None:
        bases["rope_theta"] = values["rope_theta"]
    if values.get(LOCAL_THETA) is not None:
        local[LOCAL_THETA] = values[LOCAL_THETA]
    for name in DICTIONARIES:
        rope, said = values.get(name), f"{CONFIG_FILE}: {name}"
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"{said}={rope!r} is not a dictionary")
        if LOCAL_THETA in architecture.absent and "full_attention" in rope:
            parts = {key: rope.get(key) for key in ("full_attention", "sliding_attention")}
            if wrong := [key for key, part in parts.items() if not isinstance(part, Mapping)]:
                raise InputError(
                    f"{said}.{wrong[0]}={parts[wrong[0]]!r} is not a dictionary; write one with "
                    "rope_type and rope_theta"
                )
            of_window = rope["sliding_attention"]
            if _scaling(of_window, f"{said}.sliding_attention", architecture):
                raise InputError(
                    f"{said}.sliding_attention={of_window!r} is not supported, only a base: layers "
                    "with a window have no scaling here"
                )
            if of_window.get("rope_theta") is not None:
                local[f"{name}.sliding_attention.rope_theta"] = of_window["rope_theta"]
            rope = rope["full_attention"]
        elif LOCAL_THETA in architecture.absent and name == "rope_parameters":
            raise InputError(
                f"{said}={rope!r} does not say which layers it is for; write full_attention and "
                "sliding_attention in it, each with rope_type and rope_theta"
            )
        scalings[name] = _scaling(rope, said, architecture)
        if rope.get("rope_theta") is not None:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    if architecture.needs_rope and not scalings:
        raise InputError(
            f"{CONFIG_FILE} has no rope_parameters, and transformers then takes a yarn of its own "
            f"for a {architecture.name}; write them, with rope_type=default if no angle is scaled"
        )
    fields = {"rope_theta": agreed(bases, architecture.absent["rope_theta"])}
    if LOCAL_THETA in architecture.absent:
        fields["rope_window_theta"] = agreed(local, architecture.absent[LOCAL_THETA])
    return {**fields, **agreed(scalings, {})}


def partial_rotary(values: Keys, architecture: Architecture, head_dim: int) -> Json:
    """`rope_head_dim`, of a class that rotates a part of each head."""
    dictionaries = [values.get(name) or {} for name in DICTIONARIES]
    shares = {
        where: found.get(SHARE)
        for where, found in zip((CONFIG_FILE, *DICTIONARIES), (values, *dictionaries), strict=True)
        if found.get(SHARE) is not None
    }
    usual = architecture.partial_rotary
    share = agreed(shares, usual or 1.0)
    if share == 1.0:
        return {}
    rotated = int(head_dim * share) if isinstance(share, float) and 0 < share < 1 else 1
    if rotated % 2 or usual is None:
        why = "every dimension of a head is rotated here"
        why = why if usual is None else "it must give an even number"
        raise InputError(f"{CONFIG_FILE}: {SHARE}={share!r} is not supported, only 1.0: {why}")
    return {"rope_head_dim": rotated}


def rope_keys(model: ModelConfig, architecture: Architecture) -> Json:
    """The keys of `config.json` for a model's rotary embedding; transformers 4 and 5 read both."""
    keys: Json = {"rope_theta": model.rope_theta}
    if architecture.partial_rotary is not None:
        keys[SHARE] = model.rope_dim / model.head_dim
    if model.rope_scaling is not None:
        numbers = {key: getattr(model, ours) for key, ours in _FIELDS[model.rope_scaling].items()}
        if model.rope_scaling == "yarn":
            if model.kv_lora_rank is not None and (mscale := _mscale_of(model)):
                numbers |= {"mscale": mscale, "mscale_all_dim": mscale}
            if not math.isclose(_amplitude(numbers, ""), model.rope_amplitude, rel_tol=1e-14):
                numbers["attention_factor"] = model.rope_amplitude
            if not model.rope_truncate:
                numbers["truncate"] = False
        keys["rope_scaling"] = {"rope_type": model.rope_scaling, **numbers}
    elif architecture.needs_rope:
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
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


def _scaling(rope: Keys, name: str, architecture: Architecture) -> Json:
    """The fields of one rope dictionary, without its base."""
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    kind = agreed(kinds, "default", name)
    known = ("default", *ROPE_SCALINGS)
    if kind not in known:
        raise InputError(
            f"{name}.{next(iter(kinds))}={kind!r} is not supported, only {', '.join(known)}"
        )
    read, yarn = _FIELDS.get(kind, {}), kind == "yarn"
    for key, value in rope.items():
        known_key = key in ("rope_type", "type", "rope_theta", *read)
        whole = key == SHARE and (value in (None, 1.0) or architecture.partial_rotary is not None)
        of_yarn = yarn and (key in _OF_SCORES or (key == "truncate" and isinstance(value, bool)))
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
    fields = {"rope_scaling": kind, **{ours: rope[key] for key, ours in read.items()}}
    if yarn:
        fields |= {"rope_amplitude": _amplitude(rope, name)}
        fields |= {"rope_truncate": rope.get("truncate", True)}
    return fields


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


def _amplitude(rope: Keys, name: str) -> float:
    """By what yarn also multiplies the rotated numbers."""
    for key in ("factor", *_OF_SCORES):
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise InputError(f"{name}.{key}={value!r} is not a number")
    factor, both = rope["factor"], (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    said = rope.get("attention_factor")
    if said is not None:
        return float(said)
    if all(both):
        return _mscale(factor, both[0]) / _mscale(factor, both[1])
    return _mscale(factor, 1.0)


def check_savable_latent(model: ModelConfig, architecture: Architecture) -> None:
    epsilon = model.of_latent_norms.norm_epsilon
    if architecture.latent and epsilon != LATENT_EPSILON:
        field = "norm_epsilon" if model.latent_norm_epsilon is None else "latent_norm_epsilon"
        raise InputError(
            f"model.{field}={epsilon} has no place in a DeepSeek of transformers, which normalises "
            f"latent vectors with {LATENT_EPSILON}; set model.latent_norm_epsilon to that, if they "
            "are"
        )
    if "num_shared_experts" in architecture.keys.values() and model.num_shared_experts < 1:
        raise InputError(
            f"model.num_shared_experts=0 has no place in a {architecture.name} of transformers, "
            "whose layers have one or more; only such a model can be saved"
        )
    if architecture.latent:
        _mscale_of(model)


def latent_keys(model: ModelConfig) -> Json:
    """The keys of `config.json` for the parts of a head."""
    assert model.rope_head_dim is not None, "the model has latent attention"
    return {"qk_nope_head_dim": model.head_dim - model.rope_head_dim}


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
