"""Everything README.md shows is run: code blocks, commands, and the figures' form."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import pytest_in

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
BLOCKS_OF_PYTHON = [text for language, text in BLOCKS if language == "python"]
TESTS = [text for text in BLOCKS_OF_PYTHON if "def test_" in text]
PYTHON = [text for text in BLOCKS_OF_PYTHON if text not in TESTS]
SHELL = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
SETUP = [line for line in SHELL if line.startswith("python3 -m venv")]
COMMANDS = [line for line in SHELL if line not in SETUP]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    program, *arguments = shlex.split(command)
    assert program == "nnx-pipeline"
    write_modules(tmp_path)
    if "cuda" in command:
        pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA compiler is not installed")
    script = "from nnx_pipeline.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if arguments[0] == "memory":
        (shown,) = (text for _, text in BLOCKS if text.startswith("one training step of"))
        lines = [line for line in shown.splitlines() if line != "…"]
        if lines[0].split("jax ")[0] in done.stdout:  # the same compiler
            found = {line.rstrip() for line in done.stdout.splitlines()}
            assert [line for line in lines[1:] if line not in found] == []


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
    ci = (ROOT / ".ci" / "run").read_text().replace('"', "")
    assert f"/{tests.split('/')[-1]}\n" in ci


COMMANDS_OF_THE_JOB = ".venv/bin/nnx-pipeline ab --platform tpu:v5p:2x2x2"


@pytest.mark.slow
def test_the_job_of_the_first_command_runs(tmp_path):
    script = "from nnx_pipeline.cli import main; main()"
    arguments = shlex.split(COMMANDS_OF_THE_JOB)[1:]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "verdict" in done.stdout
    assert "libtpu" in done.stdout
