"""Results on disk: found again only where nothing that matters has changed."""

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import pytest
from helpers import Run, optax_promotion, small_config, user_environment
from page_examples import attribution, measurement

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.experiments import _numerics as numerics
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._measuring import measure_programs
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.experiments._replaced import Replaced
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.compile import _cache_key as cache_key
from nnx_pipeline.lab.compile._cache import LONGEST_DAYS, Cache, restored
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.sharding.layout import left_to_compiler

CPU, TPU = Platform("cpu"), Platform.parse("tpu:v5p:2x2x2")
PLATFORMS = (CPU, TPU, Platform.parse("cuda:h100:8"))
MESH = MeshConfig(data=2, stage=2, fsdp=2)
EXPERT_MESH = MeshConfig(stage=2, fsdp=2, expert=2)
PROGRAM = Program(small_config())
KEY = "0" * 64
MEASURING = sys.modules["nnx_pipeline.experiments._measuring"]


def arms() -> list[Program]:
    """Those of every experiment that can run."""
    config = preset("tiny")
    runnable = list(EXPERIMENTS.values())
    meshes = [EXPERT_MESH if "expert" in one.needs else MESH for one in runnable]
    pairs = zip(runnable, meshes, strict=True)
    return [program for one, mesh in pairs for program in one.programs(config, mesh)]


def test_every_arm_has_a_key_and_no_two_programs_share_one() -> None:
    by_key: dict[str, Program] = {}
    for program in arms():
        key = entry_key(CPU, MESH, program)
        assert key is not None
        assert by_key.setdefault(key, program) == program
    assert len(by_key) == len(set(arms()))


def test_what_changes_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = small_config(train={"sequence_length": 16})
    keys = [
        entry_key(TPU, MESH, PROGRAM),
        entry_key(CPU, MESH, PROGRAM),
        entry_key(Platform.parse("tpu:v5p:2x2x1"), MESH, PROGRAM),
        entry_key(TPU, MeshConfig(stage=2), PROGRAM),
        entry_key(TPU, MESH, Program(longer)),
        entry_key(TPU, MESH, PROGRAM._replace(segment_ids=True)),
        entry_key(TPU, MESH, PROGRAM._replace(under=left_to_compiler)),
        entry_key(TPU, "numerics", MESH, PROGRAM),
    ]
    assert entry_key(TPU, MESH, Program(small_config())) == keys[0]
    monkeypatch.setenv("XLA_FLAGS", "--xla_another_flag")
    keys.append(entry_key(TPU, MESH, PROGRAM))
    monkeypatch.setattr(cache_key, "source", lambda: "edited")
    keys.append(entry_key(TPU, MESH, PROGRAM))
    monkeypatch.setattr(cache_key, "packages", lambda platform: "newer")
    keys.append(entry_key(TPU, MESH, PROGRAM))
    with jax.debug_nans(True):
        keys.append(entry_key(TPU, MESH, PROGRAM))
    on_cpu = entry_key(CPU, MESH, PROGRAM)
    monkeypatch.setattr(cache_key, "cpu_text", lambda: "another")
    assert entry_key(TPU, MESH, PROGRAM) == keys[-2], "a TPU's compiler does not ask the CPU"
    keys += [on_cpu, entry_key(CPU, MESH, PROGRAM)]
    monkeypatch.setattr(cache_key, "ROOT", Path("/elsewhere/nnx_pipeline"))
    keys.append(entry_key(TPU, MESH, PROGRAM))
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("package", "changed"),
    [
        *((name, "cpu tpu cuda") for name in ("jax", "jaxlib", "flax", "optax", "numpy", "qwix")),
        ("libtpu", "tpu"),
        *((name, "cuda") for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt")),
        *((name, "cuda") for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cudnn-cu13")),
    ],
)
def test_a_package_changes_keys_of_the_platforms_that_use_it(
    monkeypatch: pytest.MonkeyPatch, package: str, changed: str
) -> None:
    """Installing the extra `cuda` leaves results for the TPU where they are."""
    real = importlib.metadata.version
    monkeypatch.setattr(cache_key, "packages", cache_key.packages.__wrapped__)
    before = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if name == package else real(name)
    )
    after = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    kinds = [one.kind for one, a, b in zip(PLATFORMS, before, after, strict=True) if a != b]
    assert kinds == changed.split()


