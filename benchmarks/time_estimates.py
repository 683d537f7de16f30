"""The estimated time of a training step beside what others measured on chips.

    python benchmarks/time_estimates.py
    python benchmarks/time_estimates.py --missing

compile the programs that come nearest to those that were measured, the second only where there is
no result yet, and write benchmarks/results/time_estimates.json and, from it, time_estimates.md.
After a row its result is on disk. A row takes one to four minutes of two cores; no hardware runs.

No program here is the one that was measured. A row therefore also says what would be left of the
step if attention were a kernel, and if each token went through its own experts alone.
"""

import argparse
import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.experiments.programs import measure_step
from nnx_pipeline.files import write_text
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.timing.cost import KERNEL_EFFICIENCY
from nnx_pipeline.lab.timing.devices import device_of

RESULTS = Path(__file__).parent / "results" / "time_estimates.json"
# Products of scores' size of a flash attention with remat: two forward, the same two recomputed,
# and of the two kernels of the backward pass three and four.
KERNEL_PRODUCTS = 11
APART = 0.02  # two measured steps that differ by less say nothing of an order


class Row(NamedTuple):
    """A published measurement, and the program here that comes nearest to it.

    what: what was measured.
    model: a preset; `options` make another model of it.
    sequences: of a batch, on each device.
    measured: seconds of a step.
    """

    what: str
    model: str
    platform: str
    mesh: str
    sequences: int
    options: dict[str, str]
    measured: float


FOUR_CHIPS = "tpu:v5p:2x2x1"
ROUNDS = {"pipeline.num_microbatches": "8", "pipeline.num_repeats": "16"}
ONCE = ROUNDS | {"pipeline.fsdp_gather": "step"}
# Gradients are summed over `data` once per step, as in the measured program.
ZERO_1 = ROUNDS | {
    "pipeline.backward": "accumulate",
    "train.shard_optimizer_over_data": "true",
}
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
TOKENS = {"train.sequence_length": str(LONG)}
LLAMA_70B = {
    "model.embed_dim": "8192",
    "model.mlp_dim": "28672",
    "model.num_layers": "80",
    "model.num_heads": "64",
    "model.num_kv_heads": "8",
}
SAVED = {"pipeline.remat": "save_dot_except_mlp"}
BF16_WEIGHTS = {"model.param_dtype": "bfloat16"}


def in_parts(count: int) -> dict[str, str]:
    """Gradients added up over so many microbatches, where a whole batch does not fit."""
    return {"pipeline.schedule": "1f1b", "pipeline.num_microbatches": str(count)}


def step_of(sequences: int, per_second: int) -> float:
    """Seconds of a step, of tokens per second and chip as MaxText's page of tiers gives them."""
    return sequences * LONG / per_second


