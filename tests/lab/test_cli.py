"""The command line: exit codes, one line for every error, and the JSON that scripts rely on."""

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Ended, Run, in_a_process, missing

from nnx_pipeline.config.config import SECTIONS
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.experiments import _registry as experiments
from nnx_pipeline.experiments._replaced import Replaced
from nnx_pipeline.lab._timing.result import KEYS

COMMANDS = (*("models", "train", "generate", "schedule", "measure", "compare", "lint", "memory"),)
SCHEDULE = ("schedule", "--stages", "2", "--microbatches", "4")
SMALLEST = ("--model", "tiny", "--set", "model.num_layers=2", "--set", "train.sequence_length=16")
MEMORY = {
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "heap_bytes",
    "constant_bytes",
    "account_bytes",
    "peak_bytes",
    "generated_code_bytes",
    "host_temp_bytes",
    "host_argument_bytes",
    "host_output_bytes",
}
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
VERSIONS = {"jax", "jaxlib", "flax", "libtpu", "python"}


MAXTEXT = """
decoder_block: mixtral
base_emb_dim: 16
base_mlp_dim: 16
base_num_decoder_layers: 4
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
num_experts: 2
vocab_size: 64
max_target_length: 16
per_device_batch_size: 2
ici_pipeline_parallelism: 2
ici_fsdp_parallelism: {}
"""


@pytest.mark.parametrize(
    ("fsdp", "options", "batch"), [(2, (), 8), (-1, ("--mesh", "stage=2,fsdp=4"), 16)]
)
def test_a_file_of_maxtext_is_measured_on_its_own_mesh(
    run: Run, tmp_path: Path, fsdp: int, options: tuple[str, ...], batch: int
) -> None:
    """A mesh that is named wins, and the batch is that of the devices."""
    file = tmp_path / "config.yml"
    file.write_text(MAXTEXT.format(fsdp))
    ended = run("lint", str(file), *options, "--json", "-")
    assert ended.code in (0, 1), ended.err
    assert ended.json["config"]["train"]["global_batch"] == batch
    assert ended.json["config"]["model"]["embed_dim"] == 16


def test_a_file_that_does_not_say_its_mesh(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(MAXTEXT.format(-1))
    ended = run("lint", str(file))
    assert ended.code == 2
    assert "ici_fsdp_parallelism=-1 is what is left of the devices" in ended.err
    ended = run("measure", str(tmp_path / "none.yml"), "--mesh", "fsdp=2")
    assert ended.code == 2
    assert "none.yml" in ended.err


# ---- what is printed ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(run: Run, command: str) -> None:
    ended = run(command, "--help")
    assert ended.code == 0
    assert f"Example: nnx-pipeline {command}" in ended.out
    assert ended.err == ""


def test_help_names_every_command(run: Run) -> None:
    ended = run("--help")
    assert ended.code == 0
    assert all(command in ended.out for command in COMMANDS)


def test_help_has_three_groups_and_a_first_command(run: Run) -> None:
    shown = run("--help").out
    groups = re.split(r"^(\S.*):$", shown, flags=re.MULTILINE)[1:]
    found = {
        name: re.findall(r"^  ([\w-]+)  ", text, re.MULTILINE)
        for name, text in zip(groups[::2], groups[1::2], strict=True)
    }
    measuring = ["measure", "compare", "memory", "lint", "platforms", "bisect", "explain", "fit"]
    assert found["Measure a program"] == measuring
    assert found["Train a model"] == ["generate", "models", "plan", "schedule", "train"]
    assert found["Checkpoints"] == ["linen-compat"]
    assert "Begin with: nnx-pipeline measure " in shown


TANH = ("jax.numpy:tanh", "--arg", "float32[8,128]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("compile", *TANH), "compile jax.numpy:tanh is now written nnx-pipeline measure"),
        (("ab", "--list"), "ab is now written nnx-pipeline compare"),
        (
            ("compile", "--model", "tiny", "--hlo", "x"),
            "compile --model tiny is now written nnx-pipeline measure tiny",
        ),
    ],
)
def test_old_spellings_go_on_working(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: tuple[str, ...], new: str
) -> None:
    from nnx_pipeline.lab import measure

    def quick(*args: object, **kwargs: object) -> object:
        return measure(lambda x: x, np.float32(0))

    monkeypatch.setattr("nnx_pipeline.experiments._presets.measure_step", quick)
    monkeypatch.chdir(tmp_path)
    ended = run(*old, "--json", "-")
    assert ended.code == 0
    assert ended.json["schema"] == 1
    (line,) = [line for line in ended.err.splitlines() if "is now written" in line]
    assert line.startswith(f"nnx-pipeline: note: nnx-pipeline {new}")


