"""What the entry point `nnx_pipeline.checkpoints` offers to the commands of `nnx-pipeline`."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import yaml
from jax.sharding import Mesh

from linen_compat.checkpoints._named_config import read_config, stored_config
from linen_compat.checkpoints.loading import load
from linen_compat.checkpoints.saving import begin_orbax, layout_for
from linen_compat.checkpoints.train_state import load_train_state, source_of
from linen_compat.formats import _intact as checksums
from linen_compat.formats import _run_files as runs
from linen_compat.formats._in_memory import Copies
from linen_compat.formats._names import ORBAX, check_names, check_one_kind
from linen_compat.formats._orbax.inspect import find_items
from linen_compat.formats._orbax.layouts import NNX
from linen_compat.formats._processes import agree, check_in_all, from_first
from linen_compat.formats._run_files import ORIGIN, RUN_CONFIG, with_checksum
from linen_compat.formats._streams import Mismatch
from linen_compat.maxtext._values import load_yaml
from linen_compat.maxtext.config import config_from_yaml, mesh_from_yaml
from nnx_pipeline import Config, InputError
from nnx_pipeline.lab._files import place, read_regular
from nnx_pipeline.lab.errors import unparsed
from nnx_pipeline.train import TrainState
from nnx_pipeline.train._saved import Origin, SavedRun

__all__ = [
    "agree",
    "begin",
    "check_savable",
    "claimed",
    "config_from_yaml",
    "keep_steps",
    "load",
    "load_newest",
    "mesh_from_yaml",
    "read_config",
    "save_step",
    "saved_run",
    "stored_config",
]

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without


def check_savable(config: Config) -> None:
    """Raises InputError unless `save_step` has a name for every parameter of a model."""
    check_names(config.model)
    check_one_kind(config.model, ORBAX)


@contextlib.contextmanager
def claimed(run: str | Path) -> Iterator[None]:
    """Keeps the folder of a run to this process, or of several to process 0."""
    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(runs.claimed(run)) or "")
        yield


def begin(folder: str | Path, config: Config, origin: Origin) -> None:
    """Writes what a `claimed` run has beside its steps; where it has steps, its origin stays."""
    run = place(folder)

    def write() -> str:
        runs.write(run / RUN_CONFIG, with_checksum(dataclasses.asdict(config)))
        if not runs.has_steps(run):  # it is locked, and so cannot be replaced as a whole
            (run / ORIGIN).write_text(with_checksum(dataclasses.asdict(origin)), encoding="utf-8")
        return ""

    from_first(write)


def save_step(
    state: TrainState,
    folder: str | Path,
    config: Config,
    origin: Origin,
    copies: Copies | None = None,
) -> Callable[[], None]:
    """Begins to save a training state, in the format `nnx`, as a new step of a run.

    What is returned does it. With `copies` the state may change before it does, and they may be
    given again once it has. All processes must call it, and end it by `agree`.
    """
    run = place(folder)

    def check() -> str:
        runs.check_claim(run)
        if (_config(run), _origin(run)) != (config, origin):
            raise Mismatch(
                f"{run} holds another training now: its {RUN_CONFIG} or {ORIGIN} is not what this "
                "one has written there; choose another folder"
            )
        return ""

    from_first(check)
    source, layout = source_of(state, NNX, copies=copies), layout_for(state.model, NNX, None, None)
    # As MaxText's. The step gets its name only when it is complete.
    return begin_orbax(source, layout, [run / str(int(state.step)), "items"])


def keep_steps(folder: str | Path, newest: int, most: int, every: int | None) -> None:
    """Deletes steps of a run; see `runs.keep_steps`."""

    def delete() -> str:
        runs.keep_steps(folder, newest, most, every)
        return ""

    from_first(delete)


def saved_run(folder: str | Path) -> SavedRun | None:
    """The run that `save_step` has saved in a folder; None where there is no saved step of one.

    Raises Mismatch where one of several processes sees another one than process 0.
    """
    if not jax.distributed.is_initialized():  # such as one that watches another, without devices
        return _saved_run(folder)
    found: list[SavedRun | None] = []

    def find() -> str:
        found.append(_saved_run(folder))
        return _described(found[0])

    told = from_first(find)
    with contextlib.suppress(ValueError, OSError):  # which process 0 does not see
        found = found or [_saved_run(folder)]
    check_in_all(
        bool(found) and _described(found[0]) == told,
        lambda number: (
            f"{folder} is not to process {number} what it is to process 0; choose a folder on a "
            "file system that all processes share"
        ),
    )
    return found[0]


def _described(run: SavedRun | None) -> str:
    about = None if run is None else (run.newest.name, run.config, run.origin)
    return checksums.of_bytes(repr(about).encode())


def _saved_run(folder: str | Path) -> SavedRun | None:
    run = place(folder)
    if not str(folder) or not runs.has_steps(run):
        return None
    return SavedRun(find_items(run, resuming=True).parent, _config(run), _origin(run))


def _config(run: Path) -> Config:
    return read_config(str(run / RUN_CONFIG))


def _origin(run: Path) -> Origin:
    file = run / ORIGIN
    runs.check_checksum(file)
    try:
        values = load_yaml(read_regular(file))
        if not isinstance(values, dict) or not values.keys() == {"seed", "text"}:
            raise ValueError("it has not the two keys seed and text")
        return Origin(**values)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"{file} cannot be read, so that training cannot go on with the same batches: "
            f"{unparsed(error, cure='begin another run')}"
        ) from error


def load_newest(run: SavedRun, config: Config, mesh: Mesh) -> TrainState:
    """The state of the newest step of a run; mesh and pipeline may be other ones now."""
    return load_train_state(run.newest, config, mesh=mesh)
