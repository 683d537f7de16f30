"""The estimated time of a training step beside what others measured on chips.

    python benchmarks/time_estimates.py
    python benchmarks/time_estimates.py --missing

compile the programs that come nearest to those that were measured, the second only where there is
no result yet, and write benchmarks/results/time_estimates.json and, from it, time_estimates.md.
After a row its result is on disk. A row takes one to four minutes of two cores; no hardware runs.

No program here is the one that was measured, but it computes the same step with the same kind of
kernels.
"""

import argparse
import itertools
import json
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kept_rows import write_rows

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab import _timing
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._timing.band import band_of
from nnx_pipeline.lab._timing.cost import KERNEL_EFFICIENCY
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab.compile.platform import Platform

RESULTS = Path(__file__).parent / "results" / "time_estimates.json"
MEASURED = Path(_timing.__file__).parent / "measured.toml"
# Products of scores' size of a flash attention with remat: two forward, the same two recomputed,
# and of the two kernels of the backward pass three and four.
KERNEL_PRODUCTS = 11
APART = 0.02  # two measured steps that differ by less say nothing of an order
LARGE_LINE = 0.005  # of the compute: lines of less are not kept
CLEARLY_APART = 0.1  # the same of two runs of one model on any chips


class Row(NamedTuple):
    """A published measurement, and the program here that comes nearest to it.

    what: what was measured.
    model: a preset; `options` make another model of it.
    sequences: of a batch, on each device.
    measured: seconds of a step.
    differs: what the measured program does otherwise, beside what holds of all.
    xla: settings of the compiler, as `--xla` takes them: those that the run published.
    """

    what: str
    model: str
    platform: str
    mesh: str
    sequences: int
    options: dict[str, str]
    measured: float
    differs: str = ""
    xla: tuple[str, ...] = ()


FOUR_CHIPS = "tpu:v5p:2x2x1"
FLASH = {"model.attention": "flash"}
GROUPED = {"model.experts": "grouped"}
# As MaxText ran on v6e: tokens above the capacity are dropped.
CAPACITY = {"model.experts": "capacity", "model.capacity_factor": "1.25"}
ROUNDS = FLASH | {"pipeline.num_microbatches": "8", "pipeline.num_repeats": "16"}
# Weights are gathered ahead of their use, and their gradients summed over devices once, as with
# MaxText's `pipeline_fsdp_ag_once`, which all six runs had.
ONCE = ROUNDS | {"pipeline.fsdp_gather": "prefetch"}
ZERO_1 = ONCE | {"train.shard_optimizer_over_data": "true"}
AUTO, EXPLICIT = {"pipeline.sharding": "auto"}, {"pipeline.sharding": "explicit"}
BEFORE = AUTO | {"pipeline.shift": "slice"}  # what the pull request replaced by a permutation


def variant(what: str, mesh: str, options: dict[str, str], measured: float) -> Row:
    """Of the table in MaxText's pull request 2744: Llama2-7B on four v5p."""
    return Row(what, "llama2-7b", FOUR_CHIPS, mesh, 12, options, measured)


VARIANTS = (
    variant("gathered once, before", "stage=2,fsdp=2", ONCE | BEFORE, 4.756),
    variant("gathered once, auto", "stage=2,fsdp=2", ONCE | AUTO, 4.567),
    variant("gathered once, explicit", "stage=2,fsdp=2", ONCE | EXPLICIT, 6.822),
    variant("ZeRO-1, before", "stage=2,data=2", ZERO_1 | BEFORE, 4.759),
    variant("ZeRO-1, auto", "stage=2,data=2", ZERO_1 | AUTO, 4.636),
    variant("ZeRO-1, explicit", "stage=2,data=2", ZERO_1 | EXPLICIT, 5.272),
)
LONG = 4096  # tokens of a sequence in all published runs below
TOKENS = FLASH | {"train.sequence_length": str(LONG)}
LLAMA_70B = {
    "model.embed_dim": "8192",
    "model.mlp_dim": "28672",
    "model.num_layers": "80",
    "model.num_heads": "64",
    "model.num_kv_heads": "8",
}
SAVED = {"pipeline.remat": "save_dot_except_mlp"}
BF16_WEIGHTS = {"model.param_dtype": "bfloat16"}
# Gradients added up over two microbatches, where a whole batch does not fit.
TWO_PARTS = {"pipeline.schedule": "1f1b", "pipeline.num_microbatches": "2"}


def step_of(sequences: int, per_second: int) -> float:
    """Seconds of a step, of tokens per second and chip as MaxText's page of tiers gives them."""
    return sequences * LONG / per_second


