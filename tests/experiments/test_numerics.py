"""What counts as computing the same."""

import dataclasses
import functools
import math
import sys
from typing import Any

import numpy as np
import pytest
from helpers import replace
from page_examples import measurement

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.experiments import _numerics as numerics
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab.comparison._numerics import Numerics, compare_values
from nnx_pipeline.lab.comparison.outcome import compare_measurements

A, B = Program(preset("tiny")), Program(preset("mixtral-small"))
ONES = np.ones(3, np.float32)
NAMES = ("loss", "head", "norm")


def compared(a: list[np.ndarray], b: list[np.ndarray]) -> Numerics:
    """The verdict on made-up losses and gradients of the two arms."""
    values = (dict(zip(NAMES, arrays, strict=False)) for arrays in (a, b))
    return compare_values(*values, 1e-5)


@pytest.mark.parametrize("microbatches", [None, 2, 4, 8, 16])
@pytest.mark.parametrize("repeats", [1, 2])
def test_every_pipeline_has_numbers(microbatches: int | None, repeats: int) -> None:
    """Where that of the arms does not fit eight devices at `tiny`, another one does."""
    config = replace(
        preset("mixtral-small"), "pipeline", num_microbatches=microbatches, num_repeats=repeats
    )
    for experiment in EXPERIMENTS.values():
        mesh = numerics.mesh_of_numbers(experiment)
        for program in numerics.at_tiny(experiment, config, mesh):
            program.config.check_mesh(mesh)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_a_nan_is_within_no_tolerance(place: int, both: bool) -> None:
    bad = [ONES, ONES, ONES]
    bad[place] = np.array([1, math.nan, 1], np.float32)
    found = compared(bad if both else [ONES] * 3, bad)
    assert not found.within_tolerance
    assert math.isnan(found.max_abs_diff)
    assert found.worst == NAMES[place]


def test_infinity_is_within_no_tolerance() -> None:
    bad = np.array([1, math.inf, 1], np.float32)
    assert not compared([ONES, bad], [ONES, ONES]).within_tolerance
    assert not compared([ONES, bad], [ONES, bad]).within_tolerance


def test_every_array_is_its_own_measure() -> None:
    """A large loss hides no gradient."""
    near, far = ONES + np.float32(5e-6), ONES + np.float32(5e-5)
    assert compared([1e6 * ONES, ONES], [1e6 * ONES, near]).within_tolerance
    found = compared([1e6 * ONES, ONES], [1e6 * ONES, far])
    assert not found.within_tolerance
    assert found.worst == "head"
    assert found.worst_relative == pytest.approx(5e-5, rel=1e-2)
    assert found.max_abs_diff == pytest.approx(5e-5, rel=1e-2)
    assert not found.bitwise_equal
    assert compared([ONES], [ONES.copy()]).bitwise_equal
    tiny = np.float32(1e-20)
    assert not compared([ONES, tiny * ONES], [ONES, 1.5 * tiny * ONES]).within_tolerance


def test_a_gradient_that_is_zero() -> None:
    """In one arm it is as wrong as it can be; in both it is equal, and named."""
    zero = 0 * ONES
    for pair in ([ONES, zero, ONES], [ONES] * 3), ([ONES] * 3, [ONES, zero, ONES]):
        found = compared(*pair)
        assert not found.within_tolerance
        assert (found.worst, found.worst_relative, found.all_zero) == ("head", 1.0, ())
    found = compared([ONES, zero], [ONES, zero])
    assert found.within_tolerance
    assert found.all_zero == ("head",)


def test_equal_values_of_another_dtype_are_not_the_same_bits() -> None:
    found = compared([ONES], [ONES.astype(np.float64)])
    assert found.within_tolerance
    assert not found.bitwise_equal


def test_arms_with_other_arrays() -> None:
    with pytest.raises(
        ValueError, match=r"head has shape \(3,\) in one arm and \(1,\) in the other"
    ):
        compared([ONES, ONES], [ONES, ONES[:1]])
    with pytest.raises(ValueError, match=r"one arm computes \['head'\]"):
        compared([ONES, ONES], [ONES])


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        (1.5, "the arms differ in head, by 0.333 of its largest value"),
        (0.0, "the arms differ in head, by 1 of its largest value"),
        (1.0, ""),
    ],
)
def test_what_an_outcome_says(monkeypatch: pytest.MonkeyPatch, wrong: float, note: str) -> None:
    run = sys.modules["nnx_pipeline.experiments._run"]
    measuring = sys.modules["nnx_pipeline.experiments._measuring"]
    made_up = functools.partial(measurement, None, platform="cpu")
    programs = EXPERIMENTS["norm-scale"].programs(preset("tiny"), MeshConfig())
    values = {programs[0].replaced: ONES, programs[1].replaced: np.float32(wrong) * ONES}

    def numbers(program: Program, mesh: Any) -> dict[str, np.ndarray]:
        return {"loss": 1e6 * ONES, "head": values[program.replaced], "norm": 0 * ONES}

    monkeypatch.setattr(numerics, "arm_values", numbers)
    monkeypatch.setattr(measuring, "prepare", lambda *_, **__: made_up)
    (found,) = run.run_experiments(
        [EXPERIMENTS["norm-scale"]], preset("tiny"), MeshConfig(), run.Platform("cpu")
    )
    assert found.failed == bool(note)
    assert note in found.note
    assert "zero in both arms, so nothing is compared: norm" in found.note
    entry = found.to_json()["numerics"]
    assert entry["worst"] == ("head" if note else "loss")
    assert entry["within_tolerance"] == (not note)
    assert list(entry["all_zero"]) == ["norm"]