def test_packages_that_models_import_are_part_of_the_key() -> None:
    """Those of extras too: another version of Qwix rounds in another way."""
    folders = ("config", "modules", "ops", "pipeline", "sharding", "train")
    files = [path for name in folders for path in (cache_key.ROOT / name).rglob("*.py")]
    words = r"(?m)^\s*(?:import|from) (\w+)(?:[.\w]*$| |[.\w]* import )"
    imported = {name for path in files for name in re.findall(words, path.read_text("utf-8"))}
    names = {one: found[0] for one, found in importlib.metadata.packages_distributions().items()}
    others = {"click", "jaxtyping", "matplotlib", "nnx-pipeline", "rich"}  # decide no program
    needed = {names[one] for one in imported & names.keys()} - others
    assert "qwix" in needed
    assert needed <= set(cache_key.PACKAGES[""])


# Each step is what a process may have done before it asks for a key.
IN_ORDER = """
import json, os, sys
import jax
from nnx_pipeline import InputError, MeshConfig, preset
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.platform import Platform

platforms = [Platform.parse(text) for text in ("cpu", "tpu:v5p:2x2x2", "cuda:h100:8")]
rows = []
for step in ("start", *sys.argv[1:]):
    if step == "compile":
        jax.jit(lambda x: x + 1)(1.0)
    elif step != "start":
        try:
            platforms[int(step)].devices(8)
        except InputError:
            pass  # that compiler is not installed
    rows.append([entry_key(one, MeshConfig(stage=2), Program(preset("tiny"))) for one in platforms])
print(json.dumps(rows))
"""


def keys_of_a_process(*steps: str, **environment: str) -> list[list[str]]:
    """The keys for CPU, TPU and NVIDIA at the start of a process and after each of its steps."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ORDER, *steps],
        capture_output=True,
        text=True,
        env={**user_environment(), **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_keys_do_not_depend_on_what_a_process_did_before() -> None:
    """A platform that is set up writes into the environment and into JAX's configuration."""
    rows = keys_of_a_process("1", "2", "0", "compile")
    rows += keys_of_a_process("0", "compile", "2", "1")
    # What a user gives that is what would be set anyway is no difference either.
    rows += keys_of_a_process("1", TPU_WORKER_HOSTNAMES="localhost", JAX_PLATFORMS="cpu")
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    (other,) = keys_of_a_process(TPU_WORKER_HOSTNAMES="elsewhere")
    assert [a == b for a, b in zip(other, rows[0], strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("variable", "text", "changed"),
    [
        ("XLA_FLAGS", "{file}", "cpu tpu cuda"),
        ("XLA_FLAGS", "--xla_a=true --xla_target_config='{file}'", "cpu tpu cuda"),
        ("XLA_FLAGS", "--xla_profile={folder}", "cpu tpu cuda"),
        ("XLA_FLAGS", "--xla_dump_to={folder}", ""),  # where something is written
        ("XLA_FLAGS", "{outer}", "cpu tpu cuda"),  # a file of flags that names another file
        ("TF_XLA_FLAGS", "--flagfile={file}", "tpu"),
        ("LIBTPU_INIT_ARGS", "--xla_x=1 --flagfile {file}", "tpu"),
        ("TPU_LIBRARY_PATH", "{file}", "tpu"),
        ("UNKNOWN_FLAGS", "{file}", ""),
    ],
)
def test_what_is_in_a_file_that_flags_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, text: str, changed: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, outer = folder / "flags", tmp_path / "outer"
    outer.write_text(f"--xla_other={file}")
    file.write_text("--xla_one=1")
    monkeypatch.setenv(variable, text.format(file=file, folder=folder, outer=outer))
    before = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    assert [entry_key(platform, PROGRAM) for platform in PLATFORMS] == before
    file.write_text("--xla_one=22")
    after = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    kinds = [one.kind for one, a, b in zip(PLATFORMS, before, after, strict=True) if a != b]
    assert kinds == changed.split()


@pytest.mark.parametrize(
    ("variable", "changed"),
    [
        ("FLAX_ANY", "cpu tpu cuda"),
        ("TPU_ANY", "tpu"),
        ("CUDA_ROOT", "cuda"),
        ("CUDA_HOME", "cuda"),
        ("CUDA_PATH", "cuda"),
        ("TRITON_ANY", "cuda"),
        ("ANY", ""),
    ],
)
def test_variables_that_compilers_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, changed: str
) -> None:
    before = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    monkeypatch.setenv(variable, "another value")
    after = [entry_key(platform, PROGRAM) for platform in PLATFORMS]
    kinds = [one.kind for one, a, b in zip(PLATFORMS, before, after, strict=True) if a != b]
    assert kinds == changed.split()