V5P_512, V5P_256, V6E_256 = "tpu:v5p:4x8x8", "tpu:v5p:4x4x8", "tpu:v6e:16x16"
OTHERS = (
    Row(
        *("Llama2-70B, v5p-512", "llama2-7b", V5P_512, "fsdp=256", 4),
        options=TOKENS | LLAMA_70B | SAVED,
        measured=step_of(4, 692),
    ),
    Row(
        *("Mixtral 8x7B, v5p-256", "mixtral-8x7b", V5P_256, "fsdp=128", 36),
        options=TOKENS | in_parts(2) | BF16_WEIGHTS,
        measured=step_of(36, 2909),
    ),
    Row(
        *("Mixtral 8x7B, v6e-256", "mixtral-8x7b", V6E_256, "fsdp=256", 12),
        options=TOKENS | in_parts(2),
        measured=step_of(12, 3899),
    ),
    Row(
        *("Mixtral 8x22B, v6e-256", "mixtral-8x22b", V6E_256, "fsdp=64,expert=4", 8),
        options=TOKENS | in_parts(2) | BF16_WEIGHTS,
        measured=step_of(8, 1326),
    ),
)
ALL = (*VARIANTS, *OTHERS)
# MaxText's own program, main of August 2026 with flash attention, compiled by JAX 0.10.2 with
# libtpu 0.0.42.1: seconds of compute without the kernels, by the same cycles as ours.
PEER_COMPUTE = {"gathered once, auto": 4.559, "ZeRO-1, auto": 4.636}
ABOUT = f"""# Estimated time beside measured time

Made by `python benchmarks/time_estimates.py`. A step is estimated from the compiled program alone,
as `nnx-pipeline compile` does it: the TPU compiler's cycles of each instruction, and the time that
the compute waits for collectives and transfers. Nothing here ran on a chip; the measured seconds
are what MaxText's authors published. An error is the estimate's, as a share of the measured step.

What was measured are MaxText's programs and not these. Both compute the same step of the same model
over as many chips, but for two things that this project does not have yet, and for which a row also
says what would be left:

- Flash attention. Here attention is by dot products, 512 queries at a time, which write the scores
  to memory and compute some that the mask hides: a quarter of these in a sequence of 2048 tokens,
  an eighth in one of 4096. `attention` is what its lines take, and `with a kernel` is the step if
  they took what a kernel takes: {KERNEL_PRODUCTS} products of half the scores (forward, recomputed,
  backward) at {100 * KERNEL_EFFICIENCY:.0f} % of the peak.
- Experts for the tokens that are sent to them. Here each token goes through all experts, of which
  MaxText computes two of eight.

The compiler is that of today (versions below) with its own defaults; those of the measurements were
older, and the runs below the first table had flags that let more collectives run beside compute.
"""
ABOUT_VARIANTS = """## Six variants of one model

Llama2-7B on four v5p, sequences of 2048 tokens, 12 for each chip in 8 microbatches, 2 stages with
16 repeats, measured with JAX 0.8.0 ([pull request
2744](https://github.com/AI-Hypercomputer/maxtext/pull/2744)). `before` is MaxText before that
change, which shifted activations by slices; here `shift=slice` and auto sharding stand for it.
"""
HEAD_VARIANTS = (
    "| variant | measured, s | compute | waits | step, s | error | attention | with a kernel, s "
    "| error |\n|---" + "|--:" * 8 + "|"
)
ABOUT_OTHERS = """## Larger models

Sequences of 4096 tokens. Tokens per second and chip were measured, and are those of MaxText's
[page of tiers](https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html); sequences
for each chip and remat are those of its [recipes](https://github.com/AI-Hypercomputer/tpu-recipes)
and of `configs/v5p/llama2_70b.sh`. That page calls v5p-512 512 chips and v5p-256 256 chips with the
shape 8x4x4; those are 256 and 128 chips, which is what is compiled here. Batches of Mixtral do not
fit with attention by dot products and are added up over two microbatches, so that weights are
gathered more often than they were where it was measured.
"""
HEAD_OTHERS = (
    "| run | mesh | sequences per chip | tokens/s per chip | measured, s | compute | waits "
    "| step, s | attention | experts | with a kernel, s | and 2 of 8 experts, s | of the measured "
    "| comparable |\n"
    "|---|---" + "|--:" * 11 + "|---|"
)
NOT_COMPARABLE = """\
The rows of Mixtral have no error: two programs that differ fourfold in the products of experts are
not comparable. `and 2 of 8 experts` scales the lines of experts to two of eight, as if sorting
tokens, padding and uneven loads cost nothing. On v6e MaxText dropped tokens above a capacity of
1.25, and offloaded to the host what is recomputed here. `of the measured` is that step as a share
of the measured one. It is what can be said, and no proof of the estimate. The clock of v6e is not
published: `nnx_pipeline/lab/timing/devices.py` says what it is taken from.
"""
ABOUT_PEER = """## The measured program itself

MaxText's main of August 2026 was compiled for the same four chips, with flash attention, and its
cycles were summed as ours are. The kernel is added as above. Its waits for collectives are not
known and would come on top, so that what is above the measured step here is an error of the cycles,
or of the kernel's rate.
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
    result = measure_step(config_of(row), MeshConfig.parse(row.mesh), Platform.parse(row.platform))
    if result.time is None:
        raise SystemExit(f"{row.what}: nothing is known of the time of {row.platform}")
    return {
        "time": result.time.to_json(),
        "attention_seconds": seconds_in(result, "/ops/attention.py"),
        "experts_seconds": seconds_in(result, "/ops/experts.py"),
        "flops": result.flops,
        "needed_bytes": result.needed_bytes,
        "versions": {name: version for name, version in result.versions.items() if version},
    }


def seconds_in(result: Measurement, file: str) -> float:
    """The compute of all lines of a file, given by the end of its path."""
    rows = result.time.rows if result.time else ()
    return sum(row.seconds for row in rows if f"{file}:" in (row.source or ""))


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


def with_kernel(row: Row, found: dict[str, Any], efficiency: float = KERNEL_EFFICIENCY) -> float:
    """The step if attention took what a kernel takes."""
    step = found["time"]["step_seconds"] - found["attention_seconds"]
    return float(step + kernel_seconds(row, found, efficiency))


def with_own_experts(row: Row, found: dict[str, Any]) -> float:
    """The same if the lines of experts took their share of a token's own experts alone."""
    model = config_of(row).model
    spared = 1 - model.num_experts_per_token / model.num_experts
    return float(with_kernel(row, found) - spared * found["experts_seconds"])


def error(estimated: float, measured: float) -> str:
    """How much an estimate is above, or with a minus below, what was measured."""
    return f"{100 * (estimated / measured - 1):+.0f} %"


