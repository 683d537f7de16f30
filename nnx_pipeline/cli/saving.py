"""`--checkpoint-dir`, `--save-every` and `--resume` of `nnx-pipeline train`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from nnx_pipeline import ending
from nnx_pipeline.cli.checkpoints import Checkpoints, checkpoints
from nnx_pipeline.config.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.train.saved import Origin, SavedRun
from nnx_pipeline.train.step import TrainState

KEPT = "saved steps are kept; the same command with --resume goes on after the newest"


@dataclass(frozen=True)
class Folder:
    """The values of `--checkpoint-dir`, `--save-every` and `--resume`.

    - `name`: the folder of the run; None for no saving.
    - `every`: steps from one save to the next; None for one save at the end.
    - `resume`: whether training goes on after the newest step in the folder.
    """

    name: str | None
    every: int | None
    resume: bool

    def opened(self, config: Config, origin: Origin, stages: int) -> "Saver | None":
        """What saves the steps of a training; None where nothing is to be saved.

        - `config`: of the training.
        - `origin`: of its batches.
        - `stages`: of the mesh.

        Raises InputError where the model has no names in a checkpoint, where there is nothing to
        resume or something else, and where a new run would overwrite something.
        """
        if self.name is None:
            for flag, given in (("--resume", self.resume), ("--save-every", self.every)):
                if given:
                    raise InputError(f"{flag} needs a folder; give it with --checkpoint-dir DIR")
            return None
        offered = checkpoints()
        offered.check_savable(config)
        found = offered.saved_run(self.name)
        if self.resume:
            if found is None:
                raise InputError(f"--resume: {self._nothing()}")
            found.check(config, origin, stages)
            return Saver(offered, self.name, self.every, origin, found)
        if found is not None:
            raise InputError(
                f"{self.name} holds a run up to step {found.step} already; add --resume to go on "
                "with it, or choose a new folder"
            )
        offered.check_free(self.name)
        return Saver(offered, self.name, self.every, origin, None)

    def _nothing(self) -> str:
        """What is wrong with a folder that is to be resumed and holds no run."""
        folder = Path(self.name or "")
        if self.name and folder.is_dir() and any(folder.iterdir()):
            return (
                f"{folder} is not a run of nnx-pipeline train, which has a training.yml beside its "
                "steps; give the --checkpoint-dir of one"
            )
        what = "is empty" if self.name and folder.is_dir() else "does not exist"
        return (
            f"{self.name or 'the folder'} {what}, so that there is nothing to resume; leave "
            "--resume out to begin"
        )


@dataclass(frozen=True)
class Saver:
    """Saves steps of a training.

    - `offered`: reads and writes checkpoints.
    - `folder`: of the run.
    - `every`: steps from one save to the next; None for one save at the end.
    - `origin`: of the batches.
    - `found`: the run that is resumed; None for a new one.
    """

    offered: Checkpoints
    folder: str
    every: int | None
    origin: Origin
    found: SavedRun | None

    def check_steps(self, steps: int) -> None:
        """Raises InputError where the run is further than the last step, number `steps`."""
        if self.found is not None and self.found.step > steps:
            raise InputError(
                f"--steps {steps} counts from the beginning, and {self.folder} is at step "
                f"{self.found.step}; give --steps {self.found.step} or more"
            )

    def first_state(self, config: Config, mesh: Mesh) -> TrainState | None:
        """The state after which training goes on; None at the beginning."""
        if self.found is None:
            return None
        ending.note(KEPT)
        with _cure(self.found):
            return self.offered.load_newest(self.found, config, mesh)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether a step is to be saved.

        - `step`: its number.
        - `steps`: the number of the last one.
        """
        return step == steps or (self.every is not None and step % self.every == 0)

    def save(self, state: TrainState) -> None:
        """Saves a step."""
        self.offered.save_step(state, self.folder, self.origin)
        ending.note(KEPT)


@contextmanager
def _cure(run: SavedRun) -> Iterator[None]:
    """Adds to an error about the newest step how to go on without it."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error}; to go on from the step before it, remove {run.newest} and use --resume again"
        ) from error
