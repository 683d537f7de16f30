"""What a training tells of its steps: on the terminal, in files, and at its end."""

import json
import time
from dataclasses import dataclass, field
from typing import TextIO

from nnx_pipeline.config.train import TrainConfig
from nnx_pipeline.lab._report.output import finite
from nnx_pipeline.train._cli.board import Board
from nnx_pipeline.train.step import Metrics


@dataclass
class Journal:
    """The steps of a training that were done, after the step `first`.

    - `config`: of the training.
    - `least_seconds`: what a step takes at the peak of the devices; None where that is not known.
    - `file`: where each step and each evaluation becomes a line of JSON; None for nowhere.
    - `board`: adds the same numbers to an event file of TensorBoard; None for nowhere.
    - `losses`: of all steps.
    - `skipped`: the numbers of the steps that were skipped.
    - `held_out`: the newest loss on the held-out text.
    """

    config: TrainConfig
    first: int
    least_seconds: float | None = None
    file: TextIO | None = None
    board: Board | None = None
    losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    held_out: float | None = None
    _began: float | None = None  # the step that is being done; the first one compiles

    @property
    def last(self) -> int:
        """The number of the newest step."""
        return self.first + len(self.losses)

    def add(self, metrics: Metrics) -> str:
        """Adds a step that has just ended; returns what is shown of it."""
        now, loss = time.monotonic(), float(metrics.loss)
        seconds = None if self._began is None else now - self._began
        self._began = now
        self.losses.append(loss)
        if metrics.skipped:
            self.skipped.append(self.last)
        tokens = self.config.global_batch * self.config.sequence_length
        rate = None if not seconds else tokens / seconds
        of_step = metrics.learning_rate
        share = self.least_seconds / seconds if seconds and self.least_seconds else None
        self._write(
            loss=loss,
            gradient_norm=float(metrics.gradient_norm),
            learning_rate=self.config.learning_rate if of_step is None else float(of_step),
            skipped=bool(metrics.skipped),
            seconds=seconds,
            tokens_per_second=rate,
            mfu=share,
        )
        speed = "" if rate is None else f", {rate:,.0f} tokens/s"
        return f"loss {loss:.4f}{speed}" + ("" if share is None else f", {share:.0%} of peak")

    def evaluated(self, loss: float | None) -> None:
        """Adds a loss on the held-out text, which is after the newest step."""
        if loss is not None:
            self.held_out = loss
            self._write(held_out_loss=loss)

    def pause(self) -> None:
        """What was done since the newest step is no part of the next one."""
        self._began = time.monotonic()

    def _write(self, **values: float | None) -> None:
        if self.file is not None:
            self.file.write(json.dumps(finite({"step": self.last, **values}), allow_nan=False))
            self.file.write("\n")
            self.file.flush()
        if self.board is not None:
            self.board(self.last, values)

    def words(self) -> str:
        if not self.losses:
            return f"at step {self.last} already, so that nothing was left to train"
        begin = f"loss {self.losses[0]:.4f} at step {self.first + 1}"
        skipped = f", and {len(self.skipped)} of its steps skipped" if self.skipped else ""
        return f"{begin}, {self.losses[-1]:.4f} at step {self.last}{skipped}"
