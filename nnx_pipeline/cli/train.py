"""`nnx-pipeline train`: trains a model on generated sequences or on texts."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.cli.options import (
    Chosen,
    Place,
    bundled,
    config_options,
    json_option,
    place_options,
)
from nnx_pipeline.cli.saving import Folder, Saver, way_on
from nnx_pipeline.cli.support import Failed, bar, compiler_errors
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.config.counts import count_parameters
from nnx_pipeline.config.overrides import parse_overrides
from nnx_pipeline.errors import InputError, counted
from nnx_pipeline.lab.report.output import check_writable, emit_json, show
from nnx_pipeline.ops.router import RouterMetrics
from nnx_pipeline.train.loop import MOST_WEIGHT, is_finite, largest_weight, train
from nnx_pipeline.train.saved import Origin
from nnx_pipeline.train.step import TrainState
from nnx_pipeline.train.text import Texts, Windows, bigram_entropy, entropy_of, read_texts


@dataclass(frozen=True)
class Run:
    """The values of `--steps`, `--seed` and `--data`.

    - `steps`: the number of the last training step.
    - `seed`: of the initial values, and of generated sequences or of where in a text they begin.
    - `data`: text files; none for generated sequences.
    """

    steps: int
    seed: int
    data: tuple[str, ...]

    def texts(self, config: Config) -> Texts | None:
        """The texts of `--data`, or None; raises InputError where they cannot be used."""
        return read_texts(self.data, config) if self.data else None


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    - `first`: how many steps were done before it began.
    - `losses`: of the steps that it did.
    - `held_out`: the loss on the held-out text at its end; None without a text.
    - `router`: what the routers reported at the last step; None where no step was left to do.
    """

    first: int
    losses: list[float]
    held_out: float | None
    router: RouterMetrics | None

    def words(self) -> str:
        """The losses of the first and of the last step."""
        last = self.first + len(self.losses)
        if not self.losses:
            return f"at step {last} already, so that nothing was left to train"
        begin = f"loss {self.losses[0]:.4f} at step {self.first + 1}"
        return f"{begin}, {self.losses[-1]:.4f} at step {last}"


@click.command(
    "train",
    short_help="Train a model, and go on after a stop.",
    epilog="Example: nnx-pipeline train --model tiny --set model.vocab_size=256 --steps 300 "
    "--data README.md --checkpoint-dir run --save-every 100",
)
@config_options(None)
@place_options
@bundled(
    "run",
    Run,
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        required=True,
        help="Training steps, counted from the beginning also with --resume.",
    ),
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
        help="Train on the bytes of a text file; may be repeated. The last tenth of each is held "
        "out. Without it sequences are generated.",
    ),
)
@bundled(
    "folder",
    Folder,
    click.option(
        "--checkpoint-dir",
        "name",
        metavar="DIR",
        help="Save the model, the optimizer's state, the step and the config in this new folder.",
    ),
    click.option(
        "--save-every",
        "every",
        type=click.IntRange(min=1),
        metavar="N",
        help="Save every N steps, and not at the end alone.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on after the newest step in --checkpoint-dir. The mesh, options of the pipeline "
        "and --set train.learning_rate may be others than before.",
    ),
)
@json_option
def train_command(
    chosen: Chosen, place: Place, run: Run, folder: Folder, json_path: str | None
) -> None:
    """Train a model on generated sequences that follow a rule it can learn, or on texts.

    Of a text the loss on the held-out part is given, beside that of a bigram model, which knows of
    each byte how often every other one follows it.
    """
    config = chosen.config()
    check_writable(json_path, "--json")
    devices = place.devices()
    config.check_mesh(place.mesh_config)
    _check_memory(config, devices)
    texts = run.texts(config)
    origin = Origin(run.seed, texts.digest if texts else None)
    asked = parse_overrides(chosen.assignments)
    with folder.opened(config, origin, place.mesh_config.stage, asked) as saver:
        if saver is not None:
            saver.check_steps(run.steps)
        with compiler_errors():
            grid = place.grid(devices, config)
            trained = _trained(config, grid, run, texts, saver)
    held_out = _held_out(trained, texts, config)
    line = f"{chosen.model} on {place.mesh_config}: {trained.words()}"
    show(line, json_path=json_path)
    if held_out is not None:
        show(
            f"held-out text: loss {held_out['loss']:.4f} in nats per byte, of a bigram model "
            f"{held_out['bigram_loss']:.4f}",
            json_path=json_path,
        )
    result = {
        "schema": 1,
        "mesh": place.mesh_config.sizes(),
        "config": to_dict(config),
        "steps": run.steps,
        "resumed_after": trained.first,
        "losses": trained.losses,
        "router": _of_router(trained.router) if config.model.num_experts > 1 else None,
        "held_out": held_out,
        "checkpoint": folder.name,
    }
    emit_json(json_path, result)


