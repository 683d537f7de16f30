"""`--set section.field=value`: parse, find the field, build a new config."""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from nnx_pipeline.config import SECTIONS, Config
from nnx_pipeline.errors import InputError, nearest


def parse_overrides(assignments: Iterable[str]) -> dict[str, str]:
    """Splits `key=value` texts; the last one wins when a key comes twice."""
    pairs = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key or not value:
            raise InputError(
                f"--set {assignment!r} is not of the form key=value; "
                "write for example --set model.num_layers=8"
            )
        pairs[key.strip()] = value.strip()
    return pairs


def known_keys() -> dict[str, Any]:
    """Every dotted config key with its type."""
    return {
        f"{section}.{name}": hint
        for section, cls in SECTIONS.items()
        for name, hint in typing.get_type_hints(cls).items()
    }


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted config key."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _convert(key: str, text: str, hint: Any) -> object:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        origin = typing.get_origin(hint)
    if origin is typing.Literal:
        known = {str(choice): choice for choice in typing.get_args(hint)}
        return known.get(text, text)
    if hint is str:
        return text
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"--set {key}={text} needs true or false")
    try:
        return hint(text)
    except ValueError:
        kind = "a whole number" if hint is int else "a number"
        raise InputError(f"--set {key}={text} needs {kind}") from None


def apply_overrides(config: Config, overrides: Mapping[str, str]) -> Config:
    """A new config with the dotted keys replaced; unknown keys name the nearest known one."""
    keys = known_keys()
    sections: dict[str, dict[str, object]] = {}
    for key, text in overrides.items():
        if key not in keys:
            raise InputError(f"--set {key}={text}: no such config field; {nearest(key, keys)}")
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = _convert(key, text, keys[key])
    replaced = {
        section: dataclasses.replace(getattr(config, section), **fields)
        for section, fields in sections.items()
    }
    return dataclasses.replace(config, **replaced)
