"""The fixture `compile_memory` and `--update-memory-budgets`, in projects made for each test."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from helpers import missing, pytest_in

from nnx_pipeline import lab
from nnx_pipeline.lab.compile import _devices
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.pytest_plugin import _budgets as budgets

pytest_plugins = ["pytester"]

MODEL = """
import jax
import jax.numpy as jnp

X = jax.ShapeDtypeStruct((64, 256), "float32")
W = jax.ShapeDtypeStruct((256, 256), "float32")


def lean(x, w):
    return jnp.tanh(x @ w)


def kept(x, w):
    everything = jnp.tanh(x[:, :, None] * w)  # 64 x 256 x 256
    return jnp.sum(jnp.sort(everything, axis=0), axis=1)


def several(x, w):
    parts = [jnp.sort(x * factor, axis=0) for factor in (2.0, 3.0, 5.0)]  # 64 x 256 each
    return jnp.sort(jnp.concatenate(parts), axis=0) @ w
"""
STEP = """
import model

def test_step(compile_memory):
    assert compile_memory(model.{}, (model.X, model.W)).within_budget()
"""
UPDATE = "--update-memory-budgets"
MODELS = ("lean", "kept")

Project = Callable[..., pytest.RunResult]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Runs pytest within this process, over `model.py` and the test files given by name.

    As at a desk: under CI pytest itself repeats the whole message in its summary.
    """
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    # A file that is written twice in a second, with as many letters, would be run as it was first.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (pytester.path / "model.py").write_text(MODEL)
    pytester.syspathinsert()

    def run(*arguments: str, **files: str) -> pytest.RunResult:
        for name, text in files.items():
            (pytester.path / f"{name}.py").write_text(text)
        plugins = ("-p", "nnx_pipeline.lab.pytest_plugin", "-p", "no:hypothesispytest")
        return pytester.runpytest_inprocess(*plugins, "-p", "no:cacheprovider", "-n0", *arguments)

    return run


@pytest.fixture
def file(pytester: pytest.Pytester) -> Path:
    return pytester.path / budgets.FILE


def key(test: str, name: str = "") -> budgets.Key:
    compiler = budgets.compiler_of("cpu", Platform("cpu").versions())
    return budgets.Key(test, name, "cpu", compiler)