def _check_memory(config: Config, devices: Sequence[Any]) -> None:
    """Raises InputError where the devices together cannot hold what a training step is given.

    These are the weights, the two moments of each, and the batch. Whether the step itself fits
    besides is not known before it is compiled.
    """
    parameters, train = count_parameters(config.model).total, config.train
    of_model = 3 * parameters * jnp.dtype(config.model.param_dtype).itemsize
    needed = of_model + 3 * 4 * train.global_batch * train.sequence_length
    stats = devices[0].memory_stats() or {}
    memory = stats.get("bytes_limit", 0) * len(devices)
    if devices[0].platform == "cpu":  # of each process, for all its devices
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = of_host * len({device.process_index for device in devices})
    if memory and needed > memory:
        raise InputError(
            f"a model of {parameters:,} parameters with its moments and a batch of "
            f"{train.global_batch:,} × {train.sequence_length:,} tokens take "
            f"{needed / 1e9:,.1f} GB or more, and {counted(len(devices), 'device')} of the mesh "
            f"{'has' if len(devices) == 1 else 'have'} {memory / 1e9:,.1f} GB; choose a smaller "
            "model or batch, or a mesh of more devices"
        )


def _trained(
    config: Config, grid: Mesh, run: Run, texts: Texts | None, saver: Saver | None
) -> Trained:
    """Trains and saves, with a progress bar on standard error.

    Raises Failed at the first step that leaves numbers with which no training can go on, before
    they are saved.
    """

    def require(finite: bool, what: str, at_fault: int) -> None:
        if not finite:
            way = way_on(saver, at_fault, config.train.learning_rate)
            raise Failed(f"{what}, which is nothing to go on with; {way}")

    def checked(state: TrainState) -> float | None:
        """The loss on the held-out text of a state that is to be kept; None without a text."""
        number = int(state.step)
        with jax.set_mesh(grid):
            finite, largest = bool(is_finite(state)), float(largest_weight(state.model))
        require(finite, f"step {number} leaves weights or moments that are not finite", number)
        what = f"step {number} leaves weights as large as {largest:.1e}"
        require(largest <= MOST_WEIGHT, what, number)
        if texts is None:
            return None
        loss = entropy_of(state.model, texts.held_out, grid)
        what = f"the loss on the held-out text is {loss} after step {number}"
        require(math.isfinite(loss), what, number)
        return loss

    state = saver.first_state(config, grid) if saver else None
    first = 0 if state is None else int(state.step)
    if state is not None and first == run.steps:
        return Trained(first, [], checked(state), None)
    source = Windows(texts.training, run.seed) if texts else None
    steps = train(config, grid, steps=run.steps, seed=run.seed, source=source, state=state)
    losses: list[float] = []
    with bar("training", run.steps, "compiling", first) as advance:
        for number, (state, metrics) in enumerate(steps, first + 1):
            loss, norm = float(metrics.loss), float(metrics.gradient_norm)
            what = f"the loss is {loss} at step {number} and the norm of the gradients {norm}"
            require(math.isfinite(loss) and math.isfinite(norm), what, number - 1)
            losses.append(loss)
            advance(f"loss {loss:.4f}")
            if number == run.steps or (saver is not None and saver.is_due(number)):
                advance("checking", 0)
                held_out = checked(state)
                if saver is not None:
                    advance("saving", 0)
                    saver.save(state)
    return Trained(first, losses, held_out, metrics.router)


def _held_out(trained: Trained, texts: Texts | None, config: Config) -> dict[str, Any] | None:
    """The loss of the model on the held-out text, and that of a bigram model, for JSON."""
    if texts is None:
        return None
    length = config.train.sequence_length
    return {
        "loss": trained.held_out,
        "bigram_loss": bigram_entropy(texts.training, texts.held_out, length),
        "bytes": len(texts.held_out),
        "training_bytes": len(texts.training),
    }


def _of_router(router: RouterMetrics | None) -> dict[str, object] | None:
    """What the routers reported, as plain numbers."""
    if router is None:
        return None
    return {name: np.asarray(value).tolist() for name, value in router._asdict().items()}
