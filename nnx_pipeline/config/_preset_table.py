"""The table of presets, which can be read without JAX."""

import importlib.resources
import tomllib
from typing import Any

PRESET_TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    (importlib.resources.files("nnx_pipeline.config") / "presets.toml").read_text(encoding="utf-8")
)
