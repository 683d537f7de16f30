"""Programs that are too large are marked, and NVIDIA's two kinds of matrix products told apart."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import Run, missing
from page_examples import attribution, measurement

from nnx_pipeline.experiments import _numerics as numerics
from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab.compile import _gpus
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError


def of_size(size: int | None, **changes: Any) -> Measurement:
    return dataclasses.replace(measurement(attribution()), device_memory_bytes=size, **changes)


def test_what_devices_have() -> None:
    # 80 GB as the GPUs' own descriptions have them; test_too_large.py asks the TPU compiler.
    assert Platform.parse("cuda:h100:8").memory_bytes() == 84_942_979_072
    assert Platform.parse("cuda:h200:8").memory_bytes() == 151_397_597_184
    for name in ("tpu:v9:2x2x1", "cpu", "local"):
        assert Platform.parse(name).memory_bytes() is None


# By the data sheets, in 10⁹ bytes; in MI300X and its successors a GB is 2³⁰ bytes.
SHEETS = {
    "cuda": {
        **{"a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "b200": 192, "b300": 288},
        **{"gb200": 192, "gb300": 288, "rtx-pro-6000": 96},
    },
    "rocm": {"mi300x": 206.2, "mi325x": 274.9, "mi350x": 309.2, "mi355x": 309.2},
}


@pytest.mark.parametrize("kind", SHEETS)
def test_what_gpus_have(kind: str) -> None:
    """A description differs by what the device keeps for itself, and by the size of a GB."""
    assert set(SHEETS[kind]) == set(_gpus.targets(kind))
    for target, size in SHEETS[kind].items():
        known = Platform.parse(f"{kind}:{target}:8").memory_bytes()
        assert known is not None
        assert 0.99 < known / (size * 1e9) < 1.08, target


def test_what_does_not_fit() -> None:
    """Arguments 210 MB, results 4 bytes more than they give up, the heap and no constants."""
    needed = 210_000_000 + 4 + attribution().heap_bytes
    assert of_size(None).needed_bytes == needed
    assert of_size(needed).exceeds_device_memory is False
    assert of_size(needed - 1).exceeds_device_memory is True
    assert of_size(None).exceeds_device_memory is None
    assert of_size(1).to_json()["exceeds_device_memory"] is True
    without = dataclasses.replace(measurement(None), device_memory_bytes=1)
    assert without.needed_bytes == 210_000_004 + without.memory.temp_bytes


def replaced(
    monkeypatch: pytest.MonkeyPatch, result: Measurement, cublas: float = 1.0
) -> list[Platform]:
    """Makes every compile give this result; the platforms that were asked for are listed.

    cublas: by how much the largest buffers are larger with its matrix products.
    """
    larger = dataclasses.replace(result, memory=measurement(attribution(cublas)).memory)
    asked: list[Platform] = []

    def measured(config: Any, mesh: Any, platform: Platform, **options: Any) -> Measurement:
        asked.append(platform)
        found = larger if platform.gemm == "cublas" else result
        return dataclasses.replace(found, gemm=platform.gemm if platform.kind == "cuda" else None)

    def prepared(*arguments: Any, **options: Any) -> Callable[[], Measurement]:
        return lambda: measured(*arguments, **options)

    monkeypatch.setattr("nnx_pipeline.experiments._presets.measure_step", measured)
    measuring = importlib.import_module("nnx_pipeline.experiments._measuring")
    monkeypatch.setattr(measuring, "prepare", prepared)
    same = {"loss": np.ones(1, "float32")}
    monkeypatch.setattr(numerics, "arm_values", lambda *args: same)
    return asked


def test_reports_mark_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, of_size(100_000_000))
    for command, size in (
        (("compile", "--model", "tiny"), "of 100.0 MB: does not fit ✗"),
        (("ab", "norm-scale"), "a device has 100.0 MB"),
    ):
        ended = run(*command, "--platform", "cuda:h100:8")
        assert ended.code == 0, ended.err
        assert "does not fit ✗" in ended.out
        assert size in " ".join(ended.out.split())
    replaced(monkeypatch, of_size(10**12))
    assert "does not fit" not in run("compile", "--model", "tiny", "--platform", "cuda:h100:8").out


def test_both_kinds_of_products(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA figures are given for both unless one is asked for; tables where they differ."""
    h100 = ("--platform", "cuda:h100:8")
    asked = replaced(monkeypatch, of_size(10**12))
    for words in (h100, (*h100, "--gemm", "both")):
        ended = run("compile", "--model", "tiny", *words, "--json", "-")
        assert [platform.gemm for platform in asked] == ["triton", "cublas"]
        assert (ended.json["gemm"], ended.json["other_gemm"]["gemm"]) == ("triton", "cublas")
        asked.clear()
    ended = run("ab", "norm-scale", *h100, "--json", "-")
    for key, gemm in (("experiments", "triton"), ("experiments_cublas", "cublas")):
        (entry,) = ended.json[key]
        assert {arm["gemm"] for arm in entry["arms"].values()} == {gemm}
    for words in (("ab", "norm-scale"), ("compile", "--model", "tiny")):
        shown = run(*words, *h100).out
        assert "matrix products by cuBLASLt: the same memory" in shown
        assert "--gemm both shows the range" not in shown
        assert "--gemm both shows the range" in run(*words, *h100, "--gemm", "cublas").out
    asked.clear()
    ended = run("ab", "--sweep", "train.loss_chunks=2,4", *h100)
    assert (
        "matrix products by Triton; autotuning on a GPU may pick Triton or cuBLASLt\n" in ended.out
    )
    assert {platform.gemm for platform in asked} == {"triton"}
    assert run("ab", "--sweep", "train.loss_chunks=2,4", *h100, "--gemm", "both").code == 2
    replaced(monkeypatch, of_size(None))
    ended = run("compile", "--model", "tiny", "--platform", "cpu", "--json", "-")
    assert "other_gemm" not in ended.json