def test_a_file_of_flags_that_names_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flags").write_text(f"--flagfile={tmp_path / 'flags'}")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert entry_key(CPU, PROGRAM) is not None


# The arms need no device, as if they had been kept; the numbers do.
NUMBERS_ALONE = """
import sys
from pathlib import Path
import jax, numpy
from page_examples import attribution, measurement
from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.experiments import _numerics as numerics
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab.compile.platform import Platform

kept = measurement(attribution(), platform=sys.argv[1])
module = sys.modules["nnx_pipeline.experiments._run"]
sys.modules["nnx_pipeline.experiments._measuring"].prepare = lambda *args, **options: lambda: kept
numerics.arm_values = lambda *args: {"loss": numpy.ones(len(jax.devices("cpu")))}
mesh, platform = MeshConfig.parse(sys.argv[2]), Platform.parse(sys.argv[1])
(found,) = module.run_experiments([EXPERIMENTS["norm-scale"]], preset("tiny"), mesh, platform)
print(found.note, len(jax.devices("cpu")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "mesh", "devices"),
    [("tpu:v5p:2x2x2", "stage=4,fsdp=2", 8), ("cpu", "stage=4,data=4", 16)],
)
def test_numbers_have_their_devices_where_the_arms_were_kept(
    platform: str, mesh: str, devices: int
) -> None:
    """As many as the arms of the next experiment need, too."""
    done = subprocess.run(
        [sys.executable, "-c", NUMBERS_ALONE, platform, mesh],
        capture_output=True,
        text=True,
        env=user_environment(),
    )
    assert done.stdout.strip() == f"both arms compile to the same program {devices}", done.stderr


def test_flags_of_flax_change_a_key() -> None:
    before, profile = entry_key(CPU, PROGRAM), flax.config.flax_profile
    flax.config.update("flax_profile", not profile)
    try:
        assert entry_key(CPU, PROGRAM) != before
    finally:
        flax.config.update("flax_profile", profile)
    assert entry_key(CPU, PROGRAM) == before


def test_what_has_no_key() -> None:
    def scale(x: Any, scale: Any) -> Any:
        return x * scale

    for function in (scale, lambda x, scale: x, test_what_has_no_key):
        other = Replaced("nnx_pipeline.ops._norm", "multiply_scale", function)
        assert entry_key(CPU, PROGRAM._replace(replaced=(other,))) is None
    assert entry_key(CPU, object()) is None
    assert entry_key(Platform("local"), PROGRAM) is None


def test_the_source_of_the_package_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").write_text("one")
    monkeypatch.setattr(cache_key, "ROOT", tmp_path)
    first = cache_key.source.__wrapped__()
    (tmp_path / "__init__.py").write_text("two")
    second = cache_key.source.__wrapped__()
    (tmp_path / "other.py").write_text("")
    third = cache_key.source.__wrapped__()
    (tmp_path / "claims.toml").write_text("")  # what an experiment changes stands in a table
    assert len({first, second, third, cache_key.source.__wrapped__()}) == 4


def test_a_value_comes_back_with_its_time(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get(KEY) is None
    cache.put(KEY, {"a": [1, 2.5, None]})
    value, when = cache.get(KEY) or pytest.fail("nothing kept")
    assert value == {"a": [1, 2.5, None]}
    assert when.startswith("20")
    assert Cache(cache.folder, fresh=True).get(KEY) is None
    Cache(cache.folder, fresh=True).put(KEY, "new")
    assert (cache.get(KEY) or pytest.fail("nothing kept"))[0] == "new"
    assert Cache(None).get(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{}", "\udcff", "changed", "moved"])
def test_an_entry_that_is_broken_is_not_there(tmp_path: Path, text: str) -> None:
    cache, path = Cache(tmp_path), tmp_path / f"{KEY}.json"
    cache.put(KEY, {"bytes": 1})
    whole = path.read_text()
    if text == "changed":
        text = whole.replace('"bytes": 1', '"bytes": 2')
    if text == "moved":
        text, path = whole, tmp_path / f"{'1' * 64}.json"
    path.write_text(text, errors="surrogateescape")
    assert cache.get(path.stem) is None


def test_a_folder_that_cannot_be_written_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "folder")
    for _ in range(2):
        cache.put(KEY, 1)
        assert cache.get(KEY) is None
    assert capsys.readouterr().err.count("results cannot be kept there") == 1


def test_the_first_write_removes_what_is_old_and_nothing_else(tmp_path: Path) -> None:
    old, young = tmp_path / f"{'1' * 64}.json", tmp_path / f"{'2' * 64}.json"
    torn, foreign = tmp_path / ".nnx-pipeline.abc", tmp_path / "notes.json"
    for path in (old, young, torn, foreign):
        path.write_text("x")
    long_ago = time.time() - (LONGEST_DAYS + 1) * 86_400
    folder = tmp_path / f"{'3' * 64}.json"
    folder.mkdir()
    for path in (old, torn, foreign, folder):
        os.utime(path, (long_ago, long_ago))
    Cache(tmp_path, warn=pytest.fail).put(KEY, 1)
    kept = {young.name, foreign.name, folder.name, f"{KEY}.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_oldest_go_where_there_is_too_much(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("nnx_pipeline.lab.compile._cache.MOST_BYTES", 1000)
    now = time.time()
    for index in range(5):
        path = tmp_path / f"{str(index + 1) * 64}.json"
        path.write_text("x" * 300)
        os.utime(path, (now - 100 + index, now - 100 + index))
    Cache(tmp_path).put(KEY, 1)
    left = sorted(path.name[0] for path in tmp_path.iterdir())
    assert left == ["0", "4", "5"]


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "device"])
def test_what_is_no_file_in_the_place_of_an_entry_is_replaced(tmp_path: Path, kind: str) -> None:
    """What a link leads to stays as it is, and nothing is waited for."""
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    folder.mkdir()
    path = folder / f"{KEY}.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else victim)
    if kind == "link":
        victim.write_text("precious")
    cache = Cache(folder, warn=pytest.fail)
    assert cache.get(KEY) is None
    cache.put(KEY, 3)
    assert (cache.get(KEY) or pytest.fail("nothing kept"))[0] == 3
    assert (path.is_symlink(), path.is_file()) == (False, True)
    left = {"cache", "victim"} if kind == "link" else {"cache"}
    assert {one.name for one in tmp_path.iterdir()} == left
    assert kind != "link" or victim.read_text() == "precious"


def test_a_file_that_another_process_takes_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{'1' * 64}.json").symlink_to(tmp_path / "gone")
    listed = [*tmp_path.iterdir(), tmp_path / f"{'2' * 64}.json"]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listed))
    cache = Cache(tmp_path, warn=pytest.fail)
    cache.put(KEY, 1)
    assert cache.get(KEY) is not None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    for name in ("NNX_PIPELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert Cache.of_user().folder is None


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NNX_PIPELINE_CACHE", "/named")
    assert Cache.of_user().folder == Path("/named")
    monkeypatch.delenv("NNX_PIPELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Cache.of_user().folder == Path("/caches/nnx-pipeline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.of_user().folder == tmp_path / ".cache" / "nnx-pipeline"


def test_a_measurement_survives_json() -> None:
    whole = measurement(attribution())
    kept = Measurement.from_cache(json.loads(json.dumps(whole.to_cache())), "2026-01-01")
    expected = dataclasses.replace(
        whole, hlo="", kept_fingerprint=whole.fingerprint, measured="2026-01-01"
    )
    assert kept == expected
    assert kept.fingerprint == whole.fingerprint
    rows = attribution()
    assert restored(Attribution, json.loads(json.dumps(dataclasses.asdict(rows)))) == rows
    without = json.loads(json.dumps(measurement(None).to_cache()))
    assert Measurement.from_cache(without, None).attribution is None


def test_ab_measures_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made up here: what counts is who is asked for them."""
    calls: list[str] = []

    def prepared(*args: Any, **options: Any) -> Callable[[], Measurement]:
        calls.append("measure")
        return lambda: measurement(attribution(), platform="cpu")

    def numbers(*args: Any) -> Any:
        calls.append("numbers")
        return {"loss": np.ones(3, "float32")}

    monkeypatch.setattr(MEASURING, "prepare", prepared)
    monkeypatch.setattr(numerics, "arm_values", numbers)
    ask = ("ab", "norm-scale", "--json", "-")
    first = run(*ask).json["experiments"]
    assert sorted(calls) == ["measure", "measure", "numbers", "numbers"]
    calls.clear()
    second = run(*ask).json["experiments"]
    assert calls == []
    for entry in second:
        assert entry["numerics"].pop("measured")
        assert all(arm.pop("measured") for arm in entry["arms"].values())
    for entry in first:
        assert entry["numerics"].pop("measured") is None
        assert all(arm.pop("measured") is None for arm in entry["arms"].values())
    assert second == first
    assert "both arms compile to the same program" in second[0]["note"]
    assert "3 of 3 results are from earlier runs" in " ".join(run("ab", "norm-scale").out.split())
    assert calls == []
    run(*ask, "--fresh")
    assert len(calls) == 4
    run("ab", "norm-scale", "--set", "train.loss_chunks=2")
    assert calls.count("measure") == 4


@pytest.mark.slow
def test_a_real_measurement_comes_back(tmp_path: Path) -> None:
    cache, said = Cache(tmp_path), []
    job = (PROGRAM, MeshConfig())
    ask = functools.partial(measure_programs, {job: "step"}, CPU, cache=cache, progress=said.append)
    with optax_promotion():
        first = ask()[job]
        assert said
        said.clear()
        second = ask()[job]
    assert not said
    assert isinstance(first, Measurement)
    assert isinstance(second, Measurement)
    assert second.to_json() == first.to_json()
    assert (second.attribution, second.fingerprint) == (first.attribution, first.fingerprint)


@pytest.mark.slow
def test_an_entry_of_another_form_is_measured_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(entry_key(CPU, "measurement", MeshConfig(), PROGRAM), {"memory": 3})
    job = (PROGRAM, MeshConfig())
    with optax_promotion():
        found = measure_programs({job: "step"}, CPU, cache=cache)[job]
    assert isinstance(found, Measurement)
    assert found.measured is None
