"""Memory and time of one training step beside MaxText's, same model, shapes and compiler.

    python benchmarks/peer_memory.py
    python benchmarks/peer_memory.py tpu:v5p:2x2x1 --missing

measures, the second what is for one platform and has no result yet, and writes
benchmarks/results/peer_memory.json and, from it, peer_memory.md. After a row its result is on disk,
so a call that was stopped goes on with --missing.

MaxText's figures: its NNX path of August 2026, JAX 0.10.2 with libtpu 0.0.42.1 or jax-cuda13-pjrt
0.10.2, remat full, dense experts, dot-product attention. Another version of a compiler gives other
figures, so compare only at these. Its time is the sum of the TPU compiler's own cycles times trips,
at 1.75 GHz, and ours is that sum too: compute only, without what collectives expose.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kept_rows import write_rows

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.train._useful import bubble_share, flops_outside_layers, useful_flops

RESULTS = Path(__file__).parent / "results" / "peer_memory.json"
TPU, H100 = "tpu:v5p:2x2x2", "cuda:h100:8"
FOUR_CHIPS, POD = "tpu:v5p:2x2x1", "tpu:v5p:4x4x4"
SMALL = "mixtral-small"


class Row(NamedTuple):
    """A case and MaxText's bytes per device; None where it has none or does not compile.

    options: fields of the pipeline, and of another section with its name before them.
    peer_traffic: bytes that all its collectives give per device and step, loops counted.
    """

    platform: str
    mesh: str
    repeats: int
    batch: int
    microbatches: int
    options: dict[str, str]
    peer_temp: int | None
    peer_peak: int | None
    peer_traffic: int | None = None
    model: str = SMALL


PIPELINE = "stage=4,fsdp=2"
# MaxText's milliseconds of compute on TPU v5p, by model, mesh, repeats and batch.
PEER_COMPUTE = {
    (SMALL, "fsdp=8", 1, 16): 27.77,
    (SMALL, PIPELINE, 1, 16): 23.32,
    (SMALL, PIPELINE, 2, 16): 25.26,
    (SMALL, PIPELINE, 1, 64): 72.41,
    ("mixtral-8x7b", "stage=4,fsdp=16", 8, 64): 6589.0,
    ("llama2-7b", "stage=2,fsdp=2", 16, 48): 6112.0,
    ("deepseek-small", "fsdp=8", 1, 16): 33.52,
    ("deepseek-small", PIPELINE, 2, 16): 29.54,
}
# The same of MaxText with flash attention and grouped experts, whose kernels carry no cycles.
PEER_BESIDE_KERNELS = {
    (SMALL, PIPELINE, 2, 16): 21.51,
    ("mixtral-8x7b", "stage=4,fsdp=16", 8, 64): 589.0,
}
ACCUMULATE = {"backward": "accumulate"}
STEP, PREFETCH = {"fsdp_gather": "step"}, {"fsdp_gather": "prefetch"}
ONE_F_ONE_B = {"schedule": "1f1b"}
GROUPED, FLASH = {"model.experts": "grouped"}, {"model.attention": "flash"}
BLOCKS, TOGETHER = {"model.attention_block": "512"}, {"model.expert_group": "8"}
OFFLOADED = {"remat": "inputs_offloaded"}
ONE_BY_ONE = {"model.expert_group": "1"}
TWO_BY_TWO = {"model.expert_group": "2"}
ROWS = (
    Row(TPU, PIPELINE, 2, 16, 8, {}, 414_764_672, 674_285_888, 1_504_000_000),
    Row(TPU, PIPELINE, 2, 16, 8, ACCUMULATE, 414_764_672, 674_285_888, 1_504_000_000),
    Row(TPU, PIPELINE, 2, 16, 8, STEP, 528_396_704, 727_772_992, 963_000_000),
    Row(TPU, PIPELINE, 2, 16, 8, PREFETCH, 708_355_968, 842_423_616, 482_000_000),
    Row(TPU, PIPELINE, 1, 16, 8, {}, 427_690_528, 704_159_200, 1_634_000_000),
    Row(TPU, PIPELINE, 1, 16, 8, ACCUMULATE, 427_690_528, 704_159_200, 1_634_000_000),
    Row(TPU, PIPELINE, 1, 16, 8, ONE_F_ONE_B, 427_690_528, 704_159_200, 1_634_000_000),
    Row(TPU, PIPELINE, 1, 32, 16, ONE_F_ONE_B, None, None),
    Row(TPU, PIPELINE, 1, 64, 32, ONE_F_ONE_B, 1_358_850_784, 1_564_419_552),
    Row(TPU, PIPELINE, 1, 128, 64, ONE_F_ONE_B, None, None),
    Row(TPU, PIPELINE, 2, 16, 8, ONE_F_ONE_B, 414_764_672, 674_285_888, 1_504_000_000),
    Row(TPU, PIPELINE, 2, 64, 32, ONE_F_ONE_B, 1_292_356_544, 1_534_533_952),
    Row(TPU, PIPELINE, 1, 64, 32, {}, 1_358_850_784, 1_564_419_552),
    Row(TPU, PIPELINE, 2, 32, 16, {}, 688_147_456, 963_828_544),
    Row(TPU, PIPELINE, 2, 64, 32, {}, 1_292_356_544, 1_534_533_952),
    # MaxText with flash attention, grouped experts and the loss in tiles.
    Row(TPU, PIPELINE, 2, 16, 8, GROUPED | FLASH, 346_351_072, 574_187_328),
    Row(TPU, PIPELINE, 1, 64, 32, ONE_F_ONE_B | GROUPED | FLASH, 497_046_368, 712_915_936),
    Row(
        *(TPU, PIPELINE, 1, 64, 32, ONE_F_ONE_B | GROUPED | FLASH | OFFLOADED),
        *(497_046_368, 712_915_936),
    ),
    # One layer per visit, beside the same figures of MaxText: those of one repeat.
    *(
        Row(TPU, PIPELINE, 2, 64, 32, options, 497_046_368, 712_915_936)
        for options in (
            ONE_F_ONE_B | GROUPED | FLASH,
            ONE_F_ONE_B | GROUPED | FLASH | OFFLOADED,
        )
    ),
    Row(TPU, "fsdp=8", 1, 16, 1, {}, 374_825_568, 553_261_376),
    Row(TPU, "fsdp=8", 1, 16, 1, BLOCKS, 374_825_568, 553_261_376),
    Row(TPU, "fsdp=8", 1, 16, 1, TOGETHER, 374_825_568, 553_261_376),
    Row(H100, PIPELINE, 2, 16, 8, {}, None, None),
    Row(H100, PIPELINE, 2, 16, 8, ACCUMULATE, None, None),
    Row(H100, PIPELINE, 2, 16, 8, STEP, None, None),
    Row(H100, PIPELINE, 2, 16, 8, PREFETCH, None, None),
    Row(H100, PIPELINE, 2, 16, 8, ONE_F_ONE_B, None, None),
    Row(H100, PIPELINE, 1, 16, 8, {}, 574_115_464, 931_233_840),
    Row(H100, PIPELINE, 1, 16, 8, ONE_BY_ONE, 574_115_464, 931_233_840),
    Row(H100, PIPELINE, 1, 16, 8, ONE_BY_ONE | BLOCKS, 574_115_464, 931_233_840),
    Row(H100, PIPELINE, 1, 16, 8, ONE_F_ONE_B, 574_115_464, 931_233_840),
    Row(H100, PIPELINE, 1, 64, 32, {}, 1_049_408_392, 1_405_608_104),
    Row(H100, PIPELINE, 1, 64, 32, ONE_F_ONE_B, 1_049_408_392, 1_405_608_104),
    Row(H100, "fsdp=8", 1, 16, 1, {}, 534_835_304, 744_596_236),
)
# MaxText's are of the same model, with dense experts and dot-product attention too.
DEEPSEEK = tuple(
    Row(TPU, *case, {}, *peer, model="deepseek-small")
    for case, peer in (
        (("fsdp=8", 1, 16, 1), (532_145_632, 670_422_656)),
        ((PIPELINE, 2, 16, 8), (574_777_536, 806_392_960)),
    )
)
ZERO_1 = {"train.shard_optimizer_over_data": "true"}
AUTO, BFLOAT16 = {"sharding": "auto"}, {"train.grad_dtype": "bfloat16"}


def llama(mesh: str, options: dict[str, str], temp: int, peak: int) -> Row:
    """Of the table in MaxText's pull request 2744."""
    return Row(FOUR_CHIPS, mesh, 16, 48, 8, options, temp, peak, model="llama2-7b")


