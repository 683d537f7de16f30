"""What each style costs: counted, measured in one run, shown, and written."""

import contextlib
import dataclasses
import io
import json
import re
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from linen_compat._cli.overhead import ChosenLayers, configured
from linen_compat._overhead import LOOPS
from linen_compat._overhead import arms as overhead_arms
from linen_compat._overhead.arms import ARMS, Style, make_program
from linen_compat._overhead.measure import FIGURES, check_loops, count_calls, measure_overhead
from linen_compat._overhead.report import overhead_figure, overhead_view
from nnx_pipeline import InputError
from tests.helpers import Ended, small_config

BY_NAME = {arm.name: arm for arm in ARMS}
CONFIG = small_config(model={"num_layers": 2})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    from linen_compat._cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["linen-compat", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
    out, err = capsys.readouterr()
    return Ended(caught.value.code, out, err)


@contextlib.contextmanager
def program_of(name: str, loop: str, config=CONFIG):
    mesh = overhead_arms.mesh_for_loop(loop, config.model.num_layers)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        yield make_program(BY_NAME[name], loop, config, mesh)


def calls(name: str, loop: str) -> int:
    with program_of(name, loop, small_config()) as program:
        return count_calls(program)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_wrappers_add_few_calls_to_tracing_and_lowering(loop: str) -> None:
    """The bounds are those that hold for the seconds: 1.10 and 1.05 times the native style."""
    calls("native NNX", loop)  # what is imported at first use does not count
    assert calls("NNX as Linen", loop) <= 1.10 * calls("native NNX", loop)
    assert calls("Linen as NNX", loop) <= 1.05 * calls("native Linen", loop)


@pytest.mark.slow
def test_a_constructor_at_every_apply_is_seen_in_the_calls() -> None:
    """What the bounds above would say of a wrapper that runs the constructor each time."""
    assert calls("Flax ToLinen", "unrolled") > 1.05 * calls("NNX as Linen", "unrolled")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("wrapped", "native"), [("NNX as Linen", "native Linen"), ("Linen as NNX", "native NNX")]
)
def test_every_style_is_the_same_program(loop: str, wrapped: str, native: str) -> None:
    """As many equations of each kind, whichever side of a wrapper the layers are from."""

    def counted(name: str) -> Counter[str]:
        with program_of(name, loop) as program:
            params = program.place(jax.eval_shape(program.init))
            text = jax.jit(program.loss).trace(params, program.x).lower().as_text()
        return Counter(re.findall(r"= (stablehlo\.\w+)", text))

    assert counted(wrapped) == counted(native)


@pytest.fixture(scope="module")
def measured():
    """One repetition of a small model in one loop, with one arm that cannot work."""

    def broken(config: object, rngs: object) -> None:
        raise RuntimeError("no such layer\nand more")

    arms = (ARMS[0], ARMS[2], Style("broken", "native NNX", False, broken))
    return measure_overhead(CONFIG, repetitions=1, loops=("scan",), arms=arms)


@pytest.mark.slow
def test_every_figure_is_measured_and_held_to_the_native_style(measured) -> None:
    rows = {row.arm: row for row in measured.rows}
    for row in measured.rows[:2]:
        assert row.error is None
        figures = dataclasses.asdict(row.figures)
        assert set(figures) == set(FIGURES)
        assert all(value > 0 for value in figures.values())
        native = dataclasses.asdict(rows[row.native].figures)
        for name, ratio in row.ratios.items():
            if name == "dispatch":  # of several steps, the median of the ratios
                continue
            np.testing.assert_allclose(ratio, figures[name] / native[name], atol=1e-4)
    sizes = [(row.figures.temp_bytes, row.figures.hlo_instructions) for row in measured.rows[:2]]
    assert len(set(sizes)) == 1, "the styles compile to the same program"


@pytest.mark.slow
def test_an_arm_that_fails_is_noted_and_the_others_are_measured(measured) -> None:
    broken = measured.rows[2]
    assert broken.error == "RuntimeError: no such layer"
    assert set(dataclasses.asdict(broken.figures).values()) == {None}
    assert set(broken.ratios.values()) == {None}


@pytest.mark.slow
def test_the_table_the_json_and_the_picture(measured) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(overhead_view(measured))
    text = console.export_text()
    assert "NNX as Linen" in text
    assert "scan, broken: RuntimeError: no such layer" in text
    data = json.loads(json.dumps(measured.to_json()))
    assert (data["schema"], data["layers"], data["repetitions"]) == (1, 2, 1)
    assert data["rows"][0]["arm"] == "native NNX"
    assert data["rows"][2]["figures"]["trace"] is None
    (panel,) = overhead_figure(measured).axes
    notes = [note.get_text() for note in panel.texts]
    assert (notes[0], notes[2]) == ("1.00× native NNX", "not measured")


def test_bad_input_ends_in_one_line(capsys, tmp_path: Path) -> None:
    def refuse(message: str, *arguments: str) -> None:
        ended = run(capsys, "overhead", *arguments)
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1
        assert message in ended.err

    refuse("model 'tinny' is not a preset; did you mean 'tiny'?", "--model", "tinny")
    refuse("did you mean 'model.num_layers'?", "--set", "model.num_layer=3")
    refuse("--set pipeline.shift changes nothing", "--set", "pipeline.shift=slice")
    refuse("7 layers do not split over 4 or 2 stages", "--layers", "7")
    refuse("does not split into 4 microbatches", "--set", "train.global_batch=6")
    refuse("say the same", "--layers", "4", "--set", "model.num_layers=4")
    refuse("--picture x.pdf: the name of a picture must end in .png or .svg", "--picture", "x.pdf")
    refuse("--json /nowhere/x cannot be written; choose a file", "--json", "/nowhere/x")
    refuse("'circular' is not one of", "--loop", "circular")
    refuse("0 is not in the range 1<=x", "--repetitions", "0")


def test_layers_that_need_no_pipeline_may_be_odd() -> None:
    check_loops(configured(ChosenLayers("tiny", (), 7)), ("scan",))
    assert configured(ChosenLayers("tiny", ("train.sequence_length=6",), 3)).model.num_layers == 3
    with pytest.raises(InputError, match="loop='scam' is not known; did you mean 'scan'"):
        check_loops(CONFIG, ("scam",))


@pytest.mark.slow
def test_the_command(capsys, tmp_path: Path, monkeypatch) -> None:
    def quick(config, *, progress, **options):
        progress("measuring")
        return measure_overhead(config, arms=ARMS[:1], **options)

    monkeypatch.setattr("linen_compat._overhead.measure.measure_overhead", quick)
    picture, target = tmp_path / "price.svg", tmp_path / "price.json"
    sizes = [f"model.{name}=16" for name in ("embed_dim", "mlp_dim")]
    sets = [part for size in (*sizes, "train.sequence_length=8") for part in ("--set", size)]
    common = ("--layers", "2", "--loop", "scan", "--repetitions", "1", *sets)
    ended = run(capsys, "overhead", *common, "--picture", str(picture), "--json", str(target))
    assert ended.code == 0
    assert re.fullmatch(r"0:\d\d measuring\n", ended.err)
    assert "native NNX" in ended.out
    assert "<svg" in picture.read_text()
    assert json.loads(target.read_text())["rows"][0]["loop"] == "scan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["price.json", "price.svg"]
