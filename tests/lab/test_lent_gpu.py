"""The benchmark for a lent GPU: all of it but the GPU, which no test has."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import ROOT, missing, run_fresh, user_environment

from nnx_pipeline import lab
from nnx_pipeline.lab.compile.platform import Platform

SCRIPT = ROOT / "benchmarks" / "lent_gpu.py"
PRODUCT = "16384x16384x16384 bfloat16"  # one product, where smaller ones are several


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("lent_gpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "lent_gpu: needs an H100 or H200, and JAX finds cpu; run it where there is one, or "),
        (("--dry-run", "no such"), "error: there is no row 'no such'; the rows are 512x14336x4096"),
    ],
)
def test_without_a_gpu_or_a_row_it_is_one_line(words: tuple[str, ...], said: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="the extra cuda is not installed")
def test_a_dry_run_has_the_estimate_of_the_lab(tmp_path: Path) -> None:
    words = ("--dry-run", "--out", str(tmp_path), PRODUCT)
    text = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import lent_gpu as script"
    done = run_fresh(f"{text}; script.main()", *words, environment=user_environment())
    assert done.code == 0, done.err
    assert "1 programs took" in done.out
    found = json.loads((tmp_path / "lent_gpu.json").read_text())
    square = jax.ShapeDtypeStruct((16384, 16384), "bfloat16")
    by_lab = lab.measure(jax.numpy.matmul, square, square, platform="cuda:h100:1").time
    (row,) = found["rows"]
    assert row["without"] == pytest.approx(by_lab.step_seconds)
    assert row["bytes"] == 3 * 16384**2 * 2  # two operands and the result
    page = (tmp_path / "lent_gpu.md").read_text()
    assert "**Nothing was timed yet.**" in page
    assert f"| {PRODUCT} | – | – | – | {1e3 * row['without']:.3f} | – |" in page


def test_a_product_is_timed_on_any_device(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUNS": 3, "WARM": 1, "SHORTEST": 0.0, "MOST": 2}.items():
        monkeypatch.setattr(script, name, value)
    device, platform = jax.devices("cpu")[0], Platform.parse("cuda:h100:1")
    row = script.row(script.product("64x64x64 float32"), platform, device, real=True)
    assert 0 < row["measured"] < 1
    assert row["estimated"] > 0


def test_the_medians_by_hand(script: Any) -> None:
    """Errors of −20 %, +10 % and +50 %, and of one program that there is nothing of."""
    rows = [
        {"name": name, "kind": kind, "measured": 0.01, "estimated": seconds, "without": 0.02}
        for name, kind, seconds in (
            ("a", "products", 0.008),
            ("b", "products", 0.011),
            ("c", "steps", 0.015),
        )
    ]
    rows.append({"name": "d", "kind": "layers", "reason": "too large"})
    versions = {"jax": "1", "flax": ""}
    page = script.table({"rows": rows, "versions": versions, "device": "H100", "took": 61.2})
    assert "| a | 10.000 | 8.000 | -20.0% | 20.000 | +100.0% |" in page
    assert "| d | too large | – | – | – | – |" in page
    median = "of the program that ran {}, without a GPU 100.0%."
    assert f"Median error of products: {median.format('15.0%')}" in page
    assert f"Median error of steps: {median.format('50.0%')}" in page
    assert f"Median error of all: {median.format('20.0%')}" in page
    assert "Median error of layers" not in page
    assert "All of it took 61 s." in page
    assert "Nothing was timed" not in page