WIDTHS = {"model.num_layers": "2", "train.sequence_length": "4096"}
ONCE, OVER_DATA = (38_223_689_696, 49_715_651_904), (37_094_679_040, 57_604_857_152)
LARGER = (
    llama("stage=2,fsdp=2", STEP, *ONCE),
    llama("stage=2,fsdp=2", STEP | OFFLOADED, *ONCE),
    llama("stage=2,fsdp=2", STEP | AUTO, *ONCE),
    llama("stage=2,fsdp=2", STEP | BFLOAT16, *ONCE),
    llama("stage=2,fsdp=2", {}, *ONCE),
    llama("stage=2,fsdp=2", PREFETCH, *ONCE),
    llama("stage=2,data=2", ZERO_1, *OVER_DATA),
    llama("stage=2,data=2", ZERO_1 | AUTO, *OVER_DATA),
    llama("stage=2,data=2", ZERO_1 | STEP, *OVER_DATA),
    llama("stage=2,data=2", ZERO_1 | STEP | OFFLOADED, *OVER_DATA),
    llama("stage=2,data=2", ZERO_1 | STEP | BFLOAT16, *OVER_DATA),
    Row(
        *(POD, "stage=4,fsdp=16", 8, 64, 4, {}, 21_722_906_976, 21_908_422_464),
        model="mixtral-8x7b",
    ),
    *(
        Row(
            *(POD, "stage=4,fsdp=16", 8, 64, 4, options, 14_178_721_152, 18_672_855_872),
            model="mixtral-8x7b",
        )
        for options in (
            *(GROUPED, GROUPED | FLASH, GROUPED | FLASH | TWO_BY_TWO),
            GROUPED | FLASH | OFFLOADED,
        )
    ),
    Row(TPU, "fsdp=8", 1, 8, 1, GROUPED | FLASH | WIDTHS, None, None, model="qwen3-30b-a3b"),
)
EVERY = (*ROWS, *DEEPSEEK, *LARGER)
ABOUT = """# mixtral-small beside MaxText

Made by `python benchmarks/peer_memory.py`; MB (10⁶ bytes) per device. Compute is the sum of the TPU
compiler's own cycles per step, loops counted, in ms at 1.75 GHz; on H100 it is by XLA's own
model. Traffic is what all collectives give per step, and launches is how many there are, loops
counted. A dash: MaxText has no such option, was not measured so, or crashes its compiler (2
repeats on H100). With grouped experts and flash attention, MaxText's compute is known without its
kernels only; the share is then of ours without ours.

With 32 microbatches, 1F1B and grouped experts, one repeat has more than half of MaxText's temp,
also with `remat=inputs_offloaded`, and two repeats have less: a visit is then one layer. Both stand
beside MaxText's one repeat, because its best with two was not compiled. With one repeat and inputs
on the host the step holds, in MB: gradients of all weights 52, copies of weights in bfloat16 35,
gradients of one layer in float32 25, gathered kernels of another 27, accumulators of embedding and
head 16, tables of tuples 25; and temp counts 50 of on-chip memory and 27 that no allocation holds.
The gradients of a layer stand beside the gathered kernels of the next one, because the compiler
starts these gathers first to hide them. Tried, and worse in temp: kernels of 4 or 2 experts at a
time (325 and 315), gradients that leave a layer in bfloat16 (307), no order between layers (532),
kernels cast where a visit reads them (266, with copies of all weights in float32, and a peak of 387
in the place of 376), the same out of one stack of both layers (299). What would have to change for
one repeat: a visit that adds the gradients of a layer up before it goes on to the next, as a
hand-written loop over layers would.
"""
ABOUT_DEEPSEEK = """## deepseek-small beside MaxText

As above. The model has one dense layer before eight with 16 experts, and latent attention; in
MaxText too the dense layer runs before the pipeline.
"""
ABOUT_LARGER = """## Larger models

GB (10⁹ bytes) per device; sequences of 2048 tokens in Llama2-7B, 4096 in Mixtral 8x7B. MaxText's
figures are those of its pipeline with the same mesh, batch, microbatches and repeats, compiled as
ours; on Llama2-7B with its weights gathered once per step, or with ZeRO-1. On four v5p chips its
pull request 2744 measured a peak of 50.1 GB in the first case (48.2 with auto sharding, 50.9
explicit) and of 50.1 with ZeRO-1 (48.3 and 48.0). No hardware has run ours. Beside grouped experts
stands MaxText at its best: flash attention, grouped experts, loss in tiles of the vocabulary.
Qwen3-30B-A3B has its widths and two layers. Of MaxText at its best only shares are known: this
project took 0.87 of its temp and 0.94 of its peak when it took 3.59 and 5.67 GB, and 60.2 ms.
`wait` is the part of the estimated step in which compute waits for transfers: between device and
on-chip memory, and, with `remat=inputs_offloaded`, between device and host, at 16 GB/s each way.
"""
ABOUT_OPERATIONS = """## What a step with grouped experts multiplies

TFLOP of matrix products per device and step, term by term, beside what the lab counts in the
compiled program, kernels by what they state of themselves. `parameters` are 6 · (parameters that a
token passes, without the embedding table) · tokens; `attention` is its causal half, forward and
twice that backward; `again` is the forward pass of the layers that remat `full` repeats; `bubble`
is what the stages compute and discard, and `head` what the head does in the bubble: 1F1B with one
repeat computes it at every tick with a forward visit.
"""
HEAD_OPERATIONS = (
    "| model | repeats | options | parameters | attention | again | bubble | head | sum "
    "| counted | of the sum |\n" + "|---" * 3 + "|--:" * 8 + "|"
)
HEAD_LARGER = (
    "| model | platform | mesh | repeats | batch | microbatches | options | arguments | temp "
    "| heap | peak | on the host | MaxText's temp | peak | temp, of MaxText's | peak, of MaxText's "
    "| compute, s | of MaxText's | wait, s | step, s |\n" + "|---" * 7 + "|--:" * 13 + "|"
)
HEAD = (
    "| platform | mesh | repeats | batch | microbatches | options | arguments | temp | heap | peak "
    "| temp, of MaxText's | peak, of MaxText's | compute, ms | of MaxText's | traffic "
    "| of MaxText's | launches | TFLOP |\n" + "|---" * 6 + "|--:" * 12 + "|"
)


