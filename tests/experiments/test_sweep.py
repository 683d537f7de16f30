"""Figures against a field of the config, and the line through them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, optax_promotion, small_config
from hypothesis import given, settings
from hypothesis import strategies as st
from page_examples import attribution, measurement

from nnx_pipeline import MeshConfig
from nnx_pipeline.experiments import sweep
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab.comparison.sweep import Point, Sweep, line_through
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError

MEASURING = sys.modules["nnx_pipeline.experiments._measuring"]
SWEEP = ("ab", "--mesh", "stage=2", "--sweep")


def made_up(*values: Any, factors: tuple[float, ...]) -> Sweep:
    points = tuple(
        Point(value=value, result=measurement(attribution(factor)))
        for value, factor in zip(values, factors, strict=True)
    )
    return Sweep(field="train.loss_chunks", arms=(("step", points),), platform="cuda:h100:8")


@given(
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.lists(st.integers(1, 10_000), min_size=2, max_size=6, unique=True),
)
@settings(max_examples=50)
def test_a_line_is_found(slope: float, intercept: float, values: list[int]) -> None:
    found = line_through([(x, slope * x + intercept) for x in values])
    assert found is not None
    assert found.slope == pytest.approx(slope, abs=1e-3, rel=1e-6)
    assert found.r_squared is None or found.r_squared <= 1 + 1e-9


def test_the_fit_of_points_beside_a_line() -> None:
    found = line_through([(1, 1.0), (2, 3.0), (3, 2.0)])
    assert found is not None
    assert (found.slope, found.intercept) == pytest.approx((0.5, 1.0))
    assert found.r_squared == pytest.approx(0.25)
    two = line_through([(1, 1.0), (2, 3.0)])
    assert two is not None
    assert (two.slope, two.r_squared) == (2.0, None), "two points lie on a line"
    flat = line_through([(1, 5.0), (2, 5.0)])
    assert flat is not None
    assert (flat.slope, flat.intercept, flat.r_squared) == (0.0, 5.0, None)


def test_a_field_is_set_or_swept(run: Run) -> None:
    ended = run("ab", "--sweep", "train.loss_chunks=2,4", "--set", "train.loss_chunks=2")
    assert ended.code == 2
    assert "--set train.loss_chunks has no effect beside --sweep train.loss_chunks" in ended.err


def test_a_sweep_of_nothing() -> None:
    with pytest.raises(InputError, match="sweep of platform: give compare several --platform"):
        sweep(small_config(), "", {"platform": ["cpu"]})
    with pytest.raises(InputError, match="a sweep of no field; give one, as"):
        sweep(small_config(), "", {})


def test_where_there_is_no_slope() -> None:
    named = made_up("slice", "pad", factors=(1.0, 2.0))
    assert named.fit("temp_bytes") is None
    with pytest.raises(InputError, match="has no slope: it needs two different numbers"):
        named.slope("temp_bytes")
    assert made_up(1, 2, factors=(1.0, 2.0)).fit("peak_bytes") is None
    point = Point(value=4, result=None, error="too large")
    good = made_up(1, 2, factors=(1.0, 2.0))
    failed = Sweep(field="f", arms=(("step", (*good.arms[0][1], point)),), platform="cpu")
    assert failed.fit("temp_bytes") == good.fit("temp_bytes")
    with pytest.raises(InputError, match="step, f=4: too large"):
        failed.slope("temp_bytes")
    heap = [point.result.memory.heap_bytes for _, points in good.arms for point in points]
    assert good.slope("heap_bytes") == pytest.approx(heap[1] - heap[0])
    other = made_up(1, 2, factors=(1.0, 4.0)).arms[0][1]
    both = Sweep(field="f", arms=(*good.arms, ("b", other)), platform="cpu")
    assert both.fit("temp_bytes") == both.fit("temp_bytes", "b") != both.fit("temp_bytes", "step")
    with pytest.raises(InputError, match="did you mean 'temp_bytes'"):
        good.slope("temp_byte")
    with pytest.raises(InputError, match="choose one of: step"):
        good.slope("temp_bytes", arm="b")


BAD = [
    (("pipeline.num_microbatch=2,4",), "did you mean 'pipeline.num_microbatches'?"),
    (("pipeline.num_microbatches=2,x",), ": pipeline.num_microbatches=x needs a whole number"),
    (("pipeline.num_microbatches=2,3",), "choose a multiple of 3"),
    (("pipeline.num_microbatches=2",), "two different values or more"),
    (("pipeline.num_microbatches=2,2",), "two different values or more"),
    (("pipeline.num_microbatches=4,04",), "two different values or more"),
    (("pipeline.shift=slice,pad", "stage-shift"), "stage-shift sets pipeline.shift itself"),
    (("pipeline.num_microbatches",), "write for example --sweep"),
    (("pipeline.num_microbatches=2,,4",), "write for example --sweep"),
    (("train.loss_chunks=2,4", "--sweep", "train.global_batch=8"), "need equally many"),
    (
        ("train.loss_chunks=2,4", "--sweep", "train.loss_chunks=2,4"),
        "--sweep train.loss_chunks is given 2 times; give each field once",
    ),
    (("train.loss_chunks=2,4", "norm-scale", "embedding"), "--sweep takes one experiment"),
    (("train.loss_chunks=2,4", "zero-1"), "give the mesh a data axis"),
    (("mesh=stage=2/fsdp=2",), "--mesh has no effect beside --sweep mesh"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ended = run(*SWEEP, *arguments)
    assert ended.code == 2
    assert message in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_a_point_that_fails_leaves_the_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(program: Program, *args: Any, **options: Any) -> Callable[[], Measurement]:
        chunks = program.config.train.loss_chunks

        def measured() -> Measurement:
            if chunks == 4:
                raise RuntimeError("out of everything\nand more")
            return measurement(attribution(chunks), platform="cpu")

        return measured

    monkeypatch.setattr(MEASURING, "prepare", prepared)
    ended = run(*SWEEP, "train.loss_chunks=1,2,4", "--json", "-")
    assert ended.code == 1
    assert "train.loss_chunks=4: out of everything" in ended.err.splitlines()[-1]
    (arm,) = ended.json["arms"]
    assert [point["value"] for point in arm["points"]] == [1, 2, 4]
    assert [point["error"] for point in arm["points"]] == [None, None, "out of everything"]
    growth = arm["points"][1]["memory"]["temp_bytes"] - arm["points"][0]["memory"]["temp_bytes"]
    assert arm["fits"]["temp_bytes"]["slope"] == pytest.approx(growth)
    assert arm["fits"]["peak_bytes"] is None
    shown = run(*SWEEP, "train.loss_chunks=1,2,4").out
    assert "slope per unit" in shown
    assert f"{growth / 1e6:+,.3f}" in shown
    assert "out of everything" in shown
    assert "results are from earlier runs" in shown
    for name in ("chart.png", "chart.svg"):
        assert run(*SWEEP, "train.loss_chunks=1,2,4", "--chart", str(tmp_path / name)).code == 1
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "chart.svg").read_text()
    assert f"step: {growth / 1e6:+,.4g} per unit" in drawn
    assert "train.loss_chunks" in drawn
    panels = [drawn.index(title) for title in ("temp, MB", "estimated step, ms", "heap, MB")]
    assert panels == sorted(panels), "time stands beside memory"


def test_meshes_are_swept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each, and no slope, because they are no numbers."""

    def prepared(program: Program, mesh: MeshConfig, *_: Any, **__: Any) -> Any:
        return lambda: measurement(attribution(mesh.stage + 10 * mesh.fsdp), platform="cpu")

    monkeypatch.setattr(MEASURING, "prepare", prepared)
    asked = ("ab", "--model", "tiny", "--sweep", "mesh=stage=2,fsdp=2/fsdp=4/ stage=4", "--json")
    ended = run(*asked, "-")
    (arm,) = ended.json["arms"]
    assert [point["value"] for point in arm["points"]] == ["stage=2,fsdp=2", "fsdp=4", "stage=4"]
    held = [point["memory"]["temp_bytes"] for point in arm["points"]]
    assert held == [measurement(attribution(by)).memory.temp_bytes for by in (22, 41, 14)]
    assert arm["fits"]["temp_bytes"] is None
    assert "slope" not in run(*asked[:-1]).out
    for wrong, message in (
        ("mesh=stage=4/stage=4", "two different values or more"),
        ("mesh=stage=4/stages=2", "'stages'"),
        ("mesh=stage=4/stage=3", "num_layers"),
    ):
        ended = run("ab", "--model", "tiny", "--sweep", wrong)
        assert (ended.code, message in ended.err) == (2, True), ended.err


@pytest.mark.slow
def test_memory_per_microbatch_of_both_schedules() -> None:
    """Microbatches of one size: the circular schedule keeps each of them, 1F1B does not."""
    config = small_config(
        model={"num_layers": 2, "embed_dim": 32},
        train={"sequence_length": 32},
    )
    with optax_promotion():
        found = sweep(
            config,
            "stage=2",
            {"pipeline.num_microbatches": (4, 8), "train.global_batch": (4, 8)},
            experiment=EXPERIMENTS["schedule"],
        )
    assert [label for label, _ in found.arms] == ["circular", "1f1b"]
    assert found.slope("heap_bytes", "1f1b") < 0.5 * found.slope("heap_bytes", "circular")
