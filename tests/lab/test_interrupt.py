"""Commands that are told to end: the exit code, one line, and no file or process left behind."""

import contextlib
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import LONGEST, Run, script, started
from maxtext_data import checkpoint

from nnx_pipeline.lab import _ending as ending

TINY = ("--model", "tiny", "--mesh", "stage=4,fsdp=2", "--set", "train.sequence_length=16")
CLEARED = "interrupted; no unfinished file is left"
KEPT = f"{CLEARED}; finished measurements are kept; run the same command again to continue"


def wait_for(process: subprocess.Popen, moment: str) -> None:
    """Reads standard error up to the line that has these words."""
    said = ""
    for line in process.stderr:
        said += line
        if moment in line:
            return
    pytest.fail(f"{moment!r} did not come: {said}")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "moment", "line"),
    [
        (("compile", *TINY, "--json", "x.json"), "compiling for", CLEARED),
        (("compile", *TINY), "reading the compiled", CLEARED),
        (("lint", *TINY), "tracing", CLEARED),
        (("ab", *TINY, "--sweep", "train.global_batch=16,32"), "compiling for", KEPT),
    ],
)
def test_a_command_in_the_middle(
    tmp_path: Path, arguments: tuple[str, ...], moment: str, line: str
) -> None:
    with started(tmp_path, script("nnx_pipeline"), *arguments) as process:
        wait_for(process, moment)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"nnx-pipeline: {line}"
    assert "Traceback" not in err
    assert (out, files(tmp_path)) == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0])
def test_training_in_its_first_compile(tmp_path: Path, seconds: float) -> None:
    """The bar stands at 0 until the first step has been compiled and run."""
    terminal, end = pty.openpty()
    arguments = ("train", *TINY, "--steps", "1000000", "--json", "x.json")
    with started(tmp_path, script("nnx_pipeline"), *arguments, stderr=end, stdin=end) as process:
        os.close(end)
        shown = b""
        while b"compiling" not in shown:
            shown += os.read(terminal, 1000)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        shown = b""
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while got := os.read(terminal, 1000):
                shown += got
        process.wait(timeout=LONGEST)
    os.close(terminal)
    assert process.returncode == 130
    # It takes the place of the bar, and the cursor is shown again.
    assert shown.decode().endswith(f"\r\x1b[2K\x1b[?25hnnx-pipeline: {CLEARED}\r\n")
    assert b"Traceback" not in shown
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("nnx_pipeline", ("lint", "tiny")), ("linen_compat", ("overhead",))],
)
def test_while_everything_is_imported(
    tmp_path: Path, package: str, arguments: tuple[str, ...]
) -> None:
    """The handler is there first: importing JAX takes a second or more."""
    code = (
        "import builtins, sys; real = builtins.__import__\n"
        "def spy(name, *rest, **more):\n"
        "    if name == 'jax': print('importing', file=sys.stderr, flush=True)\n"
        "    return real(name, *rest, **more)\n"
        f"builtins.__import__ = spy\n{script(package)}"
    )
    with started(tmp_path, code, *arguments) as process:
        wait_for(process, "importing")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == f"{package.replace('_', '-')}: {CLEARED}"
    assert "Traceback" not in err


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("arguments", "moment"),
    [
        (("overhead", "--layers", "2"), ""),
        (("convert", str(checkpoint("unscanned")), "out", "--to", "maxtext:scanned"), "writing"),
        (("check", str(checkpoint("unscanned")), "--config", "tiny", "--read"), "diagnosing"),
    ],
)
def test_the_bridge_in_the_middle(tmp_path: Path, arguments: tuple[str, ...], moment: str) -> None:
    code = f"""
import sys, time
from linen_compat._cli import checking
from linen_compat.formats._orbax import new_arrays as stored
def slowly(word, real):
    def wrapped(*args, **options):
        print(word, file=sys.stderr, flush=True)
        time.sleep(0.1)
        return real(*args, **options)
    return wrapped
stored.NewArrays.write = slowly("writing", stored.NewArrays.write)
checking.diagnose = slowly("diagnosing", checking.diagnose)
{script("linen_compat")}"""
    with started(tmp_path, code, *arguments) as process:
        wait_for(process, moment)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == f"linen-compat: {CLEARED}"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert files(tmp_path) == []


# ---- how it is done ----------------------------------------------------------------------------

READY = "print('ready', file=sys.stderr, flush=True)"
IN_C = f"""
import hashlib, sys
from nnx_pipeline.lab import _ending as ending
ending.answer("command")
{READY}
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes outside the interpreter
"""
CLEARING = f"""
import sys, time
from nnx_pipeline.lab import _ending as ending
ending.answer("command")
def undo():
    print("clearing", file=sys.stderr, flush=True)
    time.sleep(60)
with ending.cleared_away(undo):
    {READY}
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_the_interpreter_is_not_waited_for(
    tmp_path: Path, sent: signal.Signals, code: int, word: str
) -> None:
    with started(tmp_path, IN_C) as process:
        wait_for(process, "ready")
        process.send_signal(sent)
        err = process.communicate(timeout=LONGEST)[1]
    assert process.returncode == code
    assert err == f"command: {word}; no unfinished file is left\n"


@pytest.mark.parametrize(
    ("signals", "why"),
    [
        (1, "the removal of unfinished files took too long"),
        (2, "a second signal cut short the removal of unfinished files"),
    ],
)
def test_clearing_away_does_not_take_for_ever(tmp_path: Path, signals: int, why: str) -> None:
    with started(tmp_path, CLEARING) as process:
        wait_for(process, "ready")
        process.send_signal(signal.SIGINT)
        wait_for(process, "clearing")
        if signals == 2:
            process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=LONGEST)[1]
    assert process.returncode == 130
    assert err == f"command: interrupted; {why}\n"


def test_half_a_file_and_half_a_folder(tmp_path: Path) -> None:
    """What was there stays."""
    (tmp_path / "x.json").write_text("before")
    code = f"""
import os, sys, time
from linen_compat.formats._new_folder import new_folder
from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab import _files as files
ending.answer("command")
def wait(*args):
    {READY}
    time.sleep(60)
os.replace = wait
with new_folder("deep/er/out") as folder:
    (folder / "part").write_text("half")
    files.write_text("x.json", "after")
"""
    with started(tmp_path, code) as process:
        wait_for(process, "ready")
        assert len(files(tmp_path)) == 4  # a mark, a part, the old file, the new one
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONGEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp", "x.json"]
    assert (tmp_path / "x.json").read_text() == "before"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked for its code does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_folder_for_temporary_files_is_tried_out_before_the_handlers_are_set(
    tmp_path: Path,
) -> None:
    """Python writes a file there, and a signal that came while it exists would leave it."""
    code = """
import os, signal, tempfile
from nnx_pipeline.lab import _ending as ending
real = os.unlink
def unlink(path):
    print(os.path.dirname(path), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    real(path)
os.unlink = unlink
ending.answer("command")
tempfile.gettempdir()
"""
    with started(tmp_path, code) as process:
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out, err) == (0, f"{tmp_path / 'tmp'} True\n", "")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from nnx_pipeline.lab import _ending as ending
signal.signal(signal.SIGINT, signal.SIG_IGN)
ending.answer("command")
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.2)
print("still here")
"""
    with started(tmp_path, code) as process:
        out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out, err) == (0, "still here\n", "")


def test_nothing_is_left_of_it_in_a_process_that_calls_a_command(run: Run) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run("models").code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not ending._answering
