"""One program on several platforms: which there are, what fits, and what tokens cost."""

import dataclasses
import importlib.metadata

import jax
import pytest
from helpers import Run, missing
from page_examples import TIME, attribution, measurement
from test_screens import text

from nnx_pipeline import InputError, lab
from nnx_pipeline.lab._cli.values import Costing
from nnx_pipeline.lab._hlo.cost import Unread
from nnx_pipeline.lab._report.platforms_table import platforms_view
from nnx_pipeline.lab._timing.rate import Rate
from nnx_pipeline.lab.compile import _gpus
from nnx_pipeline.lab.compile.platform import Platform, targets

PRODUCT = ("jax.numpy:matmul", "--arg", "bfloat16[4096,1024]", "--arg", "bfloat16[1024,512]")
V5P = ("--platform", "tpu:v5p:2x2x1")
CPU = ("--platform", "cpu")
HERE = ("--platform", "local")


def test_all_that_can_be_compiled_for_is_listed(run: Run) -> None:
    ended = run("platforms", "--json", "-")
    listed = {row["platform"]: row for row in ended.json["platforms"]}
    gpus = sum(len(_gpus.targets(kind)) for kind in _gpus.GPUS)
    assert len(listed) == gpus + 7  # generations of TPUs
    assert [str(Platform.parse(name)) for name in listed] == list(map(str, targets()))
    assert listed["tpu:v5p:2x2x1"]["memory_bytes"] == int(95.74 * 2**30)
    assert listed["tpu:v5p:2x2x1"]["time_basis"] == "cycles"
    shown = run("platforms").out
    for name, row in listed.items():
        assert f" {name} " in shown
        assert f" {row['memory_bytes'] / 1e9:,.1f} " in shown


def test_a_compiler_that_is_missing_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "tpu: libtpu not installed; pip install 'nnx-pipeline[tpu]'" in run("platforms").out


def test_tokens_and_their_cost_by_hand() -> None:
    """1,000 tokens in 0.5 s on 4 chips are 500 per chip-second, or 1.8 million in an hour."""
    rate = Rate(chips=4, tokens=1000, seconds=0.5, price=3.6)
    assert rate.per_chip_second == 500
    assert rate.cost_of(1_800_000) == pytest.approx(3.6)
    assert rate.to_json()["cost_of_million_tokens"] == pytest.approx(2.0)
    assert Rate(chips=4, tokens=1000, seconds=0.5).cost_of(10**6) is None


def test_a_price_is_for_the_platforms_that_begin_so() -> None:
    measured = lab.measure(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"), platform="cpu")
    # The longest beginning counts, wherever it stands.
    for given in (("1", "cpu=2", "tpu:v5p=3"), ("cpu=2", "c=4", "1")):
        prices = Costing(prices=given, tokens=64)
        assert (prices.of(measured).price, prices.of(measured).tokens) == (2.0, 64)
    assert Costing(prices=("tpu:v5p=3",), tokens=64).of(measured).price is None


def test_two_devices_of_a_chip_are_one_chip() -> None:
    assert Platform.parse("tpu:tpu7x:2x2x1").devices_per_chip == 2
    assert Platform.parse("tpu:v5p:2x2x1").devices_per_chip == 1


@pytest.mark.skipif(missing("libtpu"), reason="the extra tpu is not installed")
def test_one_function_on_two_platforms(run: Run) -> None:
    options = ("--price", "tpu:v5p=4", "--tokens", "4096")
    ended = run("compare", *PRODUCT, *CPU, *V5P, *options)
    assert ended.code == 0
    on_cpu, on_tpu = (line for line in ended.out.splitlines() if line.startswith("│ "))
    assert on_cpu.split() == ["│", "cpu", "│", "1", "│", *on_cpu.split()[5:]]
    assert "│ yes " in on_tpu
    found = run("compare", *PRODUCT, *CPU, *V5P, *options, "--json", "-").json["platforms"]
    assert [one["platform"] for one in found] == ["cpu", "tpu:v5p:2x2x1"]
    assert found[0]["rate"] is None  # nothing is known of the time on a CPU
    rate, seconds = found[1]["rate"], found[1]["time"]["step_seconds"]
    per_second = 4096 / seconds
    assert rate["tokens_per_second_per_chip"] == pytest.approx(per_second)
    assert rate["cost_of_million_tokens"] == pytest.approx(4 / 3600 / per_second * 1e6)
    assert f" {1e9 * 4 / 3600 / per_second:,.2f} " in on_tpu


def test_one_preset_on_two_platforms_has_its_tokens(run: Run) -> None:
    small = ("--set", "model.num_layers=1", "--set", "train.global_batch=2")
    ended = run("compare", "tiny", *small, *CPU, *HERE, "--json", "-")
    assert [one["memory"] for one in ended.json["platforms"]] == [
        ended.json["platforms"][0]["memory"]
    ] * 2


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        (("measure", "tiny", *CPU, *V5P), "nnx-pipeline compare SUBJECT takes several"),
        (("measure", "tiny", *CPU, "--price", "free"), "is no price of a chip for an hour"),
        (("measure", "tiny", *CPU, "--price", "-1"), "is no price of a chip for an hour"),
        (("compare", "tiny", *CPU, *HERE, "--price", "cpu=inf"), "is no price of a chip"),
        (("compare", "tiny", *CPU, "--price", "1"), "give several --platform"),
        (("compare", "tiny", *CPU, *V5P, "--price", "cuda=1"), "is for none of the platforms"),
        (("compare", "tiny", *CPU, *V5P, "--gemm", "both"), "write --gemm triton or --gemm cublas"),
        (("compare", "tiny", "loss-chunks", *CPU, *V5P), "leave out loss-chunks"),
        (("compare", "tiny", *CPU, *V5P, "--sweep", "model.num_layers=1,2"), "cannot be combined"),
        (("compare", "tiny", *CPU, "--platform", "cuda:h100:x"), "needs a number of GPUs"),
    ],
)
def test_what_does_not_go_together(run: Run, command: tuple[str, ...], cure: str) -> None:
    ended = run(*command)
    assert ended.code == 2
    assert cure in ended.err
    assert "Traceback" not in ended.err


