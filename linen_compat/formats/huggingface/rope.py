"""The keys of `config.json` for the rotary embedding, and the fields that they become."""

from collections.abc import Mapping
from typing import Any

from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.config.model_rules import ROPE_SCALINGS

# The entries of a rope dictionary besides its type and its base, and their fields.
_FIELDS = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "low_freq_factor": "rope_low_frequency",
    "high_freq_factor": "rope_high_frequency",
}
_DICTIONARIES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
KEYS = ("rope_theta", *_DICTIONARIES)


def fields_of_rope(values: Mapping[str, Any], absent_theta: float, file: str) -> dict[str, Any]:
    """The fields `rope_…` of a model.

    - `values`: the contents of `config.json`.
    - `absent_theta`: the base where no key names one.
    - `file`: what messages call the file.

    Raises InputError for a rotary embedding that is not computed here, and where keys disagree.
    """
    bases, scalings = {}, {}
    if values.get("rope_theta") is not None:
        bases["rope_theta"] = values["rope_theta"]
    for name in _DICTIONARIES:
        rope = values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(f"{file}: {name}={rope!r} is not a dictionary")
        scalings[name] = _scaling(rope, f"{file}: {name}")
        if rope.get("rope_theta") is not None:
            bases[f"{name}.rope_theta"] = rope["rope_theta"]
    return {"rope_theta": agreed(bases, absent_theta, file), **agreed(scalings, {}, file)}


def rope_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` for a model's rotary embedding; transformers 4 and 5 read both."""
    keys: dict[str, Any] = {"rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        read = ROPE_SCALINGS[model.rope_scaling]
        numbers = {key: getattr(model, ours) for key, ours in _FIELDS.items() if ours in read}
        keys["rope_scaling"] = {"rope_type": model.rope_scaling, **numbers}
    return keys


def agreed(found: Mapping[str, Any], absent: Any, file: str) -> Any:
    """The one value of several keys that mean the same, or `absent` if none of them is there.

    - `found`: the values by their keys.
    - `file`: what the message calls the file.
    """
    first, *others = found.values() or (absent,)
    if any(other != first for other in others):
        said = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise InputError(f"{file}: {said} disagree; remove all but one of them")
    return first


def _scaling(rope: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of one rope dictionary, without its base."""
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    kind = agreed(kinds, "default", name)
    known = ("default", *ROPE_SCALINGS)
    if kind not in known:
        raise InputError(
            f"{name}.{next(iter(kinds))}={kind!r} is not supported, only {', '.join(known)}"
        )
    read = ROPE_SCALINGS.get(kind, {})
    for key, value in rope.items():
        read_here = key in ("rope_type", "type", "rope_theta") or _FIELDS.get(key) in read
        whole = key == "partial_rotary_factor" and value in (None, 1.0)
        if not read_here and not whole:
            raise InputError(
                f"{name}.{key}={value!r} is not supported with rope_type={kind!r}: the angles "
                "here do not depend on it; remove it if those of the model do not either"
            )
    if not read:
        return {}
    missing = [key for key, ours in _FIELDS.items() if ours in read and rope.get(key) is None]
    if missing:
        raise InputError(f"{name} of rope_type={kind!r} has no {missing[0]}; add it")
    own = {ours: rope[key] for key, ours in _FIELDS.items() if ours in read}
    return {"rope_scaling": kind, **own}
