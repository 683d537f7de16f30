"""Checks of the types of arguments, with the cure for the usual mistakes."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jax.sharding import Mesh

from nnx_pipeline import Config, InputError, MeshConfig, Mixtral, ModelConfig, PipelineConfig
from nnx_pipeline.lab.errors import of_type
from nnx_pipeline.train import TrainState

# What to give for a config of each kind.
_CONFIGS: dict[type, str] = {
    Config: "a whole config, such as config_from_maxtext and preset return",
    ModelConfig: "config.model",
    PipelineConfig: "config.pipeline",
}


def check_to_load(checkpoint: object, config: object, mesh: object) -> None:
    """Raises InputError unless these can be a folder, a config or None, and a mesh or None."""
    check_folder(checkpoint)
    if isinstance(config, str | Path):
        raise InputError(
            f"config={str(config)!r} is the name of a file; read it with "
            "linen_compat.config_from_maxtext or linen_compat.config_from_huggingface"
        )
    if config is not None:
        check_config("config", config, Config)
    if isinstance(mesh, MeshConfig):
        raise InputError("mesh is of type MeshConfig; give the mesh itself, make_mesh(mesh)")
    if mesh is not None:
        of_type("mesh", mesh, Mesh)


def check_folder(checkpoint: object, name: str = "checkpoint") -> None:
    if not isinstance(checkpoint, str | os.PathLike):
        kind = type(checkpoint).__name__
        raise InputError(f"{name} is of type {kind}; give the name of a folder")


def check_savable_model(model: object) -> None:
    if isinstance(model, TrainState):
        raise InputError(
            "model is of type TrainState; give its model, state.model, or save all of it with "
            "linen_compat.save_train_state"
        )
    of_type("model", model, Mixtral)


def check_savable_state(state: object) -> None:
    if isinstance(state, Mixtral):
        raise InputError(
            "state is of type Mixtral, without the state of an optimizer; save it with "
            "linen_compat.save"
        )
    of_type("state", state, TrainState)


def check_config(name: str, value: object, kind: object) -> None:
    """Raises InputError unless a value is a config of one kind; other kinds are not checked."""
    if isinstance(kind, type) and kind in _CONFIGS and not isinstance(value, kind):
        got = type(value).__name__
        raise InputError(f"{name} is of type {got} and not {kind.__name__}; give {_CONFIGS[kind]}")


def check_configs(
    function: Callable[..., object],
    args: tuple[object, ...],
    options: Mapping[str, object],
    *,
    of: str,
) -> None:
    """Raises InputError where a function, named `of`, is given a config of another kind."""
    signature = inspect.signature(function)
    for name, value in signature.bind(None, *args, **options).arguments.items():
        if type(value) in _CONFIGS:
            check_config(f"{name} of {of}", value, signature.parameters[name].annotation)
