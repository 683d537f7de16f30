"""The config that the command-line option `--config` names, and the one that a checkpoint holds."""

import dataclasses
from pathlib import Path

from linen_compat.formats._orbax.inspect import existing_folder, inspect
from linen_compat.formats._run_files import RUN_CONFIG, check_checksum
from linen_compat.formats._streams import Mismatch
from linen_compat.formats.huggingface._architecture import CONFIG_FILE
from linen_compat.formats.huggingface._stream import folder_config, is_huggingface
from linen_compat.formats.huggingface.config import config_from_huggingface
from linen_compat.maxtext import config
from nnx_pipeline import Config, InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath


def read_config(name: str, checkpoint: str | Path | None = None) -> Config:
    """The config of a Hugging Face folder or its `config.json`, of a YAML file, or a preset.

    A `config.json` does not say the attention scale of an Orbax checkpoint, so that of `checkpoint`
    is taken where one is given. Raises Mismatch for the config of a run that is damaged.
    """
    file = place(name)
    if name and file.is_dir():
        file /= CONFIG_FILE
        if not file.is_file():
            raise InputError(
                f"{name} is a folder and holds no {CONFIG_FILE}; give the folder of a Hugging Face "
                "model that holds one, or a file, such as the config.yml of a run"
            )
    if isinstance(file, StorePath) and not file.is_file():
        file.require_bucket()
        raise InputError(f"{name} does not exist; give a config.json, a YAML file or a preset")
    if file.name != CONFIG_FILE or not file.is_file():
        check_checksum(file)
        return config.config_from_yaml(name)
    read = config_from_huggingface(file)
    scale = None if checkpoint is None else _scale_of(checkpoint)
    if scale is None:
        return read
    return dataclasses.replace(read, model=dataclasses.replace(read.model, attention_scale=scale))


def stored_config(checkpoint: str | Path) -> Config | None:
    """The config of a Hugging Face folder, or of a run, step or items folder, if it has one."""
    folder = existing_folder(checkpoint)
    if is_huggingface(folder):
        return folder_config(folder)
    whole = folder.resolve()
    of_step = whole.parent if whole.name.isdecimal() else whole
    file = (whole.parent.parent if whole.name == "items" else of_step) / RUN_CONFIG
    return read_config(str(file)) if file.is_file() else None


def _scale_of(checkpoint: str | Path) -> float | None:
    """The attention scale that an Orbax checkpoint is for; None where it does not say one."""
    if is_huggingface(checkpoint):
        return None
    try:
        return inspect(checkpoint).attention_scale
    except Mismatch:
        return None  # whoever reads the checkpoint says what is wrong with it