def test_the_platform_where_none_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNX_PIPELINE_PLATFORM")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: missing_version(name))
    ended = run("measure", *TANH, "--json", "-")
    assert ended.json["platform"] == "cpu"
    assert "no --platform is named: compiling for cpu, as no compiler" in ended.err
    ended = run("measure", *TANH, "--platform", "cpu", "--json", "-")
    assert "no --platform" not in ended.err


def missing_version(name: str) -> str:
    if name in ("libtpu", "jax-cuda13-plugin", "jax-rocm7-pjrt"):
        raise importlib.metadata.PackageNotFoundError(name)
    return VERSION(name)


VERSION = importlib.metadata.version
ALL = {
    **{"libtpu": "0.0.42.1", "jax-cuda13-plugin": "1", "nvidia-cuda-nvcc": "1", "jax": "1"},
    **{"jax-rocm7-pjrt": "1", "pyelftools": "1"},
}


@pytest.mark.parametrize(
    ("absent", "devices", "on_mesh", "platform", "why"),
    [
        ("", 8, True, "tpu:v5p:2x2x2", "as its compiler is installed"),
        ("", 1, False, "tpu:v5p:2x2x1", "as its compiler is installed"),
        ("", 1, True, "cuda:h100:1", "as no slice of a TPU v5p has 1 device"),
        ("", 6, True, "cuda:h100:6", "as no slice of a TPU v5p has 6 devices"),
        ("libtpu", 8, True, "cuda:h100:8", "as its compiler is installed"),
        ("jax-cuda13-plugin", 6, True, "rocm:mi300x:6", "as no slice of a TPU v5p has 6 devices"),
        ("nvidia-cuda-nvcc pyelftools", 2, True, "cpu", "as no slice of a TPU v5p has 2 devices"),
        (
            "libtpu jax-cuda13-plugin jax-rocm7-pjrt",
            *(8, True, "cpu", "as no compiler of an accelerator is"),
        ),
    ],
)
def test_the_compiler_that_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    absent: str,
    devices: int,
    on_mesh: bool,
    platform: str,
    why: str,
) -> None:
    module = importlib.import_module("nnx_pipeline.lab.compile.platform")
    found = {name: version for name, version in ALL.items() if name not in absent.split()}
    monkeypatch.setattr(module, "version", lambda name: found.get(name, ""))
    monkeypatch.setattr(module, "required", lambda extra, package: "==0.0.42.*")
    taken, said = module.default_platform(devices, on_mesh=on_mesh)
    assert taken == platform
    assert said.startswith(why)
    monkeypatch.setattr(module, "required", lambda extra, package: "==0.0.43.*")
    assert not module.default_platform(devices, on_mesh=on_mesh)[0].startswith("tpu")


def test_every_slice_that_is_taken_has_its_chips() -> None:
    slices = importlib.import_module("nnx_pipeline.lab.compile.platform")._V5P
    for chips, topology in slices.items():
        assert math.prod(map(int, topology.split("x"))) == chips


def test_what_is_not_compared(run: Run) -> None:
    wrong = {
        "math:sqrt": "give two functions to compare, or one with --xla-a or --xla-b",
        "math:sqrt math:sqrt math:sqrt": "give two functions to compare",
        "math:sqrt tiny": "and tiny is none; write MODULE:FUNCTION",
        "math:sqrt math:sqrt --set model.num_layers=2": "--set needs a preset",
        "math:sqrt math:sqrt --fresh": "--fresh needs a preset",
        "tiny --arg float32[8]": "--inputs and --arg are for functions",
        "tiny mixtral-small norm-scale": "leave out norm-scale, or one of the presets",
        "tiny --model mixtral-small --sweep mesh=fsdp=2/fsdp=4": "leave out --sweep",
        "tiny norm-scale --xla-b a=1": "--xla-b cannot be combined with norm-scale",
    }
    for words, said in wrong.items():
        check_one_line(run("compare", *words.split()), said)


