"""The benchmark for a GPU: tiny sizes on the CPU, and one line where there is no GPU."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

SCRIPT = str(ROOT / "benchmarks" / "gpu_layer.py")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True
    )


def test_without_a_gpu_it_is_one_line() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    *others, line = done.stderr.splitlines()
    assert line.startswith("gpu_layer: needs an NVIDIA GPU, and JAX finds cpu; run it where")
    # JAX says of each other plugin why it does not start.
    assert not others or "plugin" in others[0]


@pytest.mark.slow
def test_tiny_sizes_on_a_cpu() -> None:
    """Six kinds take some time; flash, which a CPU has no kernel for, is refused by name."""
    done = run("--smoke")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| ours \| (\w+) \| (\w+) \| (.+) \| (.+) \| – \|$", done.stdout, re.M)
    assert len(rows) == 9
    for _, attention, ms, rate in rows:
        if attention == "flash":
            assert ms.startswith("model.attention='flash' is a kernel for TPUs and NVIDIA GPUs")
            assert rate == "–"
        else:
            # 128 tokens, and a time that is rounded to 0.01 ms
            assert float(ms) * float(rate.replace(",", "")) == pytest.approx(128e3, rel=0.05)
    for peer in ("transformers", "MaxText"):
        assert f"| {peer} | " in done.stdout
