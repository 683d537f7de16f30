"""Steps that are saved while training goes on, by `--save-in-background`."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import Run, assert_close
from maxtext_data import read

from linen_compat.checkpoints.train_state import source_of
from linen_compat.formats._orbax.layouts import NNX
from linen_compat.formats._orbax.new_arrays import NewArrays
from nnx_pipeline import InputError, MeshConfig, make_mesh, preset
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.train import make_state
from nnx_pipeline.train._cli.saving import Folder, Saver, way_on
from nnx_pipeline.train._saved import Origin

SMALL = (
    *("--model", "tiny", "--set", "model.num_layers=2", "--set", "model.vocab_size=64"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=8"),
    *("--mesh", "fsdp=2", "--steps", "4", "--save-every", "1"),
)


@pytest.mark.slow(but=1)
def test_steps_are_those_of_saves_in_the_foreground(run: Run, tmp_path: Path) -> None:
    """To the bit, though their arrays are donated to the next step at once."""
    for name, options in (("one", ()), ("other", ("--save-in-background", "--keep", 2))):
        ended = run("train", *SMALL, "--checkpoint-dir", tmp_path / name, *options)
        assert ended.code == 0, ended.err
    assert {path.name for path in (tmp_path / "other").iterdir()} == {
        *("3", "4", "config.yml", "training.yml")
    }
    for step in ("3", "4"):
        found, want = (read(tmp_path / name / step / "items") for name in ("other", "one"))
        assert_close(found, want, 0.0)


def test_the_next_state_is_copied_to_the_same_memory() -> None:
    """Gigabytes are not asked for anew at each save."""
    mesh, copies = make_mesh(MeshConfig(fsdp=2)), dict[tuple[int, int], np.ndarray]()
    with jax.set_mesh(mesh):
        states = [make_state(preset("tiny"), mesh, seed=seed) for seed in (0, 1)]
    source_of(states[0], NNX, copies=copies)
    held = [*copies.values()]
    source = source_of(states[1], NNX, copies=copies)
    assert all(one is other for one, other in zip(copies.values(), held, strict=True))
    assert_close(source.read("head", None), states[1].model.head[...], 0.0)


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(arrays: NewArrays) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NewArrays, "complete", full)
    ended = run("train", *SMALL, "--checkpoint-dir", tmp_path / "run", "--save-in-background")
    assert ended.code == 1, ended.err
    assert "1 cannot be written: No space left on device; free some space" in ended.err
    assert not (tmp_path / "run").exists()


class Offered(SimpleNamespace):
    """What saves a step when it is told to."""

    def __init__(self) -> None:
        super().__init__(go=threading.Event(), fault=None, kept=[])

    def save_step(self, *about: object) -> Callable[[], None]:
        return self.write

    def write(self) -> None:
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault

    def agree(self, write: Callable[[], None]) -> None:
        write()

    def keep_steps(self, run: str, newest: int, *numbers: int | None) -> None:
        self.kept.append(newest)


@pytest.fixture
def saver() -> Iterator[Saver]:
    folder, offered = Folder("run", 1, True, False, 1, None), Offered()
    with ThreadPoolExecutor(1) as writer:
        yield Saver(offered, folder, preset("tiny"), Origin(0, None), None, None, writer)
        offered.go.set()


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(step=np.int32(step))


def test_a_step_is_the_newest_once_it_is_whole(saver: Saver) -> None:
    """Others are deleted after that alone."""
    saver.save(state(1))
    assert (saver.newest, saver.offered.kept) == (None, [])
    saver.offered.go.set()
    saver.save(state(2))
    assert (saver.newest, saver.offered.kept) == (1, [1])
    saver.finish()
    saver.finish()
    assert (saver.newest, saver.offered.kept) == (2, [1, 2])


@pytest.mark.parametrize("end", [lambda saver: saver.save(state(2)), Saver.finish])
def test_an_error_is_raised_at_the_next_save_or_at_the_end(
    end: Callable[[Saver], None], saver: Saver
) -> None:
    saver.offered.fault = InputError("the run was removed")
    saver.offered.go.set()
    saver.save(state(1))
    with pytest.raises(Failed, match="the run was removed"):
        end(saver)
    assert (saver.newest, saver.offered.kept) == (None, [])


@pytest.mark.parametrize("fault", [None, OSError("no space is left")])
def test_an_error_of_the_training_waits_for_a_save(
    fault: OSError | None, saver: Saver, recwarn: pytest.WarningsRecorder
) -> None:
    """It names the step that is then the newest, and another error is told beside it."""
    saver.offered.fault = fault
    saver.save(state(3))
    threading.Timer(0.2, saver.offered.go.set).start()
    way = way_on(saver, 4, 0.1)
    notes = [str(one.message) for one in recwarn]
    if fault is None:
        assert way.startswith("step 3 is kept: go on after it with --resume")
        assert notes == []
    else:
        assert way.startswith("begin again with a lower")
        assert notes == ["step 3 could not be saved: no space is left"]
    saver.finish()
