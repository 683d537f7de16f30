"""One program with several versions of JAX: environments are made up here, as is what they say."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import Ended, Run
from page_examples import attribution, measurement
from test_tables import text

from nnx_pipeline import InputError
from nnx_pipeline.lab._baseline import environment, process
from nnx_pipeline.lab._baseline.environment import Unavailable, Wanted
from nnx_pipeline.lab._cli import bisected
from nnx_pipeline.lab._cli.other_process import parse_versions
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.versions_table import versions_view
from nnx_pipeline.lab.compile._cache import Cache

HERE = jax.__version__
OLD, NEW = "80.1.0", "80.2.0"
TINY = ("measure", "tiny", "--across")
NOT_FOUND = f"""ERROR: Could not find a version that satisfies the requirement jax=={OLD} \
(from versions: 0.9, 0.10.1)
ERROR: No matching distribution found for jax=={OLD}"""
UNKNOWN = f"{NOT_FOUND}\nWARNING: the index was slow"
NEWER_PYTHON = f"""ERROR: Ignored the following versions that require a different python version: \
80.0.9 Requires-Python >=3.12; {OLD} Requires-Python >=3.12
{NOT_FOUND}"""


class Machine:
    """Stands for the processes that are started, and keeps their commands.

    - `pip`: what pip says by the Python that it runs on; nothing where it succeeds.
    - `heaps`: how many times as large the heap is by the version of JAX.
    - `failures`: exit status and last words of what does not compile, by the version of JAX.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.pip: dict[str, str] = {}
        self.heaps: dict[str, float] = {}
        self.failures: dict[str, tuple[int, str]] = {}
        self.published = ["80.4.0", "80.3.0", NEW, OLD, "0.9"]

    def execute(
        self,
        command: Sequence[str],
        *,
        say: Any = None,
        environment: Any = None,
        folder: Any = None,
        keep_output: bool = False,
    ) -> Any:
        self.commands.append(list(command))
        python, *rest = command
        if rest[:3] == ["-m", "pip", "index"]:
            return 0, f"jax (80.4.0)\nAvailable versions: {', '.join(self.published)}\n"
        if rest[:2] == ["-m", "venv"]:
            folder = Path(rest[2])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").write_text(python)
            return 0, ""
        if rest[:2] == ["-m", "pip"]:
            said = self.pip.get(Path(python).read_text(), "")
            return (1, said) if said else (0, "")
        if "--json" not in rest:  # asks a Python for its version
            return 0, ""
        say("compiling")
        of_environment = re.search(r"/jax-([\d.]+)-", python)
        version = of_environment[1] if of_environment else HERE
        if version in self.failures:
            code, said = self.failures[version]
            return code, f"compiling\n{said}\n"
        made = measurement(attribution(self.heaps.get(version, 1.0)), platform="cpu")
        made = dataclasses.replace(made, versions={**made.versions, "jax": version})
        Path(rest[rest.index("--json") + 1]).write_text(json.dumps(made.to_json()))
        given = json.loads(next(word for word in rest if word.startswith("{")))
        behind = [one.name for folder in given["packages"] for one in Path(folder).iterdir()]
        if python != sys.executable:  # all packages but those of another JAX
            assert environment["PYTHONPATH"] == ""
            assert {"flax", "jaxtyping"} <= set(behind)
            assert not {"jax", "jaxlib", "libtpu"} & set(behind) or "/jax-" not in python
        return 0, "compiling\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for module in (environment, process, bisected):
        monkeypatch.setattr(module, "execute", made.execute)
    return made


def python_with(version: str, kind: str, folder: Path, say: Any) -> str:
    wanted = Wanted("jax", version, f"--across jax={version}")
    return environment.environment_with([wanted], kind, folder, say).python


def folder() -> Path:
    kept = Cache.of_user().folder
    assert kept is not None
    return kept / "environments"


def measure_across(run: Run, *versions: str, more: Sequence[str] = ()) -> Ended:
    return run(*TINY, f"jax={','.join(versions)}", *more)


