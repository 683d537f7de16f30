"""What the entry point `nnx_pipeline.checkpoints` offers to the commands of `nnx-pipeline`.

A run that it saves is `<run>/<step>/items`, as MaxText's are, with the config beside the steps.
"""

import dataclasses
import logging
from pathlib import Path

import yaml

from linen_compat.formats.huggingface.stream import is_huggingface, own_config
from linen_compat.formats.new_folder import check_free, new_folder
from linen_compat.formats.orbax.layouts import NNX
from linen_compat.loading import load
from linen_compat.maxtext.config import read_config
from linen_compat.train_state import save_train_state
from nnx_pipeline import Config, InputError
from nnx_pipeline.train import TrainState

__all__ = ["check_free", "config_of", "load", "read_config", "save_run"]

CONFIG_FILE = "config.yml"

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without


def config_of(checkpoint: str | Path) -> Config | None:
    """The config that a checkpoint holds; None where it holds none.

    - `checkpoint`: a Hugging Face folder, whose `config.json` says it, or a run, a step or an items
      folder: `save_run` puts a `config.yml` into a run.

    Raises InputError where there is no such folder.
    """
    folder = Path(checkpoint)
    if not str(checkpoint) or not folder.is_dir():
        raise InputError(f"{checkpoint or 'an empty name'} is not a folder; give a checkpoint")
    if is_huggingface(folder):
        return own_config(folder)
    whole = folder.resolve()
    run = whole.parents[1] if whole.name == "items" else whole.parent if _is_step(whole) else whole
    file = run / CONFIG_FILE
    return read_config(str(file)) if file.is_file() else None


def _is_step(folder: Path) -> bool:
    return folder.name.isdecimal()


def save_run(state: TrainState, folder: str | Path) -> None:
    """Saves a training state, in this project's own format, with its config as a new run.

    - `state`: may be sharded over the devices of this process.
    - `folder`: the folder of the run; it must not exist yet, or be empty.

    Nothing is left behind when it fails.
    """
    with new_folder(folder) as run:
        save_train_state(state, run / str(int(state.step)) / "items", NNX)
        config = yaml.safe_dump(dataclasses.asdict(state.model.config), sort_keys=False)
        (run / CONFIG_FILE).write_text(config, encoding="utf-8")
