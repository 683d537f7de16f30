"""The pytest plugin in a project that has nothing of this one but the entry point."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, missing, pytest_in, user_environment

MODEL = """\
import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        keys = jax.random.split(rngs.params(), 4)
        self.layers = jax.vmap(lambda key: nnx.Linear(512, 512, rngs=nnx.Rngs(key)))(keys)

    def __call__(self, x):
        @jax.checkpoint
        def apply(x, layer):
            return jnp.tanh(layer(x)) * jnp.cos(x), None

        return jax.lax.scan(apply, x, self.layers)[0]


def gradients(model, microbatches):
    def add(total, x):
        gradient = jax.grad(lambda model: jnp.sum(model(x)))(model)
        return jax.tree.map(jnp.add, total, gradient), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, model), microbatches)[0]
"""
TEST = """\
import jax
import pytest
from flax import nnx
from model import Model, gradients


@pytest.mark.parametrize("platform", ["cpu", "cuda:h100:8"])
def test_gradients(compile_memory, platform):
    model = jax.eval_shape(lambda: Model(nnx.Rngs(0)))
    args = (model, jax.ShapeDtypeStruct((8, 4096, 512), "float32"))
    assert compile_memory(gradients, args, platform=platform).within_budget()
"""
# The TPU compiler has its turn in the tests of the documents.
PLATFORMS = ["cpu"] if missing("jax_cuda13_plugin") else ["cpu", "cuda"]


@pytest.mark.slow
def test_a_regression_is_caught_by_its_line(tmp_path: Path) -> None:
    """Recorded, within its budget, then without remat: the message names what is kept instead."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_model.py").write_text(TEST)
    count = len(PLATFORMS)
    recorded = pytest_in(tmp_path, "--update-memory-budgets")
    assert f"{count} passed" in recorded.out, recorded.out
    within = pytest_in(tmp_path)
    assert within.code == 0, within.out

    (tmp_path / "model.py").write_text(MODEL.replace("        @jax.checkpoint\n", ""))
    caught = pytest_in(tmp_path)
    assert f"{count} failed" in caught.out, caught.out
    lines = (tmp_path / "model.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, start=1) if "jnp.tanh" in text]
    for platform in PLATFORMS:
        message = caught.out.partition(f"__ test_gradients[{platform}")[2].partition("\n____")[0]
        assert re.search(r"temp [\d,]+ bytes is .* \(\+[\d.]+%\) above its budget of", message)
        rows = message.partition("buffers at the peak of the heap:\n")[2].splitlines()
        # One per layer of a microbatch of 4096 rows, which the backward pass waits for.
        residual = rf" 33\.6 MB +f32\[4,4096,512\] +model\.py:{line} +saved residual +forward: "
        assert any(re.search(residual, row) for row in rows[:2]), message
        assert "If that is intended: pytest --update-memory-budgets" in message


CONFTEST = """
import os
import sys

assert "jax" not in sys.modules, "the plugin has imported JAX before its flags were set"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
pytest_plugins = ["nnx_pipeline.lab.pytest_plugin"]  # the same plugin as the entry point
"""
FLAGS = """
import sys


def test_no_jax_without_the_fixture():
    assert "jax" not in sys.modules


def test_flags_count(compile_memory):
    import jax

    x = jax.ShapeDtypeStruct((8, 64), "float32")
    for mesh in (None, "data=4"):
        assert compile_memory(lambda x: x + 1, (x,), mesh=mesh).output_bytes
    assert len(jax.devices()) == 4
"""


@pytest.mark.slow
def test_flags_of_a_conftest_count(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_flags.py").write_text(FLAGS)
    done = pytest_in(tmp_path)
    assert done.code == 0, done.out + done.err


def test_switched_off_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_flags.py").write_text(FLAGS)
    done = pytest_in(tmp_path, "-p", "no:nnx_pipeline.lab.pytest_plugin")
    assert "fixture 'compile_memory' not found" in done.out


@pytest.mark.parametrize(
    "module", ["nnx_pipeline.lab.pytest_plugin", "nnx_pipeline.lab.pytest_plugin._budgets"]
)
def test_importing_it_imports_no_heavy_package(module: str) -> None:
    heavy = ("jax", "numpy", "flax", "rich")
    found = f"[name for name in {heavy} if name in sys.modules]"
    script = f"import sys, {module}; print({found})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=user_environment()
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_a_wheel_brings_all_that_is_needed(tmp_path: Path) -> None:
    """Not only what is installed for editing: plugin, commands, and the files beside the code."""
    (tmp_path / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    for package in ("nnx_pipeline", "linen_compat"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / "source" / package, ignore=ignored)
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "site")
    subprocess.run([*pip, str(tmp_path / "source")], cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "source")
    installed = tmp_path / "site"
    scripts = sorted(path.name for path in (installed / "bin").iterdir())
    assert scripts == ["linen-compat", "nnx-pipeline"]
    kept = {path.relative_to(ROOT) for path in ROOT.glob("nnx_pipeline/**/*.toml")}
    assert (
        {path.relative_to(installed) for path in installed.glob("nnx_pipeline/**/*.toml")}
        == kept
        != set()
    )
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_it.py").write_text(
        f"""
import nnx_pipeline


def test_it(compile_memory):
    assert nnx_pipeline.__file__.startswith({str(installed)!r})
    assert compile_memory(lambda x: x + 1, (1.0,)).within_budget()
"""
    )
    environment = {**user_environment(), "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--update-memory-budgets"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path / "project", env=environment
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
