"""Settings of the compiler: how they are written, what they change, and that nothing hides them."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import Run, missing
from page_examples import attribution, measurement, outcome
from test_tables import text

from nnx_pipeline import InputError, lab
from nnx_pipeline.lab._cli.values import Target, TwoArms
from nnx_pipeline.lab._page import outcomes_page
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.chart import outcomes_chart
from nnx_pipeline.lab.compile import _settings as settings
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile._settings import flag_sets, parse_settings
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform

TPU, H100 = "tpu:v5p:2x2x1", "cuda:h100:8"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
FAST_MATH = "xla_cpu_enable_fast_math=true"
SMALLEST = ("--model", "tiny", "--set", "model.num_layers=2", "--set", "train.sequence_length=16")


def chain(w: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of four layers."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)


ARRAYS = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 1024, 1024), (1024, 1024))]


def values(*layers: tuple[str, ...]) -> dict[str, bool | str]:
    return {one.name: one.value for one in parse_settings(*layers)}


def test_how_settings_are_written() -> None:
    assert values(("xla_a=true", "xla_b=False", "xla_c=12", "--xla_d=x,y", "xla_e=")) == {
        "xla_a": True,
        "xla_b": False,
        "xla_c": "12",
        "xla_d": "x,y",
        "xla_e": "",
    }
    assert parse_settings(("xla_b=1", "xla_a=2")) == parse_settings(("xla_a=2", "xla_b=1"))
    assert values(("xla_a=1", "xla_b=1"), ("xla_a=2",)) == {"xla_a": "2", "xla_b": "1"}


def test_sets_of_settings() -> None:
    kept = values(("@host_offload_flags",))
    assert kept["xla_latency_hiding_scheduler_rerun"] == "2"
    assert values(("@HOST-offload-flags",)) == kept
    changed = values(("xla_latency_hiding_scheduler_rerun=0", "@host_offload_flags"))
    assert changed == kept | {"xla_latency_hiding_scheduler_rerun": "0"}
    with pytest.raises(InputError, match=r"has two values, .* of @cf_for_all_gather"):
        parse_settings(("@cf_for_all_gather", "@enable_sparsecore_offloading_for_all_gather"))
    for name, texts in flag_sets().items():
        assert len(values(tuple(texts))) == len(texts), name


@pytest.mark.parametrize(
    ("texts", "platform", "message"),
    [
        (("xla_a",), TPU, "'xla_a' is not of the form NAME=VALUE or @SET; write for example"),
        (("=1",), TPU, "not of the form"),
        (("xla_a=1", "xla_a=2"), TPU, "xla_a has two values, xla_a=1 and xla_a=2; give one"),
        (("@host_offload",), TPU, "did you mean '@host_offload_flags'?"),
        (("@",), TPU, "choose one of: @dense_vmem_limit_flag, "),
        (("@host_offload_flags",), H100, "is for tpu platforms and would do nothing for cuda"),
        (
            (f"{SCHEDULER}=false",),
            TPU,
            "is for cuda and rocm platforms and would do nothing for tpu",
        ),
        (("xla_cpu_enable_fast_math=true",), H100, "is for cpu platforms"),
        (("xla_dump_to=x",), TPU, "the lab sets the dump itself"),
        (("xla_gpu_enable_triton_gemm=1",), H100, "is not a bool; write true or false"),
    ],
)
def test_settings_that_are_refused(texts: tuple[str, ...], platform: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        Platform.parse(platform, *texts)


def test_a_setting_is_part_of_the_platform_and_of_the_key() -> None:
    plain, scheduled = Platform.parse(H100), Platform.parse(H100, f"{SCHEDULER}=false")
    assert scheduled.compiler_options == {**plain.compiler_options, SCHEDULER: False}
    assert str(scheduled) == str(plain) == H100
    others = [Platform.parse(H100, f"{SCHEDULER}={value}") for value in ("true", "x")]
    keys = [entry_key(one, "x") for one in (plain, scheduled, *others)]
    assert len(set(keys)) == len(keys)
    assert entry_key(Platform.parse(H100), "x") == keys[0]
    assert entry_key(Platform.parse(H100, "xla_a=1", "xla_b=2"), "x") == entry_key(
        Platform.parse(H100, "xla_b=2", "xla_a=1"), "x"
    )


def test_the_key_without_settings_has_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what it was before there were any."""
    written: list[str] = []

    def sha256(content: bytes = b"") -> Any:
        written.append(content.decode())
        return real(content)

    real = hashlib.sha256
    monkeypatch.setattr("hashlib.sha256", sha256)
    for texts in ((), ("xla_a=1",)):
        entry_key(Platform.parse(TPU, *texts), "x")
    without, one = (text.splitlines() for text in written[-2:])
    assert without[:3] == [TPU, "triton", "'x'"]
    assert [line for line in one if line not in without] == [one[2]]
    assert "name='xla_a', value='1'" in one[2]


