"""Training that goes on after a saved step: with the same losses, or not at all."""

import contextlib
import dataclasses
import random
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import (
    LONGEST,
    ROOT,
    Run,
    arrays_by_path,
    assert_close,
    mesh_of,
    optax_promotion,
    replace,
    script,
    small_config,
    started,
)
from maxtext_data import read

import linen_compat
from linen_compat.checkpoints import _offered as offered
from nnx_pipeline import Config, InputError
from nnx_pipeline.lab._cli.progress import bar
from nnx_pipeline.train import TrainState, learnable_batches, make_state, train
from nnx_pipeline.train._saved import Origin, SavedRun

sys.path.insert(0, str(ROOT / "benchmarks"))
import kill_train

# With dropout, so that random numbers count, and gradients that are clipped from the beginning.
SMALL = (
    *("--model", "tiny", "--set", "model.num_layers=4", "--set", "model.vocab_size=256"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=8"),
    *("--set", "model.dropout_rate=0.2", "--set", "train.loss_chunks=2"),
)


@pytest.fixture(autouse=True)
def own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this checkout, whatever the environment has installed."""
    monkeypatch.setattr("nnx_pipeline.train._cli.saving.checkpoints", lambda: offered)


def losses_of(run: Run, *arguments: object) -> list[float]:
    ended = run("train", *SMALL, *arguments, "--json", "-")
    assert ended.code == 0, ended.err
    return ended.json["losses"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh", "options", "tolerance"),
    [
        ("stage=2,fsdp=2", (), 0.0),
        ("", (), 1e-5),
        ("stage=4,tensor=2", ("pipeline.schedule=1f1b", "pipeline.num_microbatches=4"), 1e-5),
        ("data=2,stage=2,tensor=2", ("train.shard_optimizer_over_data=true",), 1e-5),
        ("stage=2", ("pipeline.num_repeats=2", "pipeline.sharding=auto"), 1e-5),
    ],
)
def test_the_losses_after_a_resume_are_those_without_a_stop(
    mesh: str, options: tuple[str, ...], tolerance: float, run: Run, tmp_path: Path
) -> None:
    """To the last digit, and so is every array; on other meshes and in other layouts to rounding.

    The losses on another mesh are compared with those of the whole training, which has the same
    model and the same batches, and not with those of a resume. The vocabulary splits over no mesh.
    """
    (tmp_path / "text").write_text("".join(map(chr, range(32, 127))) * 20)
    data, whole = ("--data", tmp_path / "text"), tmp_path / "whole"
    data = (*data, "--set", "model.vocab_size=257")
    pipelined = ("--mesh", "stage=2,fsdp=2", *data, "--steps", 5)
    losses = losses_of(run, *pipelined, "--checkpoint-dir", whole, "--save-every", 2)
    assert sorted(path.name for path in whole.iterdir()) == [
        *("2", "4", "5", "config.yml", "training.yml")
    ]
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for step in ("4", "5"):
        shutil.rmtree(part / step)
    settings = [word for option in options for word in ("--set", option)]
    place = ("--mesh", mesh, *settings, *data, "--steps", 5)
    found = losses_of(run, *place, "--checkpoint-dir", part, "--resume")
    assert found == pytest.approx(losses[2:], rel=0, abs=tolerance)
    if not tolerance:
        assert_close(read(part / "5" / "items"), read(whole / "5" / "items"), 0.0)


CONFIG = small_config(model={"num_layers": 2})


def save(folder: Path, config: Config, *states: TrainState) -> None:
    """Saves states as steps of a run, as `nnx-pipeline train` does."""
    with offered.claimed(folder):
        offered.begin(folder, config, Origin(0, None))
        for state in states:
            offered.save_step(state, folder, config, Origin(0, None))()


def test_a_run_is_loaded_with_its_own_config(tmp_path: Path) -> None:
    """From the run, from a step and from its items, without being told what it is a model of."""
    mesh = mesh_of("fsdp=2")
    with jax.set_mesh(mesh):
        state = make_state(CONFIG, mesh)
    save(tmp_path / "run", CONFIG, state)
    step = Path(str(int(state.step)))
    for place in (".", step, step / "items"):
        loaded = linen_compat.load(tmp_path / "run" / place)
        assert loaded.config == CONFIG
        assert_close(arrays_by_path(loaded), arrays_by_path(state.model), 0.0)
    (tmp_path / "run" / "config.yml").unlink()
    with pytest.raises(InputError, match="does not hold the config of its model; give one"):
        linen_compat.load(tmp_path / "run")


SETTINGS = (
    *("--model", "tiny"),
    *(
        word
        for section in ("model", "train")
        for name, value in vars(getattr(CONFIG, section)).items()
        for word in ("--set", f"{section}.{name}={value}")
    ),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at step 0 and step 3, neither of which was trained."""
    folder, mesh = tmp_path_factory.mktemp("run") / "run", mesh_of("")
    with jax.set_mesh(mesh), optax_promotion():
        state = make_state(CONFIG, mesh)
    for step in (0, 3):
        counted = jax.tree.map(
            lambda leaf, step=step: np.asarray(step, leaf.dtype) if leaf.dtype == "int32" else leaf,
            state,
        )
        save(folder, CONFIG, counted)
    return folder


def test_what_is_loaded_is_what_was_saved(saved: Path) -> None:
    """On another mesh with other stages, and for Orbax's own manager too."""
    found = offered.saved_run(saved)
    assert (found.step, found.config, found.origin) == (3, CONFIG, Origin(0, None))
    with optax_promotion():
        state = offered.load_newest(found, CONFIG, mesh_of("stage=2,fsdp=2"))
        with jax.set_mesh(mesh_of("")):
            made = make_state(CONFIG, mesh_of(""))
    assert int(state.step) == 3
    want = {k: np.asarray(v).reshape(-1) for k, v in arrays_by_path(made.model).items()}
    assert_close(
        {k: np.asarray(v).reshape(-1) for k, v in arrays_by_path(state.model).items()}, want, 0.0
    )
    handlers = {"items": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(saved, item_handlers=handlers) as manager:
        assert manager.latest_step() == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume", "--checkpoint-dir", "none"), "none does not exist, so that there is nothing"),
        (("--resume", "--checkpoint-dir", "empty"), "empty is empty, so that there is nothing"),
        (("--resume", "--checkpoint-dir", "."), ". is not a run of nnx-pipeline train"),
        (("--resume", "--checkpoint-dir", "run/3"), "run/3 is not a run of nnx-pipeline train"),
        (("--resume",), "--resume needs a folder; give it with --checkpoint-dir DIR"),
        (("--save-every", "2"), "--save-every needs a folder"),
        (("--checkpoint-dir", "run"), "run holds a run up to step 3 already; add --resume"),
        (
            ("--resume", "--checkpoint-dir", "run", "--set", "model.mlp_dim=32"),
            "model.mlp_dim=32, but the run in HERE/run has 16; give the --model and --set",
        ),
        (
            (
                *("--resume", "--checkpoint-dir", "run", "--set", "train.weight_decay=1"),
                *("--set", "model.mlp_dim=8"),
            ),
            "has 16 (1 more of its fields differ)",
        ),
        (("--resume", "--checkpoint-dir", "run", "--seed", "1"), "began with 0, and its batches"),
        (("--resume", "--checkpoint-dir", "run", "--steps", "2"), "give --steps 3 or more"),
        (
            ("--resume", "--checkpoint-dir", "damaged"),
            "from the step before it, remove HERE/damaged/3",
        ),
        (("--resume", "--checkpoint-dir", "unread"), "training.yml cannot be read"),
        (
            ("--resume", "--checkpoint-dir", "no_step"),
            "holds no saved step, so that there is nothing",
        ),
    ],
)
def test_what_cannot_be_resumed(
    run: Run,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    """One line, before any work, and nothing in the folder changes."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "damaged", "unread", "no_step"):
        shutil.copytree(saved, name)
    Path("empty").mkdir()
    # On a busy machine the arrays are in two files, and what ends the first one is read no more.
    for damaged in Path("damaged/3/items").glob("d/*"):
        damaged.write_bytes(damaged.read_bytes()[:-50])
    Path("unread/training.yml").write_text("seed: [")
    for step in ("0", "3"):
        shutil.rmtree(f"no_step/{step}")
    before = sorted(tmp_path.rglob("*"))
    ended = run("train", *SETTINGS, "--steps", "5", *options)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert message.replace("HERE", str(tmp_path)) in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [("--resume",), ()])
def test_a_folder_that_may_not_be_written(
    run: Run, saved: Path, tmp_path: Path, request: Any, options: tuple[str, ...]
) -> None:
    """Refused before anything is compiled, on each way in: a run, and an empty folder."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder) if options else folder.mkdir()
    for place in (*folder.rglob("*"), folder):
        place.chmod(0o555 if place.is_dir() else 0o666)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):  # the latter of pytest-xdist
            parent.chmod(0o755)
    tmp_path.chmod(0o777)
    request.getfixturevalue("as_nobody")
    ended = run("train", *SETTINGS, "--steps", "5", "--checkpoint-dir", folder, *options)
    assert ended.code == 2, ended.err
    assert ended.err == (
        f"nnx-pipeline: {folder} cannot be written: Permission denied; choose another folder, or "
        "change its permissions\n"
    )