V5P_ON_MESH = (*V5P, "--mesh", "fsdp=4")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("measure", "tiny", *V5P_ON_MESH, "--tokens", "7"), "--tokens 7 is for a function; a"),
        (("compare", "tiny", *CPU, *V5P, "--tokens", "7"), "--tokens 7 is for a function; a"),
        (("measure", *PRODUCT, *V5P, "--price", "1"), "the tokens of a step; give --tokens N"),
        (("compare", *PRODUCT, *CPU, *V5P, "--price", "1"), "of a step; give --tokens N"),
        (("measure", *PRODUCT, *CPU, "--tokens", "7"), "--tokens has no use on cpu, of whose time"),
        (("measure", "tiny", *CPU, "--price", "1"), "--price has no use on cpu, of whose time"),
        (("compare", "tiny", *CPU, *HERE, "--price", "1"), "has no use on cpu, local, of whose"),
        (("measure", "tiny", *V5P, "--price", "cuda=1"), "cuda=1 is for none of the platforms"),
        (("measure", "tiny", *V5P, "--price", "tpu==1"), "tpu==1 is for none of the platforms"),
        (("measure", "tiny", *V5P, "--price", "1", "--price", "tpu=2"), "--price 1 is for none of"),
        (("measure", "tiny", *V5P, "--price", "1", "--price", "2"), "twice for all platforms: 1 "),
        (("measure", "tiny", *V5P, "--price", "=1"), "--price '=1' is no price of a chip"),
        (("measure", "tiny", *V5P, "--price", "1e308"), "--price '1e308' is no price of a chip"),
        (("measure", "tiny", *V5P, "--price", ""), "--price '' is no price of a chip"),
        (("compare", "tiny", *CPU, *V5P, "--fresh"), "several --platform cannot be combined with"),
    ],
)
def test_what_has_no_use_is_refused_before_anything_is_traced(
    run: Run, command: tuple[str, ...], said: str
) -> None:
    ended = run(*command)
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert "abstractly" not in ended.err
    assert "tracing" not in ended.err


def test_several_platforms_of_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNX_PIPELINE_PLATFORM", "cpu tpu:v5p:2x2x1")
    assert run("compare", "--list").code == 0
    ended = run("compare", "tiny", "--fresh")
    assert (ended.code, "several --platform cannot be combined" in ended.err) == (2, True)


