"""`plan`: its layouts, what it leaves out and why, what it compiles, and what the command says."""

import dataclasses
import json
import math
import random
import re
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import LONGEST, Run, script, started
from hypothesis import given, settings
from hypothesis import strategies as st
from page_examples import measurement

from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments.bound.floor import floor
from nnx_pipeline.experiments.plan import compiling
from nnx_pipeline.experiments.plan.fallen import fallen, refusals
from nnx_pipeline.experiments.plan.layouts import (
    FIELDS,
    Layout,
    Space,
    features_of,
    list_shapes,
    loop_of,
    meshes_of,
    options_of,
    rule_of,
)
from nnx_pipeline.experiments.plan.predict import Links, Predictor
from nnx_pipeline.experiments.plan.search import Budget, Plan, search
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.attribution.account import Memory
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.effort import Effort

V5P = Platform.parse("tpu:v5p:2x2x1")
DEVICE = device_of("tpu", "v5p")
assert DEVICE is not None, "a chip with a time"


def space_of(config: Config, devices: int, *fixed: str) -> Space:
    return Space.of(config, frozenset(fixed), V5P, devices)


def plan_of(config: Config, devices: int, *, limit: int = 10**12) -> Plan:
    made = Plan(space_of(config, devices), Predictor(config, DEVICE, Links(DEVICE, 2)), limit)
    made.fill()
    return made


def of_figures(seconds: float, account: float) -> Measurement:
    """A measurement with this step and this account."""
    timed = Time(
        basis="cycles",
        known_seconds=seconds,
        compute_seconds=seconds,
        collective_seconds=0.0,
        exposed_seconds=0.0,
        memory_wait_seconds=0.0,
        host_seconds=0.0,
        step_seconds=seconds,
        range_seconds=(seconds, seconds),
        hfu=0.5,
        launches=1,
        peak_flops=459e12,
    )
    memory = Memory(
        argument_bytes=int(account),
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=1,
        heap_bytes=0,
        constant_bytes=0,
        peak_bytes=None,
        generated_code_bytes=None,
        host_temp_bytes=0,
    )
    plain = measurement(None, platform=str(V5P))
    return dataclasses.replace(plain, time=timed, memory=memory, tokens=4096)


def truth(plan: Plan, seed: int) -> Callable[[Layout], Measurement]:
    """Figures that lie from the predicted ones by factors of a layout's choices, and by chance."""
    drawn = random.Random(seed)
    factors: dict[object, float] = {}

    def factor(key: object, apart: float) -> float:
        return factors.setdefault(key, 1 + apart * (2 * drawn.random() - 1))

    def measure(layout: Layout) -> Measurement:
        predicted = plan.predictor.predict(layout)
        seconds, account = predicted.seconds, predicted.bytes
        for name in Layout._fields[1:]:
            seconds *= factor((name, getattr(layout, name)), 0.1)
        for axis, size in layout.mesh.sizes().items():
            seconds *= factor((axis, size), 0.1)
        return of_figures(seconds * factor(layout, 0.01), account * factor((layout, 1), 0.1))

    return measure


def searched(plan: Plan, measure: Callable[[Layout], Measurement], most: int) -> None:
    effort = Effort(what="a plan", most=most)
    budget = Budget(time.monotonic() + 60, at_once=1)
    search(plan, measure, lambda layout: None, effort, budget)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["tiny", "mixtral-small", "deepseek-small"]),
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.sampled_from([8, 12, 16]),
    seed=st.integers(0, 2**16),
)
def test_every_layout_passes_the_checks_of_its_config(
    name: str, devices: int, batch: int, seed: int
) -> None:
    config = apply_overrides(preset(name), {"train.global_batch": str(batch)})
    space = space_of(config, devices)
    found = list_shapes(space)
    layouts = [layout for shape in found.shapes for layout in options_of(space, shape)]
    assert len(layouts) == len({*layouts}), "each once"
    for layout in random.Random(seed).sample(layouts, min(len(layouts), 60)):
        made = space.config_of(layout)
        made.check_mesh(layout.mesh)
        assert layout.mesh.num_devices == devices
        given = {key: name for name, key in FIELDS.items() if key in layout.settings()}
        for key, field in given.items():
            section, of_section = key.split(".")
            assert getattr(getattr(made, section), of_section) == getattr(layout, field)


