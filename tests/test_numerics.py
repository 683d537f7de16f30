"""What counts as computing the same."""

import dataclasses
import math

import numpy as np
import pytest
from page_examples import measurement

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.lab import numerics
from nnx_pipeline.lab.arms import Program
from nnx_pipeline.lab.compare import compare_measurements
from nnx_pipeline.lab.experiments import EXPERIMENTS

A, B = Program(preset("tiny")), Program(preset("mixtral-small"))
ONES = np.ones(3, np.float32)


def compared(monkeypatch: pytest.MonkeyPatch, a: list[np.ndarray], b: list[np.ndarray]):
    """The verdict on made-up losses and gradients of the two arms."""
    values = {id(A): a, id(B): b}
    monkeypatch.setattr(numerics, "_loss_and_gradients", lambda program, mesh: values[id(program)])
    return numerics._compared((A, B), MeshConfig(), 1e-5)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_a_nan_is_within_no_tolerance(
    monkeypatch: pytest.MonkeyPatch, place: int, both: bool
) -> None:
    bad = [ONES, ONES, ONES]
    bad[place] = np.array([1, math.nan, 1], np.float32)
    found = compared(monkeypatch, bad if both else [ONES] * 3, bad)
    assert not found.within_tolerance
    assert math.isnan(found.max_abs_diff)


def test_the_largest_value_is_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ONES + np.float32(5e-5), ONES + np.float32(2e-3)
    assert compared(monkeypatch, [100 * ONES, ONES], [100 * ONES, near]).within_tolerance
    found = compared(monkeypatch, [100 * ONES, ONES], [100 * ONES, far])
    assert not found.within_tolerance
    assert found.max_abs_diff == pytest.approx(2e-3, rel=1e-3)
    assert not found.bitwise_equal
    assert compared(monkeypatch, [ONES], [ONES.copy()]).bitwise_equal


def test_arms_with_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) in one arm is \(1,\)"):
        compared(monkeypatch, [ONES, ONES], [ONES, ONES[:1]])


def test_switches_of_the_config_are_those_of_the_numbers() -> None:
    small = preset("mixtral-small")
    model = dataclasses.replace(small.model, embedding="one_hot", norm_scale_offset=1.0)
    train = dataclasses.replace(small.train, load_balance_weight=0.5)
    config = dataclasses.replace(small, model=model, train=train)
    programs = numerics._at_tiny(EXPERIMENTS["norm-scale"], config, MeshConfig(stage=4, fsdp=2))
    for program in programs:
        assert program.config.model.embed_dim == preset("tiny").model.embed_dim
        assert program.config.model.embedding == "one_hot"
        assert program.config.model.norm_scale_offset == 1.0
        assert program.config.train.load_balance_weight == 0.5


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(0.985, "holds"), (0.995, "no effect"), (1.005, "no effect"), (1.015, "opposite")],
)
def test_one_percent_of_temp_is_an_effect(ratio: float, verdict: str) -> None:
    a, b = measurement(None), measurement(None)
    memory = dataclasses.replace(a.memory, temp_bytes=int(a.memory.temp_bytes * ratio))
    other = dataclasses.replace(b, memory=memory, hlo="ENTRY %other")
    assert compare_measurements(EXPERIMENTS["norm-scale"], a, other).verdict == verdict