@pytest.mark.slow
def test_no_flipped_bit_and_no_cut_makes_another_run(saved: Path, tmp_path: Path) -> None:
    """Each bit of both files beside the steps, and each length: an error, or what was there.

    The config is read as that of the run, and as a file that `--config` names.
    """
    shutil.copytree(saved, tmp_path / "run")
    want, refused = offered.saved_run(tmp_path / "run"), 0
    named = tmp_path / "run" / "config.yml"
    for name in ("config.yml", "training.yml"):
        file = tmp_path / "run" / name
        whole = file.read_bytes()
        flips = (
            whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            for at in range(len(whole))
            for bit in range(8)
        )
        for changed in (*flips, *(whole[:length] for length in range(len(whole)))):
            file.write_bytes(changed)
            try:
                assert offered.saved_run(tmp_path / "run") == want, changed
            except InputError:
                refused += 1
            if file == named:
                with contextlib.suppress(InputError):
                    assert offered.read_config(str(named)) == want.config, changed
        file.write_bytes(whole)
    assert refused > 10_000
    assert offered.saved_run(tmp_path / "run") == want


def test_a_damaged_config_that_a_command_names(saved: Path, tmp_path: Path, bridge: Run) -> None:
    """Where it stands, and copied elsewhere; without the checksum it is what its user says."""
    text = (saved / "config.yml").read_text()
    changed = text.replace("norm_epsilon: 1.0e-05", "norm_epsilon: 1.0e-04")
    assert changed != text, text
    file = tmp_path / "config.yml"
    file.write_text(changed)
    commands = (("check", saved), ("convert", saved, tmp_path / "out", "--to", "nnx"))
    for command in commands:
        ended = bridge(*command, "--config", file)
        assert (ended.code, ended.out) == (1, ""), ended.err
        assert f"{file} does not match the checksum in its first line" in ended.err
    file.write_text(changed.split("\n", 1)[1])
    for command in commands:
        assert bridge(*command, "--config", file).code == 0