def test_matrix_products_by_a_setting() -> None:
    name = settings.TRITON_GEMM
    asked = Target("", (H100,), None, (f"{name}=false",)).platforms()
    assert [one.gemm for one in asked] == ["cublas"]
    assert asked[0].compiler_options == {name: False, settings.COST_MODEL: True}
    with pytest.raises(InputError, match=r"--gemm triton and the compiler setting .* contradict"):
        Target("", (H100,), "triton", (f"{name}=false",)).platforms()
    assert [one.gemm for one in Target("", (H100,), "cublas", (f"{name}=false",)).platforms()] == [
        "cublas"
    ]
    arms = TwoArms("", (H100,), None, xla_b=(f"{name}=false",)).pairs()
    assert [(a.gemm, b.gemm) for a, b in arms] == [("triton", "cublas")]
    both = TwoArms("", (H100,), None, ("xla_a=1",), xla_b=("xla_a=2",)).pairs()
    assert [(a.gemm, b.gemm) for a, b in both] == [("triton",) * 2, ("cublas",) * 2]
    assert [a.compiler_options["xla_a"] for a, _ in both] == ["1", "1"]
    assert [b.compiler_options["xla_a"] for _, b in both] == ["2", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", *SMALLEST, "--xla", "xla_nope=1"), "cpu does not know it; correct the name"),
        (
            ("compile", *SMALLEST, "--xla", "xla_backend_optimization_level=x"),
            "the compiler for cpu says: not a valid int32 value; give another value",
        ),
        (("ab", "norm-scale", "--xla-b", FAST_MATH), "differ in one thing already; leave out"),
        (
            ("ab", "--xla-a", FAST_MATH, "--sweep", "train.loss_chunks=2,4"),
            "--xla-a cannot be combined with --sweep; use --xla instead",
        ),
        (("ab", "--list", "--xla-b", FAST_MATH), "--list cannot be combined with --xla-b"),
    ],
)
def test_one_line_of_bad_input(run: Run, words: tuple[str, ...], message: str) -> None:
    ended = run(*words)
    assert ended.code == 2
    assert message in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_ab_compares_a_step_with_and_without(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("ab", *SMALLEST, "--mesh", "data=2", "--xla-b", FAST_MATH)
    ended = run(*words, "--json", "-")
    assert ended.code == 0, ended.err
    (entry,) = ended.json["experiments"]
    arms = entry["arms"]
    assert (arms["a"]["label"], arms["a"]["xla"]) == ("without", {})
    assert (arms["b"]["label"], arms["b"]["xla"]) == ("with", {"xla_cpu_enable_fast_math": True})
    assert (entry["judged_by"], entry["numerics"]) == ("account", None)
    again = run(*words)
    assert "compiling" not in again.err
    assert "a: compiler settings: none of your own" in again.out
    assert f"b: compiler settings: {FAST_MATH}" in again.out
    both = run(*words[:-2], "--xla", "xla_a=1", "--xla-a", FAST_MATH)
    assert (both.code, "xla_a=1: the compiler for cpu does not know it" in both.err) == (2, True)


def test_a_function_with_two_settings() -> None:
    pair = ("cpu", Platform.parse("cpu", FAST_MATH))
    found = lab.compare(chain, chain, *ARRAYS, platform=pair)
    assert found.a is not None
    assert found.b is not None
    assert (found.a.xla, found.b.xla) == ({}, {"xla_cpu_enable_fast_math": True})
    assert found.question.difference == "compiler settings"
    kept = Measurement.from_cache(json.loads(json.dumps(found.b.to_cache())), "now")
    assert (kept.xla, kept.xla_left_out) == (found.b.xla, ())
    with pytest.raises(InputError, match=r"platform=\(cpu, local\): both functions are compiled"):
        lab.compare(chain, chain, *ARRAYS, platform=("cpu", "local"))


tpu = pytest.mark.skipif(missing("libtpu"), reason="the TPU compiler is not installed")


@tpu
def test_a_setting_changes_what_the_tpu_compiler_makes() -> None:
    few, many = (
        lab.measure(chain, *ARRAYS, platform=Platform.parse(TPU, f"xla_tpu_scoped_{limit}"))
        for limit in ("vmem_limit_kib=1024", "vmem_limit_kib=65536")
    )
    assert few.time is not None
    assert many.time is not None
    assert few.time.compute_seconds > 2 * many.time.compute_seconds
    assert many.memory.heap_bytes > few.memory.heap_bytes
    assert few.xla == {"xla_tpu_scoped_vmem_limit_kib": "1024"}


@tpu
def test_what_a_compiler_does_not_take_of_a_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = {"all": ["xla_nope=true", "xla_tpu_scoped_vmem_limit_kib=1024", "xla_other=1"]}
    monkeypatch.setattr(settings, "flag_sets", lambda: made_up)
    found = lab.measure(chain, *ARRAYS, platform=Platform.parse(TPU, "@all"))
    assert found.xla == {"xla_tpu_scoped_vmem_limit_kib": "1024"}
    assert found.xla_left_out == ("xla_nope=true of @all", "xla_other=1 of @all")
    shown = text(report.measurement_view("a function", found))
    assert "does not take it: xla_nope=true of @all" in " ".join(shown.split())
    with pytest.raises(InputError, match=f"compiler setting xla_nope=true: the compiler for {TPU}"):
        lab.measure(chain, *ARRAYS, platform=Platform.parse(TPU, "@all", "xla_nope=true"))


def test_settings_are_shown_wherever_figures_are() -> None:
    given = {SCHEDULER: False, "xla_gpu_all_reduce_combine_threshold_bytes": "1048576"}
    made = dataclasses.replace(measurement(attribution()), xla=given)
    for view in (report.measurement_view("a step", made), report.account_view(made)):
        shown = text(view)
        assert max(map(len, shown.splitlines())) <= 80
        assert f"compiler settings: {SCHEDULER}=false, xla_gpu_all" in " ".join(shown.split())
    same = outcome()
    same = dataclasses.replace(same, a=dataclasses.replace(same.a, xla=given), b=made)
    shown = " ".join(text(report.outcomes_view("an A/B", [same])).split())
    assert shown.count("compiler settings: ") == 1
    apart = dataclasses.replace(outcome(), b=made)
    shown = text(report.outcomes_view("an A/B", [apart]))
    assert max(map(len, shown.splitlines())) <= 80
    assert "a: compiler settings: none of your own" in shown
    assert f"b: compiler settings: {SCHEDULER}=false" in " ".join(shown.split())
    assert f"{SCHEDULER}: – → false" in outcomes_page("an A/B", [apart])
    pytest.importorskip("matplotlib")
    heading = outcomes_chart("an A/B", [apart]).get_suptitle()
    assert heading.startswith(
        "an A/B\na: compiler settings: none of your own\nb: compiler settings"
    )
