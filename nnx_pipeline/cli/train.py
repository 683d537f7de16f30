"""`nnx-pipeline train`: trains a model on generated sequences or on texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.cli.checkpoints import checkpoints
from nnx_pipeline.cli.options import (
    Chosen,
    Place,
    bundled,
    config_options,
    json_option,
    place_options,
)
from nnx_pipeline.cli.support import Failed, bar, compiler_errors, progress
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.lab.report import tables as report
from nnx_pipeline.ops.router import RouterMetrics
from nnx_pipeline.train.loop import Step, train
from nnx_pipeline.train.text import Texts, Windows, bigram_entropy, entropy_of, read_texts


@dataclass(frozen=True)
class Run:
    """The values of `--steps`, `--seed`, `--data` and `--checkpoint-dir`.

    - `steps`: training steps.
    - `seed`: of the initial values, and of generated sequences or of where in a text they begin.
    - `data`: text files; none for generated sequences.
    - `checkpoint_dir`: the folder to save the trained model in; None for none.
    """

    steps: int
    seed: int
    data: tuple[str, ...]
    checkpoint_dir: str | None

    def texts(self, config: Config) -> Texts | None:
        """The texts of `--data`, or None; raises InputError where they cannot be used."""
        return read_texts(self.data, config) if self.data else None


@click.command(
    "train",
    epilog="Example: nnx-pipeline train --model tiny --set model.vocab_size=256 --steps 300 "
    "--data README.md --checkpoint-dir run",
)
@config_options(None)
@place_options
@bundled(
    "run",
    Run,
    click.option("--steps", type=click.IntRange(min=1), required=True, help="Training steps."),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of the initial values and of the sequences.",
    ),
    click.option(
        "--data",
        multiple=True,
        metavar="FILE",
        help="Train on the bytes of a text file; may be repeated. A tenth of each is held out. "
        "Without it sequences are generated.",
    ),
    click.option(
        "--checkpoint-dir",
        metavar="DIR",
        help="Save the model, the optimizer's state and the config in this new folder.",
    ),
)
@json_option
def train_command(chosen: Chosen, place: Place, run: Run, json_path: str | None) -> None:
    """Train a fresh model on generated sequences that follow a rule it can learn, or on texts.

    Of a text the loss on the held-out part is given, beside that of a bigram model, which knows of
    each byte how often every other one follows it.
    """
    config = chosen.config()
    report.check_writable(json_path, "--json")
    devices = place.devices()
    config.check_mesh(place.mesh_config)
    texts = run.texts(config)
    if run.checkpoint_dir is not None:
        checkpoints().check_free(run.checkpoint_dir)
    with compiler_errors():
        grid = place.grid(devices, config)
        source = None if texts is None else Windows(texts.training, run.seed)
        steps = train(config, grid, steps=run.steps, seed=run.seed, source=source)
        losses, last = _with_bar(steps, run.steps)
    if losses[-1] != losses[-1]:  # true of NaN alone
        raise Failed(f"the loss is not a number after {run.steps} steps; lower train.learning_rate")
    held_out = None
    with progress() as say, compiler_errors():
        if texts is not None:
            say("computing the loss of the held-out text")
            held_out = _held_out(last, texts, grid)
        if run.checkpoint_dir is not None:
            say(f"saving {run.checkpoint_dir}")
            checkpoints().save_run(last.state, run.checkpoint_dir)
    line = (
        f"{chosen.model} on {place.mesh_config}: loss {losses[0]:.4f} at step 1, "
        f"{losses[-1]:.4f} at step {run.steps}"
    )
    report.show(line, json_path=json_path)
    if held_out is not None:
        report.show(
            f"held-out text: loss {held_out['loss']:.4f} in nats per byte, of a bigram model "
            f"{held_out['bigram_loss']:.4f}",
            json_path=json_path,
        )
    result = {
        "schema": 1,
        "mesh": place.mesh_config.sizes(),
        "config": to_dict(config),
        "steps": run.steps,
        "losses": losses,
        "router": _of_router(last.metrics.router) if config.model.num_experts > 1 else None,
        "held_out": held_out,
        "checkpoint": run.checkpoint_dir,
    }
    report.emit_json(json_path, result)


def _held_out(last: Step, texts: Texts, grid: Mesh) -> dict[str, Any]:
    """The loss of a model on the held-out text, and that of a bigram model, for JSON."""
    length = last.state.model.config.train.sequence_length
    return {
        "loss": entropy_of(last.state.model, texts.held_out, grid),
        "bigram_loss": bigram_entropy(texts.training, texts.held_out, length),
        "bytes": len(texts.held_out),
        "training_bytes": len(texts.training),
    }


def _with_bar(steps: Iterator[Step], number: int) -> tuple[list[float], Step]:
    """The loss of each step and the last step, with a progress bar on standard error."""
    losses: list[float] = []
    with bar("training", number, "loss –") as advance:
        for step in steps:
            losses.append(float(step.metrics.loss))
            advance(f"loss {losses[-1]:.4f}")
    return losses, step


def _of_router(router: RouterMetrics) -> dict[str, object]:
    """What the routers reported, as plain numbers."""
    return {name: np.asarray(value).tolist() for name, value in router._asdict().items()}
