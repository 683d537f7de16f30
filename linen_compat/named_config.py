"""The config that the command-line option `--config` names, in any form that is read."""

from pathlib import Path

from linen_compat.formats.huggingface.config import CONFIG_FILE, config_from_huggingface
from linen_compat.maxtext import config
from nnx_pipeline import Config


def read_config(name: str) -> Config:
    """The config of a file or a preset.

    - `name`: the `config.json` of a Hugging Face model, or what `maxtext.config.read_config` takes.

    Raises InputError when it is none of them.
    """
    if Path(name).name == CONFIG_FILE and Path(name).is_file():
        return config_from_huggingface(name)
    return config.read_config(name)