def is_routed(row: Row) -> bool:
    """Whether tokens are sent to experts, of which this project computes all."""
    return config_of(row).model.num_experts > 1


def waits(found: dict[str, Any]) -> float:
    """How long the compute waits for collectives and transfers."""
    time = found["time"]
    return float(time["step_seconds"] - time["compute_seconds"])


def variant_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the first table."""
    step, kernel = found["time"]["step_seconds"], with_kernel(row, found)
    times = (found["time"]["compute_seconds"], waits(found), step)
    return [
        row.what,
        f"{row.measured:.2f}",
        *(f"{seconds:.2f}" for seconds in times),
        error(step, row.measured),
        f"{found['attention_seconds']:.2f}",
        f"{kernel:.2f}",
        error(kernel, row.measured),
    ]


def other_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the table of larger models; no error stands in a row that is not comparable."""
    time, best = found["time"], with_own_experts(row, found)
    sizes = (time["compute_seconds"], waits(found), time["step_seconds"])
    parts = (found["attention_seconds"], found["experts_seconds"], with_kernel(row, found), best)
    shown = [f"{seconds:.1f}" for seconds in (row.measured, *sizes, *parts)]
    if not is_routed(row):
        shown[5] = shown[7] = "–"
    return [
        row.what,
        row.mesh,
        str(row.sequences),
        f"{row.sequences * LONG / row.measured:,.0f}",
        *shown,
        f"{best / row.measured:.2f}",
        "no" if is_routed(row) else f"yes, {error(best, row.measured)}",
    ]


def peer_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The cells of the table of MaxText's own programs."""
    compute = PEER_COMPUTE[row.what]
    whole = compute + kernel_seconds(row, found)
    shown = (f"{seconds:.2f}" for seconds in (row.measured, compute, whole))
    return [row.what, *shown, error(whole, row.measured)]


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
        estimated = [with_kernel(row, results[row.what]) for row in rows]
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
    """The errors of the runs that can be compared, as one sentence."""
    by_name = {row.what: (row, results[row.what]) for row in (*VARIANTS, *OTHERS)}

    def steps(what: str) -> str:
        row, found = by_name[what]
        return f"{with_kernel(row, found):.2f} s where {row.measured:.2f} were measured"

    def off(what: str) -> tuple[str, str]:
        row, found = by_name[what]
        by_products = error(found["time"]["step_seconds"], row.measured)
        return error(with_kernel(row, found), row.measured), by_products

    once, zero, large = "gathered once, auto", "ZeRO-1, auto", "Llama2-70B, v5p-512"
    kernel, by_products = off(once)
    return (
        f"With attention at the rate of a kernel, Llama2-7B on four v5p is estimated at "
        f"{steps(once)}, an error of {kernel}, and of {by_products} with attention by dot products "
        f"as it is here; with ZeRO-1 at {steps(zero)} ({' and '.join(off(zero))}); and Llama2-70B "
        f"on 256 v5p at {steps(large)} ({' and '.join(off(large))})."
    )


def explicit_mode(results: dict[str, dict[str, Any]]) -> str:
    """What became of MaxText's slower explicit mode, as a paragraph."""
    longer = []
    for auto, explicit in ((VARIANTS[1], VARIANTS[2]), (VARIANTS[4], VARIANTS[5])):
        ours = [with_kernel(row, results[row.what]) for row in (auto, explicit)]
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
    """What part of an error attention is, and what hangs on the kernel's rate, as a paragraph."""
    row = VARIANTS[1]
    found = results[row.what]
    above = found["time"]["step_seconds"] - row.measured
    missing = found["attention_seconds"] - kernel_seconds(row, found)
    low, high = (error(with_kernel(row, found, at), row.measured) for at in (0.8, 0.5))
    return (
        f"In the second row the step is estimated {above:.2f} s above the measured one, and "
        f"{missing:.2f} s of that are what attention takes longer here than as a kernel. Such "
        "kernels reach 50 to 80 % of the peak on a v5p: with these two rates the error that is "
        f"left is {high} and {low}."
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
        NOT_COMPARABLE,
        ABOUT_PEER,
        table(HEAD_PEER, [peer_cells(row, results[row.what]) for row in named]) + "\n",
        *chips,
    )
    return "\n".join(parts) + "\n"


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 100 letters, as the others are."""
    return textwrap.fill(text, 100, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in ALL:
        if asked.missing and row.what in results:
            continue
        results[row.what] = measure(row)
        write_text(str(RESULTS), json.dumps(results, indent=1) + "\n")
        cells = variant_cells if row in VARIANTS else other_cells
        print(" | ".join(cells(row, results[row.what])), file=sys.stderr, flush=True)
    write_text(str(RESULTS.with_suffix(".md")), document(results))


if __name__ == "__main__":
    main()
