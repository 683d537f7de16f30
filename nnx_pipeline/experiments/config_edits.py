"""Functions with which arms and experiments change a config."""

import dataclasses
from collections.abc import Callable
from typing import Any

from nnx_pipeline.config.config import Config
from nnx_pipeline.mesh import MeshConfig


def set_pipeline(**fields: Any) -> Callable[[Config], Config]:
    """A function that replaces these fields of `Config.pipeline`."""
    return lambda config: dataclasses.replace(
        config, pipeline=dataclasses.replace(config.pipeline, **fields)
    )


def set_model(**fields: Any) -> Callable[[Config], Config]:
    """A function that replaces these fields of `Config.model`."""
    return lambda config: dataclasses.replace(
        config, model=dataclasses.replace(config.model, **fields)
    )


def set_train(**fields: Any) -> Callable[[Config], Config]:
    """A function that replaces these fields of `Config.train`."""
    return lambda config: dataclasses.replace(
        config, train=dataclasses.replace(config.train, **fields)
    )


def in_both(**fields: Any) -> Callable[[Config, MeshConfig], Config]:
    """A setup that replaces these fields of `Config.pipeline` in both arms."""
    configure = set_pipeline(**fields)
    return lambda config, mesh: configure(config)