def test_one_platform_that_refuses_the_program_is_a_row(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of them compiled is not lost; where all of them refuse it, it is bad input."""
    from nnx_pipeline.lab._cli import measuring

    real, refusal = measuring.measured, InputError("no such kernel; take another")

    def refuses_once(*arguments: object) -> object:
        monkeypatch.setattr(measuring, "measured", real)
        raise refusal

    monkeypatch.setattr(measuring, "measured", refuses_once)
    ended = run("compare", *PRODUCT, *CPU, *HERE)
    assert (ended.code, "cpu: no such kernel" in ended.out) == (1, True)

    def refuses(*arguments: object) -> object:
        raise refusal

    monkeypatch.setattr(measuring, "measured", refuses)
    ended = run("compare", *PRODUCT, *CPU, *HERE)
    assert (ended.code, ended.out) == (2, "")
    assert "no such kernel; take another" in ended.err


def test_a_platform_is_named_once(run: Run) -> None:
    ended = run("compare", *PRODUCT, *CPU, *V5P, *CPU)
    assert (ended.code, ended.out) == (2, "")
    assert "--platform cpu is given twice; give each platform once" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_mesh_that_does_not_fit_is_said_at_once(run: Run) -> None:
    ended = run("compare", *PRODUCT, "--mesh", "fsdp=8", *CPU, *V5P)
    assert ended.code == 2
    assert "compiling" not in ended.err


def test_what_the_table_of_platforms_says_of_each() -> None:
    """By what its step is estimated, how good that is, why one does not fit; within 80 columns."""
    heap = attribution()
    sort = Unread("top_k.1", "sort", ("time_bound",), 7, "one pass of its bytes counts")
    times = {
        "tpu:v5p:2x2x2": dataclasses.replace(TIME, is_lower_bound=True, program="experts"),
        "cuda:h100:8": dataclasses.replace(TIME, basis="xla-model"),
        "rocm:mi300x:8": dataclasses.replace(TIME, basis="roofline", is_lower_bound=True),
        "rocm:mi355x:8": dataclasses.replace(TIME, basis="roofline", is_lower_bound=True),
        "tpu:v2:2x2": None,
    }
    rows = []
    for name, time in times.items():
        made = dataclasses.replace(measurement(heap, platform=name), time=time, gemm=None)
        made = dataclasses.replace(made, device_memory_bytes=100 * 10**9, tokens=4096, price=4.0)
        unread = (sort,) if name.startswith("tpu:v5p") else ()
        notes = (*["of one alone"][: name == "tpu:v2:2x2"], "all is whole")
        rows.append((name, dataclasses.replace(made, unread=unread, notes=notes)))
    small = dataclasses.replace(rows[1][1], platform="cuda:h200:8", device_memory_bytes=10**8)
    refused = dataclasses.replace(small.memory, temp_bytes=None)
    last = dataclasses.replace(small, platform="tpu:v5e:2x4", memory=refused, time=None)
    rows += [("cuda:h200:8", small), ("tpu:v5e:2x4", last), ("cuda:b200:8", "no compiler")]
    lines = text(platforms_view("a step", rows)).splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    cycles = "step on tpu:v5p:2x2x2: by the compiler's cycles; with the least that it takes, for"
    cycles += " sort (one pass of its bytes counts); measured steps of models with experts on v5p"
    assert cycles in shown
    assert "step on cuda:h100:8, cuda:h200:8: by XLA's own model of the GPU; measured" in shown
    amd = "step on rocm:mi300x:8, rocm:mi355x:8: a roofline: no program reaches it (XLA has no"
    assert f"{amd} products that were measured on AMD's GPUs); no step that is" in shown
    assert "step on tpu:v2:2x2: nothing is known of its time" in shown
    assert "step on tpu:v5e:2x4" not in shown
    assert "tpu:v5e:2x4: arguments 210.0 + outputs 0.0 + heap 77.8 = 287.8 of 100.0 MB" in shown
    sizes = "cuda:h200:8: arguments 210.0 + outputs 0.0 + heap 77.8 = 287.8 of 100.0 MB: does not"
    assert f"{sizes} fit ✗; largest buffer 33.6 MB: scan carry, bf16[4,8,512,1024]" in shown
    assert "cuda:b200:8: no compiler" in shown
    assert "tpu:v2:2x2: of one alone" in shown
    assert "all is whole" in lines


def test_a_platform_that_fails_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from nnx_pipeline.lab._cli import measuring
    from nnx_pipeline.lab._cli.support import Failed

    real = measuring.measured

    def fails_once(*arguments: object) -> object:
        monkeypatch.setattr(measuring, "measured", real)
        raise Failed("no room")

    monkeypatch.setattr(measuring, "measured", fails_once)
    ended = run("compare", *PRODUCT, *CPU, *HERE)
    assert ended.code == 1
    assert "cpu: no room" in ended.out
    assert "failed: cpu" in ended.err


def test_the_platform_that_a_mesh_does_not_fit_is_named(run: Run) -> None:
    two = ("--platform", "cpu", "--platform", "tpu:v5p:2x2x1")
    if missing("libtpu"):
        pytest.skip("libtpu is not installed")
    ended = run("compare", "tiny", "--mesh", "fsdp=8", *two)
    assert ended.code == 2
    assert "--platform tpu:v5p:2x2x1: mesh fsdp=8 needs 8 devices" in ended.err


@pytest.mark.parametrize(
    ("platform", "size"),
    [
        ("cpu", (None, 1)),
        ("tpu:v5p:2x2x2", (8, 1)),
        ("tpu:v5p:2x2x2*2", (16, 2)),
        ("tpu:tpu7x:2x2x1", (8, 1)),
        ("cuda:h100:8", (8, 1)),
        ("cuda:h100:4x8", (32, 4)),
    ],
)
def test_the_size_of_a_platform(platform: str, size: tuple[int | None, int]) -> None:
    assert Platform.parse(platform).size == size