V5P_512, V5P_256, V6E_256 = "tpu:v5p:4x8x8", "tpu:v5p:4x4x8", "tpu:v6e:16x16"
# What MaxText's script for the first of these runs sets. Sets (`@…`) are MaxText's too.
GATHERS = "@cf_for_all_gather"
SCRIPT_V5P = (
    *(GATHERS, "@disable_megacore_fusion_allow_ags", "@enable_async_collective_permute"),
    *("@data_parallel_overlap", "xla_tpu_enable_ag_backward_pipelining=true"),
)
# JAX-Toolbox's settings for one host of H100, but that for command buffers, which changes no
# instruction, and those for cuBLASLt; gpu-recipes has the same for H200 with its own sizes.
OVERLAP_GPU = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    *(
        f"xla_gpu_enable_pipelined_{kind}=true"
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    "xla_gpu_enable_while_loop_double_buffering=true",
    "xla_gpu_enable_all_gather_combine_by_dim=false",
    "xla_gpu_enable_reduce_scatter_combine_by_dim=false",
    "xla_disable_hlo_passes=rematerialization",
)


def combined(all_reduce: int, all_gather: int, reduce_scatter: int) -> tuple[str, ...]:
    """Up to how many bytes XLA joins collectives to one, in MiB, beside `OVERLAP_GPU`."""
    sizes = {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
    joined = (f"xla_gpu_{it}_combine_threshold_bytes={size * 2**20}" for it, size in sizes.items())
    return (*OVERLAP_GPU, *joined)


EXPERTS_V6E = ("@moe_vmem_limit_flag", GATHERS, "@data_parallel_overlap")
OTHERS = (
    Row(
        *("Llama2-70B, v5p-512", "llama2-7b", V5P_512, "fsdp=256", 4),
        options=TOKENS | LLAMA_70B | SAVED,
        measured=step_of(4, 692),
        xla=SCRIPT_V5P,
    ),
    Row(
        *("Mixtral 8x7B, v5p-256", "mixtral-8x7b", V5P_256, "fsdp=128", 36),
        options=TOKENS | GROUPED | BF16_WEIGHTS,
        measured=step_of(36, 2909),
        xla=(*SCRIPT_V5P, "@moe_vmem_limit_flag"),
    ),
    Row(
        *("Mixtral 8x7B, v6e-256", "mixtral-8x7b", V6E_256, "fsdp=256", 12),
        options=TOKENS | CAPACITY | {"pipeline.remat": "inputs_offloaded"},
        measured=step_of(12, 3899),
        xla=EXPERTS_V6E,
    ),
    Row(
        *("Mixtral 8x22B, v6e-256", "mixtral-8x22b", V6E_256, "fsdp=64,expert=4", 8),
        options=TOKENS | CAPACITY | BF16_WEIGHTS | TWO_PARTS,
        measured=step_of(8, 1326),
        xla=EXPERTS_V6E,
    ),
    # The same without dropped tokens. 8x22B does not fit so.
    Row(
        *("Mixtral 8x7B, v6e-256, grouped", "mixtral-8x7b", V6E_256, "fsdp=256", 12),
        options=TOKENS | GROUPED,
        measured=step_of(12, 3899),
        xla=EXPERTS_V6E,
    ),
)
LLAMA_405B = {
    "model.embed_dim": "16384",
    "model.mlp_dim": "53248",
    "model.num_layers": "126",
    "model.num_heads": "128",
    "model.num_kv_heads": "8",
}
# Its feed-forward block has no gate: two products of 49,152 units are as many operations as three
# of 32,768.
GPT3_175B = {
    "model.embed_dim": "12288",
    "model.mlp_dim": "32768",
    "model.num_layers": "96",
    "model.num_heads": "96",
    "model.num_kv_heads": "96",
    "model.head_dim": "128",
    "model.vocab_size": "50304",
}


def tokens_of(length: int) -> dict[str, str]:
    return FLASH | {"train.sequence_length": str(length)}


# What tpu-recipes set for these runs.
DENSE_V6E = (
    *("@dense_vmem_limit_flag", "@layout_for_all_reduce_scatter", "@data_parallel_overlap"),
    *(GATHERS, "@enable_sparsecore_offloading_for_all_reduce", "@host_offload_flags"),
)
DENSE_V5P = ("@dense_vmem_limit_flag", GATHERS, "@host_offload_flags")
RECIPE_TPU7X = (
    *("xla_tpu_scoped_vmem_limit_kib=61440", "xla_tpu_bf16_emission_mode=NATIVE_EMISSION"),
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "xla_tpu_use_single_sparse_core_for_all_gather_offload=true",
)
# What MaxText's script for GPT3 on v5p sets.
SCRIPT_GPT3 = (
    *("xla_tpu_enable_experimental_fusion_cost_model=false", "xla_tpu_dot_dot_fusion=false"),
    *("xla_tpu_dot_dot_fusion_duplicated=false", "xla_jf_conv_input_fusion=true"),
    *("xla_jf_conv_output_fusion=false", "xla_tpu_rwb_fusion=false"),
    *("xla_tpu_copy_fusion_pad_unpad_ratio=300", "xla_tpu_enable_copy_fusion=false"),
    "xla_tpu_enable_aggressive_loop_fusion_layout_opt=false",
    "xla_tpu_reduce_loop_fusion_dup_with_unfusable_user=false",
    *("xla_tpu_scavenge_vmem_for_fusions=false", "xla_tpu_vector_load_fusion_window=256"),
    *("xla_tpu_vector_store_fusion_window=64", "xla_tpu_decompose_all_gather_einsum=true"),
    *("xla_tpu_spmd_rng_bit_generator_unsafe=true", "xla_tpu_enable_megacore_fusion=true"),
    "xla_always_enable_all_gather_2d_asymmetric=true",
    *("xla_tpu_dcn_max_overlap_estimation=32", GATHERS, "@enable_async_collective_permute"),
)
OFFLOADED = "inputs, queries, keys, values and results go to the host, and are computed again here"
RECIPES = (
    Row(
        *("Llama3.1-8B, 8 v6e", "llama3.1-8b", "tpu:v6e:2x4", "fsdp=8", 3),
        options=tokens_of(8192),
        measured=3.443,
        differs=OFFLOADED,
        xla=(*DENSE_V6E, "@disable_collective_matmul"),
    ),
    Row(
        *("Llama3.1-8B, 64 v6e", "llama3.1-8b", "tpu:v6e:8x8", "fsdp=64", 5),
        options=tokens_of(8192),
        measured=5.652,
        differs=OFFLOADED,
        xla=DENSE_V6E,
    ),
    Row(
        *("Mistral-7B, 8 v6e", "mistral-7b", "tpu:v6e:2x4", "fsdp=8", 6),
        options=tokens_of(8192) | TWO_PARTS,
        measured=6.320,
        differs=f"{OFFLOADED}; gradients of two microbatches are added up here",
        xla=(*DENSE_V6E, "@disable_collective_matmul"),
    ),
    Row(
        *("Llama3.1-405B, 512 v5p", "llama3.1-8b", "tpu:v5p:8x8x8", "fsdp=512", 2),
        options=tokens_of(8192)
        | LLAMA_405B
        | {"train.loss_chunks": "4", "pipeline.remat": "inputs_offloaded"},
        measured=131.474,
        differs="inputs stay, and two products of each layer go to the host; here inputs do",
        xla=DENSE_V5P,
    ),
    Row(
        *("GPT3-175B, 512 v5p, int8", "llama2-7b", "tpu:v5p:8x8x8", "fsdp=512", 4),
        options=tokens_of(2048) | GPT3_175B | {"model.quantization": "int8"},
        measured=22.197,
        differs="`fsdp=64,tensor=8`, with activations split over `tensor`, which does not fit here",
        xla=SCRIPT_GPT3,
    ),
    Row(
        *("Llama3.1-70B, 64 tpu7x", "llama3.1-8b", "tpu:tpu7x:4x4x4", "fsdp=128", 2),
        options=tokens_of(8192) | LLAMA_70B | SAVED,
        measured=12.20,
        differs="inputs and products of attention are kept there; the first moment is bfloat16",
        xla=RECIPE_TPU7X,
    ),
    Row(
        *("DeepSeek2-16B, 4 v5p", "deepseek-v2-lite", "tpu:v5p:2x2x1", "fsdp=4", 24),
        options=tokens_of(2048) | GROUPED,
        measured=5.667,
        differs="its kernel for groups of rows is its own (megablox)",
    ),
    Row(
        *("Llama3.1-70B, 256 H200", "llama3.1-8b", "cuda:h200:32x8", "data=2,fsdp=128", 2),
        options=tokens_of(8192) | LLAMA_70B | SAVED,
        measured=15.516,
        differs="results of attention are kept there; products by cuBLASLt, here by Triton",
        xla=combined(2048, 2048, 16),
    ),
    Row(
        *("Llama2-7B, 8 H100", "llama2-7b", "cuda:h100:8", "fsdp=8", 2),
        options=tokens_of(4096) | {"pipeline.remat": "minimal"},
        measured=0.721,
        differs="layers are unrolled there; products by cuBLASLt, here by Triton",
        xla=combined(1024, 128, 64),
    ),
)
ALL = (*VARIANTS, *OTHERS, *RECIPES)
# MaxText's own program, main of August 2026 with flash attention, compiled by JAX 0.10.2 with
# libtpu 0.0.42.1: seconds of compute without the kernels, by the same cycles as ours.
PEER_COMPUTE = {"gathered once, auto": 4.559, "ZeRO-1, auto": 4.636}
PERCENT = round(100 * KERNEL_EFFICIENCY)
ABOUT = f"""# Estimated time beside measured time

Made by `python benchmarks/time_estimates.py`. A step is estimated from the compiled program alone,
as `nnx-pipeline measure` does it: the TPU compiler's cycles of each instruction, on an H100 and an
H200 the figures of XLA's own model, kernels by what they state of themselves, at {PERCENT} % of the
peak, and the time that the compute waits for collectives and transfers. Nothing here ran on a chip;
the measured seconds are what the authors of MaxText and of recipes for it published. An error is
the estimate's, as a share of the measured step.

What was measured are MaxText's programs and not these. Both compute the same step of the same model
over as many chips, with flash attention. The compiler is that of today (versions below); those of
the measurements were older. The rows have settings that their runs published, which are at the end
of this page. Those for collectives alone do not change the estimate of Llama2-70B: this compiler
does the same without them. Memory counts: a product of 8192³ in bfloat16 on a v6e is estimated at
823 TFLOP/s with 96 MiB of it, where Google's microbenchmark measured 827, and at 646 with the
default. `waits` is what a step waits for collectives and transfers; `kernels` is part of the
compute.
"""
ABOUT_VARIANTS = """## Six variants of one model

Llama2-7B on four v5p, sequences of 2048 tokens, 12 for each chip in 8 microbatches, 2 stages with
16 repeats, measured with JAX 0.8.0 ([pull request
2744](https://github.com/AI-Hypercomputer/maxtext/pull/2744)). `before` is MaxText before that
change, which shifted activations by slices; here `shift=slice` and auto sharding stand for it.
"""
HEAD_VARIANTS = (
    "| variant | measured, s | compute | kernels | waits | step, s | error |\n|---"
    + "|--:" * 6
    + "|"
)
ABOUT_OTHERS = """## Larger models

Sequences of 4096 tokens. Tokens per second and chip were measured, and are those of MaxText's [page
of tiers](https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html); sequences for
each chip and remat are those of its [recipes](https://github.com/AI-Hypercomputer/tpu-recipes) and
of `configs/v5p/llama2_70b.sh`. That page calls v5p-512 512 chips and v5p-256 256 chips with the
shape 8x4x4; those are 256 and 128 chips, which is what is compiled here. On v5p each token goes to
its two experts, sorted and grouped, as there. On v6e MaxText dropped tokens above a capacity of
1.25, which is what is compiled here too, and sent inputs, queries, keys, values and results of
layers to the host. Here 8x7B sends the inputs and computes the others again, and 8x22B computes all
of them again and adds gradients up over two microbatches, because its whole batch does not fit. The
last row is that of 8x7B without dropping tokens, with kernels for the experts. The clock of v6e is
not published: `nnx_pipeline/lab/_timing/devices.toml` says what it is taken from. `needs` is the
account of the program.
"""
HEAD_OTHERS = (
    "| run | mesh | sequences per chip | tokens/s per chip | measured, s | compute | kernels "
    "| waits | step, s | error | needs, GB |\n|---|---" + "|--:" * 9 + "|"
)
ABOUT_RECIPES = """## Runs of public recipes

Steps that recipes of Google, NVIDIA and MaxText publish (tpu-recipes, gpu-recipes, JAX-Toolbox,
read in November 2026); no constant was fitted to them. Attention takes twice as long on v6e and
tpu7x as its share of the peak says, because their matrix units are 256 wide and a head is 128
(`nnx_pipeline/lab/_timing/cost.py`). The first row asked for that rule, without which it is 16 %
too short; the compiler's own cycles gave it, and the row of tpu7x was compiled after it. `band` is
what the other rows of the same kind say of a step: how far measured steps lay from their estimates.
"""
HEAD_RECIPES = (
    "| run | mesh | sequences × tokens per device | measured, s | compute | kernels | waits "
    "| step, s | error | band, % | needs, GB | what differs |\n|---|---|---" + "|--:" * 8 + "|---|"
)
ABOUT_SETTINGS = """## Settings of the compiler

As `--xla` takes them; those with `@` are sets that MaxText publishes by these names. Of the set for
sparse cores this compiler does not know `xla_sc_disjoint_spmem`.
"""
ABOUT_PEER = """## The measured program itself

MaxText's main of August 2026 was compiled for the same four chips, with flash attention, and its
cycles were summed as ours are. Its kernels are added as 11 products of half the scores (forward,
recomputed, backward) at the same rate. Its waits for collectives are not known and would come on
top, so that what is above the measured step here is an error of the cycles, or of the kernel's
rate.
"""
HEAD_PEER = (
    "| variant | measured, s | compute but kernels | with the kernels, s | error |\n|---"
    + "|--:" * 4
    + "|"
)


def config_of(row: Row) -> Config:
    """The preset with what the row sets."""
    batch = {"train.global_batch": str(row.sequences * MeshConfig.parse(row.mesh).num_devices)}
    return apply_overrides(preset(row.model), batch | row.options)


def measure(row: Row) -> dict[str, Any]:
    """Compiles the program of a row and keeps what the page is made of."""
    platform = Platform.parse(row.platform, *row.xla)
    result = measure_step(config_of(row), MeshConfig.parse(row.mesh), platform)
    if result.time is None:
        raise SystemExit(f"{row.what}: nothing is known of the time of {row.platform}")
    return {
        "time": result.time.to_json(),
        "kernels": [
            [row.source, row.pass_name, row.seconds, row.launches]
            for row in result.time.rows
            if row.kind == "kernels"
        ],
        "lines": [
            [row.source, row.caller, row.kind, row.pass_name, row.seconds]
            for row in result.time.rows
            if row.seconds >= LARGE_LINE * result.time.known_seconds
        ],
        "flops": result.flops,
        "needed_bytes": result.needed_bytes,
        "xla_left_out": list(result.xla_left_out),
        "versions": {name: version for name, version in result.versions.items() if version},
    }


def kernel_seconds(row: Row, found: dict[str, Any], efficiency: float = KERNEL_EFFICIENCY) -> float:
    """What attention would take as a kernel, per device and step, at a share of the peak."""
    config, platform = config_of(row), Platform.parse(row.platform)
    model, length = config.model, config.train.sequence_length
    half = length * length * model.num_heads * model.head_dim  # 2 operations each, half of them
    operations = KERNEL_PRODUCTS * half * row.sequences * model.num_layers
    device = device_of(platform.kind, platform.target)
    assert device is not None
    # A stage that has no microbatch computes all the same.
    return operations / (1 - found["time"]["bubble_share"]) / (efficiency * device.flops["bf16"])


def kernels(found: dict[str, Any]) -> float:
    """What all kernels of a step take, at the stated share of the peak."""
    return float(sum(seconds for *_, seconds, _ in found["kernels"]))


def error(estimated: float, measured: float) -> str:
    """How much an estimate is above, or with a minus below, what was measured."""
    return f"{100 * (estimated / measured - 1):+.0f} %"


def waits(found: dict[str, Any]) -> float:
    """How long the compute waits for collectives and transfers."""
    time = found["time"]
    return float(time["step_seconds"] - time["compute_seconds"])


def times(row: Row, found: dict[str, Any]) -> list[float]:
    """Measured, and estimated: the compute, kernels in it, waits, and the step; seconds."""
    time = found["time"]
    return [
        row.measured,
        time["compute_seconds"],
        kernels(found),
        waits(found),
        time["step_seconds"],
    ]


def variant_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the first table."""
    shown = (f"{seconds:.2f}" for seconds in times(row, found))
    return [row.what, *shown, error(found["time"]["step_seconds"], row.measured)]


def other_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the table of larger models."""
    return [
        row.what,
        row.mesh,
        str(row.sequences),
        f"{row.sequences * LONG / row.measured:,.0f}",
        *(f"{seconds:.1f}" for seconds in times(row, found)),
        error(found["time"]["step_seconds"], row.measured),
        f"{found['needed_bytes'] / 1e9:.1f}",
    ]


def recipe_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the table of recipes."""
    others = band_of(found["time"]["basis"], kind_of(row), but=row.what)
    return [
        row.what,
        f"`{row.mesh}`",
        f"{row.sequences} × {config_of(row).train.sequence_length}",
        *(f"{seconds:.2f}" for seconds in times(row, found)),
        error(found["time"]["step_seconds"], row.measured),
        f"{100 * others.least:+.0f} … {100 * others.most:+.0f}" if others else "–",
        f"{found['needed_bytes'] / 1e9:.1f}",
        row.differs,
    ]


def peer_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the table of MaxText's own programs."""
    compute = PEER_COMPUTE[row.what]
    whole = compute + kernel_seconds(row, found)
    shown = (f"{seconds:.2f}" for seconds in (row.measured, compute, whole))
    return [row.what, *shown, error(whole, row.measured)]


def at_lines(found: dict[str, Any], *of: str) -> float:
    """Seconds of the large lines whose source, caller, kind and pass have all these texts."""
    return float(
        sum(
            seconds
            for *where, seconds in found["lines"]
            if all(any(text in (part or "") for part in where) for text in of)
        )
    )


def in_order(
    measured: Sequence[float], estimated: Sequence[float], apart: float = 0.0
) -> tuple[int, int]:
    """How many pairs of programs are estimated in the measured order, and of how many.

    - `measured`, `estimated`: the steps of the same programs, in seconds.
    - `apart`: pairs whose measured steps differ by less than this share are left out.
    """
    right = pairs = 0
    for (a, x), (b, y) in itertools.combinations(zip(measured, estimated, strict=True), 2):
        if abs(a - b) >= apart * min(a, b):
            right, pairs = right + ((a - b) * (x - y) > 0), pairs + 1
    return right, pairs


def table(head: str, rows: Sequence[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join([head, *("| " + " | ".join(cells) + " |" for cells in rows)])


def order(results: dict[str, dict[str, Any]]) -> str:
    """What the estimates say of the order of the six variants, as one sentence."""

    def pairs(rows: Sequence[Row], apart: float = 0.0) -> tuple[int, int]:
        estimated = [results[row.what]["time"]["step_seconds"] for row in rows]
        return in_order([row.measured for row in rows], estimated, apart)

    right, of_all = pairs(VARIANTS)
    clear, of_clear = pairs(VARIANTS, APART)
    without = [row for row in VARIANTS if row.options["pipeline.sharding"] == "auto"]
    same, of_same = pairs(without, APART)
    return (
        f"Of the {of_all} pairs of six variants of Llama2-7B {right} are estimated in the measured "
        f"order, {clear} of the {of_clear} that were measured {100 * APART:.0f} % or more apart, "
        f"and {same} of the {of_same} such pairs without MaxText's explicit mode, whose program is "
        "not like this project's."
    )


def errors(results: dict[str, dict[str, Any]]) -> str:
    """The errors of all runs but those of MaxText's explicit mode, as one sentence."""
    by_name = {row.what: (row, results[row.what]["time"]["step_seconds"]) for row in ALL}

    def said(what: str) -> str:
        row, step = by_name[what]
        return f"{step:.2f} s where {row.measured:.2f} were measured ({error(step, row.measured)})"

    others = [said(row.what) for row in OTHERS]
    return (
        f"Llama2-7B on four v5p is estimated at {said('gathered once, auto')}, with ZeRO-1 at "
        f"{said('ZeRO-1, auto')}; Llama2-70B on 256 v5p at {others[0]}; Mixtral 8x7B on 128 v5p "
        f"at {others[1]} and on 256 v6e at {others[2]}; and Mixtral 8x22B on 256 v6e at "
        f"{others[3]}. Without dropped tokens the same 8x7B is estimated at {others[4]}."
    )


def explicit_mode(results: dict[str, dict[str, Any]]) -> str:
    """What became of MaxText's slower explicit mode, as a paragraph."""
    longer = []
    for auto, explicit in ((VARIANTS[1], VARIANTS[2]), (VARIANTS[4], VARIANTS[5])):
        ours = [results[row.what]["time"]["step_seconds"] for row in (auto, explicit)]
        longer += [explicit.measured / auto.measured - 1, ours[1] / ours[0] - 1]
    once, zero = (f"{100 * share:.0f} %" for share in longer[::2])
    ours_once, ours_zero = (f"{100 * share:+.1f} %" for share in longer[1::2])
    return (
        f"MaxText's explicit mode was measured {once} slower than its auto sharding, and with "
        f"ZeRO-1 {zero}. Here the estimates are {ours_once} and {ours_zero} apart: the "
        "shardings of this project are the same in both modes, so that the compiler makes nearly "
        "one program of them. The errors of the two explicit rows are therefore those of another "
        "program, and no estimate of this project's step can show what MaxText's explicit mode did."
    )


def attention(results: dict[str, dict[str, Any]]) -> str:
    """What of an error hangs on waits and on the kernels' rate, as a paragraph."""
    row = VARIANTS[1]
    found = results[row.what]
    step, kernel = found["time"]["step_seconds"], kernels(found)
    low, high = (
        error(step + kernel * (KERNEL_EFFICIENCY / at - 1), row.measured) for at in (0.8, 0.5)
    )
    return (
        f"Of the step in the second row {kernel:.2f} s are kernels of attention. Such kernels "
        f"reach 50 to 80 % of the peak on a v5p: with these two rates the error is {high} and "
        f"{low}. Without the {waits(found):.2f} s of waits it is "
        f"{error(found['time']['compute_seconds'], row.measured)}."
    )


def orders(results: dict[str, dict[str, Any]]) -> str:
    """Which of two runs of one model does more tokens per second and chip, as one sentence."""
    kept = {one["what"] for one in runs(results)}
    by_model: dict[tuple[int, ...], list[Row]] = {}
    for row in ALL:
        model = config_of(row).model
        size = (model.embed_dim, model.mlp_dim, model.num_layers, model.num_experts)
        if row.what in kept:
            by_model.setdefault((*size, model.vocab_size), []).append(row)

    def per_token(row: Row, seconds: float) -> float:
        tokens = row.sequences * config_of(row).train.sequence_length
        return seconds / tokens / Platform.parse(row.platform).devices_per_chip

    right = of_all = across = 0
    for rows in by_model.values():
        chips = [Platform.parse(row.platform).target for row in rows]
        across += sum(one != other for one, other in itertools.combinations(chips, 2))
        measured = [per_token(row, row.measured) for row in rows]
        estimated = [per_token(row, results[row.what]["time"]["step_seconds"]) for row in rows]
        found = in_order(measured, estimated, CLEARLY_APART)
        right, of_all = right + found[0], of_all + found[1]
    return (
        f"Of the {of_all} pairs of these runs that are of one model and were measured "
        f"{100 * CLEARLY_APART:.0f} % or more apart, in tokens per second and chip, {right} are "
        f"estimated in the measured order. {across} of the pairs of one model are of different "
        "chips, whose peaks alone say as much."
    )


def summary(results: dict[str, dict[str, Any]]) -> str:
    """The median error, how many runs lie in their band, and the orders, as a paragraph."""
    found = runs(results)
    kept = {one["what"] for one in found}
    left_out = "; ".join(row.what for row in ALL if row.what not in kept)
    apart = sorted(abs(one["estimated"] / one["measured"] - 1) for one in found)
    inside = total = 0
    for one in found:
        others = band_of(one["basis"], one["program"], but=one["what"])
        if others:
            total += 1
            inside += others.least <= one["measured"] / one["estimated"] - 1 <= others.most
    return (
        f"Of {len(found)} measured runs the median error is {100 * statistics.median(apart):.0f} "
        f"%, and the largest {100 * apart[-1]:.0f} %. {inside} of {total} lie in the band that the "
        f"others of their kind give. Not among them are {left_out}, where another program was "
        f"measured, or a nearer one is among them. {orders(results)}"
    )


def reasons(results: dict[str, dict[str, Any]]) -> list[str]:
    """Where the errors come from, by line of the program; a paragraph each."""
    return [
        of_llama_v6e(results),
        of_gpt3(results),
        of_gpus(results),
        of_experts(results),
        of_gathers(results),
    ]


def of_llama_v6e(results: dict[str, dict[str, Any]]) -> str:
    step = results["Llama3.1-8B, 8 v6e"]["time"]["step_seconds"]
    return (
        "Llama3.1-8B on v6e: with the compiler's defaults the same program was estimated at 3.95 s "
        "on eight chips; its products (`_low_precision.py:33`, `_loss.py`) take less with the "
        f"run's settings, and its kernels more. Of the {step:.2f} s, 0.09 are products of queries, "
        "keys, values and results that this program computes again (`_low_precision.py:33`, "
        "recomputed) and the run fetched from the host. The backward kernel of the run does five "
        "products of scores' size, the two kernels here seven."
    )


def of_gpt3(results: dict[str, dict[str, Any]]) -> str:
    row = next(row for row in RECIPES if row.what.startswith("GPT3"))
    found, model = results[row.what], config_of(row).model
    device = device_of("tpu", "v5p")
    assert device is not None
    weights = 4 * model.embed_dim**2 + 3 * model.embed_dim * model.mlp_dim
    operations = 2 * model.num_layers * weights * row.sequences * 2048
    in_bf16, in_int8 = (operations / device.flops[dtype] for dtype in ("bf16", "s8"))
    return (
        "GPT3-175B: the gradient of each weight is a product in bfloat16 here "
        f"(`_product_backward` in `_low_precision.py`), which takes {in_bf16:.1f} s at the peak, "
        f"and one in int8 in the run, {in_int8:.1f} s. The weights of a layer are gathered over "
        f"512 chips, and in the run an eighth of them over 64: the waits are {waits(found):.1f} s. "
        f"Another {at_lines(found, '_whole_batch.py:81', 'moves'):.1f} s are moves at the loop "
        "over layers (`_whole_batch.py:81`)."
    )


def of_experts(results: dict[str, dict[str, Any]]) -> str:
    deepseek, dropped, larger = (
        results[what]
        for what in ("DeepSeek2-16B, 4 v5p", "Mixtral 8x7B, v6e-256", "Mixtral 8x22B, v6e-256")
    )
    own = sum(one[2] for one in deepseek["kernels"] if "_by_choice.py" in one[0])
    compute, moves = larger["time"]["compute_seconds"], at_lines(larger, "_by_choice.py", "moves")
    log = 12 * LONG / 3645.203  # what the recipe of 8x7B shows
    return (
        f"Experts: of DeepSeek2-16B {kernels(deepseek):.1f} of "
        f"{deepseek['time']['compute_seconds']:.1f} s of compute are kernels, {own:.1f} s of them "
        "the experts' (`_by_choice.py`), whose share of the peak is the one of attention. Of "
        f"Mixtral 8x22B {moves:.1f} of {compute:.1f} s of compute are moves in `_by_choice.py`, "
        "and the weights are gathered for each of two microbatches, which adds "
        f"to the {waits(larger):.1f} s of waits. With the compiler's defaults 8x7B and 8x22B on "
        "v6e were 55 and 52 % above what was measured: the runs' settings give experts' products "
        "80 MiB on the chip, and they take less. The log in the recipe of 8x7B shows "
        f"{log:.2f} s, from which the estimate is {error(dropped['time']['step_seconds'], log)}."
    )


def of_gpus(results: dict[str, dict[str, Any]]) -> str:
    time = results["Llama2-7B, 8 H100"]["time"]
    beside = time["collective_seconds"] - time["exposed_seconds"]
    return (
        "Llama2-7B on H100: the products (`_low_precision.py:33`, 0.41 of "
        f"{time['compute_seconds']:.2f} s) count at 780 TFLOP/s, what XLA measured of each alone. "
        "That a chip at its limit of power clocks lower, that collectives "
        f"({beside:.2f} of {time['collective_seconds']:.2f} s run beside compute) take "
        "multiprocessors from it, and that the rest (0.10 s) does not reach the full rate of the "
        "memory, is not in the estimate: no rate for it was found that holds of all programs. The "
        "same holds of H200."
    )


def of_gathers(results: dict[str, dict[str, Any]]) -> str:
    before = (5.5277, 5.1446, 5.0959, 5.9509, 5.6106, 5.6286)  # compiled as the text says
    errors = [error(step, row.measured) for step, row in zip(before, VARIANTS, strict=True)]
    steps = [f"{step:.2f}" for step in before]
    return (
        "Llama2-7B on v5p: all six runs had `pipeline_fsdp_ag_once`, with which MaxText gathers "
        "the weights once before its loop over ticks, over `fsdp` or from the shards of ZeRO-1 "
        "over `data`, and sums their gradients once. `fsdp_gather=prefetch` sums them once too, "
        "and gathers repeat by repeat; so the rows have it. `fsdp_gather=step` gathers before the "
        "loop, but sums the gradients of each of 8 microbatches at once, so that no device holds "
        "full ones of more than one visit, and keeps the links busy for longer: with it the first "
        f"three rows took {', '.join(steps[:3])} s ({', '.join(errors[:3])}). With ZeRO-1 and "
        "weights that stay whole along `data` (`fsdp_gather=use`, `backward=accumulate`) the last "
        f"three took {', '.join(steps[3:])} s ({', '.join(errors[3:])}). Of these, 0.6 s are in "
        "the backward pass alone, which then adds to one array with the gradients of all repeats, "
        "and not to those of one or two: the products of gradients of weights take 0.4 s more "
        "(`_low_precision.py:33` under `_mlp.py:39`, `_mlp.py:40` and `grouped_query.py`), and "
        "seven copies in each tick, one for each weight, 0.2 s (`layers.py:83`)."
    )


def document(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown file, of results of all rows."""
    chips = dict.fromkeys(f"- {row.platform}: {results[row.what]['versions']}" for row in ALL)
    named = [row for row in VARIANTS if row.what in PEER_COMPUTE]
    parts = (
        ABOUT,
        ABOUT_VARIANTS,
        table(HEAD_VARIANTS, [variant_cells(row, results[row.what]) for row in VARIANTS]) + "\n",
        "\n\n".join(map(wrapped, (attention(results), order(results), explicit_mode(results)))),
        "",
        ABOUT_OTHERS,
        table(HEAD_OTHERS, [other_cells(row, results[row.what]) for row in OTHERS]) + "\n",
        ABOUT_RECIPES,
        table(HEAD_RECIPES, [recipe_cells(row, results[row.what]) for row in RECIPES]) + "\n",
        wrapped(summary(results)) + "\n",
        "### Where the errors come from, by line of the program\n",
        "\n".join(map(bullet, reasons(results))) + "\n",
        ABOUT_PEER,
        table(HEAD_PEER, [peer_cells(row, results[row.what]) for row in named]) + "\n",
        settings() + "\n",
        "## Versions\n",
        *chips,
    )
    return "\n".join(parts) + "\n"


def settings() -> str:
    """The settings of the compiler that runs published, as a section."""
    of_rows: dict[tuple[str, ...], list[str]] = {}
    for row in ALL:
        if row.xla:
            of_rows.setdefault(row.xla, []).append(row.what)
    found = (
        textwrap.fill(
            f"- {'; '.join(names)}: {' '.join(f'`{one}`' for one in xla)}",
            100,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for xla, names in of_rows.items()
    )
    others = "; ".join(row.what for row in ALL if not row.xla)
    defaults = f"These have the compiler's defaults: {others}."
    return "\n".join([ABOUT_SETTINGS, *found, "", wrapped(defaults)])


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 100 letters, as the others are."""
    return textwrap.fill(text, 100, break_on_hyphens=False)


def bullet(text: str) -> str:
    return textwrap.fill(f"- {text}", 100, subsequent_indent="  ", break_on_hyphens=False)


def kind_of(row: Row) -> str:
    return "experts" if config_of(row).model.num_experts > 1 else "dense"


def runs(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured runs with the estimate of the nearest program, for `_timing/measured.toml`.

    MaxText's explicit mode is left out: what was measured there is another program. So is the
    second program of a run of which one drops tokens, as that run did.
    """
    left_out = [row for row in VARIANTS if row.options["pipeline.sharding"] == "explicit"]
    left_out += [row for row in OTHERS if row.what.endswith(", grouped")]
    return [
        {
            "what": row.what,
            "chip": Platform.parse(row.platform).target,
            "basis": results[row.what]["time"]["basis"],
            "program": kind_of(row),
            "estimated": round(results[row.what]["time"]["step_seconds"], 4),
            "measured": round(row.measured, 4),
        }
        for row in ALL
        if row not in left_out and row.what in results
    ]


def as_toml(entries: Sequence[dict[str, Any]]) -> str:
    text = "# Made by benchmarks/time_estimates.py, whose page says what was measured. Seconds.\n"
    for entry in entries:
        lines = (f"{name} = {json.dumps(value)}" for name, value in entry.items())
        text += "\n".join(["", "[[run]]", *lines, ""])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--only", metavar="TEXT", default="", help="only runs with it in the name")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in ALL:
        if asked.only not in row.what or (asked.missing and row.what in results):
            continue
        results[row.what] = measure(row)
        write_rows(RESULTS, results)
        cells = variant_cells if row in VARIANTS else other_cells
        print(" | ".join(cells(row, results[row.what])), file=sys.stderr, flush=True)
    write_text(str(MEASURED), as_toml(runs(results)))
    write_text(str(RESULTS.with_suffix(".md")), document(results))


if __name__ == "__main__":
    main()
