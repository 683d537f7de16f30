"""What a step must hold and take: the terms by hand, what is not known, and the report."""

import dataclasses
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import documents
import pytest
from helpers import optax_promotion
from page_examples import attribution, measurement
from rich.console import Console, Group

from nnx_pipeline import Config, MeshConfig, ModelConfig, PipelineConfig, TrainConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments import floor
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._page import measurement_page
from nnx_pipeline.lab._report.program_tables import floor_view
from nnx_pipeline.lab._report.view.floor import floor_lines
from nnx_pipeline.lab.attribution._floor import Floor, Term, between, live_bytes
from nnx_pipeline.lab.attribution._result import ROLES
from nnx_pipeline.lab.compile._packages import MissingCompiler
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.train._useful import bubble_share, useful_flops

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "floor.json"
V5P = "tpu:v5p:2x2x2"
MODEL = ModelConfig(
    vocab_size=1024,
    embed_dim=256,
    mlp_dim=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
# On stage=2,fsdp=2 a device has 4 sequences of a microbatch, and 2 layers.
CONFIG = Config(
    model=MODEL,
    pipeline=PipelineConfig(num_microbatches=4),
    train=TrainConfig(global_batch=32, sequence_length=128, loss_chunks=4),
)
MESH = "stage=2,fsdp=2"
STREAM = 4 * 128 * 256 * 2  # sequences × tokens × embed × bfloat16
OF_LAYER = 256 * (4 * 64 * 2 + 2 * 64 * 2 + 3 * 512)  # query, out, key, value, and the MLP
SCALES = 2 * 256  # of the two norms of a layer, which no device shards


def terms(moment: str, config: Config = CONFIG, mesh: str = MESH) -> dict[str, int]:
    """The bytes of each term at a moment."""
    (found,) = [one for one in floor(config, mesh).moments if one.name == moment]
    return {term.name: term.bytes for term in found.terms}


def with_pipeline(**fields: Any) -> Config:
    return dataclasses.replace(CONFIG, pipeline=dataclasses.replace(CONFIG.pipeline, **fields))


def test_state_and_batch() -> None:
    outside = 2 * 1024 * 256 // 4 + 256  # table and head over stage and fsdp, and the last norm
    weights = 4 * (2 * (OF_LAYER // 2 + SCALES) + outside)
    found = {term.name: term.bytes for term in floor(CONFIG, MESH).arguments}
    assert found == {
        "parameters": weights,
        "optimizer state": 2 * weights + 4,  # and the number of the step
        "batch": 3 * 32 * 128 * 4 // 4,
    }


def test_backward_pass_of_the_circular_schedule() -> None:
    found = terms("backward pass of attention")
    assert found == {
        "saved inputs of layers": 5 * 2 * STREAM,  # ticks × layers
        "cotangents between stages": 2 * STREAM,
        "gradients of the layers": 4 * 2 * (OF_LAYER // 2 + SCALES),
        "gradient of head": 4 * 1024 * 256 // 4,
        "gradient of one kernel": 256 * 512 * 2,
        "gathered kernel": 256 * 512 * 2,
        "query, key, value, result": 4 * 128 * (4 + 4 + 2 + 2) * 64 * 2,
        "softmax denominators": 4 * 128 * 4 * 4,
        "cotangent of the layer": STREAM,
        "scores of one block": 4 * 4 * 128 * 128 * 2,
        "cotangent of the result": 4 * 128 * 4 * 64 * 2,
    }
    hidden = terms("backward pass of the feed-forward block")
    assert hidden["hidden units"] == 2 * 4 * 128 * 512 * 2
    assert hidden["stream after attention"] == STREAM


def test_loss_and_optimizer() -> None:
    found = terms("loss")
    # The columns are split over stages, and the tokens of all stages are gathered.
    assert found["logits of one chunk"] == (32 * 128 // 2 // 4) * (1024 // 2) * 2
    assert found["tokens of one chunk"] == (32 * 128 // 2 // 4) * 256 * 2
    assert found["its gradient"] == 256 * (1024 // 2) * 4
    assert found["outputs of the layers"] == found["gradient of the outputs"] == 2 * STREAM
    parameters = floor(CONFIG, MESH).arguments[0].bytes
    assert terms("optimizer") == {"gradients of all weights": parameters}
    half = dataclasses.replace(
        CONFIG, train=dataclasses.replace(CONFIG.train, grad_dtype="bfloat16")
    )
    assert terms("optimizer", half) == {"gradients of all weights": parameters // 2}


def test_one_forward_one_backward_keeps_few_visits() -> None:
    moment = "backward pass of attention"
    few, many = (
        terms(moment, with_pipeline(schedule="1f1b", num_microbatches=count)) for count in (2, 4)
    )
    # Half as many microbatches are twice as large.
    assert few["saved inputs of layers"] == 3 * 2 * 2 * STREAM
    assert many["saved inputs of layers"] == 3 * 2 * STREAM
    assert "gradient of embedding, norm and head" in many


def test_weights_gathered_once_per_step() -> None:
    found = terms("loss", with_pipeline(fsdp_gather="step"))
    assert found["gathered weights"] == 2 * (2 * OF_LAYER + 2 * SCALES)
    assert "gathered weights" not in terms("loss")


def test_zero_1_shards_the_gradients_that_the_optimizer_reads() -> None:
    config = dataclasses.replace(
        CONFIG, train=dataclasses.replace(CONFIG.train, shard_optimizer_over_data=True)
    )
    whole, shards = (terms("optimizer", one, "stage=2,data=2") for one in (CONFIG, config))
    assert sum(shards.values()) == sum(whole.values()) // 2


def test_zero_1_adds_up_shards_where_weights_are_gathered() -> None:
    train = dataclasses.replace(CONFIG.train, shard_optimizer_over_data=True)
    config = dataclasses.replace(CONFIG, train=train)
    by_use, once = (
        terms(
            "backward pass of attention",
            dataclasses.replace(config, pipeline=one.pipeline),
            "stage=2,data=2",
        )
        for one in (with_pipeline(backward="accumulate"), with_pipeline(fsdp_gather="step"))
    )
    assert once["gradients of the layers"] == by_use["gradients of the layers"] // 2
    assert once["gathered weights"] == 2 * (2 * OF_LAYER + 2 * SCALES)
    assert "gathered weights" not in by_use


def test_it_does_not_know_shared_experts() -> None:
    routed = {"model.num_experts": "4", "model.num_shared_experts": "2"}
    found = floor(apply_overrides(CONFIG, routed), MESH)
    assert found.unknown == ("what model.num_shared_experts=2 hold is not counted",)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pipeline.remat", "qkv_proj_offloaded", "remat=qkv_proj_offloaded keeps"),
        ("pipeline.sharding", "auto", "leaves shardings to the compiler"),
        ("pipeline.save_decoder_layer_input", "false", "save_decoder_layer_input=False"),
        ("pipeline.shift", "slice", "shift=slice"),
        ("model.embedding", "one_hot", "embedding=one_hot"),
        ("model.dropout_rate", "0.1", "dropout_rate=0.1"),
    ],
)
def test_what_it_does_not_know_it_says(key: str, value: str, reason: str) -> None:
    found = floor(apply_overrides(CONFIG, {key: value}), MESH)
    assert len(found.unknown) == 1
    assert reason in found.unknown[0]
    assert found.moments == ()
    assert found.heap_bytes is None
    assert found.account_bytes is None
    assert found.to_json()["heap_bytes"] is None
    assert found.argument_bytes > 0


def test_mesh_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="num_layers=4 does not split"):
        floor(CONFIG, "stage=3")


def test_least_time() -> None:
    mesh = MeshConfig.parse(MESH)
    time = floor(CONFIG, MESH, V5P).time
    assert time is not None
    assert time.compute_seconds == useful_flops(CONFIG, mesh) / 459e12
    # The head runs on all devices, and no bubble delays it: 3 passes, 2 operations per weight.
    model, train = CONFIG.model, CONFIG.train
    weights, tokens = model.embed_dim * model.vocab_size, train.global_batch * train.sequence_length
    head = 3 * 2 * weights * tokens / mesh.num_devices / 459e12
    layers = time.compute_seconds - head
    assert 0 < head < layers
    busy = 1 - bubble_share(CONFIG, mesh)
    assert time.step_seconds == pytest.approx(head + layers / busy, rel=1e-12)
    assert time.bubble_seconds == pytest.approx(time.step_seconds - time.compute_seconds)
    assert floor(CONFIG, MESH).time is None
    assert floor(CONFIG, MESH, "cpu").time is None


def with_floor(least: Floor | None) -> Measurement:
    return dataclasses.replace(measurement(attribution()), floor=least)


def test_the_rows_between_sum_to_what_the_heap_has_more() -> None:
    least, held = floor(CONFIG, MESH), attribution()
    gaps = between(least, held)
    assert sum(gap.excess for gap in gaps) == held.heap_bytes - (least.heap_bytes or 0)
    assert [gap.excess for gap in gaps] == sorted((gap.excess for gap in gaps), reverse=True)
    assert live_bytes(held) == held.heap_bytes - held.by_role()["padding"]


def test_every_term_has_a_role_and_a_formula() -> None:
    for config in (CONFIG, with_pipeline(schedule="1f1b", fsdp_gather="step")):
        least = floor(config, MESH)
        assert all(
            term.role in ROLES and term.formula for one in least.moments for term in one.terms
        )
        assert {term.role for term in least.arguments} == {"argument"}


def test_a_cache_gives_it_back() -> None:
    before = with_floor(floor(CONFIG, MESH, V5P))
    after = Measurement.from_cache(json.loads(json.dumps(before.to_cache())), None)
    assert after.floor == before.floor
    told = json.loads(json.dumps(after.to_json()))["floor"]
    assert before.floor is not None
    assert told["heap_bytes"] == before.floor.heap_bytes
    assert with_floor(None).to_json()["floor"] is None


def shown(measured: Measurement) -> str:
    text = io.StringIO()
    Console(file=text, width=80, markup=False).print(Group(*floor_view(measured)))
    return text.getvalue()


def shown_terms(least: Floor) -> list[Term]:
    """The arguments, and what the heap must hold and is expected to hold at its peak."""
    assert least.peak is not None
    assert least.expected_peak is not None
    return [*least.arguments, *least.peak.terms, *least.expected_peak.terms]


def test_at_80_columns_no_name_is_cut() -> None:
    least = floor(with_pipeline(schedule="1f1b"), MESH, V5P)
    text = shown(with_floor(least))
    every = shown_terms(least)
    names = [term.name for term in every]
    roles = [gap.role for gap in between(least, attribution()) if gap.bytes > 50_000]
    assert [name for name in (*names, *roles) if name not in text] == []
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"heap: .* MB, [0-9.]+ times the floor of", text)
    assert re.search(r"[0-9.]+ times the expected [0-9.]+", " ".join(text.split()))


def test_a_floor_that_is_not_known_says_why() -> None:
    least = floor(with_pipeline(remat="minimal"), MESH)
    assert (
        "floor of the heap: – (what pipeline.remat=minimal keeps"
        in floor_lines(with_floor(least))[0]
    )
    assert floor_view(with_floor(None)) == []
    page = measurement_page("a step", with_floor(least))
    assert "what pipeline.remat=minimal keeps is not counted" in page


def test_the_page_lists_terms_and_roles() -> None:
    least = floor(CONFIG, MESH, V5P)
    page = measurement_page("a step", with_floor(least))
    shown = shown_terms(least)
    assert all(term.name in page for term in shown)
    assert "The heap at its peak beside the floor, by role" in page
    assert "Floor" not in measurement_page("a function", with_floor(None))


def test_a_term_of_nothing_is_left_out() -> None:
    least = floor(CONFIG, "stage=4")
    assert all(term.bytes > 0 for one in least.moments for term in one.terms)
    assert isinstance(least.moments[0].terms[0], Term)


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("floor")
    finally:
        sys.path.pop(0)


def assert_same_config(shown: Any, config: Config) -> None:
    """What a page shows is this config, whose fields that are newer than the page have defaults."""
    for section in dataclasses.fields(config):
        own = getattr(config, section.name)
        for field in dataclasses.fields(own):
            value = shown[section.name].pop(field.name, field.default)
            assert value == getattr(own, field.name), field.name
        assert not shown[section.name], "the page has a field that the config has not"


def test_the_page_of_results(benchmark: Any) -> None:
    """It is that of the JSON, which is of the configs that are drawn and of today's floor."""
    found = json.loads(RESULTS.read_text())
    assert benchmark.document(found) == RESULTS.with_suffix(".md").read_text()
    drawn = benchmark.drawn()
    assert len(found) == len(drawn) == benchmark.COUNT
    for (config, mesh), one in zip(drawn, found, strict=True):
        assert one["mesh"] == str(mesh)
        assert_same_config(one["config"], config)
    for (config, mesh), one in list(zip(drawn, found, strict=True))[::6]:
        least = floor(config, mesh, V5P)
        assert one["floor"] == benchmark.figures(least)


def test_the_page_says_what_the_benchmark_found(benchmark: Any) -> None:
    told = " ".join(benchmark.summary(json.loads(RESULTS.read_text())).split())
    assert told.partition(" Arguments are ")[0] in documents.WORDS


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_a_compiled_step_holds_no_less(schedule: str) -> None:
    larger = {
        "pipeline.schedule": schedule,
        "train.global_batch": "64",
        "train.sequence_length": "512",
    }
    config = apply_overrides(CONFIG, larger)
    try:
        with optax_promotion():
            found = measure_step(config, MeshConfig.parse(MESH), Platform.parse("tpu:v5p:2x2x1"))
    except MissingCompiler as error:
        pytest.skip(str(error))
    least = found.floor
    assert least is not None
    assert least.heap_bytes is not None
    assert found.time is not None
    assert 0.5 < least.heap_bytes / (found.memory.heap_bytes or 1) < 1
    # The compiler pads some layouts of the arguments.
    assert 1 <= found.memory.argument_bytes / least.argument_bytes < 1.2
    assert least.time is not None
    assert least.time.step_seconds < (found.time.step_seconds or 0)


def rows(moment: str, config: Config = CONFIG, mesh: str = MESH) -> dict[str, int]:
    """The bytes of each row that a moment is expected to have."""
    (found,) = [one for one in floor(config, mesh, V5P).expected if one.name == moment]
    return {row.name: row.bytes for row in found.terms}


def test_what_is_expected_beside_the_floor() -> None:
    """A stage casts all weights before the loop, unless each is cast as it is gathered."""
    moment = "backward pass of the feed-forward block"
    found, once = rows(moment), rows(moment, with_pipeline(fsdp_gather="step"))
    of_a_layer = 2 * (OF_LAYER // 2 + SCALES)  # as it is sharded, in bfloat16
    assert found["cast weights"] == 2 * of_a_layer
    assert found["gradients of one visit"] == of_a_layer
    assert "cast weights" not in once
    assert once["gradients of one visit"] == 2 * (OF_LAYER + SCALES)
    hidden = 2 * 4 * 128 * 512 * 2
    assert found["cotangents of hidden units"] == found["hidden units"] == hidden
    # One of the two pairs is the largest of what lives in a turn of the loop, and is not moved.
    in_a_turn = {
        "query, key, value, result",
        "softmax denominators",
        "cotangent of the layer",
        "stream after attention",
        "gradient of one kernel",
    }
    assert found["on-chip instead"] == -hidden - sum(found[name] for name in in_a_turn)
    assert found["in flight between stages"] == 3 * STREAM
    assert found["tables of tuples"] == (140 + 2 * 105) * 16384
    arrays = sum(found.values()) - found["holes"] - found["tables of tuples"]
    assert found["holes"] == int(0.2 * arrays)
    assert sum(terms(moment).values()) < arrays - found["on-chip instead"]


def test_what_is_too_large_for_the_on_chip_memory_stays_in_the_heap() -> None:
    """Of what fits, no more is moved than there is room for."""
    long = {"train.sequence_length": "8192", "model.attention_block": "8192"}
    found = rows("backward pass of attention", apply_overrides(CONFIG, long))
    assert found["scores of one block"] > 48 * 2**20
    assert -48 * 2**20 < found["on-chip instead"] < -40 * 2**20


def test_one_visit_adds_nothing_up() -> None:
    """With one tick there is no loop; layers that a scan runs stack their gradients."""
    once = dataclasses.replace(
        with_pipeline(schedule="1f1b", num_microbatches=1),
        model=dataclasses.replace(MODEL, num_layers=8),
    )
    found = rows("backward pass of attention", once, "fsdp=4")
    assert "gradients of the layers" in terms("backward pass of attention", once, "fsdp=4")
    assert "gradients of the layers" not in found
    assert found["gradients of one visit"] == 8 * 2 * (OF_LAYER // 4 + SCALES)
    assert found["tables of tuples"] == 140 * 16384


def test_a_heap_is_expected_only_where_the_compiler_was_looked_at() -> None:
    for platform in (None, "tpu:v6e:2x4", "cuda:h100:4", "cpu"):
        least = floor(CONFIG, MESH, platform)
        assert least.expected == ()
        assert least.expected_bytes is None
        assert least.heap_bytes is not None


def test_the_floor_counts_the_experts_that_the_platform_computes_at_a_time() -> None:
    least = {on: floor(preset("mixtral-small"), "stage=4,fsdp=2", on) for on in ("cpu", V5P)}
    tokens, mlp = 1024, 2048  # of a microbatch on a device; hidden units in bfloat16
    hidden = {on: 2 * tokens * group * mlp * 2 for on, group in (("cpu", 1), (V5P, 4))}
    for on, found in least.items():
        terms = {term.name: term.bytes for one in found.moments for term in one.terms}
        assert terms["hidden units"] == hidden[on]
    assert floor(preset("mixtral-small"), "stage=4,fsdp=2").moments == least[V5P].moments


def test_mixtral_small_is_known() -> None:
    found = floor(preset("mixtral-small"), "stage=4,fsdp=2")
    assert found.unknown == ()
    assert found.peak is not None
