"""Everything README.md shows is run: code blocks, commands, and the figures' form."""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import Ended, pytest_in, user_environment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
BLOCKS_OF_PYTHON = [text for language, text in BLOCKS if language == "python"]
TESTS = [text for text in BLOCKS_OF_PYTHON if "def test_" in text]
PYTHON = [text for text in BLOCKS_OF_PYTHON if text not in TESTS]
SHELL = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
SETUP = [line for line in SHELL if line.startswith("python3 -m venv")]
TRAINING = "nnx-pipeline train --model tiny --mesh stage=4,fsdp=2 --steps 50"
# It needs a package registry and another Python; tests/test_across.py runs what it does.
ACROSS = [line for line in SHELL if "--across" in line]
# They belong together, in this order: one trains on a text, and the others continue prompts.
TEXT = [line for line in SHELL if "--data" in line or "nnx-pipeline generate" in line]
COMMANDS = [line for line in SHELL if line not in (*SETUP, *ACROSS, *TEXT)]


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_budget_is_recorded_and_then_exceeded(tmp_path):
    """As the text beside it says, down to the figures of the message."""
    (code,) = TESTS
    file = tmp_path / "test_memory.py"
    file.write_text(code)
    recorded = pytest_in(tmp_path, "--update-memory-budgets")
    if "1 skipped" in recorded.out:
        pytest.skip("the TPU compiler is not installed")
    assert "1 passed" in recorded.out, recorded.out
    changed = code.replace("    @jax.checkpoint\n", "")
    assert changed != code
    file.write_text(changed)
    exceeded = pytest_in(tmp_path).out
    (shown,) = (text for _, text in BLOCKS if text.startswith("MemoryExceeded"))
    (version,) = re.findall(r"\(libtpu (\S+)\):\n\n```text\nMemoryExceeded", README)
    assert re.search("test_memory.py:7 +saved residual", exceeded), exceeded
    if f"libtpu {version}," in exceeded:
        missing = [line for line in shown.splitlines() if line not in exceeded]
        assert not missing, exceeded


def write_modules(folder):
    """The files that the text names before their code, such as `my_step.py`:."""
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", README, re.DOTALL):
        (folder / name).write_text(code)


def test_setup_commands_name_what_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    job, tests = SETUP
    for line in SETUP:
        named = re.search(r"\.\[([\w,]+)\]", line)
        assert named is not None
        assert set(named[1].split(",")) <= set(extras)
    assert job.endswith(COMMANDS_OF_THE_JOB)
    assert TRAINING in COMMANDS
    ci = (ROOT / ".ci" / "run").read_text().replace('"', "")
    assert f"/{tests.split('/')[-1]}\n" in ci


COMMANDS_OF_THE_JOB = ".venv/bin/nnx-pipeline ab --platform tpu:v5p:2x2x2"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Empty before the first command; the others find what it measured, as for a user."""
    return tmp_path_factory.mktemp("cache")


def first_command(cache: Path, *, interrupted_at: str | None = None) -> Ended:
    """The job of the first command in a process of its own; interrupted where it says that."""
    script = "from nnx_pipeline.console import main; main()"
    ready = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{ready}; {script}", *shlex.split(COMMANDS_OF_THE_JOB)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Nothing of what conftest.py sets for the TPU compiler: a user has none of it.
        env={**user_environment(), "NNX_PIPELINE_CACHE": str(cache)},
    )
    said = ""
    if interrupted_at:
        for line in process.stderr:
            said += line
            if interrupted_at in line:
                process.send_signal(signal.SIGINT)
                break
    out, err = process.communicate()
    return Ended(process.returncode, out, said + err)


def numbers_in(cache: Path) -> list[Path]:
    """The entries of the cache about compared losses."""
    return [path for path in cache.iterdir() if "max_abs_diff" in path.read_text()]


@pytest.mark.slow
def test_the_job_of_the_first_command_runs_again_and_again(cache):
    """Minutes the first time; then nothing is compiled, whatever of it was kept."""
    first = first_command(cache)
    assert first.code == 0, first.err
    assert "same numbers: to" in first.out
    assert "libtpu" in first.out
    assert "compiling for" in first.err
    again = first_command(cache)
    assert again.code == 0, again.err
    assert not re.search("compiling|measuring", again.err)
    numbers = numbers_in(cache)
    numbers[0].unlink()
    interrupted = first_command(cache, interrupted_at="comparing losses")
    assert interrupted.code == 130
    assert "Traceback" not in interrupted.err
    after = first_command(cache)
    assert after.code == 0, after.err
    assert "numbers were not compared" not in after.out
    assert not re.search("compiling|measuring", after.err)
    assert sorted(numbers_in(cache)) == sorted(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, cache, tmp_path):
    program, *arguments = shlex.split(command)
    assert program == "nnx-pipeline"
    write_modules(tmp_path)
    if "cuda" in command:
        pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA compiler is not installed")
    script = "from nnx_pipeline.cli.main import main; main()"
    # The CPU compiler is as fast here as in other tests; TPU figures are those a user has.
    environment = user_environment() if "tpu" in command else os.environ
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment, "NNX_PIPELINE_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if command == TRAINING:  # from log(128) or more it comes near what the rule leaves to guess
        first, last = map(
            float, re.findall(r"loss ([\d.]+) at step 1, ([\d.]+) at", done.stdout)[0]
        )
        assert first > math.log(128)
        assert last < 0.25 * first
    if arguments[0] == "memory":
        (shown,) = (text for _, text in BLOCKS if text.startswith("one training step of"))
        lines = [line for line in shown.splitlines() if line != "…"]
        if lines[0].split("jax ")[0] in done.stdout:  # the same compiler
            found = {line.rstrip() for line in done.stdout.splitlines()}
            assert [line for line in lines[1:] if line not in found] == []


@pytest.mark.slow
def test_a_model_learns_the_text_of_this_repository(tmp_path):
    """Better than a bigram model, as the text says, and what it makes are words of that text."""
    for path in (ROOT / "README.md", ROOT / "migration_guide.md", *(ROOT / "docs").glob("*.md")):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    said = []
    for command in TEXT:
        script = "from nnx_pipeline.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", script, *shlex.split(command)[1:]],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=user_environment(),  # as fast as for a user
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    trained, greedy, drawn = said
    loss, bigram = map(float, re.findall(r"([\d.]+) in nats per byte, .* ([\d.]+)\n", trained)[0])
    assert loss < bigram - 0.5
    shown = re.search(r"about ([\d.]+) nats per byte .*?is about ([\d.]+) there", README, re.DOTALL)
    assert shown is not None
    assert [loss, bigram] == pytest.approx(list(map(float, shown.groups())), abs=0.1)
    assert greedy.startswith("The pipeline")
    assert "\nA microbatch is" in greedy
    assert drawn.startswith("The pipeline")
    assert len(drawn) == len("The pipeline") + 40 + len("\n")
    made = set(re.findall(r"[a-z]{2,}", greedy[len("The pipeline") :]))
    assert made & set(re.findall(r"[a-z]{2,}", README)) - {"microbatch", "is"}