@pytest.mark.parametrize(("name", "devices"), [("tiny", 8), ("llama2-7b", 6), ("qwen3-8b", 10)])
def test_every_mesh_has_a_layout_or_a_reason(name: str, devices: int) -> None:
    space = space_of(preset(name), devices)
    found = list_shapes(space)
    meshes = [*meshes_of(devices, with_experts=space.config.model.num_experts > 1)]
    assert found.meshes == len(meshes) == len({*meshes})
    unlisted = {*meshes} - {shape.mesh for shape in found.shapes}
    for mesh in unlisted:
        with pytest.raises(InputError):
            space.config.check_mesh(mesh)
    assert sum(found.refused.values()) >= len(unlisted), "a reason for each"
    assert {*found.examples} == {*found.refused}
    assert all(rule_of(text) == rule for rule, text in found.examples.items())


def test_what_the_user_sets_is_not_searched() -> None:
    changes = {"pipeline.remat": "save_qkv_proj", "pipeline.num_microbatches": "8"}
    config = apply_overrides(preset("tiny"), changes)
    space = space_of(config, 4, *changes)
    layouts = [one for shape in list_shapes(space).shapes for one in options_of(space, shape)]
    assert {(one.remat, one.microbatches) for one in layouts} == {("save_qkv_proj", 8)}
    assert {one.mesh.stage for one in layouts} == {1, 2, 4}


MESHES = ("fsdp=4", "stage=2,fsdp=2", "data=2,tensor=2", "fsdp=2,expert=2", "stage=4")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("clip", ["1.0", "none"])
def test_the_least_that_a_layout_holds_is_below_its_floor(mesh: str, clip: str) -> None:
    """What leaves a layout out is a lower bound: state, and all gradients where they are needed
    at once, as the floor counts them from shardings."""
    config = apply_overrides(preset("mixtral-small"), {"train.clip_norm": clip})
    space = space_of(config, 4)
    predictor = Predictor(config, DEVICE, Links(DEVICE, 2))
    shapes = [shape for shape in list_shapes(space).shapes if str(shape.mesh) == mesh]
    assert shapes
    for shape in {shape.zero1: shape for shape in shapes}.values():
        # The floor knows the gradients of these options.
        plain = shape._replace(remat="full", attention="dot_product", experts="dense")
        exact = floor(space.config_of(plain), shape.mesh, "tpu:v5p:2x2x1")
        (optimizer,) = [one for one in exact.moments if one.name == "optimizer"]
        least = predictor.predict(shape).least_bytes
        whole = sum(term.bytes for term in exact.arguments)
        whole += optimizer.bytes if clip != "none" else 0
        assert 0.9 * whole < least <= whole