def test_versions_side_by_side(run: Run, machine: Machine) -> None:
    machine.heaps = {OLD: 1.0, NEW: 0.6}
    more = ("--mesh", "fsdp=2", "--xla", "xla_cpu_enable_fast_math=true", "--json", "-")
    ended = measure_across(run, HERE, OLD, NEW, more=more)
    assert ended.code == 0, ended.err
    assert [row["version"] for row in ended.json["across"]] == [HERE, OLD, NEW]
    assert (ended.json["schema"], ended.json["platform"]) == (1, "cpu")
    heaps = [row["memory"]["heap_bytes"] for row in ended.json["across"]]
    assert heaps[0] == heaps[1] > heaps[2]
    assert f"jax {HERE}: it is installed here" in ended.err
    assert f"jax {NEW}: compiling" in ended.err
    compiled = [command for command in machine.commands if "measure" in command]
    assert compiled[0][0] == sys.executable
    assert compiled[1][0] == str(next(folder().glob(f"jax-{OLD}-cpu-*")) / "bin" / "python")
    words = " ".join(compiled[1][compiled[1].index("measure") :])
    options = "tiny --mesh fsdp=2 --platform cpu --xla xla_cpu_enable_fast_math=true"
    assert words.startswith(f"measure {options} --json ")
    machine.commands.clear()
    again = measure_across(run, OLD, NEW)
    assert again.code == 0
    assert not any("pip" in command for command in machine.commands), "they are kept"
    assert "−" in again.out


def test_an_interrupted_environment_is_made_again(run: Run, machine: Machine) -> None:
    def killed(command: Sequence[str], **options: Any) -> Any:
        if "pip" in command:
            raise KeyboardInterrupt
        return machine.execute(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "execute", killed)
        assert measure_across(run, HERE, OLD).code == 130
    assert list(folder().iterdir()) == []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    say = [].append
    home = Path(python_with(NEW, "cpu", folder(), say)).parents[1]
    half = home.with_name(f"{home.name}.building-{gone.pid}")
    busy = home.with_name(f"{home.name}.building-{os.getppid()}")
    half.mkdir()
    busy.mkdir()
    (home / "bin" / "python").unlink()
    machine.commands.clear()
    python = python_with(NEW, "cpu", folder(), say)
    assert Path(python).exists()
    assert any("pip" in command for command in machine.commands)
    assert (half.exists(), busy.exists()) == (False, True)


def test_a_version_that_needs_another_python(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.pip = {sys.executable: NEWER_PYTHON}
    monkeypatch.setattr("shutil.which", lambda name: f"/of/this/test/{name}")
    python = python_with(OLD, "cpu", folder(), print)
    assert Path(python).read_text().startswith("/of/this/test/python3.")
    monkeypatch.setattr(environment, "OLDEST", environment.NEWEST + 1)
    with pytest.raises(InputError, match=f"{OLD}: it supports none of the Pythons here"):
        python_with(OLD, "tpu", folder(), print)


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        (UNKNOWN, 2, f"No matching distribution found for jax=={OLD}; choose one that there is"),
        ("ERROR: no space left\nnote: x", 1, f"no environment with jax {OLD}: no space left"),
        ("the network is down", 1, f"no environment with jax {OLD}: the network is down"),
    ],
)
def test_what_pip_says(run: Run, machine: Machine, said: str, code: int, message: str) -> None:
    machine.pip = {sys.executable: said}
    ended = measure_across(run, OLD, NEW)
    assert ended.code == code
    assert message in ended.err.splitlines()[-1]
    assert list(folder().iterdir()) == []


ABORTED = """F1125 10:00:00.000000    7 emitter.cc:12] Check failed: x == y
*** Check failure stack trace: ***
    @     0x7f5a3c0b8d64  absl::log_internal::LogMessage::Die()"""


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        (1, "nnx-pipeline: it did not compile: too large", "it did not compile: too large"),
        (-signal.SIGABRT, ABORTED, f"the process was ended by a signal (Aborted): {ABORTED[:20]}"),
        (-signal.SIGKILL, "", "the process was ended by a signal (Killed): compiling"),
    ],
)
def test_a_version_that_does_not_compile(
    run: Run, machine: Machine, code: int, said: str, message: str
) -> None:
    """The others are shown; of a compiler that ends its process, what it found wrong."""
    machine.failures = {OLD: (code, said)}
    ended = measure_across(run, HERE, OLD)
    assert ended.code == 1
    assert f"jax {OLD}: {message}" in ended.err
    assert "Die()" not in ended.err.splitlines()[-1]
    assert f"jax {OLD}: {message[:30]}" in ended.out
    assert HERE in ended.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("libtpu=1,2", "not of the form jax=VERSION,VERSION"),
        ("jax=0.10.2,", "not of the form"),
        ("0.10.2,0.12", "not of the form"),
        ("jax=80.1", "two different versions or more"),
        ("jax=80.1,80.1.0", "none of them twice"),
        ("jax=0.4.30,80.1", "--across jax=0.4.30: this project needs jax>=0.10.2"),
    ],
)
def test_versions_that_are_refused(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_versions(given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--hlo", "x.txt"), "--across cannot be combined with --hlo"),
        (("--platform", "local"), "found --platform local"),
        (("--xla", "xla_a"), "not of the form NAME=VALUE"),
        (("--mesh", "stage=5"), "choose a multiple of 5"),
    ],
)
def test_bad_input_is_found_before_anything_is_built(
    run: Run, machine: Machine, more: tuple[str, ...], message: str
) -> None:
    ended = measure_across(run, OLD, NEW, more=more)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert machine.commands == []


