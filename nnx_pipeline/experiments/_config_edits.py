"""How arms and experiments change a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx_pipeline.config.config import Config

Fields = Mapping[str, Mapping[str, Any]]  # values by section and field


def with_fields(config: Config, fields: Fields) -> Config:
    """The config with other values of some fields; InputError where they do not go together."""
    sections = {
        section: dataclasses.replace(getattr(config, section), **values)
        for section, values in fields.items()
    }
    return dataclasses.replace(config, **sections)