def config_of(row: Row) -> Config:
    """The preset with what the case sets."""
    numbers = {
        "train.global_batch": str(row.batch),
        "pipeline.num_microbatches": str(row.microbatches),
        "pipeline.num_repeats": str(row.repeats),
    }
    options = {
        name if "." in name else f"pipeline.{name}": value for name, value in row.options.items()
    }
    return apply_overrides(preset(row.model), numbers | options)


def kernel_seconds(time: Any) -> float:
    """The part of compute that is in kernels, which carry no cycles: from what they say of it."""
    return sum(part.seconds for part in time.rows if part.kind == "kernels")


def measure(row: Row) -> Measurement:
    """Compiles the case."""
    mesh, platform = MeshConfig.parse(row.mesh), Platform.parse(row.platform)
    return measure_step(config_of(row), mesh, platform)


def share(ours: float | None, peer: float | None) -> str:
    """Ours as a share of MaxText's."""
    return "–" if peer is None or ours is None else f"{ours / peer:.2f}"


def name_of(row: Row) -> str:
    """What a row is called in the file of results."""
    model = () if row.model == SMALL else (row.model,)
    words = (*model, *row[:5], *(f"{name}={it}" for name, it in row.options.items()))
    return " ".join(map(str, words))


def line(row: Row, found: dict[str, Any]) -> str:
    """The row of the table; bytes as MB of 10⁶."""
    memory, traffic = found["memory"], found["traffic"]
    sizes = [memory[f"{name}_bytes"] for name in ("argument", "temp", "heap", "peak")]
    cells = [
        *row[:5],
        options_of(row),
        *map(megabytes, sizes),
        share(memory["temp_bytes"], row.peer_temp),
        share(memory["peak_bytes"], row.peer_peak),
        *compute(row, found, scale=1e3),
        megabytes(traffic),
        share(traffic, row.peer_traffic),
        found["launches"],
        "–" if found["flops"] is None else f"{found['flops'] / 1e12:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def peer_compute(row: Row) -> float | None:
    """MaxText's milliseconds of compute; None where they are not those of the same kernels."""
    if row.platform == H100 or GROUPED.items() <= row.options.items():
        return None
    return PEER_COMPUTE.get((row.model, row.mesh, row.repeats, row.batch))


def compute(row: Row, found: dict[str, Any], *, scale: float) -> tuple[str, str]:
    """The time of compute in units of 1 / `scale` seconds, and its share of MaxText's."""
    seconds, kernels = found["compute_seconds"], found.get("kernel_seconds")
    shown = "–" if seconds is None else f"{seconds * scale:.2f}"
    peer = peer_compute(row)
    if GROUPED.items() | FLASH.items() <= row.options.items() and kernels is not None:
        peer = PEER_BESIDE_KERNELS.get((row.model, row.mesh, row.repeats, row.batch))
        seconds = None if seconds is None else seconds - kernels
    return shown, "–" if seconds is None or peer is None else f"{seconds * 1e3 / peer:.2f}"


def options_of(row: Row) -> str:
    """The options of a case as they stand in a table."""
    return ", ".join(f"{name}={value}" for name, value in row.options.items())


def gigabytes(value: int | None) -> str:
    """Bytes as GB of 10⁹."""
    return "–" if value is None else f"{value / 1e9:.1f}"


def larger_line(row: Row, found: dict[str, Any]) -> str:
    """The row of the table of larger models."""
    memory = found["memory"]
    sizes = [memory[f"{name}_bytes"] for name in ("argument", "temp", "heap", "peak", "host_temp")]
    times = [found.get(f"{name}_seconds") for name in ("memory_wait", "step")]
    cells = [
        row.model,
        *row[:5],
        options_of(row),
        *map(gigabytes, (*sizes, row.peer_temp, row.peer_peak)),
        share(memory["temp_bytes"], row.peer_temp),
        share(memory["peak_bytes"], row.peer_peak),
        *compute(row, found, scale=1),
        *("–" if seconds is None else f"{seconds:.2f}" for seconds in times),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def operations(row: Row) -> dict[str, float]:
    """What a step of grouped experts needs and does besides, in operations per device.

    The sum of the terms is what its program should multiply.
    """
    config, mesh = config_of(row), MeshConfig.parse(row.mesh)
    model, length = config.model, config.train.sequence_length
    needed, head = useful_flops(config, mesh), flops_outside_layers(config, mesh)
    tokens = config.train.global_batch * length / mesh.num_devices
    scores = 2 * 2 * length / 2 * model.num_heads * model.head_dim
    attention = 3 * tokens * model.num_layers * scores
    again, idle = (needed - head) / 3, bubble_share(config, mesh)
    return {
        "parameters": needed - attention,
        "attention": attention,
        "again": again,
        "bubble": (needed - head + again) * idle / (1 - idle),
        "head": head * idle_heads(config, mesh),
    }


def idle_heads(config: Config, mesh: MeshConfig) -> float:
    """How often the head works for nothing, for each time that a microbatch needs it.

    1F1B computes it at every tick with a forward visit, and with repeats only when a microbatch
    leaves.
    """
    pipeline = config.pipeline
    if pipeline.schedule != "1f1b" or mesh.stage == 1 or pipeline.num_repeats > 1:
        return 0.0
    return (mesh.stage - 1) / pipeline.microbatches_on(mesh.stage)


def operations_line(row: Row, found: dict[str, Any]) -> str:
    """The row of the table of operations, in TFLOP."""
    terms = [*operations(row).values()]
    figures = [f"{value / 1e12:.3f}" for value in (*terms, sum(terms), found["flops"])]
    cells = [row.model, row.repeats, options_of(row), *figures, share(found["flops"], sum(terms))]
    return "| " + " | ".join(map(str, cells)) + " |"


def document(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown file of what has been measured."""
    there = [(row, results[name_of(row)]) for row in EVERY if name_of(row) in results]
    lines = "\n".join(line(row, found) for row, found in there if row in ROWS)
    deepseek = "\n".join(line(row, found) for row, found in there if row in DEEPSEEK)
    larger = "\n".join(larger_line(row, found) for row, found in there if row in LARGER)
    compilers = dict.fromkeys(f"- {row.platform}: {found['versions']}" for row, found in there)
    small = f"{ABOUT}\n{HEAD}\n{lines}\n\n{ABOUT_DEEPSEEK}\n{HEAD}\n{deepseek}\n\n"
    kinds = [(row, found) for row, found in there if GROUPED.items() <= row.options.items()]
    products = "\n".join(operations_line(row, found) for row, found in kinds)
    tables = f"{small}{ABOUT_LARGER}\n{HEAD_LARGER}\n{larger}\n\n"
    tables += f"{ABOUT_OPERATIONS}\n{HEAD_OPERATIONS}\n{products}\n\n"
    return tables + "\n".join(compilers) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = [TPU, H100, FOUR_CHIPS, POD]
    parser.add_argument("platforms", nargs="*", default=everything)
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in EVERY:
        if row.platform not in asked.platforms or (asked.missing and name_of(row) in results):
            continue
        result = measure(row)
        results[name_of(row)] = {
            "memory": dataclasses.asdict(result.memory),
            "traffic": sum(counted["bytes"] for counted in result.collectives.values()),
            "launches": sum(counted["executed"] for counted in result.collectives.values()),
            "compute_seconds": result.time and result.time.compute_seconds,
            "kernel_seconds": result.time and kernel_seconds(result.time),
            "memory_wait_seconds": result.time and result.time.memory_wait_seconds,
            "step_seconds": result.time and result.time.step_seconds,
            "flops": result.flops,
            "versions": {k: v for k, v in result.versions.items() if v},
        }
        write_rows(RESULTS, results)
        write_text(str(RESULTS.with_suffix(".md")), document(results))
        shown = line if row in ROWS else larger_line
        print(shown(row, results[name_of(row)]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