def test_a_step_in_the_folder_of_another_number(saved: Path, tmp_path: Path, run: Run) -> None:
    """It is the newest one by its name alone: neither training nor the model alone takes it."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "0", folder / "7")
    message = f"{folder}/7 holds step 0 of a run, and not step 7: it was renamed or copied"
    with pytest.raises(InputError, match=message):
        linen_compat.load(folder)
    ended = run("train", *SETTINGS, "--steps", 9, "--checkpoint-dir", folder, "--resume")
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert f"remove {folder}/7 and use --resume again" in ended.err
    shutil.rmtree(folder / "7")
    assert run("train", *SETTINGS, "--steps", 3, "--checkpoint-dir", folder, "--resume").code == 0


@pytest.mark.parametrize("only", [False, True])
def test_the_cure_for_a_newest_step_that_is_empty(
    saved: Path, tmp_path: Path, run: Run, only: bool
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "7").mkdir()
    for step in ("0", "3") if only else ():
        shutil.rmtree(folder / step)
    words = ("train", *SETTINGS, "--steps", 4, "--checkpoint-dir", folder)
    ended = run(*words, "--resume")
    cure = f"remove {folder}/7, and {'begin again' if only else 'go on with --resume'}\n"
    assert (ended.code, cure in ended.err) == (2, True), ended.err
    (folder / "7").rmdir()
    ended = run(*words, *() if only else ("--resume",))
    assert ended.code == 0, ended.err


def test_a_run_that_has_become_another_one_is_not_added_to(saved: Path, tmp_path: Path) -> None:
    folder, mesh = tmp_path / "run", mesh_of("")
    shutil.copytree(saved, folder)
    with jax.set_mesh(mesh), optax_promotion():
        state = dataclasses.replace(make_state(CONFIG, mesh), step=np.int32(4))
    other = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, adam_b1=0.5))
    for config, origin in ((CONFIG, Origin(1, None)), (other, Origin(0, None))):
        with pytest.raises(InputError, match=f"{folder} holds another training now: its config"):
            offered.save_step(state, folder, config, origin)()
    assert steps_in(folder) == [0, 3]


def test_a_folder_that_is_replaced_while_it_is_claimed(saved: Path, tmp_path: Path) -> None:
    """By a copy, which another process may claim: this one neither saves nor deletes in it."""
    folder, mesh = tmp_path / "run", mesh_of("")
    with jax.set_mesh(mesh), optax_promotion():
        state = dataclasses.replace(make_state(CONFIG, mesh), step=np.int32(4))
    words = f"{folder} is not the folder of this training any more"
    for steps in (True, False):
        shutil.copytree(saved, folder)
        if not steps:
            for step in ("0", "3"):
                shutil.rmtree(folder / step)
        with offered.claimed(folder):
            folder.rename(tmp_path / "old")
            for there in (False, True):
                if there:
                    shutil.copytree(tmp_path / "old", folder)
                with pytest.raises(InputError, match=words):
                    offered.save_step(state, folder, CONFIG, Origin(0, None))()
        before = {path.name for path in (tmp_path / "old").iterdir()}
        assert {path.name for path in folder.iterdir()} == before
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "old")


def test_where_no_folder_can_be_made() -> None:
    """In a file system that says of each that it is not there: no endless try."""
    no = pytest.raises(InputError, match="/proc/run cannot be written: No such file or directory")
    with no, offered.claimed("/proc/run"):
        pass


def test_what_a_killed_process_left_is_removed(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    before = sorted(folder.iterdir())
    (folder / "4.0123abcd.incomplete").mkdir()
    (folder / "4.0123abcd.incomplete" / ".nnx-pipeline-is-writing").touch()
    (folder / ".nnx-pipeline.k2j4").write_text("half of config.yml")
    with offered.claimed(folder):
        assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("field", "text", "matters"),
    [
        ("load_balance_weight", None, True),
        ("router_z_loss_weight", "a digest", True),
        ("router_z_loss_weight", None, False),
        ("weight_decay", "a digest", False),
    ],
)
def test_whether_the_number_of_microbatches_must_stay(
    tmp_path: Path, field: str, text: str | None, matters: bool
) -> None:
    config, other = (
        replace(replace(CONFIG, "train", **{field: 0.1}), "pipeline", num_microbatches=number)
        for number in (2, 4)
    )
    run = SavedRun(tmp_path / "run" / "3", config, Origin(0, text))
    assert run.to_go_on(config, Origin(0, text), stages=2) == config
    refused = pytest.raises(
        InputError, match=f"num_microbatches=4, but .* has 2, and train.{field}"
    )
    with refused if matters else contextlib.nullcontext():
        run.to_go_on(other, Origin(0, text), stages=2)


def test_steps_that_are_kept(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    for step in (4, 5, 10):
        shutil.copytree(folder / "3", folder / str(step))
    (folder / "1").mkdir()  # of the user, as these are
    (folder / "20261129").mkdir()
    (folder / "99").write_text("")
    (folder / "98").symlink_to("3")
    of_user = [98, 99, 20261129]

    def steps() -> list[int]:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())

    offered.keep_steps(folder, 10, 4, None)
    assert steps() == [1, 3, 4, 5, 10, *of_user]
    offered.keep_steps(folder, 5, 1, None)
    assert steps() == [1, 5, 10, *of_user], "what is newer than what was saved stays"
    shutil.copytree(folder / "5", folder / "4")
    offered.keep_steps(folder, 10, 1, 4)
    assert steps() == [1, 4, 10, *of_user]
    before = sorted(folder.iterdir())

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        offered.keep_steps(folder, 10, 1, None)
    monkeypatch.undo()
    assert steps() == [1, 10, *of_user]
    assert len(list(folder.iterdir())) == len(before)
    with offered.claimed(folder):
        assert sorted(folder.iterdir()) == [path for path in before if path.name != "4"]


@pytest.mark.parametrize("text", ["", "a", "seed: 0", "seed: 0\ntext: null\nother: 1"])
def test_an_origin_of_other_keys(saved: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    (folder / "training.yml").write_text(text)
    with pytest.raises(
        InputError, match="it has not the two keys seed and text; begin another run"
    ):
        offered.saved_run(folder)


def test_a_folder_is_one_training_s(saved: Path, tmp_path: Path, run: Run) -> None:
    """From the first moment on; what a killed process left without a step is free."""
    folder = tmp_path / "new" / "run"
    words = ("train", *SETTINGS, "--steps", 3, "--checkpoint-dir", folder)
    with offered.claimed(folder):
        offered.begin(folder, CONFIG, Origin(0, None))
        ended = run(*words)
        assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
        assert f"another process is training in {folder}; wait until it has ended" in ended.err
        assert sorted(path.name for path in folder.iterdir()) == ["config.yml", "training.yml"]
    assert list(tmp_path.iterdir()) == []
    shutil.copytree(saved, folder)
    with offered.claimed(folder):
        ended = run(*words, "--resume")
        assert (ended.code, "another process is training in" in ended.err) == (2, True), ended.err
    for step in (0, 3):
        shutil.rmtree(folder / str(step))
    with offered.claimed(folder):
        offered.begin(folder, CONFIG, Origin(5, None))
        shutil.copytree(saved / "3", folder / "3")
    assert offered.saved_run(folder).origin == Origin(5, None)


@pytest.mark.parametrize(
    "files",
    [
        {"training.yml": "lr: 3", "config.yml": "mine: 1"},
        {"training.yml": "", "config.yml": "mine: 1"},
        {"training.yml": "", "notes.txt": ""},
    ],
)
def test_files_of_the_user_are_not_replaced(tmp_path: Path, files: dict[str, str]) -> None:
    """Though a run has files of these names."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    taken = pytest.raises(InputError, match="exists already; choose a new folder or remove it")
    with taken, offered.claimed(tmp_path):
        offered.begin(tmp_path, CONFIG, Origin(0, None))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (None, "a", "--data is given, but .* on generated sequences; leave it out"),
        ("a", "b", "--data is another text than that on which"),
        ("a", None, "--data is missing: there is a text on which"),
        ("a", "a", None),
    ],
)
def test_the_text_is_the_same(
    saved: Path, was: str | None, now: str | None, message: str | None
) -> None:
    found = offered.saved_run(saved)
    run = dataclasses.replace(found, origin=Origin(0, was))
    if message is None:
        run.to_go_on(CONFIG, Origin(0, now), 1)
        return
    with pytest.raises(InputError, match=message):
        run.to_go_on(CONFIG, Origin(0, now), 1)