@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_the_best_with_a_tenth_of_the_compiles(seed: int) -> None:
    config = preset("tiny")
    plan = plan_of(config, 4)
    sizes = sorted(one.predicted.bytes for one in plan.candidates)
    plan.limit = int(sizes[len(sizes) // 2])
    measure = truth(plan, seed)
    every = [measure(one.layout) for one in plan.candidates]
    fitting = [one for one in every if one.needed_bytes <= plan.limit]
    best = min(one.time.step_seconds or 0.0 for one in fitting if one.time)
    searched(plan, measure, most=len(plan.candidates) // 10)
    assert plan.best is not None
    assert plan.best.step is not None
    assert plan.best.step <= 1.03 * best


def test_plain_sharding_comes_first_then_small_layouts_of_other_kinds() -> None:
    """A program that nearly fills a device takes long to compile, and may not fit."""
    config = apply_overrides(preset("llama2-7b"), {"train.global_batch": "256"})
    plan = plan_of(config, 64, limit=100 * 10**9)
    searched(plan, truth(plan, 0), most=3)
    layouts = [one.candidate.layout for one in plan.compiled]
    assert str(layouts[0].mesh) == "fsdp=64"
    assert loop_of(layouts[0]) == ""
    assert all(one.candidate.predicted.bytes <= 60 * 10**9 for one in plan.compiled)
    names = ("loop", "tensor", "expert", "data")
    assert len({tuple(features_of(one)[name] for name in names) for one in layouts}) == 3


def test_what_does_not_compile_is_passed_over_and_said() -> None:
    plan = plan_of(preset("tiny"), 4)
    right = truth(plan, 0)

    def measure(layout: Layout) -> Measurement:
        if layout.mesh.data == 1:  # as the layout that is compiled first
            raise RuntimeError("no such kernel")
        return right(layout)

    searched(plan, measure, most=24)
    assert plan.best is not None
    assert plan.best.candidate.layout.mesh.data > 1
    assert any(one.error for one in plan.compiled)
    assert "no such kernel" in fallen(plan)["data = 1"]


def test_what_takes_too_long_is_not_tried_again_and_again() -> None:
    plan = plan_of(preset("tiny"), 8)
    right = truth(plan, 0)

    def measure(layout: Layout) -> Measurement:
        if layout.mesh.stage > 1 or layout.microbatches > 1:
            raise RuntimeError("took longer than 180 s, and was ended")
        return right(layout)

    searched(plan, measure, most=16)
    assert plan.best is not None, "the whole batch at once compiles"
    failed = [one for one in plan.compiled if one.error]
    features = [features_of(one.candidate.layout) for one in failed]
    kinds = Counter((one["loop"], one["tensor"], one["data"]) for one in features)
    assert max(kinds.values()) <= 6, kinds


def test_a_reason_for_each_kind_that_fell_out() -> None:
    plan = plan_of(preset("mixtral-8x7b"), 8, limit=30 * 10**9 + 86 * 10**9)
    searched(plan, truth(plan, 1), most=6)
    reasons, best = fallen(plan), plan.best
    assert best is not None
    assert best.step is not None
    has = {*features_of(best.candidate.layout).values()}
    kinds = {"whole batch at once", "circular pipeline", "tensor > 1", "expert > 1", "remat=full"}
    assert kinds - has <= {*reasons}
    assert not has & {*reasons}
    assert sum(refusals(plan).values()) == sum(plan.listed.refused.values())
    # No layout of a kind is faster than the one that is named, compiled or as predicted now.
    left = plan.left()
    steps = [(one.step or 0.0, one.candidate) for one in plan.fitting()]
    seconds, account = plan.refitted(left, "step").mean, plan.refitted(left, "account").mean
    steps += [
        (math.exp(step), one)
        for step, size, one in zip(seconds, account, left, strict=True)
        if size <= math.log(plan.limit)
    ]
    for kind, why in reasons.items():
        mine = [step for step, one in steps if kind in features_of(one.layout).values()]
        if mine:
            said = float(why.partition("%")[0]) / 100
            assert abs(said - (min(mine) / best.step - 1)) < 0.002, (kind, why)
        else:
            needs = re.search(r"([\d,.]+) of 116.0 GB", why)
            assert needs, why
            assert float(needs[1].replace(",", "")) > 116.0, why


def test_nothing_is_compiled_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(preset("tiny"), 4)
    release, asked = threading.Event(), list[Layout]()
    monkeypatch.setattr("nnx_pipeline.experiments.plan.search.end_all", release.set)

    def measure(layout: Layout) -> Measurement:
        asked.append(layout)
        if len(asked) > 2:
            release.wait(30)
            raise RuntimeError("ended")
        return truth(plan, 0)(layout)

    effort = Effort(what="a plan", most=50)
    began = time.monotonic()
    search(plan, measure, lambda layout: None, effort, Budget(began + 1.0, at_once=2))
    assert time.monotonic() - began < 20
    assert len(plan.compiled) == 2
    assert plan.ended == "time"
    assert not any(one.error for one in plan.compiled), "what was ended is no result"


def test_what_is_known_costs_nothing() -> None:
    first, again = plan_of(preset("tiny"), 4), plan_of(preset("tiny"), 4)
    measure = truth(first, 3)
    searched(first, measure, most=8)
    results = {one.candidate.layout: one.result for one in first.compiled}
    effort = Effort(what="a plan", most=2)
    search(again, measure, results.get, effort, Budget(time.monotonic() + 60, at_once=1))
    assert effort.tried <= 2
    assert [one.candidate.layout for one in again.compiled][:8] == [*results]
    assert len(again.compiled) > len(first.compiled) or effort.tried == 0


def test_a_plan_begins_with_all_that_earlier_ones_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = plan_of(preset("tiny"), 4), plan_of(preset("tiny"), 4)
    measure = truth(first, 3)
    compiler = compiling.Compiler(first.space, V5P, compiling.Cache(tmp_path), patience=60)
    monkeypatch.setattr(compiling.Compiler, "_compile", lambda self, one: measure(one).to_cache())
    effort = Effort(what="a plan", most=8)
    budget = Budget(time.monotonic() + 60, at_once=2)
    ended = list[str]()
    search(first, compiler, lambda layout: None, effort, budget, lambda: ended.append(first.ended))
    assert {*ended} == {""}, "as long as a compile runs"
    assert first.ended == "compiles"
    again.recall(compiler.tried(), compiler.known)
    made = {one.candidate.layout: one.step for one in first.compiled}
    assert len(made) == 8
    assert {one.candidate.layout: one.step for one in again.compiled} == made


def test_what_did_not_compile_is_not_tried_again_unless_it_may_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(preset("tiny"), 4)
    compiler = compiling.Compiler(plan.space, V5P, compiling.Cache(tmp_path), patience=60)
    refused, slow, killed = (one.layout for one in plan.candidates[:3])
    why = {
        refused: compiling.NotCompiled("no such kernel"),
        slow: compiling.NotCompiled("took longer than 60 s", seconds=60),
        killed: compiling.NotCompiled("ended by a signal", is_chance=True),
    }

    def fail(self: compiling.Compiler, layout: Layout) -> None:
        raise why[layout]

    monkeypatch.setattr(compiling.Compiler, "_compile", fail)
    for layout in why:
        with pytest.raises(compiling.NotCompiled):
            compiler(layout)
    plan.recall(compiler.tried(), compiler.known)
    assert {one.candidate.layout for one in plan.compiled} == {refused, slow}
    assert "no such kernel" in {one.error for one in plan.compiled}
    assert {*dataclasses.replace(compiler, patience=61).tried()} == {str(refused)}


REFUSED = {
    "--platform tpu:v5p:2x2x1 --limit 500%": "is no share of a device",
    "--platform cpu": "needs the time of a step",
    "--platform tpu:v5p:2x2x1*2": "a plan is for one slice; leave out *2",
    "--platform tpu:v5p:2x2x1 --what-if tpu:v5p:2x2x1": "is named twice",
    "--platform tpu:v5p:2x2x1 --price much": "is no price of a chip",
    "--platform tpu:v5p:2x2x1 --price cuda=2": "is for none of the platforms",
    "--platform tpu:v5p:2x2x1 --set train.global_batch=3": "does not split over",
    "--platform tpu:v5p:2x2x1 --set pipeline.schedul=1f1b": "no such config field",
    "--platform tpu:v5p:2x2x1 --html nowhere/page.html": "cannot be written",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line(run: Run, words: str) -> None:
    done = run("plan", "--model", "tiny", *words.split())
    assert done.code == 2, done.err
    assert REFUSED[words] in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_a_model_that_cannot_fit_is_one_line(run: Run) -> None:
    done = run("plan", "--model", "mixtral-8x22b", "--platform", "tpu:v5p:2x2x1")
    assert done.code == 2
    assert "no layout fits: the state alone needs" in done.err.splitlines()[-1]
    assert "or --set model.param_dtype=bfloat16" in done.err.splitlines()[-1]
    words = ("--set", "model.param_dtype=bfloat16", "--limit", "20GB")
    again = run("plan", "--model", "mixtral-8x22b", *words, "--platform", "tpu:v5p:2x2x1")
    assert "of 20.0 GB that a device may hold; take more devices" in again.err.splitlines()[-1]
    assert "bfloat16" not in again.err.splitlines()[-1]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command with figures that are made up, and no compiler."""
    plan = plan_of(preset("tiny"), 4)
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(compiling.Compiler, "__call__", lambda self, one: truth(plan, 5)(one))
    monkeypatch.setattr(compiling.Compiler, "known", lambda self, layout: None)


PLAN = ("plan", "--model", "tiny", "--platform", "tpu:v5p:2x2x1", "--most", "6")


@pytest.mark.usefixtures("faked")
def test_the_command_says_what_it_found(run: Run, tmp_path: Path) -> None:
    page, result = tmp_path / "page.html", tmp_path / "plan.json"
    done = run(*PLAN, "--price", "4.2", "--html", page, "--json", result)
    assert done.code == 0, done.err
    said = done.err.splitlines()
    assert any("6 compiles at most; how long one takes is not known yet" in line for line in said)
    table = done.out.split("→ with", 1)[0]
    assert max(map(len, table.splitlines())) <= 80, done.out
    (plan,) = json.loads(result.read_text())["plans"]
    assert plan["layouts"] == plan["cannot_fit"] + plan["predicted_too_slow"] + plan["candidates"]
    assert len(plan["compiled"]) == 6
    best = min(one["time"]["step_seconds"] for one in plan["compiled"] if one["fits"])
    assert plan["best"]["time"]["step_seconds"] == best
    assert plan["best"]["rate"]["price_per_chip_hour"] == 4.2
    assert "tensor > 1" in done.out or "tensor = 1" in done.out
    assert "all compiles are used up: with a larger --most" in done.out
    assert re.search(r"→ 10¹² tokens cost [≳≥ ]*\d", done.out)
    pasted = done.out[done.out.index("nnx-pipeline train") :].replace("\\\n", "")
    assert pasted.split() == plan["paste"].split()
    assert page.read_text().count('class="peak') == 6


@pytest.mark.usefixtures("faked")
def test_several_platforms_have_a_row_each(run: Run) -> None:
    done = run(*PLAN, "--what-if", "tpu:v5p:2x2x2")
    assert done.code == 0, done.err
    rows = done.out.split("the best of each", 1)[1]
    assert re.findall(r"tpu:v5p:\S+", rows) == ["tpu:v5p:2x2x1", "tpu:v5p:2x2x2"]


def test_an_interrupted_plan_writes_its_files(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    code = f"""
import itertools, time
from nnx_pipeline.experiments.plan import compiling
numbers = itertools.count()
def fail(self, layout):
    time.sleep(60 if next(numbers) > 1 else 0)
    raise RuntimeError("no such kernel")
compiling.Compiler.__call__ = fail
{script("nnx_pipeline")}"""
    words = (*PLAN, "--json", "x.json", "--html", "x.html")
    with started(tmp_path, code, *words, stdout=subprocess.PIPE) as process:
        for line in process.stderr:
            if " 4 of " in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 130, err
    assert "not finished" in out
    (plan,) = json.loads((tmp_path / "x.json").read_text())["plans"]
    assert plan["ended"] is None
    assert [one["error"] for one in plan["compiled"]] == ["RuntimeError: no such kernel"] * 2
    assert "<html" in (tmp_path / "x.html").read_text()


def test_a_real_plan_ends_in_a_command_that_trains(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile, which an earlier run has the second time; the pasted command trains."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    monkeypatch.setenv("NNX_PIPELINE_CACHE", str(tmp_path / "cache"))
    settings = ("model.num_layers=2", "train.global_batch=8", "model.experts=dense")
    settings = (*settings, "train.sequence_length=16")
    small = [word for text in settings for word in ("--set", text)]
    words = ("plan", "--model", "tiny", *small, "--platform", "tpu:v5e:2x2", "--most", "1")
    done = run(*words, "--json", tmp_path / "plan.json")
    assert done.code == 0, done.err
    (plan,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    (made,) = plan["compiled"]
    assert made["time"], made
    assert made["account_bytes"] > 0
    again = run(*words, "--json", tmp_path / "again.json", "--minutes", "0.05")
    (known,) = json.loads((tmp_path / "again.json").read_text())["plans"]
    assert again.code == 0, again.err
    assert [one["layout"] for one in known["compiled"]][:1] == [plan["compiled"][0]["layout"]]
    assert known["compiled"][0]["earlier"]
    program, *rest = shlex.split(plan["paste"])
    assert program == "nnx-pipeline"
    rest[rest.index("local")], rest[rest.index("--steps") + 1] = "cpu", "2"
    trained = run(*rest)
    assert trained.code == 0, trained.err


def test_the_child_says_why_there_is_no_program(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    space = space_of(preset("tiny"), 4)
    shape = list_shapes(space).shapes[0]
    wrong = shape._replace(mesh=dataclasses.replace(shape.mesh, data=3, fsdp=1))
    compiler = compiling.Compiler(space, V5P, compiling.Cache(tmp_path), patience=300)
    with pytest.raises(compiling.NotCompiled, match="InputError"):
        compiler(wrong)
    assert compiler.known(wrong) is None
    with pytest.raises(compiling.NotCompiled, match="took longer than 1 s, and was ended"):
        dataclasses.replace(compiler, patience=1)(shape)
