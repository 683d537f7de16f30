"""What the command `train` does: it trains a model on generated sequences or on texts."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.config._overrides import parse_overrides
from nnx_pipeline.config.config import Config, to_dict
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.lab._cli.progress import bar
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Chosen
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._timing.devices import device_seen_as
from nnx_pipeline.lab.errors import InputError, counted, note
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.ops._router import RouterMetrics
from nnx_pipeline.train._cli.hosts import Hosts
from nnx_pipeline.train._cli.journal import Journal
from nnx_pipeline.train._cli.profiling import profiled
from nnx_pipeline.train._cli.saving import RESUME_NOTE, Folder, Run, Saver, Texts, way_on
from nnx_pipeline.train._held_out import bigram_of, entropy_of
from nnx_pipeline.train._saved import MOST_WEIGHT, Origin
from nnx_pipeline.train._text import Data
from nnx_pipeline.train._useful import peak_of, useful_flops
from nnx_pipeline.train.loop import Step, is_finite, largest_weight, train
from nnx_pipeline.train.processes import check_same, stopping
from nnx_pipeline.train.step import Metrics, TrainState, bytes_of_parameter


@dataclass(frozen=True)
class _Checks:
    """What must hold of a state before it is saved."""

    mesh: Mesh
    data: Data | None
    saver: Saver | None
    config: Config

    def require(self, finite: bool, what: str, at_fault: int) -> None:
        if not finite:
            way = way_on(self.saver, at_fault, self.config.train.learning_rate)
            raise Failed(f"{what}, which is nothing to go on with; {way}")

    def finite_step(self, metrics: Metrics, number: int) -> None:
        """Raises Failed for a step that leaves nothing to go on with; notes one that is skipped."""
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        what = f"the loss is {loss} at step {number} and the norm of the gradients {norm}"
        skipped = int(metrics.skipped or 0)
        if not skipped:
            self.require(math.isfinite(loss) and math.isfinite(norm), what, number - 1)
            return
        note(f"step {number} was skipped: {what}")
        most = self.config.train.max_skipped_steps
        if skipped > most:
            way = way_on(self.saver, number, self.config.train.learning_rate)
            raise Failed(
                f"{counted(skipped, 'step')} in a row were skipped up to step {number}, more than "
                f"train.max_skipped_steps={most}; {way}"
            )

    def sound(self, state: TrainState) -> None:
        """Raises Failed for weights or moments that are nothing to go on with."""
        number = int(state.step)
        with jax.set_mesh(self.mesh):
            finite, largest = bool(is_finite(state)), float(largest_weight(state.model))
        self.require(finite, f"step {number} leaves weights or moments that are not finite", number)
        what = f"step {number} leaves weights as large as {largest:.1e}"
        self.require(largest <= MOST_WEIGHT, what, number)

    def held_out_loss(self, state: TrainState) -> float | None:
        """The loss on the held-out text, None without a text; raises Failed for a bad state."""
        self.sound(state)
        if self.data is None:
            return None
        loss, number = entropy_of(state.model, self.data.held_out, self.mesh), int(state.step)
        what = f"the loss on the held-out text is {loss} after step {number}"
        self.require(math.isfinite(loss), what, number)
        return loss


@dataclass(frozen=True)
class Trained:
    """What a training came to; `held_out` and `router` are for JSON."""

    journal: Journal
    held_out: dict[str, Any] | None
    router: dict[str, object] | None


class _Ready(NamedTuple):
    """A training before its next step."""

    steps: Iterator[Step]
    checks: _Checks
    journal: Journal


@dataclass
class _Told:
    """Checks and tells of each step once it has ended, when the next one has been started: devices
    wait for nothing that is told."""

    ready: _Ready
    advance: Callable[[str], None]
    metrics: Metrics | None = None  # of the step that was started last, until it is told of

    def started(self, metrics: Metrics) -> None:
        """Takes what the next step computes, and tells of the one before it."""
        self.ended()
        self.metrics = metrics

    def ended(self) -> None:
        """Waits for the step that was started last, and tells of it."""
        metrics, self.metrics = self.metrics, None
        if metrics is not None:
            journal = self.ready.journal
            self.ready.checks.finite_step(metrics, journal.last + 1)  # which waits
            self.advance(journal.add(metrics))


def train_and_save(
    config: Config, chosen: Chosen, hosts: Hosts, run: Run, texts: Texts, folder: Folder
) -> Trained:
    """Trains and saves, up to the last step or to SIGTERM, with a progress bar on standard error.

    Raises Failed at the first step that leaves numbers with which no training can go on.
    """
    router = None
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(_ready(config, chosen, hosts, run, texts, folder))
        steps, checks, journal = ready
        traced = stack.enter_context(profiled(run.profile, journal.first, run.steps))
        saver, stops = checks.saver, None
        shown = bar("training", run.steps, "compiling", journal.first)
        advance = stack.enter_context(shown) if hosts.leads else _say_nothing
        told = _Told(ready, advance)

        def is_due(number: int) -> bool:
            return number == run.steps or (saver is not None and saver.is_due(number))

        def waits(number: int) -> bool:
            return is_due(number) or run.evaluates(number)

        for number, (state, metrics) in enumerate(steps, journal.first + 1):
            told.started(metrics)
            traced(number, metrics)
            router = metrics.router
            if stops is None and (saver is not None or hosts.joins):
                # Until here there was nothing to save, and the first step may compile for minutes.
                stops = stack.enter_context(stopping())
            is_last = stops is not None and stops(number)
            if is_last or any(map(waits, (number - 1, number, number + 1))):
                told.ended()  # so that steps beside a pause are timed alone
            if not (is_last or waits(number)):
                continue
            advance("checking", 0)
            # Who sent SIGTERM does not wait for long.
            if is_last:
                checks.sound(state)
            else:
                journal.evaluated(checks.held_out_loss(state))
            if saver is not None and (is_last or is_due(number)):
                advance("saving", 0)
                saver.save(state)
            if is_last:
                _check_saved(saver, number)
                break
            journal.pause()
        if saver is not None:
            saver.finish()
    held_out = _held_out(journal.held_out, checks.data)
    return Trained(journal, held_out, _routing(router, config))


def _say_nothing(text: str, by: int = 1) -> None: ...


def _check_saved(saver: Saver | None, number: int) -> None:
    """Notes what SIGTERM has ended; raises Failed where nothing is saved."""
    if saver is None:  # of several processes, which go on until they can agree
        raise Failed("SIGTERM came, and nothing is saved; give --checkpoint-dir DIR to go on later")
    saver.finish()
    note(f"SIGTERM came, and step {number} is saved; {RESUME_NOTE}")


@contextlib.contextmanager
def _ready(
    config: Config, chosen: Chosen, hosts: Hosts, run: Run, texts: Texts, folder: Folder
) -> Iterator[_Ready]:
    """The training, which has no steps where the last one was done before."""
    devices = hosts.devices()
    _check_memory(config, devices)
    _warn_of_no_rate(config, run.steps)
    data = texts.read(config, run)
    origin = Origin(run.seed, data.digest if data else None)
    if hosts.joins:
        _check_same(config, origin, hosts, run, folder)
    fields = parse_overrides(chosen.assignments)
    with folder.opened(config, origin, hosts.mesh_config.stage, fields) as saver, compiler_errors():
        if saver is not None:
            saver.check_steps(run.steps)
        grid = hosts.grid(devices, config.pipeline.sharding)
        checks = _Checks(grid, data, saver, config)
        state = saver.first_state(config, grid) if saver else None
        first = 0 if state is None else int(state.step)
        with run.metrics_file(first, hosts.leads) as file, run.board(first, hosts.leads) as board:
            least = _least_seconds(config, hosts.mesh_config, devices[0])
            journal = Journal(config.train, first, least, file, board)
            if state is not None and first == run.steps:
                journal.evaluated(checks.held_out_loss(state))
                yield _Ready(iter(()), checks, journal)
                return
            source = data.training if data else None
            steps = train(config, grid, steps=run.steps, seed=run.seed, source=source, state=state)
            yield _Ready(steps, checks, journal)


def _check_same(config: Config, origin: Origin, hosts: Hosts, run: Run, folder: Folder) -> None:
    """Raises InputError unless all processes train and save the same."""
    fields = {
        f"{section}.{name}": value
        for section, values in to_dict(config).items()
        for name, value in values.items()
    }
    options = {"--seed": run.seed, "--data": origin.text, "--mesh": hosts.mesh_config}
    options |= {"--steps": run.steps, "--eval-every": run.eval_every}
    options |= {"--checkpoint-dir": folder.name, "--save-every": folder.every}
    options |= {"--save-in-background": folder.in_background, "--resume": folder.resume}
    check_same({**fields, **options, "--keep": folder.keep, "--keep-every": folder.keep_every})


def _routing(router: RouterMetrics | None, config: Config) -> dict[str, object] | None:
    if router is None or config.model.num_experts == 1:
        return None
    return {name: np.asarray(value).tolist() for name, value in router._asdict().items()}


def report(trained: Trained, title: str, about: dict[str, object], json_path: str | None) -> None:
    journal, held_out = trained.journal, trained.held_out
    show(f"{title}: {journal.words()}", json_path=json_path)
    if held_out is not None and held_out["loss"] is not None:
        show(f"held-out text: loss {_in_nats(held_out)}", json_path=json_path)
    about |= {"resumed_after": journal.first, "losses": journal.losses, "skipped": journal.skipped}
    emit_json(json_path, {"schema": 1, **about, "router": trained.router, "held_out": held_out})


def _check_memory(config: Config, devices: Sequence[jax.Device]) -> None:
    """Raises InputError where the devices cannot hold the weights, their moments and the batch.

    Whether the step itself fits besides is not known before it is compiled.
    """
    parameters, train = count_parameters(config.model).total, config.train
    of_model = parameters * bytes_of_parameter(config)
    needed = of_model + 3 * 4 * train.global_batch * train.sequence_length
    own = next(device for device in devices if device.process_index == jax.process_index())
    stats = own.memory_stats() or {}
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


def _least_seconds(config: Config, mesh: MeshConfig, device: jax.Device) -> float | None:
    """The seconds of a step at the peak of the devices, without bubbles and transfers."""
    peak = peak_of(config.model, device_seen_as(device.device_kind))
    return None if peak is None else useful_flops(config, mesh) / peak


def _warn_of_no_rate(config: Config, steps: int) -> None:
    end, several = config.train.schedule_steps, config.train.accumulate_steps
    if end is not None and steps > end * several:
        of = f" times train.accumulate_steps={several}" if several > 1 else ""
        note(
            f"--steps {steps} is more than train.schedule_steps={end}{of}, after which the "
            "learning rate is 0, so that weights stay as they are"
        )


def _held_out(loss: float | None, data: Data | None) -> dict[str, Any] | None:
    """What is told of a held-out text; `tokens` has those that end documents."""
    if data is None:
        return None
    training, tokens = (
        sum(len(stream.tokens) for stream in part.streams)
        for part in (data.training, data.held_out)
    )
    size = data.held_out_bytes
    return {
        "loss": loss,
        "loss_per_byte": loss * data.held_out.targets / size if loss is not None and size else None,
        "bigram_loss": bigram_of(data.training, data.held_out) if data.tokens_are_bytes else None,
        "tokens": tokens,
        "bytes": size,
        "training_tokens": training,
    }


def _in_nats(held_out: dict[str, Any]) -> str:
    loss, per_byte, bigram = (held_out[key] for key in ("loss", "loss_per_byte", "bigram_loss"))
    if bigram is not None:  # by what it has more of tokens that are predicted than of bytes
        of_bigram = bigram * per_byte / loss
        return f"{per_byte:.4f} in nats per byte, of a bigram model {of_bigram:.4f}"
    of_bytes = "" if per_byte is None else f", {per_byte:.4f} in nats per byte"
    return f"{loss:.4f} in nats per token{of_bytes}"