def output(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


def test_figures_are_those_of_measure(project: Project) -> None:
    result = project(
        test_step="""
        import jax, model
        from nnx_pipeline import lab

        def test_figures(compile_memory):
            measured = lab.measure(model.lean, model.X, model.W)
            result = compile_memory(model.lean, (model.X, model.W), platform="cpu")
            for name in ("temp", "heap", "peak", "argument", "output", "alias", "host_temp"):
                name = f"{name}_bytes"
                assert getattr(result, name) == getattr(measured.memory, name)
            assert result.flops == measured.flops == 2 * 64 * 256 * 256
            assert result.collectives == measured.collectives
            assert result.measurement.fingerprint == measured.fingerprint
        """.replace("\n        ", "\n")
    )
    result.assert_outcomes(passed=1)


def test_settings_of_the_compiler_have_budgets_of_their_own(project: Project, file: Path) -> None:
    files = {
        "test_settings": """
        import model
        from nnx_pipeline.lab import Platform

        def test_both(compile_memory):
            fast = Platform.parse("cpu", "xla_cpu_enable_fast_math=true")
            for platform in ("cpu", fast):
                found = compile_memory(model.lean, (model.X, model.W), platform=platform)
                assert found.within_budget()
        """.replace("\n        ", "\n")
    }
    project("--update-memory-budgets", **files).assert_outcomes(passed=1)
    platforms = [one.platform for one in budgets.read_budgets(file)]
    assert platforms == ["cpu", "cpu with xla_cpu_enable_fast_math=true"]
    project(**files).assert_outcomes(passed=1)


def test_each_case_of_a_table_is_measured_as_it_is(project: Project, file: Path) -> None:
    """What a test replaces in a module counts, though the function is the same one."""
    result = project(
        UPDATE,
        test_step="""
        import jax, jax.numpy as jnp, model, pytest
        from nnx_pipeline import lab

        @jax.jit
        def step(x, w):
            return model.lean(x, w)

        @pytest.mark.parametrize("name", ["lean", "kept", "lean"])
        @pytest.mark.parametrize("function", [step, lambda x, w: model.lean(x, w)])
        def test_step(compile_memory, monkeypatch, function, name):
            monkeypatch.setattr(model, "lean", getattr(model, name))
            assert compile_memory(function, (model.X, model.W)).within_budget()
        """.replace("\n        ", "\n"),
    )
    result.assert_outcomes(passed=6)
    namespace: dict = {}
    exec(MODEL, namespace)
    given = namespace["X"], namespace["W"]
    temps = {name: lab.measure(namespace[name], *given).memory.temp_bytes for name in MODELS}
    assert temps["lean"] < temps["kept"]
    found = {key.test: figures["temp_bytes"] for key, figures in budgets.read_budgets(file).items()}
    assert found == {
        f"test_step.py::test_step[{function}-{name}{number}]": temps[name]
        for function in ("step", "<lambda>")
        for name, number in (("lean", 0), ("kept", ""), ("lean", 1))
    }


def test_record_pass_and_exceed(project: Project, file: Path) -> None:
    first = project(test_step=STEP.format("lean"))
    first.assert_outcomes(failed=1)
    assert "test_step.py::test_step on cpu has no budget in memory-budgets.toml" in output(first)
    assert f"record one: pytest {UPDATE} 'test_step.py::test_step'" in output(first)
    assert not file.exists()

    recorded = project(UPDATE)
    recorded.assert_outcomes(passed=1)
    assert "new: test_step.py::test_step on cpu" in output(recorded)
    namespace: dict = {}
    exec(MODEL, namespace)
    memory = lab.measure(namespace["lean"], namespace["X"], namespace["W"]).memory
    # Of a CPU nothing is estimated, so that no time is recorded.
    expected = {name: getattr(memory, name) for name in budgets.BYTES}
    assert budgets.read_budgets(file) == {key("test_step.py::test_step"): expected}

    before = file.read_bytes()
    project().assert_outcomes(passed=1)
    again = project(UPDATE)
    assert "1 budget unchanged" in output(again)
    assert file.read_bytes() == before

    exceeded = project(test_step=STEP.format("kept"))
    exceeded.assert_outcomes(failed=1)
    text = output(exceeded)
    assert re.search(
        rf"heap [\d,]+ bytes is [\d,]+.*above its budget of {memory.heap_bytes:,}", text
    )
    assert f"If that is intended: pytest {UPDATE} 'test_step.py::test_step'" in text
    assert text.count("MB per device") == 1, "the figures are shown once"
    assert "def within_budget" not in text, "the code of the plugin is not shown"
    assert file.read_bytes() == before


def test_a_step_that_takes_longer(project: Project, file: Path) -> None:
    """On a platform with an estimate the time of a step is recorded, compared and updated."""
    if missing("libtpu"):
        pytest.skip("libtpu is not installed")
    step = STEP.format("lean").replace("model.W)", "model.W), platform='tpu:v5p:2x2x1'")
    project(UPDATE, test_step=step).assert_outcomes(passed=1)
    ((entry, figures),) = budgets.read_budgets(file).items()
    assert set(figures) == set(budgets.FIGURES)
    budgets.write_budgets(file, {entry: {**figures, "step_seconds": figures["step_seconds"] / 2}})
    exceeded = project(test_step=step)
    exceeded.assert_outcomes(failed=1)
    text = output(exceeded)
    assert re.search(r"estimated step [\d.]+ µs is [\d.]+ \(\+100\.0%\) above its budget of", text)
    assert re.search(r"ms by estimate: step [\d.]+, compute [\d.]+, waiting for collectives", text)
    assert re.search(r"longest of \d+ lines? of source:\n.* ms  \S*model\.py:10", text)
    assert "buffers at the peak" not in text, "the memory is within its budget"
    changed = output(project(UPDATE))
    assert re.search(r"changed: .* estimated step [\d.]+ µs,.* -> .* estimated step", changed)
    assert budgets.read_budgets(file) == {entry: figures}

    limit = step.replace("within_budget()", "assert_at_most(step_seconds=1e-9)")
    text = output(project(test_step=limit))
    assert re.search(r"step_seconds [\d.]+ is [\d.]+ .* above its limit of 0\.000000001", text)


@pytest.mark.parametrize(
    ("share", "code", "ini"),
    [(0.995, "", ""), (0.9, "", "0.2"), (0.9, "tolerance=0.2", ""), (0.9, "tolerance=0.2", "0")],
)
def test_tolerance(project: Project, file: Path, share: float, code: str, ini: str) -> None:
    """A budget a little too small: within the tolerance it holds, below it it does not."""
    step = STEP.format("kept")
    project(UPDATE, test_step=step)
    ((entry, figures),) = budgets.read_budgets(file).items()
    budgets.write_budgets(
        file, {entry: {name: int(share * bytes_) for name, bytes_ in figures.items()}}
    )
    options = ("-o", f"memory_budget_tolerance={ini}") if ini else ()
    within = step.replace("within_budget()", f"within_budget({code})")
    project(*options, test_step=within).assert_outcomes(passed=1)
    project("-o", "memory_budget_tolerance=0.001", test_step=step).assert_outcomes(failed=1)


@pytest.mark.parametrize("text", ["a lot", "-0.1", "1", "nan"])
def test_a_tolerance_that_is_no_share(project: Project, text: str) -> None:
    result = project("-o", f"memory_budget_tolerance={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"memory_budget_tolerance = {text!r} is not a number from 0" in "\n".join(
        result.errlines
    )


def test_a_budget_that_is_too_large_is_named_and_lowered(project: Project, file: Path) -> None:
    project(UPDATE, test_step=STEP.format("kept"))
    hint = project(test_step=STEP.format("lean"))
    hint.assert_outcomes(passed=1)
    assert re.search(r"test_step on cpu: heap [\d,]+ bytes is .* below its budget", output(hint))
    lowered = project(UPDATE)
    figures = r"account [\d,]+, heap [\d,]+,"
    assert re.search(rf"changed: test_step.py::test_step on cpu: {figures}", output(lowered))
    assert "below" not in output(project())


def test_a_hint_is_said_once(project: Project) -> None:
    project(UPDATE, test_step=STEP.format("kept"))
    lines = output(project(test_step=STEP.format("lean"))).splitlines()
    hints = [line for line in lines if "lowers it" in line]
    assert len(hints) == len(set(hints)) > 0


def test_a_figure_taken_out_of_the_file_is_not_watched(project: Project, file: Path) -> None:
    project(UPDATE, test_step=STEP.format("lean"))
    budgets.write_budgets(file, {key("test_step.py::test_step"): {}})
    project(test_step=STEP.format("kept")).assert_outcomes(passed=1)


def test_another_compiler_version_skips(project: Project, file: Path) -> None:
    there = key("test_step.py::test_step")
    budgets.write_budgets(file, {there._replace(compiler="jaxlib 0.1"): {"temp_bytes": 1}})
    result = project("-rs", test_step=STEP.format("lean"))
    result.assert_outcomes(skipped=1)
    text = output(result)
    assert f"has a budget for jaxlib 0.1, and this is {there.compiler}; record one: pytest" in text
    project(UPDATE).assert_outcomes(passed=1)
    assert {entry.compiler for entry in budgets.read_budgets(file)} == {
        "jaxlib 0.1",
        there.compiler,
    }


@pytest.mark.parametrize(
    ("package", "platform", "extra"),
    [
        ("libtpu", "tpu:v5p:2x2x1", "tpu"),
        ("jax-cuda13-plugin", "cuda:h100:8", "cuda"),
        ("nvidia-cuda-nvcc", "cuda:h100:8", "cuda"),
        ("jax-rocm7-pjrt", "rocm:mi300x:8", "rocm"),
        ("pyelftools", "rocm:mi300x:8", "rocm"),
    ],
)
def test_a_missing_compiler_skips(
    project: Project, monkeypatch: pytest.MonkeyPatch, package: str, platform: str, extra: str
) -> None:
    same = jax.__version__
    there = {"jax": same, "jax-cuda13-plugin": same, "jax-rocm7-pjrt": same}
    monkeypatch.setattr(_devices, "version", lambda name: {**there, package: ""}.get(name, ""))
    step = STEP.format("lean").replace("model.W)", f"model.W), platform={platform!r}")
    result = project("-rs", test_step=step)
    result.assert_outcomes(skipped=1)
    assert re.search(r"platform \S+ needs .*pip install '", output(result))
    assert f"pip install 'nnx-pipeline[{extra}]'" in output(result)


def test_a_compiler_of_the_wrong_version_fails(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_devices, "version", lambda name: "0.0.1")
    step = STEP.format("lean").replace("model.W)", "model.W), platform='tpu:v5p:2x2x1'")
    result = project(test_step=step)
    result.assert_outcomes(failed=1)
    assert "found 0.0.1, whose programs this JAX cannot read back" in output(result)


def test_a_broken_file_is_a_usage_error(project: Project, file: Path) -> None:
    file.write_text("[[budget]\n")
    result = project(test_step=STEP.format("lean"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert f"{file} cannot be read" in line
    assert "Traceback" not in output(result)


def test_a_file_that_cannot_be_written(
    project: Project, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    project(UPDATE, test_step=STEP.format("lean"))
    before = file.read_bytes()
    monkeypatch.setattr(budgets, "write_text", full)
    result = project(UPDATE, test_step=STEP.format("kept"))
    assert result.ret == 1
    assert f"{file} was not written: [Errno 28] No space left" in "\n".join(result.errlines)
    assert file.read_bytes() == before


TWO = """
import model

def test_first(compile_memory):
    assert compile_memory(model.lean, (model.X, model.W)).within_budget()

def test_second(compile_memory):
    result = compile_memory(model.kept, (model.X, model.W))
    assert result.within_budget("some") and result.within_budget("others")
"""


def names(file: Path) -> list[tuple[str, str]]:
    return [
        (entry.test.partition("::")[2], entry.name) for entry in sorted(budgets.read_budgets(file))
    ]


def test_what_is_no_more_is_removed(project: Project, pytester: pytest.Pytester) -> None:
    file = pytester.path / budgets.FILE
    project(UPDATE, test_two=TWO, test_step=STEP.format("lean"))
    two = [("test_second", "others"), ("test_second", "some")]
    everything = [("test_step", ""), ("test_first", ""), *two]
    assert names(file) == everything
    # Another name in a test that passes, a test of another name, and a file that is not there.
    renamed = TWO.replace(' and result.within_budget("others")', "").replace("first", "renamed")
    result = project(UPDATE, "-k", "second", test_two=renamed)
    assert "removed: test_two.py::test_second (others) on cpu" in output(result)
    assert names(file) == [("test_step", ""), ("test_first", ""), two[1]], "-k leaves tests out"
    project(UPDATE, "test_two.py::test_renamed")
    assert ("test_first", "") in names(file), "one test alone says nothing of the others"
    conftest = pytester.path / "conftest.py"
    conftest.write_text("def pytest_collection_modifyitems(items):\n    del items[1:]\n")
    project(UPDATE)
    assert ("test_first", "") in names(file), "items that were dropped without a word may exist"
    conftest.unlink()
    (pytester.path / "test_step.py").unlink()
    project(UPDATE)
    assert names(file) == [("test_renamed", ""), two[1]]


def test_a_test_that_fails_keeps_its_budget(project: Project, file: Path) -> None:
    project(UPDATE, test_two=TWO)
    before = file.read_bytes()
    failing = TWO.replace("model.kept", "model.lean") + "    assert False\n"
    project(UPDATE, test_two=failing).assert_outcomes(passed=1, failed=1)
    assert file.read_bytes() == before


def test_a_run_that_stopped_removes_nothing(project: Project, file: Path) -> None:
    project(UPDATE, test_two=TWO)
    before = file.read_bytes()
    failing = TWO.replace("model.lean", "1 / 0")
    project(UPDATE, "-x", test_two=failing).assert_outcomes(failed=1)
    assert file.read_bytes() == before


def test_two_figures_need_two_names(project: Project) -> None:
    second = TWO.replace('"some"', "").replace('result.within_budget("others")', "other()")
    second = second.replace("    assert result", OTHER + "    assert result")
    result = project(UPDATE, test_two=second)
    result.assert_outcomes(passed=1, failed=1)
    assert (
        "test_second on cpu has two different budgets; name each by within_budget(name)"
        in output(result)
    )


OTHER = """
    def other():
        return compile_memory(model.lean, (model.X, model.W)).within_budget()
"""


def test_a_plain_assertion_shows_the_buffers(project: Project) -> None:
    step = STEP.format("kept").replace(".within_budget()", ".heap_bytes <= 1_000_000")
    result = project(test_step=step)
    result.assert_outcomes(failed=1)
    text = output(result)
    assert re.search(r"assert \d+ <= 1000000\n.*<model:kept on cpu>.heap_bytes", text)
    assert "- compile memory -" in text
    assert re.search(r"16\.8 MB +f32\[64,256,256\] +model.py:1[45]", text)
    assert f"jaxlib {jax.lib.__version__}" in text


def test_a_limit_shows_the_buffers(project: Project) -> None:
    step = STEP.format("kept").replace("within_budget()", "assert_at_most(temp_bytes=10**6)")
    text = output(project(test_step=step))
    assert re.search(r"temp_bytes [\d,]+ is [\d,]+ \([\d.]+%\) above its limit of 1,000,000", text)
    assert re.search(r"16\.8 MB +f32\[64,256,256\] +model.py:1[45]", text)
    assert text.count("MB per device") == 1


def test_buffers_that_read_the_same_are_one_row(project: Project) -> None:
    step = STEP.format("several").replace("within_budget()", "assert_at_most(temp_bytes=10**4)")
    text = output(project(test_step=step))
    assert re.search(r"0\.2 MB in 3 buffers +f32\[64,256\] +model.py:19 +activation +mul\n", text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("(model.lean, [model.X])", "args= is a list; give a tuple of the arguments"),
        ("(model.lean, (model.X,))", "cannot be called with 1 argument:"),
        ("(model.lean, (), platform='gpu')", "did you mean 'cuda'?"),
        ("(model.lean, (model.X, model.W)).assert_at_most()", "has no limit; give one"),
        (
            "(model.lean, (model.X, model.W)).assert_at_most(tmp_bytes=3)",
            "tmp_bytes= is not a known figure; did you mean 'temp_bytes'?",
        ),
        (
            "(model.lean, (model.X, model.W)).assert_at_most(temp_bytes=float('nan'))",
            "temp_bytes=nan is not a limit",
        ),
        (
            "(model.lean, (model.X, model.W)).assert_at_most(step_seconds='a')",
            "step_seconds='a' is not a limit",
        ),
        ("(model.lean, (model.X, model.W)).within_budget(4)", "a name must be a string; write '4'"),
        (
            "(model.lean, (model.X, model.W)).within_budget(tolerance=float('nan'))",
            "tolerance=nan is not a valid share; write 0.01 for 1 %",
        ),
        (
            "(model.lean, (model.X, model.W)).within_budget(tolerance='x')",
            "tolerance='x' is not a valid share; write 0.01 for 1 %",
        ),
        (
            "(model.lean, (model.X, model.W), platform='local').within_budget()",
            "platform='local' cannot have a budget: devices differ between machines",
        ),
    ],
)
def test_bad_input(project: Project, call: str, message: str) -> None:
    step = f"import model\n\ndef test_step(compile_memory):\n    compile_memory{call}\n"
    result = project(test_step=step)
    result.assert_outcomes(failed=1)
    assert message in output(result)
    assert "def measure" not in output(result), "where in this package it was noticed is not shown"


@pytest.mark.slow
def test_workers_give_the_same_file(project: Project, pytester: pytest.Pytester) -> None:
    """With two workers of xdist, processes of their own, as without them."""
    group = "import pytest\n\n@pytest.mark.xdist_group('one')\ndef test_"
    tests = "".join(STEP.format(name).replace("def test_step", f"{group}{name}") for name in MODELS)
    project(UPDATE, test_one=tests, test_two=tests)
    file = pytester.path / budgets.FILE
    alone = file.read_bytes()
    assert len(budgets.read_budgets(file)) == 4
    file.unlink()
    assert pytest_in(pytester.path, "-n2", "--dist=loadgroup", UPDATE).code == 0
    assert file.read_bytes() == alone


def strict_run(project: Project, *arguments: str, **files: str) -> str:
    result = project("--memory-strict", *arguments, **files)
    result.assert_outcomes(failed=1)
    return output(result)


def test_what_is_skipped_fails_where_nothing_may_be(
    project: Project, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = key("test_step.py::test_step")
    budgets.write_budgets(file, {there._replace(compiler="jaxlib 0.1"): {"temp_bytes": 1}})
    text = strict_run(project, test_step=STEP.format("lean"))
    assert "has a budget for jaxlib 0.1, and this is" in text
    assert "(not skipped, by --memory-strict)" in text
    monkeypatch.setattr(_devices, "version", lambda name: "")
    step = STEP.format("lean").replace("model.W)", "model.W), platform='tpu:v5p:2x2x1'")
    assert "platform tpu:v5p:2x2x1 needs" in strict_run(project, test_step=step)


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (".within_budget()", r"heap 16\.8 MB, budget 1\.0 MB \(\+1577\.7%\)"),
        (".assert_at_most(heap_bytes=10**6)", r"heap 16\.8 MB, limit 1\.0 MB \(\+1577\.7%\)"),
        (".assert_at_most(step_seconds=0.02)", r"step not known, limit 20\.0 ms"),
    ],
)
def test_the_short_summary_has_the_figure(
    project: Project, file: Path, check: str, line: str
) -> None:
    """In 80 columns, where pytest cuts off the rest."""
    budgets.write_budgets(file, {key("test_step.py::test_step"): {"heap_bytes": 10**6}})
    step = STEP.format("kept").replace(".within_budget()", check)
    result = project(test_step=step)
    result.assert_outcomes(failed=1)
    assert re.search(rf"^FAILED test_step.py::test_step - {line}$", output(result), re.MULTILINE)


def marked(marker: str, call: str = "(model.kept, (model.X, model.W))") -> str:
    body = f"    compile_memory{call}\n" if call else "    pass\n"
    test = f"@pytest.mark.memory_budget({marker})\ndef test_step(compile_memory):\n{body}"
    return f"import model\nimport pytest\n\n{test}"


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ('"24 MB"', ""),
        ('"16 MB"', r"account 17\.\d MB, limit 16\.0 MB \(\+\d\.\d%\)"),
        ('"16 MiB"', r"account 17\.\d MB, limit 16\.8 MB \(\+\d\.\d%\)"),
        ('heap="1.5 MB", temp="1 GiB"', r"heap 16\.8 MB, limit 1\.5 MB \(\+\d+\.\d%\)"),
        ('step="20 ms"', r"step not known, limit 20\.0 ms"),
        ('"16 MB", platform="cpu"', r"account 17\.\d MB, limit 16\.0 MB \(\+\d\.\d%\)"),
    ],
)
def test_a_limit_in_a_marker(project: Project, marker: str, line: str) -> None:
    result = project("--strict-markers", test_step=marked(marker))
    result.assert_outcomes(failed=bool(line), passed=not line)
    assert not line or re.search(f"::test_step - {line}$", output(result), re.MULTILINE)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("", "@memory_budget has no limit; give one, such as"),
        ("24", "'account=24' is no limit; write"),
        ('"24 Mb"', "is no limit; write"),
        ('"5%"', "is a share of nothing"),
        ('step="3 MB"', "step is in seconds; write step=20ms"),
        ('hepa="3 MB"', "is no figure; did you mean 'heap'?"),
        ('"1 MB", "2 MB"', "takes one limit without a name"),
        ('"1 MB", platform="gpu"', "did you mean 'cuda'?"),
    ],
)
def test_a_marker_that_says_nothing(project: Project, marker: str, message: str) -> None:
    result = project(test_step=marked(marker))
    result.assert_outcomes(errors=1)
    assert message in output(result)