def test_where_they_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, of_size(10**12), cublas=2.0)
    h100 = ("--platform", "cuda:h100:8")
    shown = run("ab", "norm-scale", *h100).out
    text = " ".join(shown.split())
    assert "per device, matrix products by Triton " in text
    assert "per device, matrix products by cuBLASLt, where that differs " in text
    for kind in ("Triton", "cuBLASLt"):
        told = f"matrix products by {kind}; autotuning on a GPU may pick Triton or cuBLASLt\n"
        assert told in shown
    shown = run("compile", "--model", "tiny", *h100).out
    for factor in (1.0, 2.0):
        assert f"{attribution(factor).heap_bytes / 1e6:,.1f}" in shown


def test_what_was_chosen_and_does_not_count_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, of_size(10**12))
    chosen = ("--set", "pipeline.backward=autodiff", "--set", "train.loss_chunks=2")
    ended = run("ab", "weights-per-step", "norm-scale", *chosen, "--json", "-")
    setup, free = ended.json["experiments"]
    assert setup["note"].endswith(
        "pipeline.backward=autodiff is overridden: per step has accumulate, per use has accumulate"
    )
    assert "is overridden" not in free["note"]


@pytest.mark.slow
@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="needs the NVIDIA compiler")
@pytest.mark.parametrize("command", ["measure", "memory", "compare"])
def test_both_kinds_for_functions_of_ones_own(run: Run, command: str) -> None:
    names = ("own_functions:tall", "own_functions:lean")[: 2 if command == "compare" else 1]
    words = (command, *names, "--inputs", "own_functions:inputs", "--platform", "cuda:h100:8")
    ended = run(*words, "--gemm", "both", "--json", "-")
    assert ended.code == 0, ended.err
    if command == "compare":
        (one,), (other,) = (ended.json[key] for key in ("experiments", "experiments_cublas"))
        results = [entry["arms"]["a"] for entry in (one, other)]
    else:
        results = [ended.json, ended.json["other_gemm"]]
    heaps = {result["gemm"]: result["memory"]["heap_bytes"] for result in results}
    assert heaps["cublas"] > heaps["triton"] > 0
    if command == "memory":
        for result in results:
            rows = result["buffers"]["buffers"]
            assert sum(row["bytes"] for row in rows) == heaps[result["gemm"]]
    if command == "measure":
        shown = run(*words, "--gemm", "both").out
        assert ("Triton" in shown, "cuBLASLt" in shown) == (True, True)


def test_the_compiler_is_told() -> None:
    triton, cublas = Target("", ("cuda:h100:8",), "both").platforms()
    assert triton == Platform.parse("cuda:h100:8")
    gemm, asked = "xla_gpu_enable_triton_gemm", {"xla_gpu_collect_cost_model_stats": True}
    assert triton.compiler_options == {gemm: True, **asked}
    assert Target("", ("cuda:h100:8",), None).platforms() == [triton, cublas]
    assert Target("", ("cuda:h100:8",), "cublas").platforms() == [cublas]
    assert Target("", ("cpu",), None).platforms() == [Platform.parse("cpu")]
    assert cublas.compiler_options == {gemm: False, **asked}
    assert entry_key(triton, "x") != entry_key(cublas, "x")
    with pytest.raises(InputError, match="did you mean 'cublas'"):
        Target("", ("cuda:h100:8",), "cublass").platforms()
    with pytest.raises(InputError, match="applies only to GPUs; leave it out with cpu"):
        Target("", ("cpu",), "both").platforms()