@pytest.mark.slow
def test_a_function_and_two_presets_are_compared(run: Run) -> None:
    ended = run("compare", *TANH, "--xla-b", "xla_cpu_enable_fast_math=true", "--json", "-")
    (entry,) = ended.json["experiments"]
    labels = [entry["arms"][arm]["label"] for arm in "ab"]
    assert labels == ["jax.numpy:tanh", "jax.numpy:tanh, --xla-b"]
    sizes = ("--set", "model.num_layers=2", "--set", "train.sequence_length=16")
    ended = run("compare", "tiny", "mixtral-small", *sizes, "--mesh", "stage=2", "--json", "-")
    assert ended.code == 0, ended.err
    (entry,) = ended.json["experiments"]
    assert [entry["arms"][arm]["label"] for arm in "ab"] == ["tiny", "mixtral-small"]
    assert entry["difference"] == "the training steps of two presets"
    assert entry["judged_by"] == "account"
    assert entry["delta_account_bytes"] > 0


def test_without_a_command_the_help_can_be_read(run: Run) -> None:
    """Not squeezed into one line."""
    ended = run()
    lines = (ended.out + ended.err).splitlines()
    assert any(line.strip().startswith("measure") for line in lines)


def test_models(run: Run, tmp_path: Path) -> None:
    shown = run("models")
    assert shown.code == 0
    assert "46.70 B" in shown.out
    assert "12.88 B" in shown.out
    assert "6.74 B" in shown.out
    ended = run("models", "--json", "-")
    assert ended.json["schema"] == 1
    rows = {row["name"]: row for row in ended.json["models"]}
    assert set(rows) == set(PRESETS)
    assert rows["mixtral-8x7b"]["parameters"] > rows["mixtral-8x7b"]["active_parameters"]
    path = tmp_path / "models.json"
    assert run("models", "--json", str(path)).code == 0
    assert json.loads(path.read_text()) == ended.json
    assert list(tmp_path.iterdir()) == [path]  # nothing half-written is left


def test_schedule(run: Run) -> None:
    arguments = ("schedule", "--stages", "2", "--microbatches", "4", "--repeats", "2")
    shown = run(*arguments)
    assert shown.code == 0
    assert "9 ticks, 1 of them idle" in shown.out
    assert "0a" in shown.out
    result = run(*arguments, "--json", "-").json
    assert result["schema"] == 1
    assert (result["ticks"], result["bubble_ticks"]) == (9, 1)
    assert result["timetable"][0] == [[0, 0], None]
    assert result["timetable"][-1] == [None, [3, 1]]


def test_schedule_of_one_forward_one_backward(run: Run) -> None:
    arguments = ("schedule", "--stages", "2", "--microbatches", "4", "--schedule", "1f1b")
    shown = run(*arguments)
    assert shown.code == 0
    assert "6 ticks = 4 + 2 · 1 (bubble 20.0%), ring slots per stage: 3" in shown.out
    assert "F forward only (0), FB both (1–4), B backward only (5)" in shown.out
    result = run(*arguments, "--json", "-").json
    assert (result["schema"], result["schedule"]) == (1, "1f1b")
    assert (result["ticks"], result["bubble_ticks"], result["ring_slots"]) == (6, 1, 3)
    assert result["phases"] == {"forward_only": [0, 1], "both": [1, 5], "backward_only": [5, 6]}
    assert result["timetable"][1] == [[1, 0], [0, 0]]
    assert result["backward_timetable"][1] == [None, [0, 0]]


def test_layers_of_a_schedule(run: Run) -> None:
    """30 layers over 4 stages: 30 · 4 of 32 · 7 layer times do something."""
    arguments = ("schedule", "--stages", "4", "--microbatches", "4", "--layers", "30")
    table = run(*arguments).out
    assert "2 of 32 places are padding, so that bubble and padding take 46.4%" in table
    assert "1 of 8 places is padding" in run(*arguments[:-1], "7").out
    assert "23–29 + 1 padding" in table
    assert "24–29 + 2 padding" in run(*arguments, "--stage-layers", "8,8,8,6").out
    layers = run(*arguments, "--json", "-").json["layers"]
    assert layers["idle_share"] == pytest.approx(1 - 30 * 4 / (32 * 7))
    assert layers["busy_share_of_stage"] == [32 / 56, 32 / 56, 28 / 56, 28 / 56]
    assert layers["of_stage"][3] == [[*range(23, 30)]]
    assert "no padding" in run(*arguments[:-1], "8", "--schedule", "1f1b").out


