"""Checkpoints for the commands, which another package offers by an entry point.

This package reads and writes none. `linen_compat`, which does, declares a module with the functions
of `Checkpoints` in the group `nnx_pipeline.checkpoints`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from nnx_pipeline.modules.decoder import Mixtral
    from nnx_pipeline.train._saved import Origin, SavedRun
    from nnx_pipeline.train.step import TrainState

    Copies = dict[tuple[int, int], np.ndarray]  # by the numbers of an array and of a shard

GROUP = "nnx_pipeline.checkpoints"


class Checkpoints(Protocol):
    """The functions of the module. Each raises InputError for what is damaged or does not fit."""

    def read_config(self, name: str, checkpoint: str | Path) -> Config:
        """The config of a file or a preset, for the model of a checkpoint."""

    def config_from_yaml(self, name: str, mesh: MeshConfig | None = None) -> Config:
        """The config of a YAML file, of MaxText too; `mesh` replaces MaxText's parallelisms."""

    def mesh_from_yaml(self, name: str, devices: int | None, slices: int) -> MeshConfig:
        """The mesh that a YAML of MaxText asks for, on devices of several slices."""

    def stored_config(self, checkpoint: str | Path) -> Config | None:
        """The config that a checkpoint holds; None where it holds none."""

    def load(
        self, checkpoint: str | Path, config: Config, *, mesh: Mesh, adapter: str | None = None
    ) -> Mixtral:
        """The model with all parameters of the checkpoint, placed on the mesh.

        An adapter, by the name of its folder, is merged into them.
        """

    def claimed(self, run: str | Path) -> AbstractContextManager[None]:
        """Keeps the folder of a run, or of one to be made, to the processes of this training."""

    def begin(self, folder: str | Path, config: Config, origin: Origin) -> None:
        """Writes what a run has beside its steps, into a folder that is claimed."""

    def check_savable(self, config: Config) -> None:
        """Raises InputError unless the states of a model of this config can be saved."""

    def save_step(
        self,
        state: TrainState,
        folder: str | Path,
        config: Config,
        origin: Origin,
        copies: Copies | None = None,
    ) -> Callable[[], None]:
        """Begins to save a state as a new step of a run; what is returned does it, in any thread.

        No step is ever there unfinished. With `copies` the state may change before it is saved:
        they take its arrays, and may be given again when it is.
        """

    def agree(self, write: Callable[[], None]) -> None:
        """Calls this; what it raises in process 0 is raised in all processes."""

    def keep_steps(self, folder: str | Path, newest: int, most: int, every: int | None) -> None:
        """Deletes steps of a run, but for the `most` last up to `newest` and each `every`-th."""

    def saved_run(self, folder: str | Path) -> SavedRun | None:
        """The run in a folder, or None where there are no saved steps."""

    def load_newest(self, run: SavedRun, config: Config, mesh: Mesh) -> TrainState:
        """The state of the newest step, on a mesh."""


def checkpoints() -> Checkpoints:
    """What the installed package offers; raises InputError unless there is exactly one."""
    offers = {entry.value: entry for entry in entry_points(group=GROUP)}
    if len(offers) != 1:
        raise InputError(
            f"{', '.join(offers) or 'no installed package'} offers checkpoints (the entry points "
            f"{GROUP}), and exactly one must; install nnx-pipeline again, and only one such package"
        )
    (entry,) = offers.values()
    offered: Checkpoints = entry.load()
    return offered