def test_a_marker_that_limits_nothing_fails(project: Project) -> None:
    result = project(test_step=marked('"24 MB"', call=""))
    result.assert_outcomes(failed=1)
    assert "limits nothing: the test compiles nothing; call the fixture" in output(result)
    bare = marked('"24 MB"', call="").replace("(compile_memory)", "()")
    project(test_step=bare).assert_outcomes(failed=1)
    other = marked(
        '"24 MB", platform="tpu:v5p:2x2x1"', "(model.lean, (model.X, model.W), platform='cpu')"
    )
    result = project(test_step=other)
    result.assert_outcomes(failed=1)
    assert "compiles nothing for tpu:v5p:2x2x1" in output(result)


def test_the_platform_of_a_marker_is_what_is_compiled_for(project: Project) -> None:
    if missing("libtpu"):
        pytest.skip("libtpu is not installed")
    two = "@pytest.mark.memory_budget('1 kB', platform='cuda:h100:8')\n@pytest.mark.memory"
    step = (
        marked('"24 MB", platform="tpu:v5p:2x2x1"')
        .replace("kept", "lean")
        .replace("@pytest.mark.memory", two, 1)
    )
    step += "    assert compile_memory(model.lean, (model.X, model.W), platform='cpu')\n"
    project(test_step=step).assert_outcomes(failed=1)
    step = step.replace("@pytest.mark.memory_budget('1 kB', platform='cuda:h100:8')\n", "")
    project(test_step=step).assert_outcomes(passed=1)