def test_batches_go_on_where_they_stopped() -> None:
    whole, part = (learnable_batches(CONFIG, mesh_of(""), first=first) for first in (0, 2))
    next(whole), next(whole)
    for _ in range(2):
        assert_close(next(part), next(whole), 0.0)


def test_progress_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 0.0, 5.0, 41.0, 41.0, 41.0, 42.0, 3700.0, 3700.0)).__next__
    monkeypatch.setattr("nnx_pipeline.lab._cli.progress.time.monotonic", clock)
    with bar("training", 5, "compiling", done=1) as advance:
        for loss in (3.0, 2.5, 2.25, 2.125):
            advance(f"loss {loss}")
    assert capsys.readouterr().err.splitlines() == [
        "training: 1 of 5, 0:00, compiling",
        "training: 3 of 5, 0:41, 0:41 left, loss 2.5",
        "training: 5 of 5, 1:01:40, loss 2.125",
    ]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir())


@pytest.mark.slow
def test_what_is_not_finite_is_not_saved_and_the_cure_works(run: Run, tmp_path: Path) -> None:
    """The state after the update, the loss of a text, the gradients: whichever is first."""
    folder = tmp_path / "run"
    to = ("--checkpoint-dir", folder, "--save-every", 1)
    new = ("train", *SETTINGS, *to, "--steps", 4)

    def rate(value: str) -> tuple[str, str]:
        return ("--set", f"train.learning_rate={value}")

    # Weights of 1e5, whose gradients in float16 are not finite: the only saved step has to go.
    ended = run(*new, *rate("1e5"), "--set", "model.dtype=float16")
    assert (ended.code, steps_in(folder)) == (1, [1])
    cure = f"remove {folder}, and begin again with a lower --set train.learning_rate=… (it is 10000"
    assert cure in ended.err.splitlines()[-1]
    shutil.rmtree(folder)
    # Weights that are finite after the last update, and too large for another one.
    for value in ("1e8", "1e30"):
        ended = run(*new, *rate(value), "--steps", 1)
        assert (ended.code, list(tmp_path.iterdir()), ended.out) == (1, [], "")
        line = ended.err.splitlines()[-1]
        assert (
            f"step 1 leaves weights as large as {1.3 * float(value):.1e}, which is nothing" in line
        )
    # Weights that are infinite after the first update: nothing is left.
    ended = run(*new, *rate("3e38"))
    assert (ended.code, list(tmp_path.iterdir())) == (1, [])
    line = ended.err.splitlines()[-1]
    assert "step 1 leaves weights or moments that are not finite" in line
    assert "begin again with a lower --set train.learning_rate=… (it is 3e+38)" in line
    # The same after two good steps: they stay, and training goes on from them.
    assert run(*new, "--steps", 2).code == 0
    on = (*new, "--resume")
    ended = run(*on, *rate("3e38"))
    assert (ended.code, steps_in(folder)) == (1, [1, 2])
    assert "step 2 is kept: go on after it with --resume and a lower" in ended.err.splitlines()[-1]
    at = on.index("train.learning_rate=0.0003")
    ended = run(*on[: at - 1], *on[at + 1 :])  # so that it is the preset's, which nobody asked for
    said = f"learning_rate=0.003, but the run in {folder} has 0.0003; give the --model and --set"
    assert (ended.code, said in ended.err) == (2, True), ended.err
    ended = run(*on, *rate("1e-2"), "--json", "-")
    assert (ended.code, steps_in(folder)) == (0, [1, 2, 3, 4]), ended.err
    assert offered.saved_run(folder).config.train.learning_rate == 1e-2
    # As in Python, where the state of step 2 goes on with that rate.
    mesh = mesh_of("")
    config = dataclasses.replace(
        CONFIG, train=dataclasses.replace(CONFIG.train, learning_rate=1e-2)
    )
    with optax_promotion():
        state = linen_compat.load_train_state(folder / "2", config, mesh=mesh)
        want = [float(step.metrics.loss) for step in train(config, mesh, steps=4, state=state)]
    assert ended.json["losses"] == want


