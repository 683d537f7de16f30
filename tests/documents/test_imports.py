"""What a command imports: nothing large for an answer that needs no program, no model for one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import commands_of, pytest_in, user_environment
from maxtext_data import DATA

from linen_compat._cli.main import FORMATS
from linen_compat._cli.main import commands as linen_compat
from linen_compat.checkpoints._convert import TARGETS
from nnx_pipeline.lab._cli.main import cli as nnx_pipeline

MOST = 90  # files of ours that a program without a model takes
LARGE = {"jax", "flax", "optax", "orbax", "rich", "tensorstore"}
NO_MODEL = {"flax", "optax", "orbax", "tensorstore"}
OURS = ("nnx_pipeline", "linen_compat")

# Runs commands one after the other in one process; each answer is its exit code and its output.
SCRIPT = """
import contextlib, importlib, io, json, os, sys
package, cases = json.loads(sys.argv[1])
main = importlib.import_module(package + "._cli.console").main
answers = []
for words, environment in cases:
    os.environ.update(environment)
    sys.argv = [sys.argv[0], *words]
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            main()
        except SystemExit as ended:
            shown.flush()
            answers.append([ended.code or 0, shown.buffer.getvalue().decode()])
    for name in environment:
        del os.environ[name]
print(json.dumps({"answers": answers, "modules": list(sys.modules)}))
"""


def answers(
    package: str, *cases: tuple[list[str], dict[str, str]], folder: Path | None = None
) -> tuple[list[Any], set[str], list[str]]:
    """The answers of a fresh process, the packages that it has imported, and our own files."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([package, cases])],
        capture_output=True,
        text=True,
        cwd=folder,
        env=user_environment(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    roots = {name.partition(".")[0] for name in found["modules"]}
    return found["answers"], roots, [name for name in found["modules"] if name.startswith(OURS)]


HELPS = {
    "nnx_pipeline.lab": [["--help"], ["--version"]]
    + [[name, "--help"] for name in (*commands_of(nnx_pipeline), "compile", "ab")],
    "linen_compat": [["--help"], ["--version"]]
    + [[name, "--help"] for name in commands_of(linen_compat)],
}
WRONG = {
    "nnx_pipeline.lab": {
        "scedule": "Did you mean 'schedule'",
        "measure --meshes 4": "No such option",
        "measure": "give one thing to measure",
        "compare --platfrm cpu": "No such option",
        "train --model tiny": "Missing option '--steps'",
        "train --model tiny --steps 0": "not in the range",
        "generate": "Missing option '--checkpoint'",
        "schedule --stages none": "not a valid integer",
    },
    "linen_compat": {
        "inspct": "Did you mean 'inspect'",
        "check here": "Missing option '--config'",
        "convert here": "Missing argument 'DST'",
        "overhead --loop scn": "not one of",
    },
}


@pytest.mark.parametrize("package", HELPS)
def test_a_help_and_a_wrong_word_import_nothing_large(package: str) -> None:
    wrong = WRONG[package]
    cases = [(words, {}) for words in (*HELPS[package], *map(str.split, wrong))]
    found, roots, _ = answers(package, *cases)
    codes = [code for code, _ in found]
    assert codes == [0] * len(HELPS[package]) + [2] * len(wrong)
    for (_, shown), said in zip(found[-len(wrong) :], wrong.values(), strict=True):
        assert said in shown
    assert not roots & LARGE


def test_a_value_that_is_wrong_imports_no_jax() -> None:
    wrong = {
        "measure tin": "did you mean 'tiny'?",
        "measure tiny --set model.num_layer=8": "did you mean 'model.num_layers'?",
        "measure tiny --mesh stage=3": "choose a multiple of 3",
        "memory tiny --platform tpu": "write for example tpu:v5p:2x2x2",
        "lint tiny --mesh stages=2": "did you mean 'stage'?",
        "train --model tin --steps 1": "did you mean 'tiny'?",
    }
    found, roots, _ = answers("nnx_pipeline.lab", *((one.split(), {}) for one in wrong))
    for (code, shown), said in zip(found, wrong.values(), strict=True):
        assert (code, said in shown) == (2, True), shown
    assert "jax" not in roots


COMPLETED = {
    "mea": "measure",
    "tra": "train",
    "measure --pl": "--platform",
    "measure mixtral-8x2": "mixtral-8x22b",
    "compare tiny loss": "loss-chunks",
    "ab loss": "loss-chunks",
    "train --model ti": "tiny",
    "memory --set pipeline.num_r": "pipeline.num_repeats=",
    "measure --mesh stage=4,te": "stage=4,tensor=",
    "measure --platform cuda:h1": "cuda:h100:8",
}


def test_a_tab_imports_nothing_large() -> None:
    def pressed(line: str) -> tuple[list[str], dict[str, str]]:
        words = {"COMP_WORDS": f"nnx-pipeline {line}", "COMP_CWORD": str(len(line.split()))}
        return [], {"_NNX_PIPELINE_COMPLETE": "bash_complete", **words}

    found, roots, _ = answers("nnx_pipeline.lab", *map(pressed, COMPLETED))
    for (code, shown), name in zip(found, COMPLETED.values(), strict=True):
        assert (code, name in shown.replace("plain,", "").split()) == (0, True), shown
    assert not roots & LARGE


def test_a_conversion_imports_no_jax(tmp_path: Path) -> None:
    model = str(DATA.parent / "huggingface" / "mixtral")
    ways = [
        (model, "nnx", "--to", "nnx"),
        ("nnx", "scanned", "--to", "maxtext:scanned"),
        ("scanned", "back", "--to", "huggingface", "--config", model),
    ]
    found, roots, _ = answers(
        "linen_compat", *((["convert", *words], {}) for words in ways), folder=tmp_path
    )
    assert [code for code, _ in found] == [0, 0, 0], found
    assert {"back", "nnx", "scanned"} <= {path.name for path in tmp_path.iterdir()}
    assert not roots & {"jax", "jaxlib", "flax", "optax", "orbax"}


def test_the_formats_of_the_options_are_those_of_the_code() -> None:
    assert ", ".join(TARGETS) == FORMATS


OWN = "import jax.numpy as jnp\n\n\ndef f(x):\n    return jnp.tanh(x) @ x.T\n"


@pytest.mark.parametrize("command", ["measure own:f", "memory own:f", "lint own:f"])
def test_a_program_without_a_model_imports_no_model(tmp_path: Path, command: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = [*command.split(), "--arg", "float32[8,128]"]
    ((code, shown),), roots, files = answers("nnx_pipeline.lab", (words, {}), folder=tmp_path)
    assert code == 0, shown
    assert not roots & NO_MODEL
    assert len(files) <= MOST
    assert not [name for name in files if not name.startswith("nnx_pipeline.lab")][1:]


def test_a_comparison_imports_no_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ["compare", "own:f", "own:f", "--arg", "float32[8,128]"]
    ((code, shown),), roots, files = answers("nnx_pipeline.lab", (words, {}), folder=tmp_path)
    assert code == 0, shown
    assert not roots & NO_MODEL
    assert len(files) <= MOST


def test_the_plugin_imports_no_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "test_own.py").write_text(
        f"""
import sys
import jax
from own import f

def test_f(compile_memory):
    x = jax.ShapeDtypeStruct((8, 128), "float32")
    compile_memory(f, (x,)).assert_at_most(temp_bytes=10**6)
    assert not {NO_MODEL} & {{name.partition(".")[0] for name in sys.modules}}
    assert len([name for name in sys.modules if name.startswith({OURS})]) <= {MOST}
"""
    )
    ended = pytest_in(tmp_path)
    assert ended.code == 0, ended.out
