"""The options of `nnx-pipeline train`, and how it saves its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._files import MOST_TEXT, place
from nnx_pipeline.lab.errors import InputError, note
from nnx_pipeline.train._cli.board import Board, board
from nnx_pipeline.train._cli.checkpoints import Checkpoints, checkpoints
from nnx_pipeline.train._saved import RATE, Origin, SavedRun

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nnx_pipeline.train._cli.checkpoints import Copies
    from nnx_pipeline.train._text import Data
    from nnx_pipeline.train.step import TrainState

RESUME_NOTE = "saved steps are kept; the same command with --resume goes on after the newest"


@dataclass(frozen=True)
class Run:
    """The values of `--steps`, `--seed`, `--eval-every`, and of the options of where numbers go."""

    steps: int
    seed: int
    eval_every: int | None
    metrics: str | None
    tensorboard: str | None
    profile: str | None

    def evaluates(self, step: int) -> bool:
        """Whether the loss on the held-out text is asked for after a step."""
        return self.eval_every is not None and step % self.eval_every == 0

    @contextmanager
    def metrics_file(self, first: int, leads: bool) -> Iterator[TextIO | None]:
        """The file of `--metrics`, which a training that goes on after `first` adds to, in the
        process that leads."""
        if self.metrics is None or not leads:
            yield None
            return
        with open(self.metrics, "a" if first else "w", encoding="utf-8") as file:
            yield file

    def board(self, first: int, leads: bool) -> AbstractContextManager[Board | None]:
        """What adds to the event file of `--tensorboard`, in the process that leads."""
        return board(self.tensorboard if leads else None, first)


@dataclass(frozen=True)
class Texts:
    """The values of `--data`, `--tokenizer` and `--end-token`."""

    files: tuple[str, ...]
    tokenizer: str | None
    end_token: str | None

    def read(self, config: Config, run: Run) -> Data | None:
        """What is trained on; None for generated sequences."""
        options: dict[str, object] = {"--tokenizer": self.tokenizer, "--end-token": self.end_token}
        options["--eval-every"] = run.eval_every
        needless = [name for name, value in options.items() if value is not None]
        if not self.files and needless:
            raise InputError(
                f"{needless[0]} is about texts, and sequences are generated; give a text by --data"
            )
        if not self.files:
            return None
        from nnx_pipeline.lab._cli.progress import progress
        from nnx_pipeline.train._text import read_data

        end, slow = self._end(), any(map(_takes_long, self.files))
        with progress() if slow else nullcontext() as begin:
            if begin is not None:
                begin(f"reading {', '.join(self.files)}")
            return read_data(
                self.files, config, seed=run.seed, tokenizer=self.tokenizer, end_token=end
            )

    def _end(self) -> int | Literal["none"] | None:
        said = self.end_token
        if said is None or said == "none":
            return None if said is None else "none"
        if not said.isdecimal() or len(said) > 10:
            raise InputError(f"--end-token {said!r} is no token id; give a whole number or none")
        return int(said)


def _takes_long(file: str) -> bool:
    """Whether a text, if it is one, is read for more than a moment."""
    return os.path.isfile(file) and 2**22 < os.path.getsize(file) <= MOST_TEXT


@dataclass(frozen=True)
class Folder:
    """The values of `--checkpoint-dir`, `--resume`, and of the options of what is saved when."""

    name: str | None
    every: int | None
    in_background: bool
    resume: bool
    keep: int | None
    keep_every: int | None

    @contextmanager
    def opened(
        self, config: Config, origin: Origin, stages: int, fields: Container[str]
    ) -> Iterator[Saver | None]:
        """What saves the steps of a training; None where nothing is to be saved.

        `fields` are the fields of the config that the user has set. Within the context no other
        process can train in the folder.
        """
        if self.keep_every is not None and self.keep is None:
            raise InputError(
                f"--keep-every {self.keep_every} is about steps that --keep would remove; give "
                "--keep N too, or leave it out, and all steps are kept"
            )
        if self.name is None:
            for flag, value in (
                ("--resume", self.resume),
                ("--save-every", self.every),
                ("--save-in-background", self.in_background),
                ("--keep", self.keep),
            ):
                if value:
                    raise InputError(f"{flag} needs a folder; give it with --checkpoint-dir DIR")
            yield None
            return
        offered = checkpoints()
        offered.check_savable(config)
        if self.resume and offered.saved_run(self.name) is None:
            raise InputError(f"--resume: {self._nothing()}")
        with offered.claimed(self.name):
            saved = offered.saved_run(self.name)  # no other process changes it from here on
            if saved is not None and not self.resume:
                raise InputError(
                    f"{self.name} holds a run up to step {saved.step} already; add --resume to go "
                    "on with it, or choose a new folder"
                )
            if saved is None:
                offered.begin(self.name, config, origin)
                newest = None
            else:
                config, newest = saved.to_go_on(config, origin, stages, fields), saved.step
            with ThreadPoolExecutor(1) as writer:
                saver = Saver(offered, self, config, origin, saved, newest, writer)
                try:
                    yield saver
                finally:
                    saver.settle()

    def _nothing(self) -> str:
        """What is wrong with a folder that is to be resumed and holds no saved step of a run."""
        folder = place(self.name or "")
        if (folder / "training.yml").is_file():
            what = "holds no saved step"
        elif self.name and folder.is_dir() and any(folder.iterdir()):
            return (
                f"{folder} is not a run of nnx-pipeline train, which has a training.yml beside its "
                "steps; give the --checkpoint-dir of one"
            )
        else:
            what = "is empty" if self.name and folder.is_dir() else "does not exist"
        return (
            f"{self.name or 'the folder'} {what}, so that there is nothing to resume; leave "
            "--resume out to begin"
        )


@dataclass
class Saver:
    """Saves steps of a training.

    `config` is what the run has beside its steps, `saved` the run that is resumed, if any, and
    `newest` the number of the newest saved step, if any. `writer` saves in the background.
    """

    offered: Checkpoints
    folder: Folder
    config: Config
    origin: Origin
    saved: SavedRun | None
    newest: int | None
    writer: Executor
    _copies: Copies = field(default_factory=dict)  # of the state that is saved in the background
    _begun: tuple[int, Callable[[], None]] | None = None  # a step, and what ends its save

    @property
    def run(self) -> str:
        """The name of the folder, which `Folder.opened` has asked for."""
        return self.folder.name or ""

    def check_steps(self, steps: int) -> None:
        if self.saved is not None and self.saved.step > steps:
            raise InputError(
                f"--steps {steps} counts from the beginning, and {self.run} is at step "
                f"{self.saved.step}; give --steps {self.saved.step} or more"
            )

    def first_state(self, config: Config, mesh: Mesh) -> TrainState | None:
        """The state after which training goes on; None at the beginning."""
        if self.saved is None:
            return None
        ending.add_note(RESUME_NOTE)
        try:
            return self.offered.load_newest(self.saved, config, mesh)
        except InputError as error:
            raise InputError(
                f"{error}; to go on from the step before it, remove {self.saved.newest} and use "
                "--resume again"
            ) from error

    def is_due(self, step: int) -> bool:
        """Whether a step that is not the last is to be saved."""
        every = self.folder.every
        return every is not None and step % every == 0

    def save(self, state: TrainState) -> None:
        """Saves a state, or begins to, when the save before has ended.

        Raises Failed where a step cannot be saved.
        """
        self.finish()
        later = self.folder.in_background
        try:
            if self.saved is not None and self.newest == self.saved.step:
                self.offered.begin(self.run, self.config, self.origin)
            copies = self._copies if later else None
            write = self.offered.save_step(state, self.run, self.config, self.origin, copies)
        except InputError as error:
            raise Failed(str(error)) from error
        self._begun = int(state.step), self.writer.submit(write).result if later else write
        if not later:
            self.finish()

    def finish(self) -> None:
        """Waits for the save that is under way, if any; raises Failed where it has failed."""
        if self._begun is None:
            return
        (step, write), self._begun = self._begun, None
        try:
            self.offered.agree(write)
            keep, every = self.folder.keep, self.folder.keep_every
            if keep is not None:  # once the new step is whole
                self.offered.keep_steps(self.run, step, keep, every)
        except InputError as error:
            raise Failed(str(error)) from error
        self._is_whole(step)

    def settle(self) -> None:
        """Waits as `finish` does, where an error ends the training: it notes another error, and
        asks no other process, which may not have come here."""
        if self._begun is None:
            return
        (step, write), self._begun = self._begun, None
        try:
            write()
        except Exception as error:
            note(f"step {step} could not be saved: {error}")
        else:
            self._is_whole(step)

    def _is_whole(self, step: int) -> None:
        self.newest = step
        ending.add_note(RESUME_NOTE)


def way_on(saver: Saver | None, at_fault: int, rate: float) -> str:
    """How to go on where the step `at_fault` has left numbers that are not finite or too large."""
    if at_fault == 0:
        return "no learning rate is to blame, as nothing was trained: choose another model.dtype"
    if saver is not None:
        saver.settle()
    lower = f"--set {RATE}=… (it is {rate})"
    newest = None if saver is None else saver.newest
    if saver is None or newest is None:
        return f"begin again with a lower {lower}"
    folder = place(saver.run)
    if newest < at_fault:
        return f"step {newest} is kept: go on after it with --resume and a lower {lower}"
    if any(path.name.isdecimal() and int(path.name) < newest for path in folder.iterdir()):
        return f"remove {folder / str(newest)}, and go on with --resume and a lower {lower}"
    return f"remove {folder}, and begin again with a lower {lower}"