def test_ticks_without_layers_in_a_place(run: Run) -> None:
    """12 layers in 2 repeats of 4 stages: 11 ticks with a visit of 2 layers, and 8 with 1."""
    arguments = ("schedule", "--stages", "4", "--microbatches", "8", "--repeats", "2")
    shown = run(*arguments, "--layers", "12", "--json", "-").json["layers"]
    assert shown["layer_times"] == 11 * 2 + 8
    assert shown["busy_share_of_stage"] == [24 / 30] * 4
    at_the_end = run(*arguments, "--layers", "12", "--stage-layers", "2,2,2,2,2,2,0,0")
    assert "ticks take 38" not in at_the_end.out
    assert "bubble and padding take 36.8%" in at_the_end.out
    by_turns = run(*arguments, "--layers", "12", "--schedule", "1f1b", "--json", "-").json
    assert by_turns["layers"]["layer_times"] == (8 * 2 + 3) * 2


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_picture_of_a_schedule(run: Run, tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "schedule.svg"
    ended = run(
        *("schedule", "--stages", "2", "--microbatches", "4", "--schedule", schedule),
        *("--picture", str(path), "--json", "-"),
    )
    assert ended.code == 0, ended.err
    assert ended.json["schedule"] == schedule
    assert "</svg>" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_without_matplotlib(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = ("--picture", str(tmp_path / "schedule.png"))
    check_one_line(run(*SCHEDULE, *picture), "pip install 'nnx-pipeline[report]'")
    assert run(*SCHEDULE).code == 0  # needed for pictures only


@pytest.mark.slow
def test_matplotlib_is_imported_only_for_pictures() -> None:
    modules = "nnx_pipeline.experiments._cli.comparing, nnx_pipeline.train._cli.training"
    script = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


def test_list_of_experiments(run: Run) -> None:
    ended = run("ab", "--list", "--json", "-")
    listed = {row["name"] for row in ended.json["experiments"]}
    assert listed == set(experiments.EXPERIMENTS)
    assert {"stage-shift", "stage-vmap", "norm-scale", "loss-chunks"} <= listed
    shown = run("ab", "--list").out
    assert "norm-scale" in shown
    assert {row["kind"] for row in ended.json["experiments"]} == {"step", "init", "trace"}
    (elsewhere,) = ended.json["elsewhere"]
    assert (elsewhere["claim"], elsewhere["command"]) == ("S2.12", "linen-compat overhead")
    assert "S2.12" in shown
    # The last column without its line breaks: shapes such as [batch, seq] stand in these texts.
    cells = [line.split("│") for line in shown.splitlines()]
    column = "".join("".join(row[-2].split()) for row in cells if len(row) > 4)
    for row in (*ended.json["experiments"], elsewhere):
        assert "".join(row["difference"].split()) in column
    assert "linen-compat overhead" in shown


# ---- compile -----------------------------------------------------------------------------------


def check_measurement(result: dict[str, Any], platform: str) -> None:
    """The fields of the contract, no more and no less, and figures that make sense."""
    assert set(result) >= {
        "schema",
        "platform",
        "mesh",
        "config",
        "memory",
        "flops",
        "xla_flops",
        "bytes_accessed",
        "collectives",
        "seconds",
        "versions",
    }
    assert result["schema"] == 1
    assert result["platform"] == platform
    assert set(result["config"]) == set(SECTIONS)
    assert set(result["memory"]) == MEMORY
    assert set(result["collectives"]) == COLLECTIVES
    assert all(set(c) == {"ops", "executed", "bytes"} for c in result["collectives"].values())
    assert set(result["seconds"]) == {"abstract_init", "trace", "lower", "compile"}
    assert set(result["time"]) >= set(KEYS)
    if platform == "cpu":
        assert set(result["time"].values()) == {None}
    else:
        assert result["time"]["step_seconds"] > result["time"]["compute_seconds"] > 0
        assert result["time"]["host_seconds"] > 0  # what is offloaded goes there and back
        assert not any("time" in one["figures"] for one in result["unread"])
    assert set(result["versions"]) >= VERSIONS
    assert result["versions"]["jax"] == importlib.metadata.version("jax")
    memory = result["memory"]
    assert 0 < memory["alias_bytes"] <= memory["argument_bytes"]
    assert memory["temp_bytes"] > 0
    assert memory["heap_bytes"] > 0
    assert sum(result["account"]["rows"].values()) == memory["account_bytes"]
    assert result["flops"] > 0
    permuted = result["collectives"]["collective-permute"]
    assert permuted["executed"] >= permuted["ops"] > 0
    assert permuted["bytes"] > 0


@pytest.mark.slow
def test_compile_for_cpu(run: Run, tmp_path: Path) -> None:
    arguments = ("compile", *SMALLEST, "--mesh", "stage=2,fsdp=2")
    program, path = tmp_path / "step.hlo", tmp_path / "step.json"
    shown = run(*arguments, "--hlo", str(program), "--json", str(path))
    assert shown.code == 0
    assert "memory per device" in shown.out
    assert "CPU figures mislead" in shown.out
    assert "compiling" in shown.err  # progress
    assert program.read_text().startswith("HloModule")
    result = json.loads(path.read_text())
    check_measurement(result, "cpu")
    assert result["config"]["model"]["num_layers"] == 2
    assert (result["mesh"]["stage"], result["mesh"]["fsdp"]) == (2, 2)


# Four layers on two stages: the compiler brings several layers of a stage to the host.
FIELDS = (
    *("model.vocab_size=64", "model.embed_dim=64", "model.mlp_dim=64", "model.head_dim=16"),
    *("model.num_layers=4", "train.sequence_length=64", "pipeline.remat=qkv_proj_offloaded"),
)
SETTINGS = tuple(word for field in FIELDS for word in ("--set", field))
OFFLOADED = ("--model", "tiny", "--mesh", "stage=2,fsdp=4", *SETTINGS)


@pytest.mark.slow
@pytest.mark.skipif(missing("libtpu"), reason="libtpu is not installed")
def test_compile_for_tpu() -> None:
    """In its own process, as libtpu is loaded once per process and for good."""
    ended = in_a_process("compile", *OFFLOADED, "--platform", "tpu:v5p:2x2x2", "--json", "-")
    assert ended.code == 0, ended.err
    check_measurement(ended.json, "tpu:v5p:2x2x2")
    assert ended.json["versions"]["libtpu"] == importlib.metadata.version("libtpu")
    assert ended.json["memory"]["generated_code_bytes"] > 0
    assert ended.json["memory"]["host_temp_bytes"] > 0


@pytest.mark.slow
@pytest.mark.skipif(missing("jax_cuda13_plugin"), reason="jax-cuda13-plugin is not installed")
def test_compile_for_nvidia() -> None:
    platform = ("--platform", "cuda:h100:8", "--gemm", "triton")
    ended = in_a_process("compile", *OFFLOADED, *platform, "--json", "-")
    assert ended.code == 0, ended.err
    check_measurement(ended.json, "cuda:h100:8")
    assert ended.json["memory"]["host_temp_bytes"] > 0
    # Figures that this compiler does not give are null, never 0.
    assert ended.json["memory"]["generated_code_bytes"] is None
    assert ended.json["xla_flops"] is None


# ---- ab ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ab_compares_two_arms(run: Run) -> None:
    mesh = ("--mesh", "stage=2,fsdp=2")
    ended = run("ab", "norm-scale", *SMALLEST, *mesh, "--json", "-")
    assert ended.code == 0, ended.err
    assert (ended.json["schema"], ended.json["platform"]) == (1, "cpu")
    (entry,) = ended.json["experiments"]
    assert set(entry) >= {
        "name",
        "claim",
        "difference",
        "arms",
        "delta_temp_bytes",
        "ratio_temp",
        "delta_account_bytes",
        "ratio_account",
        "judged_by",
        "numerics",
        "verdict",
        "note",
    }
    assert entry["name"] == "norm-scale"
    assert entry["verdict"] in ("holds", "no effect", "opposite", "not applicable")
    for label, key in (("einsum", "a"), ("multiply", "b")):
        arm = dict(entry["arms"][key])
        assert arm.pop("label") == label
        check_measurement(arm, "cpu")
    a, b = (entry["arms"][key]["memory"]["temp_bytes"] for key in "ab")
    assert entry["delta_temp_bytes"] == b - a
    assert entry["ratio_temp"] == pytest.approx(b / a)
    assert set(entry["numerics"]) >= {"max_abs_diff", "bitwise_equal"}
    assert entry["numerics"]["max_abs_diff"] < 1e-4


def broken(monkeypatch: pytest.MonkeyPatch, label: str, scale: Callable[..., Any]) -> None:
    """Adds an experiment whose second arm scales the norm in a way of its own."""
    experiment = experiments.Experiment(
        name="broken",
        claim="test",
        difference="one arm is broken",
        a=experiments.Arm(label="whole"),
        b=experiments.Arm(
            label=label, replaced=(Replaced("nnx_pipeline.ops._norm", "multiply_scale", scale),)
        ),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "broken", experiment)


@pytest.mark.slow
def test_an_arm_that_does_not_compile_leaves_the_other(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(x: Any, scale: Any, offset: float) -> Any:
        raise ValueError("this arm never compiles\nand says so at length")

    broken(monkeypatch, "never", fail)
    ended = run("ab", "broken", *SMALLEST, "--mesh", "stage=2,fsdp=2", "--json", "-")
    assert ended.code == 1
    (entry,) = ended.json["experiments"]
    whole = dict(entry["arms"]["a"])
    assert whole.pop("label") == "whole"
    check_measurement(whole, "cpu")
    assert entry["arms"]["b"] == {"label": "never"}
    assert "this arm never compiles" in entry["note"]
    assert entry["ratio_temp"] is None
    assert ended.err.splitlines()[-1] == "nnx-pipeline: failed: broken; the notes say why"
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_arms_that_compute_different_things_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "larger", lambda x, scale, offset: 1.001 * x * scale)
    ended = run("ab", "broken", *SMALLEST, "--mesh", "stage=2,fsdp=2", "--json", "-")
    assert ended.code == 1
    (entry,) = ended.json["experiments"]
    assert entry["numerics"]["within_tolerance"] is False
    assert "differ" in entry["note"]


def test_an_experiment_that_needs_stages(run: Run) -> None:
    ended = run("ab", "stage-vmap", *SMALLEST, "--mesh", "fsdp=2", "--json", "-")
    assert ended.code == 0
    (entry,) = ended.json["experiments"]
    assert entry["verdict"] == "not applicable"
    assert "stage" in entry["note"]


# ---- train -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train(run: Run) -> None:
    ended = run("train", *SMALLEST, "--mesh", "stage=2,fsdp=2", "--steps", "3", "--json", "-")
    assert ended.code == 0, ended.err
    assert len(ended.json["losses"]) == ended.json["steps"] == 3
    assert all(loss > 0 for loss in ended.json["losses"])
    router = ended.json["router"]
    assert sorted(router) == ["dropped", "entropy", "load", "load_balance", "z_loss"]
    assert router["dropped"] == 0
    assert sum(router["load"]) == pytest.approx(1, abs=1e-6)
    assert "training" in ended.err


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_fails(run: Run) -> None:
    rate = ("--set", "train.learning_rate=1e30", "--set", "train.clip_norm=1e30")
    ended = run("train", *SMALLEST, *rate, "--steps", "3", "--json", "-")
    assert ended.code == 1
    assert "with a lower --set train.learning_rate=" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


# ---- bad input ---------------------------------------------------------------------------------

COMPILE = ("measure", "tiny")

BAD = [
    (("scedule",), "Did you mean 'schedule'"),
    (("compile",), "give one thing to measure"),
    ((*COMPILE, "--meshes", "stage=4"), "No such option"),
    (("compile", "--model", "mixtral-smal"), "did you mean 'mixtral-small'?"),
    ((*COMPILE, "--set", "model.num_layer=8"), "did you mean 'model.num_layers'?"),
    ((*COMPILE, "--set", "model.grad_dtype=float32"), "no such config field"),
    ((*COMPILE, "--set", "model.num_layers"), "not of the form key=value"),
    ((*COMPILE, "--set", "model.num_layers=many"), "needs a whole number"),
    ((*COMPILE, "--set", "model.attention=flash"), "set model.attention='chunked'"),
    ((*COMPILE, "--set", "train.global_batch=12", "--mesh", "stage=8"), "choose a multiple of 8"),
    ((*COMPILE, "--mesh", "stages=4"), "did you mean 'stage'?"),
    ((*COMPILE, "--mesh", "stage=3"), "choose a multiple of 3"),
    ((*COMPILE, "--mesh", "context=2"), "use context=1"),
    ((*COMPILE, "--mesh", "stage=four"), "write stage=N"),
    ((*COMPILE, "--mesh", "stage=4,fsdp=2", "--platform", "cuda:h100:4"), "there are 4"),
    ((*COMPILE, "--platform", "tpu"), "write for example tpu:v5p:2x2x2"),
    ((*COMPILE, "--platform", "tpu:v5q:2x2x2"), "tpu:v5p:2x2x2"),
    ((*COMPILE, "--platform", "cuda:a100:8"), "choose a100-40gb or a100-80gb"),
    ((*COMPILE, "--platform", "gpus"), "'gpus' is not known"),
    ((*COMPILE, "--json", "/no/such/folder/x.json"), "--json /no/such/folder/x.json"),
    ((*COMPILE, "--hlo", "/no/such/folder/x.hlo"), "--hlo /no/such/folder/x.hlo"),
    ((*COMPILE, "--json", "/"), "--json /"),
    (
        (
            *COMPILE,
            *("--mesh", "stage=2", "--set", "pipeline.num_repeats=2"),
            *("--set", "pipeline.shift=pad"),
        ),
        "choose 'slice', or circular with more microbatches",
    ),
    (("ab", "norm-scal"), "did you mean 'norm-scale'?"),
    (("ab", "norm-scale", "--mesh", "stage=3"), "choose a multiple of 3"),
    (("train", "--model", "tiny"), "Missing option '--steps'"),
    (("train", "--model", "tiny", "--steps", "0"), "0 is not in the range"),
    (
        ("train", "--model", "tiny", "--steps", "1", "--platform", "tpu:v5p:2x2x2"),
        "use cpu or local",
    ),
    (("train", "--model", "tiny", "--steps", "1", "--mesh", "fsdp=3"), "choose a multiple of 3"),
    (("schedule", "--stages", "4", "--microbatches", "6"), "choose a multiple of 4"),
    (("schedule", "--stages", "0", "--microbatches", "6"), "0 is not in the range"),
    (("schedule", "--stages", "4", "--microbatches", "4", "--delay", "2"), "choose 8 or more"),
    ((*SCHEDULE, "--schedule", "1f1"), "did you mean '1f1b'?"),
    ((*SCHEDULE, "--schedule", "zigzag"), "choose one of: circular, 1f1b"),
    (("schedule", "--stages", "9999", "--microbatches", "9999"), "has more than"),
    ((*SCHEDULE, "--schedule", "1f1b", "--delay", "2"), "choose delay=1"),
    ((*SCHEDULE, "--picture", "schedule.pdf"), "the name of a picture must end in .png or .svg"),
    ((*SCHEDULE, "--picture", "/no/such/folder/x.png"), "--picture /no/such/folder/x.png"),
    (("models", "--json", "/no/such/folder/x.json"), "--json /no/such/folder/x.json"),
]


def check_one_line(ended: Ended, *expected: str) -> None:
    assert ended.code == 2
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1, ended.err
    assert ended.err.startswith("nnx-pipeline")
    assert "Traceback" not in ended.err
    for part in expected:
        assert part in ended.err


@pytest.mark.parametrize(("arguments", "cure"), BAD, ids=lambda value: str(value)[:60])
def test_bad_input_ends_in_one_line(run: Run, arguments: tuple[str, ...], cure: str) -> None:
    if "tpu:v5q:2x2x2" in arguments and missing("libtpu"):
        pytest.skip("libtpu is not installed")
    if "cuda:h100:4" in arguments and missing("jax_cuda13_plugin"):
        pytest.skip("jax-cuda13-plugin is not installed")
    check_one_line(run(*arguments), cure)


def test_a_folder_that_may_not_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Said before any work is done."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check_one_line(
        run(*COMPILE, "--json", str(tmp_path / "x.json")),
        "cannot be written; choose a file in a writable folder",
    )


@pytest.mark.parametrize(
    ("platform", "package", "version", "expected"),
    [
        ("tpu:v5p:2x2x2", "libtpu", None, "not installed; pip install 'nnx-pipeline[tpu]'"),
        ("tpu:v5p:2x2x2", "libtpu", "0.0.1", "found 0.0.1"),
        ("cuda:h100:8", "jax-cuda13-plugin", None, "pip install 'nnx-pipeline[cuda]'"),
    ],
)
def test_a_compiler_that_is_missing_or_wrong(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    package: str,
    version: str | None,
    expected: str,
) -> None:
    real = importlib.metadata.version

    def fake(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", fake)
    ended = run(*COMPILE, "--mesh", "stage=4,fsdp=2", "--platform", platform)
    check_one_line(ended, expected, "pip install")


@pytest.mark.slow
def test_bad_input_in_a_fresh_process() -> None:
    check_one_line(in_a_process(*COMPILE, "--mesh", "stage=5"), "choose a multiple of 5")


def test_an_error_inside_the_compiler_is_a_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1, with the first line of what went wrong, and where."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of registers\nand a long story")

    monkeypatch.setattr("nnx_pipeline.experiments._presets.measure_step", fail)
    ended = run(*COMPILE)
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    said = "nnx-pipeline: the program did not compile or run: RuntimeError: out of registers"
    assert re.fullmatch(said + r" \(.*test_cli\.py:\d+, in fail\)", line)


def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nnx_pipeline.experiments._presets.measure_step", interrupt)
    ended = run(*COMPILE)
    assert ended.code == 130
    assert ended.err.strip() == "nnx-pipeline: interrupted; no unfinished file is left"


def test_json_through_a_link_and_into_a_device(run: Run, tmp_path: Path) -> None:
    """What is there stays what it is."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("{}")
    link.symlink_to(real)
    assert run(*SCHEDULE, "--json", str(link)).code == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["schema"] == 1
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(*SCHEDULE, "--json", str(pipe)).code == 0
        assert json.loads(os.read(reader, 1_000_000))["schema"] == 1
    finally:
        os.close(reader)
    assert pipe.is_fifo()


OUTPUTS = [
    *(((*SCHEDULE, option, "{}"), "") for option in ("--json", "--csv")),
    *(((*SCHEDULE, option, "{}.svg"), ".svg") for option in ("--picture", "--both")),
    *((("measure", "math:sqrt", option, "{}"), "") for option in ("--json", "--hlo")),
    *((("memory", "math:sqrt", option, "{}"), "") for option in ("--json", "--html")),
    (("memory", "math:sqrt", "--chart", "{}.svg"), ".svg"),
    (("lint", "math:sqrt", "--json", "{}"), ""),
    (("models", "--json", "{}"), ""),
]


@pytest.mark.parametrize(("command", "ending"), OUTPUTS, ids=lambda it: " ".join(it)[:40])
def test_a_pipe_that_nobody_reads(
    run: Run, tmp_path: Path, command: tuple[str, ...], ending: str
) -> None:
    """It is refused before any work; opening it would wait for a reader for ever."""
    pipe = tmp_path / f"pipe{ending}"
    os.mkfifo(pipe)
    ended = run(*(word.format(tmp_path / "pipe") for word in command))
    assert ended.code == 2
    assert ended.err == (
        f"nnx-pipeline: {pipe} is a pipe that nobody reads; start its reader first, or name a "
        "file\n"
    )


def test_a_pipe_is_kept_open_for_its_reader() -> None:
    """Of `--json >(jq)`: the reader stays until the text is there, and then gets an end."""
    program = Path(sys.executable).with_name("nnx-pipeline")
    command = f"{program} {' '.join(SCHEDULE)} --json >(cat >&2) >/dev/null && wait $!"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads(done.stderr)["schema"] == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((SCHEDULE, one) for one in ("--stages", "--microbatches", "--repeats", "--layers")),
        (("memory", "math:sqrt"), "--top"),
        (("train", "--model", "tiny"), "--steps"),
        (("train", "--model", "tiny", "--steps", "1"), "--save-every"),
        (("generate", "--model", "tiny"), "--new-tokens"),
    ],
)
def test_a_number_that_no_computer_counts_to(
    run: Run, command: tuple[str, ...], option: str
) -> None:
    ended = run(*command, option, "9" * 26)
    assert ended.code == 2
    assert f"Invalid value for '{option}'" in ended.err
    assert "1<=x<=2147483647" in ended.err


def test_an_argument_of_thousands_of_axes(run: Run) -> None:
    ended = run("measure", "math:sqrt", "--arg", f"float32[{'1,' * 2999}1]")
    assert (ended.code, len(ended.err) < 400) == (2, True)
    assert "has 3,000 axes, more than 64; give fewer" in ended.err
