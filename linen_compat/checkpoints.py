"""What the entry point `nnx_pipeline.checkpoints` offers to the commands of `nnx-pipeline`.

A run that it saves is `<run>/<step>/items`, as MaxText's are, with the config beside the steps and
with what decides the batches of its training.
"""

import dataclasses
import logging
from pathlib import Path

import yaml
from jax.sharding import Mesh

from linen_compat.formats.names import check_names
from linen_compat.formats.new_folder import check_free, clear_left_behind, new_folder
from linen_compat.formats.orbax.inspect import find_items
from linen_compat.formats.orbax.layouts import NNX
from linen_compat.formats.yaml_text import load_yaml
from linen_compat.loading import load
from linen_compat.named_config import RUN_CONFIG, config_of, read_config
from linen_compat.train_state import load_train_state, save_train_state
from nnx_pipeline import Config, InputError
from nnx_pipeline.train import TrainState
from nnx_pipeline.train.saved import Origin, SavedRun

__all__ = [
    "check_free",
    "check_savable",
    "config_of",
    "load",
    "load_newest",
    "read_config",
    "save_step",
    "saved_run",
]

ORIGIN_FILE = "training.yml"

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without


def check_savable(config: Config) -> None:
    """Raises InputError unless `save_step` has a name for every parameter of a model."""
    check_names(config.model)


def save_step(state: TrainState, folder: str | Path, origin: Origin) -> None:
    """Saves a training state, in this project's own format, as a new step of a run.

    - `state`: may be sharded over the devices of this process.
    - `folder`: the folder of the run. With its first step it is made, or filled if it is empty.
    - `origin`: of the batches; it is kept beside the first step, as is the config.

    A step gets its name, and the run with its first step too, only when it is complete: whenever a
    process is killed, no step is unfinished. Raises InputError where the step is there already.
    """
    step = str(int(state.step))
    if (Path(folder) / ORIGIN_FILE).is_file():
        with new_folder(Path(folder) / step) as made:
            save_train_state(state, made / "items", NNX)
        return
    with new_folder(folder) as run:
        save_train_state(state, run / step / "items", NNX)
        for name, kept in ((RUN_CONFIG, state.model.config), (ORIGIN_FILE, origin)):
            text = yaml.safe_dump(dataclasses.asdict(kept), sort_keys=False)
            (run / name).write_text(text, encoding="utf-8")


def saved_run(folder: str | Path) -> SavedRun | None:
    """The run that `save_step` has saved in a folder; None where there is no such run.

    Raises InputError where its files cannot be read, and where its newest step is damaged.
    """
    file = Path(folder) / ORIGIN_FILE
    if not str(folder) or not file.is_file():
        return None
    try:
        found = load_yaml(file.read_text(encoding="utf-8"))
        origin = Origin(**found)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{file} cannot be read ({reason}), so that training cannot go on with the same "
            "batches; begin another run"
        ) from error
    newest = find_items(folder).parent
    return SavedRun(newest, read_config(str(file.with_name(RUN_CONFIG))), origin)


def load_newest(run: SavedRun, config: Config, mesh: Mesh) -> TrainState:
    """The state of the newest step of a run, placed on a mesh, from which training goes on.

    - `config`: with the model and the optimizer of the run; its pipeline may be another one.
    - `mesh`: need not be the one on which the run was trained.

    What killed processes left unfinished in the run is deleted. Raises InputError where the step is
    damaged.
    """
    clear_left_behind(run.newest.parent)
    return load_train_state(run.newest, config, mesh=mesh)