def test_the_table_at_80_columns() -> None:
    base = measurement(attribution(9.0), platform="cuda:h100:8")
    rows = []
    for version, factor in (("0.10.2", 9.0), ("0.12.0.1", 1.0), ("0.12.1", None)):
        row = {"version": version, "error": "too large" if factor is None else None}
        if factor is not None:
            large = dataclasses.replace(
                measurement(attribution(factor)),
                seconds={"compile": 12.3 * factor},
                xla={"xla_gpu_enable_latency_hiding_scheduler": False},
            )
            row |= large.to_json()
            row |= {"other_gemm": base.to_json()}
        rows.append(row)
    shown = text(versions_view("a step", rows))
    assert max(map(len, shown.splitlines())) <= 80
    lines = [line.split() for line in shown.splitlines()]
    (first, *_) = (line for line in lines if line[:1] == ["0.10.2"] and len(line) == 9)
    assert first[1] == report.megabytes(base.memory.temp_bytes)
    assert "−8" in shown
    assert "=" in shown
    assert "matrix products by cuBLASLt" in shown
    assert "jax 0.12.1: too large" in shown
    assert "compiler settings: xla_gpu_enable_latency_hiding_scheduler=false" in " ".join(
        shown.split()
    )


@pytest.mark.slow
def test_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed, and not the project; a registry is needed, and less for a short test."""
    monkeypatch.setattr(environment, "requirements", lambda kind: ["click>=8.4"])
    said: list[str] = []
    try:
        python = python_with(HERE, "cpu", tmp_path, said.append)
    except Unavailable as error:  # what pip says where it reaches no registry
        if "No matching distribution found" not in str(error):
            raise
        pytest.skip(str(error))
    script = "import click, jax; print(jax.__version__)"
    shown = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True).stdout
    assert shown.strip() == HERE
    project = [python, "-I", "-c", "import nnx_pipeline"]
    assert subprocess.run(project, capture_output=True).returncode == 1
    said.clear()
    assert python_with(HERE, "cpu", tmp_path, said.append) == python
    assert said == []


def test_beside_another_version(run: Run, machine: Machine) -> None:
    machine.heaps = {OLD: 2.0}
    ended = run("compare", "tiny", "--with", f"jax=={OLD}", "--platform", "cpu", "--json", "-")
    assert ended.code == 0, ended.err
    arms = ended.json["experiments"][0]["arms"]
    assert [arms[key]["label"] for key in "ab"] == [f"jax=={OLD}", f"jax=={HERE}"]
    assert [arms[key]["versions"]["jax"] for key in "ab"] == [OLD, HERE]
    assert arms["a"]["memory"]["heap_bytes"] > arms["b"]["memory"]["heap_bytes"]
    shown = run("compare", "tiny", "--with", f"jax=={OLD}", "--platform", "cpu").out
    compilers = [line for line in shown.splitlines() if line.startswith("compiler: ")]
    for version, line in zip((OLD, HERE), compilers, strict=True):
        assert f"jax {version}," in line


def test_a_package_that_is_not_jax_is_installed_alone(run: Run, machine: Machine) -> None:
    ended = run("compare", "tiny", "--with", "optax==99.1", "--platform", "cpu")
    assert ended.code == 0, ended.err
    (installed,) = (command for command in machine.commands if "install" in command)
    assert installed[-2:] == ["--no-deps", "optax==99.1"]


@pytest.mark.parametrize("broken", [(), (NEW,)])
def test_the_version_after_which_it_needs_more(
    run: Run, machine: Machine, broken: tuple[str, ...]
) -> None:
    """One that does not compile may be the first as well."""
    machine.heaps = {"80.3.0": 2.0, "80.4.0": 2.0}
    machine.failures = dict.fromkeys(broken, (1, "nnx-pipeline: too large"))
    ended = run("bisect", f"jax=={OLD}", "jax==80.4.0", "tiny", "--platform", "cpu", "--json", "-")
    assert ended.code == 0, ended.err
    found = [one["version"].removeprefix("jax==") for one in ended.json["first"]]
    assert found == [*broken, "80.3.0"]
    assert "jax==0.9" not in str(ended.json["compiled"])
