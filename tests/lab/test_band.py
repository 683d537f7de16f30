"""How far measured steps lay from their estimates, and where that is said."""

import pytest

from nnx_pipeline.lab._report.view import figures
from nnx_pipeline.lab._timing import band
from nnx_pipeline.lab._timing.band import Run, band_of
from nnx_pipeline.lab._timing.result import Time

RUNS = tuple(
    Run(what=what, chip=chip, basis=basis, program=program, estimated=2.0, measured=measured)  # type: ignore[arg-type]
    for what, chip, basis, program, measured in (
        ("a", "v5p", "cycles", "dense", 1.8),
        ("b", "v5p", "cycles", "dense", 2.1),
        ("c", "v6e", "cycles", "dense", 2.6),
        ("d", "v5p", "cycles", "experts", 1.0),
        ("e", "h100", "xla-model", "dense", 2.4),
    )
)


@pytest.fixture(autouse=True)
def known_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(band, "runs", lambda: RUNS)


BOTH = "all models on v5p, v6e"


@pytest.mark.parametrize(
    ("basis", "program", "but", "kind", "within", "count"),
    [
        ("cycles", "dense", "", "dense models on v5p, v6e", "−10 % to +30 %", "3 runs"),
        ("cycles", "dense", "c", "dense models on v5p", "−10 % to +5 %", "2 runs"),
        # One run alone is no band: those of all models count.
        ("cycles", "experts", "", BOTH, "−50 % to +30 %", "4 runs"),
        ("cycles", "", "", BOTH, "−50 % to +30 %", "4 runs"),
        ("xla-model", "dense", "", "dense models on h100", "+20 %", "1 run"),
    ],
)
def test_the_band_of_a_kind(
    basis: str, program: band.Program, but: str, kind: str, within: str, count: str
) -> None:
    said = f"measured steps of {kind} lay {within} from the estimate ({count})"
    assert str(band_of(basis, program, but=but)) == said


def test_where_nothing_was_measured() -> None:
    assert band_of("roofline", "dense") is None
    assert band_of("xla-model", "dense", but="e") is None


def test_a_step_says_its_band() -> None:
    nothing = dict.fromkeys(("collective_seconds", "exposed_seconds", "memory_wait_seconds"))
    time = Time(
        basis="cycles",
        known_seconds=1.0,
        compute_seconds=1.0,
        **nothing,
        host_seconds=None,
        step_seconds=1.0,
        range_seconds=None,
        hfu=None,
        launches=1,
        peak_flops=1.0,
    ).of_model(1.0, 0.0, "dense")
    assert figures.band(time) == str(band_of("cycles", "dense"))
    shown = time.to_json()["band"]
    assert (shown["runs"], shown["least"]) == (3, pytest.approx(-0.1))
    assert shown["most"] == pytest.approx(0.3)
