"""`nnx-pipeline train`: what it resumes, what it tells of its steps, and how it ends."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import LONGEST, Run, assert_close, missing, script, started
from maxtext_data import read

from linen_compat.checkpoints import _offered as offered
from nnx_pipeline.train._cli import training
from nnx_pipeline.train._cli.journal import Journal

SMALL = (
    *("--model", "tiny", "--set", "model.num_layers=4", "--set", "model.vocab_size=256"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=8"),
    *("--set", "model.dropout_rate=0.2", "--set", "train.loss_chunks=2"),
)


@pytest.fixture(autouse=True)
def own_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this checkout, whatever the environment has installed."""
    monkeypatch.setattr("nnx_pipeline.train._cli.saving.checkpoints", lambda: offered)


def test_a_step_is_told_of_when_the_next_one_was_started(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But beside a save each for itself, so that it is timed alone."""
    done, train, add = list[str](), training.train, Journal.add

    def steps(*given: Any, **options: Any) -> Iterator[Any]:
        for step in train(*given, **options):
            done.append("started")
            yield step

    def told(journal: Journal, metrics: Any) -> str:
        done.append("told")
        return add(journal, metrics)

    monkeypatch.setattr(training, "train", steps)
    monkeypatch.setattr(Journal, "add", told)
    saves = ("--checkpoint-dir", tmp_path / "run", "--save-every", 5)
    assert run("train", *SMALL, "--steps", 6, *saves).code == 0
    by_step = " ".join(done).replace(" started", "; started")
    assert by_step == (
        "started told; started; started told; started told told; started told; started told"
    )


def given(**fields: object) -> list[str]:
    return [word for name, value in fields.items() for word in ("--set", f"train.{name}={value}")]


SCHEDULE = given(learning_rate_decay="cosine", schedule_steps=6, warmup_steps=2)
BFLOAT16 = ("--set", "model.param_dtype=bfloat16")
GUARD = given(max_skipped_steps=9, spike_factor=0.1, spike_interval=4)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "options",
    [
        [*SCHEDULE, *GUARD],
        [*SCHEDULE, *given(accumulate_steps=2)],
        [*GUARD, *given(accumulate_steps=2, master_dtype="float32"), *BFLOAT16],
        [*given(master_dtype="float32"), *BFLOAT16],
    ],
    ids=str,
)
def test_a_resume_in_the_middle(options: list[str], run: Run, tmp_path: Path) -> None:
    """Losses, skipped steps, and every array as without a stop, to the bit."""
    words = ("train", *SMALL, "--mesh", "stage=2,fsdp=2", *options, "--steps", 8, "--json", "-")
    whole, part = tmp_path / "whole", tmp_path / "part"
    ended = run(*words, "--checkpoint-dir", whole, "--save-every", 5)
    assert ended.code == 0, ended.err
    shutil.copytree(whole, part)
    shutil.rmtree(part / "8")
    again = run(*words, "--checkpoint-dir", part, "--resume")
    assert again.code == 0, again.err
    assert again.json["losses"] == ended.json["losses"][5:]
    assert again.json["skipped"] == [step for step in ended.json["skipped"] if step > 5]
    assert_close(read(part / "8" / "items"), read(whole / "8" / "items"), 0.0)
    if "train.max_skipped_steps=9" in options:
        assert min(ended.json["skipped"]) < 5
        assert "was skipped: the loss is" in ended.err


@pytest.mark.slow
def test_what_may_change_about_the_guard(run: Run, tmp_path: Path) -> None:
    """A run without one goes on with one, with other spikes, and not without it again."""
    words = ("train", *SMALL, "--checkpoint-dir", tmp_path / "run", "--steps")
    assert run(*words, 1).code == 0
    assert run(*words, 4, "--resume", *GUARD).code == 0
    other = given(max_skipped_steps=9, spike_factor=0.5, spike_interval=6)
    assert run(*words, 5, "--resume", *other).code == 0
    ended = run(*words, 6, "--resume", *given(max_skipped_steps=0))
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "train.max_skipped_steps=0, but the run in" in ended.err
    assert offered.saved_run(tmp_path / "run").config.train.spike_interval == 6


@pytest.mark.slow
def test_too_many_skipped_steps_end_the_training(run: Run, tmp_path: Path) -> None:
    """Weights of 1e5 in float16, whose loss is never a number again."""
    folder = tmp_path / "run"
    options = given(learning_rate="1e5", max_skipped_steps=2)
    words = ("train", *SMALL, "--set", "model.dtype=float16", *options, "--steps", 9)
    ended = run(*words, "--checkpoint-dir", folder, "--save-every", 1)
    assert (ended.code, ended.out) == (1, ""), ended.err
    assert "step 2 was skipped: the loss is" in ended.err
    line = ended.err.splitlines()[-1]
    assert "3 steps in a row were skipped up to step 4, more than train.max_skipped_steps=2" in line
    assert "step 3 is kept: go on after it with --resume and a lower --set train.learn" in line


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow(but=1)
def test_evaluation_and_metrics(run: Run, tmp_path: Path) -> None:
    """Each step and each evaluation is a line; a resume adds to them."""
    (tmp_path / "text").write_text("".join(map(chr, range(32, 127))) * 20)
    file = tmp_path / "metrics.jsonl"
    words = ("train", *SMALL, "--data", tmp_path / "text", *SCHEDULE, "--metrics", file)
    words = (*words, "--eval-every", 2, "--checkpoint-dir", tmp_path / "run")
    words = (*words, "--save-every", 2, "--keep", 1, "--keep-every", 4)
    first = run(*words, "--steps", 3, "--json", "-", "--profile", f"2..3:{tmp_path / 'trace'}")
    assert first.code == 0, first.err
    lines = lines_of(file)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["loss"] for line in steps] == first.json["losses"]
    assert [line["learning_rate"] for line in steps] == pytest.approx([0, 1.5e-3, 3e-3], rel=1e-6)
    assert steps[0]["tokens_per_second"] is None  # it compiled
    assert steps[1]["tokens_per_second"] == pytest.approx(8 * 16 / steps[1]["seconds"])
    held_out = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(held_out) == [2, 3]
    assert held_out[3] == first.json["held_out"]["loss"]
    again = run(*words, "--steps", 6, "--resume")
    assert again.code == 0, again.err
    assert lines_of(file)[: len(lines)] == lines
    assert [line["step"] for line in lines_of(file) if "held_out_loss" in line] == [2, 3, 4, 6]
    kept = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert kept == {"4", "6"}
    (trace,) = (tmp_path / "trace").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    note = run(*words, "--steps", 7, "--resume")
    assert "--steps 7 is more than train.schedule_steps=6, after which the learning" in note.err


def scalars_of(file: Path, tag: str) -> list[Any]:
    """Those of a file, or of all in a folder, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return events.Scalars(tag) if tag in events.Tags()["scalars"] else []


@pytest.mark.skipif(missing("tensorboardX", "tensorboard"), reason="an extra is not installed")
def test_event_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the numbers of the JSON lines; a resume adds a file, which hides lost steps."""
    monkeypatch.setattr("nnx_pipeline.train._cli.training._least_seconds", lambda *_: 1e-6)
    (tmp_path / "text").write_text("".join(map(chr, range(32, 127))) * 20)
    file, folder, saved = tmp_path / "lines", tmp_path / "logs" / "one", tmp_path / "run"
    words = ("train", *SMALL, "--data", tmp_path / "text", *SCHEDULE, "--metrics", file)
    words = (*words, "--tensorboard", folder, "--checkpoint-dir", saved, "--save-every", 2)
    began = time.time()
    ended = run(*words, "--steps", 3)
    assert ended.code == 0, ended.err
    (first,) = folder.iterdir()
    lines = lines_of(file)
    tags = {tag for line in lines for tag in line} - {"step"}
    assert len(tags) == 8, "skipped and held_out_loss among them"
    for tag in tags:
        want = [(line["step"], line[tag]) for line in lines if line.get(tag) is not None]
        found = scalars_of(first, tag)
        assert [one.step for one in found] == [step for step, _ in want]
        assert np.array_equal([one.value for one in found], np.float32([one for _, one in want]))
        assert len(found) >= 2, tag
        times = [began, *(one.wall_time for one in found), time.time()]
        assert times == sorted(times)
    shutil.rmtree(saved / "3")
    again = run(*words, "--steps", 4, "--resume")
    assert again.code == 0, again.err
    (second,) = set(folder.iterdir()) - {first}
    assert [one.step for one in scalars_of(second, "loss")] == [3, 4]
    whole = scalars_of(folder, "loss")
    assert [one.step for one in whole] == [1, 2, 3, 4]
    assert whole[2:] == scalars_of(second, "loss")


def test_event_files_without_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboardX", "tensorboardX.event_file_writer"):
        monkeypatch.setitem(sys.modules, name, None)
    asked = ("--tensorboard", tmp_path / "logs", "--checkpoint-dir", tmp_path / "run")
    ended = run("train", *SMALL, "--steps", 1, *asked)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert f"--tensorboard {tmp_path / 'logs'} needs tensorboardX (" in ended.err
    assert "pip install 'nnx-pipeline[tensorboard]'" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(missing("tensorboardX"), reason="the extra tensorboard is not installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "file cannot be written; choose a writable folder"),
        ("file/logs", "file/logs cannot be written; choose a writable folder"),
        ("closed/logs", "closed/logs cannot be written; choose a writable folder"),
        ("", "--tensorboard '' cannot be written; choose a writable folder"),
        ("gs://bucket/logs", "gs://bucket/logs is an address, and only files and folders of this"),
        ("/proc/x", "--tensorboard /proc/x cannot be written: No such file or directory; choose"),
        ("n" * 999, "is a longer name than the file system allows; give a shorter one"),
    ],
)
def test_folders_of_event_files_that_cannot_be(
    name: str, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("closed").mkdir(mode=0o500)
    if name.startswith("closed"):  # whoever runs the tests may write everywhere
        monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    ended = run("train", *SMALL, "--steps", 1, "--tensorboard", name, "--checkpoint-dir", "run")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert message in ended.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--eval-every", 2), "--eval-every is about texts, and sequences are generated; give a"),
        (("--metrics", "no/such/file"), "--metrics no/such/file cannot be written; choose a file"),
        (("--profile", "1..2:trace"), "--profile 1..2:trace: steps 1 to 1 are trained now; give"),
        (("--profile", "1..1:/proc/x"), "--profile 1..1:/proc/x cannot be written: No such file"),
        (("--profile", "1..1:/dev/null/x"), "/dev/null/x cannot be written; choose a writable fo"),
        (("--profile", "2"), "--profile '2' is not of the form FIRST..LAST:DIR; write"),
        (("--keep", 2), "--keep needs a folder; give it with --checkpoint-dir DIR"),
        (("--keep-every", 2), "--keep-every 2 is about steps that --keep would remove"),
        (("--metrics", "-"), "--metrics -: only JSON goes to standard output; name a file"),
    ],
)
def test_options_that_cannot_be(options: tuple[Any, ...], message: str, run: Run) -> None:
    ended = run("train", *SMALL, "--steps", 1, *options)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert message in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm(tmp_path: Path, signals: int) -> None:
    """The step is finished and saved, and the exit code is 0; a second one does not wait."""
    code = f"""
import sys, time
from linen_compat.checkpoints import _offered as offered
from nnx_pipeline.train._cli import saving
real = offered.save_step
def save(*arguments, **options):
    print("saving", file=sys.stderr, flush=True)
    if {signals} == 2:
        time.sleep(60)
    return real(*arguments, **options)
offered.save_step = save
saving.checkpoints = lambda: offered
{script("nnx_pipeline")}"""
    options = (*SMALL, "--steps", "1000000", "--checkpoint-dir", "run", "--metrics", "lines")
    with started(tmp_path, code, "train", *options) as process:
        while not (tmp_path / "lines").is_file() or not (tmp_path / "lines").read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            for line in process.stderr:
                if line == "saving\n":
                    break
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LONGEST)
    newest = lines_of(tmp_path / "lines")[-1]["step"]
    if signals == 1:
        assert process.returncode == 0, err
        assert f"SIGTERM came, and step {newest} is saved" in err
        assert f"at step {newest}\n" in out
        assert offered.saved_run(tmp_path / "run").step == newest
    else:
        assert process.returncode == 143, err
        assert not (tmp_path / "run").exists()
