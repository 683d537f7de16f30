"""What the command `train` does: it trains a model on generated sequences or on texts."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.config._overrides import parse_overrides
from nnx_pipeline.config.config import Config
from nnx_pipeline.config.model import count_parameters
from nnx_pipeline.lab._cli.progress import bar
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Chosen, Place
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.train._cli.saving import Folder, Run, Saver, way_on
from nnx_pipeline.train._saved import Origin
from nnx_pipeline.train._text import Texts, Windows, bigram_entropy, entropy_of, read_texts
from nnx_pipeline.train.loop import MOST_WEIGHT, is_finite, largest_weight, train
from nnx_pipeline.train.step import Metrics, TrainState


@dataclass(frozen=True)
class Trained:
    """What a training came to, after the step `first`; `held_out` and `router` are for JSON."""

    first: int
    losses: list[float]
    held_out: dict[str, object] | None
    router: dict[str, object] | None

    def words(self) -> str:
        last = self.first + len(self.losses)
        if not self.losses:
            return f"at step {last} already, so that nothing was left to train"
        begin = f"loss {self.losses[0]:.4f} at step {self.first + 1}"
        return f"{begin}, {self.losses[-1]:.4f} at step {last}"


@dataclass(frozen=True)
class _Checks:
    """What must hold of a state before it is saved."""

    mesh: Mesh
    texts: Texts | None
    saver: Saver | None
    rate: float

    def require(self, finite: bool, what: str, at_fault: int) -> None:
        if not finite:
            way = way_on(self.saver, at_fault, self.rate)
            raise Failed(f"{what}, which is nothing to go on with; {way}")

    def finite_loss(self, metrics: Metrics, number: int) -> float:
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        what = f"the loss is {loss} at step {number} and the norm of the gradients {norm}"
        self.require(math.isfinite(loss) and math.isfinite(norm), what, number - 1)
        return loss

    def held_out_loss(self, state: TrainState) -> float | None:
        """The loss on the held-out text, None without a text; raises Failed for a bad state."""
        number = int(state.step)
        with jax.set_mesh(self.mesh):
            finite, largest = bool(is_finite(state)), float(largest_weight(state.model))
        self.require(finite, f"step {number} leaves weights or moments that are not finite", number)
        what = f"step {number} leaves weights as large as {largest:.1e}"
        self.require(largest <= MOST_WEIGHT, what, number)
        if self.texts is None:
            return None
        loss = entropy_of(state.model, self.texts.held_out, self.mesh)
        what = f"the loss on the held-out text is {loss} after step {number}"
        self.require(math.isfinite(loss), what, number)
        return loss


def train_and_save(
    config: Config, chosen: Chosen, place: Place, run: Run, folder: Folder
) -> Trained:
    """Trains and saves, with a progress bar on standard error.

    Raises Failed at the first step that leaves numbers with which no training can go on.
    """
    devices = place.devices()
    _check_memory(config, devices)
    texts = read_texts(run.data, config) if run.data else None
    origin = Origin(run.seed, texts.digest if texts else None)
    fields = parse_overrides(chosen.assignments)
    losses: list[float] = []
    router = None
    with folder.opened(config, origin, place.mesh_config.stage, fields) as saver, compiler_errors():
        if saver is not None:
            saver.check_steps(run.steps)
        grid = place.grid(devices, config.pipeline.sharding)
        checks = _Checks(grid, texts, saver, config.train.learning_rate)
        state = saver.first_state(config, grid) if saver else None
        first = 0 if state is None else int(state.step)
        if state is not None and first == run.steps:
            loss = checks.held_out_loss(state)
            return Trained(first, losses, _held_out(loss, texts, config), None)
        source = Windows(texts.training, run.seed) if texts else None
        steps = train(config, grid, steps=run.steps, seed=run.seed, source=source, state=state)
        with bar("training", run.steps, "compiling", first) as advance:
            for number, (state, metrics) in enumerate(steps, first + 1):
                losses.append(checks.finite_loss(metrics, number))
                advance(f"loss {losses[-1]:.4f}")
                router = metrics.router
                if number == run.steps or (saver is not None and saver.is_due(number)):
                    advance("checking", 0)
                    loss = checks.held_out_loss(state)
                    if saver is not None:
                        advance("saving", 0)
                        saver.save(state)
    reported = None
    if router is not None and config.model.num_experts > 1:
        reported = {name: np.asarray(value).tolist() for name, value in router._asdict().items()}
    return Trained(first, losses, _held_out(loss, texts, config), reported)


def report(trained: Trained, title: str, about: dict[str, object], json_path: str | None) -> None:
    show(f"{title}: {trained.words()}", json_path=json_path)
    held_out = trained.held_out
    if held_out is not None:
        show(
            f"held-out text: loss {held_out['loss']:.4f} in nats per byte, of a bigram model "
            f"{held_out['bigram_loss']:.4f}",
            json_path=json_path,
        )
    about |= {"resumed_after": trained.first, "losses": trained.losses}
    emit_json(json_path, {"schema": 1, **about, "router": trained.router, "held_out": held_out})


def _check_memory(config: Config, devices: Sequence[jax.Device]) -> None:
    """Raises InputError where the devices cannot hold the weights, their moments and the batch.

    Whether the step itself fits besides is not known before it is compiled.
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


def _held_out(loss: float | None, texts: Texts | None, config: Config) -> dict[str, object] | None:
    if texts is None:
        return None
    length = config.train.sequence_length
    return {
        "loss": loss,
        "bigram_loss": bigram_entropy(texts.training, texts.held_out, length),
        "bytes": len(texts.held_out),
        "training_bytes": len(texts.training),
    }