def test_switches_of_the_config_are_those_of_the_numbers() -> None:
    small = preset("mixtral-small")
    model = dataclasses.replace(
        small.model,
        embedding="one_hot",
        norm_scale_offset=1.0,
        attention="flash",
        sliding_window=7,
    )
    train = dataclasses.replace(small.train, load_balance_weight=0.5)
    config = dataclasses.replace(small, model=model, train=train)
    programs = numerics.at_tiny(EXPERIMENTS["norm-scale"], config, MeshConfig(stage=4, fsdp=2))
    for program in programs:
        assert program.config.model.embed_dim == preset("tiny").model.embed_dim
        assert program.config.model.embedding == "one_hot"
        assert program.config.model.norm_scale_offset == 1.0
        assert program.config.model.attention == "chunked", "CPU devices have no kernel"
        assert program.config.model.sliding_window == 7
        assert program.config.train.load_balance_weight == 0.5


def test_sizes_of_a_claim_are_not_those_of_the_numbers() -> None:
    experiment, mesh = EXPERIMENTS["embedding"], MeshConfig(stage=4, fsdp=2)
    for program in experiment.programs(preset("tiny"), mesh):
        assert program.config.model.vocab_size == 102_400
    for program in numerics.at_tiny(experiment, preset("tiny"), mesh):
        assert program.config.model.vocab_size == preset("tiny").model.vocab_size


@pytest.mark.parametrize(
    ("ratio", "verdict", "note"),
    [
        (0.985, "holds", ""),
        (0.995, "no effect", "two programs whose temp is less than 1 % apart"),
        (1.0, "no effect", "two programs with the same temp"),
        (1.015, "opposite", ""),
    ],
)
def test_one_percent_of_temp_is_an_effect(ratio: float, verdict: str, note: str) -> None:
    a, b = measurement(None), measurement(None)
    memory = dataclasses.replace(a.memory, temp_bytes=int(a.memory.temp_bytes * ratio))
    other = dataclasses.replace(b, memory=memory, hlo="ENTRY %other")
    found = compare_measurements(EXPERIMENTS["norm-scale"].question, a, other)
    assert (found.verdict, found.note) == (verdict, note)
    assert found.to_json()["same_program"] is False
    assert found.to_json()["judged_by"] == "temp"


@pytest.mark.parametrize(
    ("temps", "verdict"), [((0, 0), "no effect"), ((0, 1), "opposite"), ((1, 0), "holds")]
)
def test_no_temp_at_all_is_a_figure_too(temps: tuple[int, int], verdict: str) -> None:
    made = measurement(None)
    a, b = (
        dataclasses.replace(made, memory=dataclasses.replace(made.memory, temp_bytes=temp))
        for temp in temps
    )
    assert compare_measurements(EXPERIMENTS["shard-variable"].question, a, b).verdict == verdict


def test_one_program_is_said() -> None:
    found = compare_measurements(
        EXPERIMENTS["norm-scale"].question, measurement(None), measurement(None)
    )
    assert (found.verdict, found.note) == ("no effect", "both arms compile to the same program")
    assert found.to_json()["same_program"] is True


@pytest.mark.parametrize(
    ("held", "verdict"),
    [((100, 90), "holds"), ((100, 100), "no effect"), ((90, 100), "opposite")],
)
def test_tracing_is_judged_by_what_the_host_holds(held: tuple[int, int], verdict: str) -> None:
    a, b = (
        dataclasses.replace(measurement(None), trace_host_bytes=size * 1_000_000) for size in held
    )
    found = compare_measurements(EXPERIMENTS["stage-metadata"].question, a, b)
    assert found.verdict == verdict
    assert "as metadata is not part of a program" in found.note
    assert f"{held[0]}.0 MB and {held[1]}.0 MB" in found.note
    assert found.to_json()["judged_by"] == "trace_host"
    assert found.to_json()["arms"]["a"]["trace_host_bytes"] == held[0] * 1_000_000
