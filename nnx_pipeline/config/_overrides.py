"""The command-line option `--set section.field=value`: parse it and build a new config."""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from nnx_pipeline.config.config import SECTIONS, Config
from nnx_pipeline.lab.errors import InputError, nearest


def parse_overrides(assignments: Iterable[str]) -> dict[str, str]:
    """Splits texts of the form `key=value`; when a key comes twice, the last one wins.

    Raises InputError for a text without a key, a `=` or a value.
    """
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


def known_keys() -> dict[str, object]:
    """Every dotted config key, such as `model.num_layers`, with its type hint."""
    return {
        f"{section}.{name}": hint
        for section, cls in SECTIONS.items()
        for name, hint in typing.get_type_hints(cls).items()
    }


def value_of(config: Config, key: str) -> object:
    """The value of a field by its dotted key, such as `model.num_layers`."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _convert(key: str, text: str, hint: Any) -> object:
    origin, or_none = typing.get_origin(hint), ""
    if origin in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        or_none = " or none"
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        origin = typing.get_origin(hint)
    if origin is typing.Literal:
        # An unknown choice is left to the check of the config, which names the nearest known one.
        known = {str(choice): choice for choice in typing.get_args(hint)}
        return known.get(text, text)
    if hint is str:
        return text
    if hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"{key}={text} needs true or false")
    try:
        return hint(text)
    except ValueError:
        kind = "a whole number" if hint is int else "a number"
        raise InputError(f"{key}={text} needs {kind}{or_none}") from None


def apply_overrides(config: Config, overrides: Mapping[str, str]) -> Config:
    """A new config with the values of some dotted keys replaced by those that the texts stand for.

    Raises InputError for an unknown key, naming the nearest known one, and for a value that is not
    of the field's type or that the config refuses.
    """
    keys = known_keys()
    # Collected first and replaced together: every config checks itself when it is made, and fields
    # that must fit each other would fail if they were replaced one at a time.
    sections: dict[str, dict[str, object]] = {}
    for key, text in overrides.items():
        if key not in keys:
            raise InputError(f"{key}={text}: no such config field; {nearest(key, keys)}")
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = _convert(key, text, keys[key])
    replaced = {
        section: dataclasses.replace(getattr(config, section), **fields)
        for section, fields in sections.items()
    }
    return dataclasses.replace(config, **replaced)
