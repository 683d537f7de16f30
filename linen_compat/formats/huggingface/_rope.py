"""The keys of `config.json` for the rotary embedding, and the fields that they become."""

from collections.abc import Mapping
from typing import TypeVar

from linen_compat.formats._checksums import Json
from linen_compat.formats.huggingface import _deepseek as deepseek
from linen_compat.formats.huggingface._architectures import Keys
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.config._model_rules import ROPE_SCALINGS

# The entries of a rope dictionary of each type, besides its type and its base, with their fields.
_LENGTH = {"original_max_position_embeddings": "rope_original_length"}
_FIELDS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        **_LENGTH,
        "low_freq_factor": "rope_low_frequency",
        "high_freq_factor": "rope_high_frequency",
    },
    "yarn": {
        "factor": "rope_factor",
        **_LENGTH,
        "beta_slow": "rope_low_frequency",
        "beta_fast": "rope_high_frequency",
    },
}
# transformers' defaults for entries of yarn; some other entries are about the scores alone.
_ABSENT_IN_YARN = {"beta_slow": 1.0, "beta_fast": 32.0}
_OF_SCORES = ("mscale", "mscale_all_dim", "attention_factor")
Value = TypeVar("Value")
KEYS = ("rope_theta", *deepseek.DICTIONARIES)


def fields_of_rope(values: Keys, absent_theta: float, file: str, *, latent: bool = False) -> Json:
    """The fields `rope_…` of a model; `absent_theta` is the base where no key names one.

    Raises InputError for a rotary embedding that is not computed here, and where keys disagree.
    """
    bases, scalings = {}, {}
    if values.get("rope_theta") is not None:
        bases["rope_theta"] = values["rope_theta"]
    for name in deepseek.DICTIONARIES:
        rope = values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"{file}: {name}={rope!r} is not a dictionary")
        scalings[name] = _scaling(rope, f"{file}: {name}", latent=latent)
        if rope.get("rope_theta") is not None:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    return {"rope_theta": agreed(bases, absent_theta, file), **agreed(scalings, {}, file)}


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
            numbers |= deepseek.keys_of_yarn(model)
        keys["rope_scaling"] = {"rope_type": model.rope_scaling, **numbers}
    return keys


def agreed(found: Mapping[str, Value], absent: Value, file: str) -> Value:
    """The one value of several keys that mean the same, or `absent` if none of them is there."""
    first, *others = found.values() or (absent,)
    if any(other != first for other in others):
        said = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise InputError(f"{file}: {said} disagree; remove all but one of them")
    return first


def _scaling(rope: Keys, name: str, *, latent: bool) -> Json:
    """The fields of one rope dictionary, without its base."""
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    kind = agreed(kinds, "default", name)
    known = ("default", *(one for one in ROPE_SCALINGS if latent or one != "yarn"))
    if kind not in known:
        raise InputError(
            f"{name}.{next(iter(kinds))}={kind!r} is not supported, only {', '.join(known)}"
        )
    read, yarn = _FIELDS.get(kind, {}), kind == "yarn"
    for key, value in rope.items():
        read_here = key in ("rope_type", "type", "rope_theta") or key in read
        whole = key == "partial_rotary_factor" and value in (None, 1.0)
        of_yarn = yarn and (key in _OF_SCORES or (key == "truncate" and value in (None, True)))
        if not read_here and not whole and not of_yarn:
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
    own = {ours: rope[key] for key, ours in read.items()}
    made = {"rope_scaling": kind, **own}
    if yarn:
        if isinstance(rope["factor"], bool) or not isinstance(rope["factor"], int | float):
            raise InputError(f"{name}.factor={rope['factor']!r} is not a number")
        deepseek.check_turns_alone(rope, name)
    return made