def committed(folder: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "First"]):
        subprocess.run([*git, *words], check=True)


def test_a_revision_instead_of_budgets(project: Project, pytester: pytest.Pytester) -> None:
    """What needs more than at the revision fails, and what is new has nothing to be held against.

    A budget that is recorded there counts for nothing.
    """
    (pytester.path / "test_old.py").write_text(STEP.format("lean"))
    recorded = {key("test_old.py::test_step"): {"heap_bytes": 10**12}}
    budgets.write_budgets(pytester.path / budgets.FILE, recorded)
    committed(pytester.path)
    more = MODEL.replace(
        "def lean(x, w):", "def lean(x, w):\n    return kept(x, w)\n\n\ndef was(x, w):"
    )
    (pytester.path / "model.py").write_text(more)
    result = project("--memory-baseline", "HEAD", test_new=STEP.format("several"))
    result.assert_outcomes(passed=1, failed=1)
    said = output(result)
    assert re.search(r"FAILED test_old.py::test_step - .*, HEAD \d", said)
    assert "test_new.py::test_step on cpu: HEAD has no figures of it" in said
    assert budgets.read_budgets(pytester.path / budgets.FILE) == recorded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory-baseline", "nope"), "'nope' is no revision of"),
        (("--memory-baseline=HEAD", UPDATE), "cannot be combined with --memory-baseline"),
    ],
)
def test_a_revision_that_cannot_be_taken(
    project: Project, pytester: pytest.Pytester, words: tuple[str, ...], message: str
) -> None:
    committed(pytester.path)
    result = project(*words, test_step=STEP.format("lean"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in "\n".join([*result.outlines, *result.errlines])
