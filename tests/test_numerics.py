"""What counts as computing the same."""

import math

import numpy as np
import pytest

from nnx_pipeline import MeshConfig, preset
from nnx_pipeline.lab import numerics
from nnx_pipeline.lab.arms import Program

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