@pytest.mark.slow
def test_parameters_in_float16(run: Run, tmp_path: Path) -> None:
    """No learning rate helps; what the line names does, and so does a number that is not zero."""
    folder = tmp_path / "run"
    words = ("train", *SETTINGS, "--steps", 2, "--set", "model.param_dtype=float16")
    ended = run(*words, "--checkpoint-dir", folder)
    assert (ended.code, folder.exists(), ended.out) == (2, False, "")
    assert "train.adam_eps=1e-08 is zero in model.param_dtype='float16'" in ended.err
    assert ended.err.rstrip().endswith("set model.param_dtype=float32")
    for cure in ("model.param_dtype=float32", "train.adam_eps=1e-4"):
        assert run(*words, "--set", cure).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("eps", ["0", "1e-40"])
def test_an_epsilon_that_is_zero_in_float32(run: Run, stored: str, eps: str) -> None:
    """As 1e-40 is to XLA. No dtype helps; what the line names does."""
    words = ("train", *SETTINGS, "--steps", 2, "--set", f"model.param_dtype={stored}")
    ended = run(*words, "--set", f"train.adam_eps={eps}")
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert f"train.adam_eps={float(eps):g} is zero in model.param_dtype={stored!r}" in ended.err
    cure = re.search(r"; set train.adam_eps to a larger number, such as (\S+)\n", ended.err)
    assert cure, ended.err
    ended = run(*words, "--set", f"train.adam_eps={cure[1]}", "--json", "-")
    assert (ended.code, np.isfinite(ended.json["losses"]).all()) == (0, True), ended.err


