"""What is written under another name first: several at once, killed ones, and what is not ours."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import INTERRUPTIBLE, user_environment
from huggingface_reference import FOLDER
from maxtext_data import assert_same_leaves, checkpoint, read, state_in
from safetensors.numpy import load_file

import linen_compat
from linen_compat._cli import main as cli
from linen_compat.checkpoints import _convert as convert
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.formats._new_folder import new_folder
from nnx_pipeline import InputError

HUGGINGFACE = FOLDER / "mixtral"
SOURCE = str(checkpoint("unscanned"))
# A process that says where it writes, and waits there.
WRITER = """
import sys, time
from linen_compat.formats._new_folder import new_folder
from nnx_pipeline.lab._cli.support import main_of

class Group:
    def main(self, **options):
        with new_folder(sys.argv[1]) as folder:
            (folder / "part").write_text("half")
            print(folder, flush=True)
            time.sleep(60)

main_of(Group(), "writer")()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_what_a_process_that_ended_leaves_behind_goes_away(tmp_path, sent, code):
    out = tmp_path / "run" / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + WRITER, str(out)],
        env=user_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    unfinished = process.stdout.readline().strip()
    assert (os.path.dirname(unfinished), os.path.exists(unfinished)) == (str(out.parent), True)
    with new_folder(out):  # another one at the same time leaves it alone
        assert os.path.exists(unfinished)
        process.send_signal(sent)
        errors = process.communicate(timeout=30)[1]
    assert (process.returncode, "Traceback" in errors) == (code, False)
    assert os.path.exists(unfinished) == (sent == signal.SIGKILL)
    out.rmdir()
    with new_folder(out) as folder:
        (folder / "whole").write_text("whole")
    assert names(tmp_path / "run") == ["out"]
    assert names(out) == ["whole"]


@pytest.mark.slow
def test_an_interrupted_convert_can_be_run_again(tmp_path):
    out = tmp_path / "out"
    # Every write waits, so that the signal comes in the middle.
    slow = (
        "import time\n"
        "from linen_compat._cli import main as cli\n"
        "from linen_compat.formats._orbax import new_arrays as stored\n"
        "write = stored.NewArrays.write\n"
        "def slowly(*a): time.sleep(0.05); write(*a)\n"
        "stored.NewArrays.write = slowly; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "convert", SOURCE, str(out), "--to", "maxtext:scanned"],
        env=user_environment(),
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.*/.nnx*writing")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert names(tmp_path) == []
    plan(From(SOURCE), To(out, "maxtext:scanned")).run()
    assert names(tmp_path) == ["out"]
    assert_same_leaves(read(out), state_in("scanned"))


def test_of_two_converts_at_once_one_wins_and_the_other_says_so(tmp_path, monkeypatch, capsys):
    """The second begins and ends while the first is writing."""
    out, copy = tmp_path / "out", convert.copy

    def with_another(*arguments, **options):
        monkeypatch.setattr(convert, "copy", copy)
        plan(From(SOURCE), To(out, "maxtext:scanned")).run()
        copy(*arguments, **options)

    monkeypatch.setattr(convert, "copy", with_another)
    words = ["linen-compat", "convert", SOURCE, str(out), "--to", "maxtext:unscanned"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    message = capsys.readouterr().err
    assert exit_.value.code == 1
    assert f"{out} was written by somebody else in the meantime and is left as it is" in message
    assert "choose another destination" in message
    assert names(tmp_path) == ["out"]
    assert_same_leaves(read(out), state_in("scanned"))


def test_two_at_once_do_not_share_a_folder(tmp_path):
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(new_folder(out))
        (first / "by").write_text("first")
        with new_folder(out) as second:
            assert first != second
            (second / "by").write_text("second")
        with pytest.raises(FileExistsError, match="left as it is"):
            stack.close()
    assert (out / "by").read_text() == "second"
    assert names(tmp_path) == ["out"]


def test_folders_are_readable_to_whom_the_user_lets_read(tmp_path):
    (tmp_path / "plain").mkdir()
    with new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_bears_no_mark_is_not_deleted(tmp_path, kind):
    """However much its name is like that of an unfinished folder."""
    there = tmp_path / "out.1234abcd.incomplete"
    if kind == "file":
        there.write_text("mine")
    else:
        place = tmp_path / "mine" if kind == "link" else there
        place.mkdir()
        (place / "notes").write_text("mine")
        if kind == "link":
            there.symlink_to(place)
    before = sorted(tmp_path.rglob("*"))
    with new_folder(tmp_path / "out"):
        pass
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "out"])


def test_a_destination_that_is_taken_is_refused_first(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(InputError, match="exists already"), new_folder(tmp_path / "out"):
        pass


@pytest.mark.parametrize("to", ["nnx", "huggingface"])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(tmp_path, bridge, to):
    """Whatever TensorStore raises for it, or a plain write, whose error names no file.

    Here a file may have so many bytes and no more.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        ended = bridge("convert", HUGGINGFACE, tmp_path / "out", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.code == 1
    assert f"linen-compat: {tmp_path / 'out'} cannot be written: File too large; free" in ended.err
    assert names(tmp_path) == []


def test_room_is_looked_at_before_anything_is_written(tmp_path, bridge, monkeypatch):
    tensors = load_file(HUGGINGFACE / "model.safetensors")
    needed = sum(tensor.nbytes for tensor in tensors.values())

    def free(blocks):
        found = SimpleNamespace(f_blocks=9, f_bavail=blocks, f_bfree=blocks, f_frsize=4)
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    free(needed // 4 - 1)
    ended = bridge("convert", HUGGINGFACE, tmp_path / "new" / "out", "--to", "huggingface")
    said = f"takes {needed:,} bytes, and {tmp_path} has {needed - 4:,} bytes free; free some space"
    assert (ended.code, said in ended.err, names(tmp_path)) == (2, True, [])
    model = linen_compat.load(HUGGINGFACE)
    with pytest.raises(InputError, match="bytes free"):
        linen_compat.save(model, tmp_path / "out", "huggingface")
    ended = bridge("convert", HUGGINGFACE, tmp_path / "orbax", "--to", "nnx")
    assert (ended.code, said in ended.err, names(tmp_path)) == (2, True, [])
    free(needed // 4)
    linen_compat.save(model, tmp_path / "out", "huggingface")
    assert names(tmp_path) == ["out"]


def test_a_name_that_leaves_no_room_for_the_mark_of_what_is_unfinished(tmp_path):
    for name in ("n" * 255, "é" * 127):
        with new_folder(tmp_path / name) as folder:
            assert (folder.parent, name[:100] in folder.name) == (tmp_path, True)
    assert names(tmp_path) == sorted(["n" * 255, "é" * 127])
