"""The figures in README.md and docs/ are those of the result files."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import PAGES, ROOT, TEXT, WORDS, table
from page_examples import attribution, measurement

from nnx_pipeline import MeshConfig
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.lab._timing.cost import KERNEL_EFFICIENCY
from nnx_pipeline.lab._timing.result import KEYS
from nnx_pipeline.lab.compile.platform import targets
from nnx_pipeline.ops._fast_attention.kernels import SHORT

RESULTS = ROOT / "benchmarks" / "results"
PLATFORMS = {"TPU v5p": "tpu:v5p:2x2x2", "H100": "cuda:h100:8", "MI355X": "rocm:mi355x:8"}
COMPILERS = {
    **PLATFORMS,
    "H100 with cuBLASLt": "cuda:h100:8 cublas",
    "MI300X": "rocm:mi300x:8",
}


def megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.1f}"


def benchmark(name: str) -> Any:
    """A module of the folder `benchmarks`, which is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def peer() -> Any:
    return benchmark("peer_memory")


@pytest.fixture(scope="module")
def estimates() -> Any:
    return benchmark("time_estimates")


def test_every_target_has_its_row() -> None:
    script = benchmark("every_target")
    page = (RESULTS / "every_target.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:tpu|cuda|rocm):\S+) \| (\S+) \| (\S+) \|", page, re.M)
    assert [name for name, *_ in rows] == list(map(script.of_eight, targets()))
    # As a compile by hand gave it.
    assert ("rocm:mi300x:8", "209.7", "273.3") in rows


