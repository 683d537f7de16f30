"""Named configs, from the table in `presets.toml`."""

import importlib.resources
import tomllib
from typing import Any

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.config.train import TrainConfig
from nnx_pipeline.lab.errors import InputError, nearest


def _config(row: dict[str, Any]) -> Config:
    model = {name: value for part in row["model"] for name, value in part.items()}
    return Config(model=ModelConfig(**model), train=TrainConfig(**row["train"]))


_TABLE = (importlib.resources.files("nnx_pipeline.config") / "presets.toml").read_text("utf-8")
PRESETS: dict[str, Config] = {name: _config(row) for name, row in tomllib.loads(_TABLE).items()}


def preset(name: str) -> Config:
    """The preset config called `name`; raises InputError where there is none."""
    if name not in PRESETS:
        raise InputError(f"model {name!r} is not a preset; {nearest(name, PRESETS)}")
    return PRESETS[name]