@pytest.mark.slow
def test_a_held_out_loss_that_is_not_a_number(run: Run, tmp_path: Path) -> None:
    """Of finite weights: without the text nothing would show before the next step."""
    (tmp_path / "text").write_text("".join(map(chr, range(32, 127))) * 20)
    data = ("--data", tmp_path / "text", "--set", "train.learning_rate=1e5")
    rest = ("--steps", 1, "--set", "model.dtype=float16")
    ended = run("train", *SMALL, *data, *rest, "--checkpoint-dir", tmp_path / "run")
    assert (ended.code, ended.out) == (1, ""), ended.err
    assert "the loss on the held-out text is nan after step 1" in ended.err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.slow
def test_the_page_shows_what_the_commands_print(run: Run, tmp_path: Path) -> None:
    """Its commands run one after the other; losses may differ a little with the compiler."""
    text = (ROOT / "docs" / "train.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(\$ nnx-pipeline train.*?)```", text, re.DOTALL)
    lines = shown.splitlines()
    for command, printed in zip(lines[::2], lines[1::2], strict=True):
        _, _, *arguments = shlex.split(command)
        ended = run(*[str(tmp_path / "run") if word == "run" else word for word in arguments])
        assert ended.code == 0, ended.err
        number = r"[\d.]{6,}"
        assert re.sub(number, "N", ended.out) == re.sub(number, "N", printed) + "\n"
        found, want = (list(map(float, re.findall(number, one))) for one in (ended.out, printed))
        assert found == pytest.approx(want, abs=0.02)
    table = text.partition("| in `run` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    files = {word for cell in named for word in re.findall(r"`([^`]+)`", cell)} - {"run"}
    assert files == {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
def test_training_that_is_interrupted_keeps_whole_steps(tmp_path: Path) -> None:
    """SIGINT in the middle of saves: one line, exit code 130, and every step there is whole."""
    code = f"""
from nnx_pipeline.train._cli import saving
from linen_compat.checkpoints import _offered as offered
from linen_compat.formats._orbax import new_arrays as stored
import sys
real, calls = stored.NewArrays.write, []
def write(self, *arguments):
    calls.append(arguments)
    if len(calls) in (1, 200):
        print("writing", len(calls), file=sys.stderr, flush=True)
        if len(calls) == 200:
            import time; time.sleep(60)
    real(self, *arguments)
stored.NewArrays.write = write
saving.checkpoints = lambda: offered
{script("nnx_pipeline")}"""
    options = (*SETTINGS, "--steps", "1000000", "--checkpoint-dir", "run", "--save-every", "1")
    with started(tmp_path, code, "train", *options) as process:
        for line in process.stderr:
            if line == "writing 200\n":
                break
        assert list((tmp_path / "run").glob("*.incomplete"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    assert err.splitlines()[-1].endswith(
        "interrupted; no unfinished file is left; saved steps are kept; the same command with "
        "--resume goes on after the newest"
    )
    steps = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert all(name.isdecimal() for name in steps)
    assert offered.saved_run(tmp_path / "run").step == int(steps[-1])


@pytest.mark.slow
def test_training_that_is_killed(tmp_path: Path) -> None:
    """`benchmarks/kill_train.py` with a few kills: it checks losses, arrays and what is lost."""
    tally = kill_train.kill_again_and_again(tmp_path, kills=3, steps=6, seed=1)
    assert tally.killed == 3
    assert tally.runs >= 1
    assert tally.losses >= 6


def started_in(folder: Path, seed: int, name: str, *more: str) -> Any:
    """A process that trains in a folder, and says in `name.txt` beside it what it has to say."""
    words = (*kill_train.MODEL, "--steps", "4", "--save-every", "1", "--seed", str(seed), *more)
    arguments = [*words, "--checkpoint-dir", str(folder)]
    here, pipe = kill_train.METHOD.Pipe(duplex=False)
    target, beside = kill_train.train, folder.with_name(name)
    process = kill_train.METHOD.Process(target=target, args=(arguments, pipe, beside))
    process.start()
    process.told = here  # stays open, as the process writes to it
    return process


@pytest.mark.slow
def test_two_trainings_in_one_folder(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Interleavings of two trainings with other seeds; of every third the first one is killed.

    20 of them with `--draws 10`.

    Each folder has one training alone, as it is without the other one; that goes on if it was
    killed, and the other is told so. A killed one that has saved nothing leaves the folder free.
    """
    draw, alone, longest = random.Random(0), {}, 0.0
    for seed in (1, 2):
        task = kill_train.Task(tmp_path / f"alone{seed}", 4, 1)
        for _ in range(2):  # what is compiled by the first is read by the second
            shutil.rmtree(task.folder, ignore_errors=True)
            began = time.monotonic()
            process = started_in(task.folder, seed, f"said{seed}")
            process.join(kill_train.LONGEST)
            assert process.exitcode == 0, (tmp_path / f"said{seed}.txt").read_text()
            longest = time.monotonic() - began
        alone[seed] = task.saved()
    for number in range(2 * request.config.getoption("--draws")):
        task = kill_train.Task(tmp_path / f"run{number}", 4, 1)
        first = started_in(task.folder, 1, "first")
        time.sleep(draw.uniform(0.0, 1.2 * longest) if number % 2 else draw.uniform(0.0, 0.3))
        second = started_in(task.folder, 2, "second")
        if number % 3 == 2:
            time.sleep(draw.uniform(0.0, longest))
            first.kill()
        for process, name in ((first, "first"), (second, "second")):
            process.join(kill_train.LONGEST)
            said = (tmp_path / f"{name}.txt").read_text() if process.exitcode > 0 else ""
            assert process.exitcode in (0, 2, -9), said
            if process.exitcode == 2:
                assert re.search("another process is training in|holds a run up to step", said)
        if first.exitcode != -9:
            assert {first.exitcode, second.exitcode} == {0, 2}
        found = offered.saved_run(task.folder)
        seed = found.origin.seed if found else 2
        if not found or found.step < 4:
            more = ("--resume",) if found else ()
            again = started_in(task.folder, seed, "again", *more)
            again.join(kill_train.LONGEST)
            assert again.exitcode == 0, (tmp_path / "again.txt").read_text()
        saved = task.saved()
        assert saved.keys() == alone[seed].keys() == {1, 2, 3, 4}
        for step, leaves in saved.items():
            for name, leaf in leaves.items():
                np.testing.assert_array_equal(leaf, alone[seed][step][name], f"{number}: {name}")
        assert sorted(path.name for path in task.folder.iterdir()) == [
            *("1", "2", "3", "4", "config.yml", "training.yml")
        ]