def test_memory_beside_the_peer(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    shown = table("The figures are of one training step")
    assert len(shown) >= 10
    for device, mesh, repeats, batch, options, *figures in shown:
        wanted = [
            row
            for row in peer.ROWS
            if row.platform == PLATFORMS[device]
            and (row.mesh == "fsdp=8") == ("no pipeline" in mesh)
            and f"{row.batch} in {row.microbatches}" == batch
            and (not repeats or repeats.split()[0] == str(row.repeats))
            and ", ".join(f"`{name}={value}`" for name, value in row.options.items()) == options
        ]
        (row,) = wanted
        result = found[peer.name_of(row)]
        memory = result["memory"]
        pairs = (
            (memory["temp_bytes"], row.peer_temp),
            (memory["heap_bytes"], None),
            (memory["peak_bytes"], row.peer_peak),
            (result["traffic"], row.peer_traffic),
        )
        *expected, traffic = [
            f"{megabytes(ours)} ({megabytes(theirs)})" if theirs else megabytes(ours)
            for ours, theirs in pairs
        ]
        assert figures == [*expected, compute(peer, row, result, digits=1, scale=1e3), traffic]


def test_the_four_rows_of_the_readme(peer: Any) -> None:
    """They are rows of the measured file too, each with MaxText's figures in brackets."""
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    shown = table("## Beside MaxText", PAGES["README.md"])
    assert len(shown) == 4
    for model, where, batch, options, *figures in shown:
        (row,) = (
            row
            for row in peer.EVERY
            if row.platform != peer.H100
            and row.model == model
            and where == f"{MeshConfig.parse(row.mesh).num_devices}, `{row.mesh}`"
            and batch == f"{row.microbatches} × {row.repeats}"
            and options.strip("`") == peer.options_of(row)
        )
        result, small = found[peer.name_of(row)], model == peer.SMALL
        size, unit = (megabytes, "MB") if small else (peer.gigabytes, "GB")
        memory, theirs = result["memory"], (row.peer_temp, row.peer_peak)
        ours = (memory["temp_bytes"], memory["peak_bytes"])
        expected = [f"{size(a)} {unit} ({size(b)})" for a, b in zip(ours, theirs, strict=True)]
        digits, scale, unit = (1, 1e3, "ms") if small else (2, 1, "s")
        time = compute(peer, row, result, digits=digits, scale=scale)
        assert figures == [*expected, time.replace(" (", f" {unit} (")]
    (best,) = (
        row
        for row in peer.LARGER
        if row.options == peer.GROUPED | peer.FLASH and row.model == "mixtral-8x7b"
    )
    peaks = map(peer.gigabytes, (best.peer_peak, found[peer.name_of(best)]["memory"]["peak_bytes"]))
    assert "a peak of {} GB, and this project's is {}.".format(*peaks) in WORDS


def test_the_picture_of_the_readme() -> None:
    """The text below it has the figures of the results, which are those of the same config."""
    arms = json.loads((RESULTS / "pipeline_claims.json").read_text())["tpu:v5p:2x2x2"][
        "loss-chunks"
    ]["arms"]
    a, b = (megabytes(arms[key]["heap_bytes"]) for key in "ab")
    assert f"The heap goes from {a} MB per device to {b}." in WORDS


def compute(peer: Any, row: Any, found: dict[str, Any], *, digits: int, scale: float) -> str:
    """Milliseconds, or seconds, of compute, with MaxText's in brackets but for an H100."""
    theirs = None if row.platform == peer.H100 else peer.peer_compute(row)
    ours = f"{found['compute_seconds'] * scale:.{digits}f}"
    return f"{ours} ({theirs / 1e3 * scale:.{digits}f})" if theirs else ours


def test_larger_models_beside_the_peer(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    shown = table("Larger models, in GB")
    expected = []
    for row in peer.LARGER:
        if row.peer_temp is None:  # the table shows what stands beside the peer
            continue
        if "sharding" in row.options:  # the same memory as with explicit sharding
            plain = row._replace(options={k: v for k, v in row.options.items() if k != "sharding"})
            assert (
                peer.larger_line(row, found[peer.name_of(row)]).split("|")[8:-5]
                == (peer.larger_line(plain, found[peer.name_of(plain)]).split("|")[8:-5])
            )
            continue
        memory = found[peer.name_of(row)]["memory"]
        temp, heap, peak = (peer.gigabytes(memory[f"{n}_bytes"]) for n in ("temp", "heap", "peak"))
        stages, fsdp = (part.split("=") for part in row.mesh.split(","))
        chips = 4 if row.platform == peer.FOUR_CHIPS else 64
        options = peer.options_of(row)
        expected.append(
            [
                row.model,
                f"{chips} × TPU v5p",
                f"{stages[1]} stages × {fsdp[0]} {fsdp[1]}",
                f"`{options}`" if options else "",
                f"{temp} ({peer.gigabytes(row.peer_temp)})",
                heap,
                f"{peak} ({peer.gigabytes(row.peer_peak)})",
                compute(peer, row, found[peer.name_of(row)], digits=2, scale=1),
            ]
        )
    assert shown == expected


def test_every_row_of_the_peer_is_measured(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    assert {peer.name_of(row) for row in peer.EVERY} == set(found)
    assert peer.document(found) == (RESULTS / "peer_memory.md").read_text()


def test_deepseek_beside_the_peer(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    for row in peer.DEEPSEEK:
        result = found[peer.name_of(row)]
        memory = result["memory"]
        ours = (megabytes(memory["temp_bytes"]), megabytes(memory["peak_bytes"]))
        time = f"{result['compute_seconds'] * 1e3:.1f}"
        theirs = (megabytes(row.peer_temp), megabytes(row.peer_peak), peer.peer_compute(row))
        assert f"(MaxText: {theirs[0]}, {theirs[1]} and {theirs[2]:.1f})" in WORDS
        shown = WORDS.partition(f"(MaxText: {theirs[0]},")[0][-150:]
        assert all(figure in shown for figure in (*ours, time)), (row, ours, time)


def test_grouped_experts_multiply_what_active_parameters_need(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    grouped = [row for row in peer.EVERY if peer.GROUPED.items() <= row.options.items()]
    assert {row.model for row in grouped} == {"mixtral-small", "mixtral-8x7b", "qwen3-30b-a3b"}
    for row in grouped:
        expected = sum(peer.operations(row).values())
        assert found[peer.name_of(row)]["flops"] == pytest.approx(expected, rel=0.1)


def test_the_buffers_of_llama() -> None:
    """The page is that of the results, and the program is that of the row beside MaxText."""
    buffers, found = (
        benchmark("llama2_buffers"),
        json.loads((RESULTS / "peer_memory.json").read_text()),
    )
    results = json.loads((RESULTS / "llama2_buffers.json").read_text())
    assert buffers.document(results) == (RESULTS / "llama2_buffers.md").read_text()
    rows = dict(zip(buffers.ARMS, buffers.rows(), strict=True))
    assert "full" in results
    for name, result in results.items():
        assert result["heap_bytes"] == sum(result["by_role"].values())
        row = buffers.peer_memory.name_of(rows[name])
        if row in found:
            assert result["heap_bytes"] == found[row]["memory"]["heap_bytes"]


def test_claims() -> None:
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())
    shown = {row[0].strip("`"): row[1:] for row in table("An experiment is two arms")}
    assert set(shown) == set(found["tpu:v5p:2x2x2"])
    for name, (a, b, *figures) in shown.items():
        expected = []
        for platform in PLATFORMS.values():
            outcome = found[platform][name]
            arms = outcome["arms"]
            assert (a, b) == (arms["a"]["label"], arms["b"]["label"])
            expected += [megabytes(arms[key].get("heap_bytes")) for key in ("a", "b")]
            expected.append(outcome["verdict"])
        assert figures == expected


def test_experiments_without_figures_are_named() -> None:
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())
    sentence = TEXT.partition("no figures in these tables yet;")[2].partition("\n\n")[0]
    for platform in PLATFORMS.values():
        missing = set(EXPERIMENTS) - set(found[platform])
        assert set(re.findall(r"`([a-z0-9-]+)`", sentence)) == missing


def test_how_many_claims_hold() -> None:
    """The sentences about each compiler are those under its heading in the results."""
    pipeline_claims = benchmark("pipeline_claims")
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())
    assert pipeline_claims.document(found) == (RESULTS / "pipeline_claims.md").read_text()
    for device, platform in COMPILERS.items():
        said = pipeline_claims.summary(found[platform])
        assert f"- {device}: {said}" in WORDS
        counts = list(map(int, re.findall(r"(\d+) (?:claims|hold|are)", said)))
        verdicts = [one["verdict"] for one in found[platform].values() if one["claim"] != "design"]
        wanted = [verdicts.count(word) for word in ("holds", "opposite", "no effect")]
        assert counts == [len(verdicts), *wanted]


@pytest.mark.parametrize(
    ("platform", "other", "device"),
    [
        ("cuda:h100:8", "cuda:h100:8 cublas", "cuBLASLt's"),
        ("rocm:mi355x:8", "rocm:mi300x:8", "MI300X"),
    ],
)
def test_verdicts_that_differ(platform: str, other: str, device: str) -> None:
    """Of the other kind of products, and of the other GPU of AMD."""
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())
    shown, others = found[platform], found[other]
    assert set(shown) == set(others) == set(EXPERIMENTS)
    differ = {
        (name, others[name]["verdict"], shown[name]["verdict"])
        for name in shown
        if shown[name]["verdict"] != others[name]["verdict"]
    }
    plain = [kind["stage-shift"]["arms"]["a"]["heap_bytes"] for kind in (others, shown)]
    said = WORDS.partition(f" {device} the plain step holds")[2]
    sentence = re.split(r"verdicts? differs?: ", said, maxsplit=1)[1].partition(".")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`: ([a-z ]+) instead of ([a-z ]+)", sentence)) == differ
    assert said.startswith(" {} MB instead of {}, ".format(*map(megabytes, plain)))


def by_verdict(found: dict[str, Any], *claims: str) -> list[list[str]]:
    """The experiments about some source documents that hold, are opposite and have no effect."""
    names = sorted(name for name, one in found.items() if one["claim"].partition(".")[0] in claims)
    return [
        [name for name in names if found[name]["verdict"] == verdict]
        for verdict in ("holds", "opposite", "no effect")
    ]


def quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_the_two_pull_requests() -> None:
    """A row for each compiler names what is not moot; README sums up those of both GPUs."""
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())
    expected = []
    for device, platform in COMPILERS.items():
        cells = [device]
        for claim in ("S1", "S2"):
            held, opposite, moot = by_verdict(found[platform], claim)
            cells += [quoted(held), quoted(opposite), str(len(moot))]
        expected.append(cells)
    assert sorted(table("## Two pull requests")) == sorted(expected)
    both = [by_verdict(found[PLATFORMS[device]], "S1", "S2") for device in ("H100", "MI355X")]
    assert both[0] == both[1]
    held, opposite, moot = both[0]
    assert (
        f"Of {len(held + opposite + moot)} experiments on their changes {len(held)} hold for "
        f"either GPU ({quoted(held)}), {len(opposite)} are opposite ({quoted(opposite)}), and "
        f"{len(moot)} change temp by less than 1 %."
    ) in WORDS


def test_temp_says_one_thing_and_the_account_another() -> None:
    found = json.loads((RESULTS / "pipeline_claims.json").read_text())["tpu:v5p:2x2x2"]["zero-1"]
    accounts = (megabytes(found["arms"][key]["account_bytes"]) for key in ("b", "a"))
    assert "an account of {} MB instead of {}.".format(*accounts) in WORDS
    assert (found["verdict"], found["note"]) == ("opposite", "by the account: holds")


def test_growth_of_1f1b(peer: Any) -> None:
    """The two figures in the text, and that they are what the claim says."""
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    temps = {
        row.microbatches: found[peer.name_of(row)]["memory"]["temp_bytes"]
        for row in peer.ROWS
        if row.options == peer.ONE_F_ONE_B and row.platform == peer.TPU and row.repeats == 1
    }
    (shown,) = re.findall(
        r"8 → 64 of the same size on a TPU v5p: temp ([\d.]+) → ([\d.]+) MB", WORDS
    )
    assert shown == (megabytes(temps[8]), megabytes(temps[64]))
    assert all(temps[2 * count] < 1.02 * temps[count] for count in (8, 16, 32))


def test_what_shards_of_zero_1_save_and_cost(peer: Any) -> None:
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    shards, whole = (
        found[peer.name_of(row)]
        for options in (peer.ZERO_1 | peer.STEP, peer.ZERO_1)
        for row in peer.LARGER
        if row.options == options
    )
    peaks = (peer.gigabytes(one["memory"]["peak_bytes"]) for one in (shards, whole))
    sent = (peer.gigabytes(one["traffic"]) for one in (shards, whole))
    said = "is {} GB instead of {}, and collectives give {} GB instead of {}."
    assert said.format(*peaks, *sent) in WORDS


def test_growth_under_other_policies() -> None:
    growth = benchmark("microbatch_growth")
    found = json.loads((RESULTS / "microbatch_growth.json").read_text())
    assert set(found) == {" ".join(row) for row in growth.ROWS}
    assert growth.page(found) == (RESULTS / "microbatch_growth.md").read_text()
    most = max(growth.growth(row["temp_bytes"]) for name, row in found.items() if "1f1b" in name)
    assert f"at most {most:.1%} per doubling".replace("%", " %") in TEXT
    assert most < 0.01


def cells(name: str) -> dict[str, list[list[str]]]:
    """The rows of the tables of a result file, by their first cell."""
    found: dict[str, list[list[str]]] = {}
    for line in (RESULTS / name).read_text().splitlines():
        if line.startswith("| "):
            first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(first, []).append(rest)
    return found


def test_results_have_a_line_for_each_row(tmp_path: Path) -> None:
    script, again = benchmark("kept_rows"), tmp_path / "again.json"
    for file in RESULTS.glob("*.json"):
        text = file.read_text("utf-8")
        script.write_rows(again, json.loads(text))
        assert again.read_text("utf-8") == text, file


def test_time_to_compile_and_to_trace() -> None:
    """The figures in the text, and that neither grows as the layers do."""
    (shown,) = re.findall(
        r"\(256 layers\) take ([\d.]+) s .*? 1 repeat ([\d.]+) s",
        WORDS,
    )
    scale = cells("compile_scale.md")
    rows = (scale["16 × 16"][0], scale["2 × 1"][0])
    assert shown == tuple(row[1] for row in rows)
    assert all(float(row[1]) <= 2 * float(scale["1"][0][1]) for row in rows)
    (ratios,) = re.findall(r"([\d.]+) times as long .*?, ([\d.]+) times with 1F1B", WORDS)
    traced = cells("trace_time.md")
    assert ratios == (traced["2 repeats"][0][1], traced["1F1B"][0][1])
    for schedule in ("circular", "1f1b"):
        few, many = (
            float(traced[f"32 stages, {count} microbatches, 2 repeats, {schedule}"][0][0])
            for count in (32, 512)
        )
        eight = float(traced["2 repeats" if schedule == "circular" else "1F1B"][0][0])
        assert max(few, many) <= 1.25 * eight


def test_figures_of_time() -> None:
    """The page names every figure, and the part of the peak that a kernel reaches."""
    shown = table("## What the milliseconds are")
    named = {name for cells in shown for cell in cells[:2] for name in re.findall(r"`(\w+)`", cell)}
    assert named >= set(KEYS)
    assert f"its operations at {KERNEL_EFFICIENCY:.0%} of".replace("%", " %") in WORDS


def test_estimates_beside_measurements(estimates: Any) -> None:
    """Every row is measured, the page is that of the results, and a document says what it says."""
    found = json.loads((RESULTS / "time_estimates.json").read_text())
    assert {row.what for row in estimates.ALL} == set(found)
    assert estimates.document(found) == (RESULTS / "time_estimates.md").read_text()
    assert estimates.as_toml(estimates.runs(found)) == estimates.MEASURED.read_text()
    assert estimates.errors(found) in WORDS
    assert estimates.order(found) in WORDS
    assert estimates.summary(found) in WORDS


def test_pairs_in_order(estimates: Any) -> None:
    """Of three programs, two of them measured as nearly equal."""
    measured = (1.0, 1.01, 2.0)
    assert estimates.in_order(measured, (1, 2, 3)) == (3, 3)
    assert estimates.in_order(measured, (2, 1, 3)) == (2, 3)
    assert estimates.in_order(measured, (2, 1, 3), apart=0.02) == (2, 2)
    assert estimates.in_order(measured, (1, 1, 3)) == (2, 3), "a tie is no order"
    assert estimates.in_order(measured, (3, 2, 1)) == (0, 3)


def test_operations_of_an_attention_kernel(estimates: Any) -> None:
    """Those that MaxText's own program does, 73.1 TFLOP per device and step."""
    once = estimates.VARIANTS[1]
    found = {"time": {"bubble_share": 1 / 129}}  # 8 microbatches 16 times through 2 stages
    rate = KERNEL_EFFICIENCY * 459e12
    assert estimates.kernel_seconds(once, found) * rate == pytest.approx(73.1e12, rel=1e-3)


def test_groups_of_experts_and_blocks_of_queries(peer: Any) -> None:
    """Memory and time in the text: of both groups, and of attention in blocks."""
    found = json.loads((RESULTS / "peer_memory.json").read_text())
    (shown,) = re.findall(
        r"takes ([\d.]+) MB of temp and ([\d.]+) ms of compute with all 8, and ([\d.]+) and "
        r"([\d.]+) with the 4.*with blocks of 512, `mixtral-small` takes ([\d.]+) MB and "
        r"([\d.]+) ms",
        WORDS,
    )
    alone = [row for row in peer.ROWS if (row.platform, row.mesh) == (peer.TPU, "fsdp=8")]
    by_options = {tuple(row.options.items()): found[peer.name_of(row)] for row in alone}
    expected = []
    for options in (peer.TOGETHER, {}, peer.BLOCKS):
        result = by_options[tuple(options.items())]
        expected.append(megabytes(result["memory"]["temp_bytes"]))
        expected.append(f"{result['compute_seconds'] * 1e3:.1f}")
    assert list(shown) == expected


def test_attention_as_the_sequence_grows() -> None:
    """The table is that of the results, and neither `chunked` nor `flash` grows by the square."""
    bench = benchmark("attention_memory")
    found = json.loads((RESULTS / "attention_memory.json").read_text())
    assert bench.table(found) == (RESULTS / "attention_memory.md").read_text()
    assert table("hold so many MB of temp") == bench.readme(found)
    for platform in bench.PLATFORMS:
        for kind in ("chunked", "flash"):
            temps = [
                found[f"{platform} {kind} {length}"]["temp"]
                for name, length in bench.names(platform)
                if name == kind
            ]
            # Eight times the tokens; the square would be 64 times as much.
            assert not temps or temps[-1] < 10 * temps[0]
    # What `auto` goes by, in the comment on its limit.
    for platform, ratio in (("tpu:v5p:2x2x1", 3.2), ("cuda:h100:1", 2.5)):
        dense, tiles = (found[f"{platform} {kind} {SHORT}"] for kind in ("dot_product", "chunked"))
        assert dense["temp"] / tiles["temp"] == pytest.approx(ratio, abs=0.1)
        assert dense["compute_seconds"] < tiles["compute_seconds"]
    # By hand: three forward projections, twice that backward, and splash's 9 products of 36 tiles.
    projections = 2 * SHORT * 4096 * (4096 + 1024 + 1024)
    products = 9 * 2 * 36 * 512 * 512 * 32 * 128
    flops = 3 * projections + 2 * 2 * SHORT * 4096 * 4096 + products
    assert found[f"tpu:v5p:2x2x1 flash {SHORT}"]["flops"] == flops


def test_a_block_of_experts() -> None:
    """What grouped experts, and those of limited capacity, take of dense ones, in the text."""
    moe = benchmark("moe_block")
    found = json.loads((RESULTS / "moe_block.json").read_text())
    shown = re.findall(
        r"Mixtral 8x7B(?:, as above,)? take ([\d.]+) times the temp and ([\d.]+) times the compute "
        r"of `dense` on a TPU v5p, and ([\d.]+) and ([\d.]+) times on an H100",
        WORDS,
    )
    assert moe.KINDS == ("dense", "grouped", "capacity")
    for kind, work, figures in zip(moe.KINDS[1:], (1.0, 1.25), shown, strict=True):
        expected = []
        for platform in moe.PLATFORMS:
            dense, other = (found[f"{platform} mixtral-8x7b {name}"] for name in ("dense", kind))
            for figure in ("temp", "compute_seconds"):
                expected.append(f"{other[figure] / dense[figure]:.2f}")
            assert other["flops"] == pytest.approx(work * other["flops_of_active"], rel=0.01)
        assert list(figures) == expected
    peer = json.loads((RESULTS / "peer_memory.json").read_text())
    pod = [
        row
        for row in benchmark("peer_memory").LARGER
        if row.model == "mixtral-8x7b" and "remat" not in row.options
    ]
    kinds = [row.options.get("model.experts") for row in pod]
    assert kinds == [None, "grouped", "grouped", "grouped"]
    ours = [peer[benchmark("peer_memory").name_of(row)] for row in pod]
    dense, grouped, flash, by_two = (one["compute_seconds"] for one in ours)
    peaks = [one["memory"]["peak_bytes"] / 1e9 for one in ours]
    said = "takes {:.2f} s of compute instead of {:.2f}, and a peak of {:.1f} GB instead of {:.1f}."
    assert said.format(grouped, dense, peaks[1], peaks[0]) in WORDS
    said = "then {:.1f} GB instead of {:.1f}, and compute takes {:.2f} s instead of {:.2f}."
    assert said.format(peaks[3], peaks[2], by_two, flash) in WORDS
    claims = json.loads((RESULTS / "pipeline_claims.json").read_text())["tpu:v5p:2x2x2"]
    arms = claims["grouped-experts"]["arms"]
    took = (1e3 * arms[key]["compute_seconds"] for key in "ba")
    assert "`grouped-experts`: {:.1f} ms instead of {:.1f})".format(*took) in WORDS
    assert moe.table(found) == (RESULTS / "moe_block.md").read_text()


def test_a_layer_in_8_bits() -> None:
    bench = benchmark("low_precision")
    found = json.loads((RESULTS / "low_precision.json").read_text())
    assert bench.page(found) == (RESULTS / "low_precision.md").read_text()

    def figures(device: str) -> list[tuple[str, str]]:
        rows = [found[f"layer {device} {kind}"] for kind in (None, "int8", "fp8")]
        return [(f"{1e3 * row['compute_seconds']:.1f}", megabytes(row["temp"])) for row in rows]

    (plain, plain_temp), (int8, int8_temp), (fp8, _) = figures("tpu:v5p")
    said = (
        f"takes by estimate {int8} ms with int8 and {fp8} with fp8 on a TPU v5p instead of {plain},"
    )
    assert f"{said} and {int8_temp} MB of temp instead of {plain_temp};" in WORDS
    plain, int8, fp8 = figures("cuda:h100")
    assert int8 == fp8
    said = f"on H100 it takes {int8[0]} ms with either instead of {plain[0]}, and holds"
    assert f"{said} {int8[1]} MB instead of {plain[1]}." in WORDS


def test_every_key_of_the_json_is_explained() -> None:
    section = PAGES["docs/figures.md"].split("## The JSON of a program")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    explained = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(measurement(attribution()).to_json())
