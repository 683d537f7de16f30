"""What holds the memory and takes the time of Llama2-7B on four chips, beside MaxText's temp.

    python benchmarks/llama2_buffers.py
    python benchmarks/llama2_buffers.py --missing

compile the step of the first rows of Llama2-7B in peer_memory.py for four TPU v5p, the second only
those that have no result yet, and write benchmarks/results/llama2_buffers.json and, from it,
llama2_buffers.md. A compilation takes some minutes; no hardware runs.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import peer_memory
from kept_rows import write_rows

from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.compile.measure import Measurement

RESULTS = Path(__file__).parent / "results" / "llama2_buffers.json"
MESH = "stage=2,fsdp=2"
ARMS = {
    "full": {"fsdp_gather": "step"},
    "inputs_offloaded": {"fsdp_gather": "step", "remat": "inputs_offloaded"},
    "full, 1f1b": {"fsdp_gather": "step", "schedule": "1f1b"},
}
SHOWN = 5_000_000  # bytes: what is less is not in the table of roles
ROWS = 14  # of the buffers, and of the lines of source
Found = dict[str, Any]


def rows() -> list[peer_memory.Row]:
    """The rows of peer_memory.md whose buffers the page shows."""
    return [peer_memory.llama(MESH, options, *peer_memory.ONCE) for options in ARMS.values()]


def measured(row: peer_memory.Row) -> Found:
    """Compiles a case and keeps what the page is made of."""
    result = peer_memory.measure(row)
    if result.attribution is None or result.time is None:
        raise SystemExit(f"{row.options}: the compiler gives no figure")
    return kept(result)


def kept(result: Measurement) -> Found:
    """What the page is made of.

    - `result`: the compiled step, with its buffers and its time.
    """
    held, time = result.attribution, result.time
    assert held is not None
    assert time is not None
    return {
        "temp_bytes": result.memory.temp_bytes,
        "heap_bytes": result.memory.heap_bytes,
        "peak_bytes": result.memory.peak_bytes,
        "host_bytes": result.memory.host_temp_bytes,
        "compute_seconds": time.compute_seconds,
        "memory_wait_seconds": time.memory_wait_seconds,
        "step_seconds": time.step_seconds,
        "by_role": held.by_role(),
        "beside": {buffer.name: buffer.bytes for buffer in held.other},
        "buffers": merged(held.buffers),
        "lines": by_line(result),
        "versions": {name: one for name, one in result.versions.items() if one},
    }


def merged(buffers: tuple[Buffer, ...]) -> list[Found]:
    """Buffers of one role, shape and line of source as one row, the largest first."""
    groups: dict[tuple[str, str, str], list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        groups[buffer.role, buffer.shape, line_of(buffer.source)].append(buffer)
    rows = [
        {
            "bytes": sum(one.bytes for one in group),
            "count": len(group),
            "role": role,
            "shape": shape,
            "source": source,
        }
        for (role, shape, source), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])[:ROWS]


def by_line(result: Measurement) -> list[Found]:
    """Seconds of each line of source, by pass, the longest first."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    assert result.time is not None
    for row in result.time.rows:
        seconds[line_of(row.source)][row.pass_name] += row.seconds
    lines = [{"source": source, **passes} for source, passes in seconds.items()]
    return sorted(lines, key=lambda line: -total(line))[:ROWS]


def total(line: Found) -> float:
    """The seconds of all passes of a line."""
    return float(sum(value for key, value in line.items() if key != "source"))


def line_of(source: str | None) -> str:
    """A line of source from the package on, which is the same on every machine."""
    return "–" if source is None else source[source.rfind("nnx_pipeline/") :]


ABOUT = """# What holds the memory of Llama2-7B

Made by `python benchmarks/llama2_buffers.py`: Llama2-7B as in [peer_memory.md](peer_memory.md),
with weights gathered once per step (`fsdp_gather=step`) and gradients that add up in float32. Four
TPU v5p, 2 stages × fsdp 2, 16 repeats, 48 sequences of 2048 tokens in 8 microbatches. GB (10⁹
bytes) per device, and seconds by the TPU compiler's cycles. Nothing ran on a device.

The aim is at most 0.7 times MaxText's temp, 0.85 times its peak and 0.95 times its compute. With
remat `full` temp misses it. With `inputs_offloaded` all three are met: the inputs of layers are in
the memory of the host, and the step is longer by what it waits for them. MaxText can send inputs of
layers to the host too; its figures here are those of its authors, without that.
"""
ABOUT_ROLES = """## The heap at its peak, by role, and what temp has beside it

`in temp, in no allocation` is what the compiler's `temp_size_in_bytes` has more than all of its
allocations together. The peak above has no place for it: it is about the sum of arguments (20.2 GB)
and heap. What is on the host is in none of them.
"""
ABOUT_BUFFERS = "## The largest buffers at the peak, with `full`\n"
ABOUT_LINES = "## Where the compute goes with `full`, seconds\n"
CONCLUSION = """## What was tried, and what would have to change

With `full` three things of almost one size hold nine tenths of the heap:

- The inputs of layers that the forward pass keeps, one for each of the 129 ticks. Remat `full`
  keeps nothing else. `inputs_offloaded` sends them to the host, 6.5 GB there and back per device
  and step, beside the compute. A schedule that goes back earlier keeps fewer: 33 with
  `schedule=1f1b`, which takes more off temp than that, and computes more: with repeats a stage is
  idle longer, and computes in vain meanwhile.
- The accumulators, one float32 number for each weight of the stage. With
  `train.grad_dtype=bfloat16` they take half of that, and the row has {narrow} of MaxText's temp.
- The gathered weights, which are what `fsdp_gather=step` is. With `fsdp_gather=use` they are
  gathered for each layer, and temp is {use} of MaxText's. With `fsdp_gather=prefetch` two repeats
  of them are held, and temp is {ahead} all the same.

With ZeRO-1 temp is {whole} of MaxText's if gradients of whole parameters add up. With
`fsdp_gather=step` they add up as shards, and it is {shards} ({both} in bfloat16), and
{there} with `inputs_offloaded`. To run the
optimizer leaf by leaf does not help: the peak is in the backward pass of the layers.

With `full` more than a quarter of temp is in no allocation. Of MaxText's figures temp and peak are
known, and not the heap, so that nothing here says how much of its temp is of that kind.
"""


def shares() -> dict[str, str]:
    """Temp as a share of MaxText's, of the other rows of Llama2-7B in peer_memory.json."""
    found = json.loads(peer_memory.RESULTS.read_text())
    zero, step, narrow = peer_memory.ZERO_1, peer_memory.STEP, peer_memory.BFLOAT16
    cases = {
        "narrow": (MESH, step | narrow, peer_memory.ONCE),
        "use": (MESH, {}, peer_memory.ONCE),
        "ahead": (MESH, peer_memory.PREFETCH, peer_memory.ONCE),
        "whole": ("stage=2,data=2", zero, peer_memory.OVER_DATA),
        "shards": ("stage=2,data=2", zero | step, peer_memory.OVER_DATA),
        "there": ("stage=2,data=2", zero | step | peer_memory.OFFLOADED, peer_memory.OVER_DATA),
        "both": ("stage=2,data=2", zero | step | narrow, peer_memory.OVER_DATA),
    }
    shown = {}
    for name, (mesh, options, peer) in cases.items():
        row = peer_memory.llama(mesh, options, *peer)
        temp = found[peer_memory.name_of(row)]["memory"]["temp_bytes"]
        shown[name] = peer_memory.share(temp, row.peer_temp)
    return shown


HEAD_ARMS = (
    "| remat | temp | of MaxText's | heap | peak | of MaxText's | compute, s "
    "| of MaxText's | on the host | waits for it, s | step, s |\n|---" + "|--:" * 10 + "|"
)
HEAD_BUFFERS = "| GB | × | role | shape | source |\n|--:|--:|---|---|---|"
HEAD_LINES = "| source | forward | recomputed | backward | all |\n|---" + "|--:" * 4 + "|"


def gigabytes(value: int) -> str:
    """Bytes as GB of 10⁹, to 10 MB."""
    return f"{value / 1e9:.2f}"


def arms(results: dict[str, Found]) -> list[list[str]]:
    """The figures of each arm, beside MaxText's."""
    temp, peak = peer_memory.ONCE
    seconds = peer_memory.PEER_COMPUTE["llama2-7b", MESH, 16, 48] / 1e3
    return [
        [
            f"`{name}`",
            gigabytes(found["temp_bytes"]),
            f"{found['temp_bytes'] / temp:.3f}",
            gigabytes(found["heap_bytes"]),
            gigabytes(found["peak_bytes"]),
            f"{found['peak_bytes'] / peak:.3f}",
            f"{found['compute_seconds']:.2f}",
            f"{found['compute_seconds'] / seconds:.3f}",
            gigabytes(found["host_bytes"]),
            f"{found['memory_wait_seconds']:.2f}",
            f"{found['step_seconds']:.2f}",
        ]
        for name, found in results.items()
    ]


def roles(results: dict[str, Found]) -> list[list[str]]:
    """The heap at its peak by role, and what is in temp beside it, for each arm."""
    names = dict.fromkeys(name for found in results.values() for name in found["by_role"])
    beside = dict.fromkeys(name for found in results.values() for name in found["beside"])
    rows = [
        [name, *(found["by_role"].get(name, 0) for found in results.values())] for name in names
    ]
    rows += [
        [name, *(found["beside"].get(name, 0) for found in results.values())] for name in beside
    ]
    return [[name, *map(gigabytes, sizes)] for name, *sizes in rows if max(map(abs, sizes)) >= 5e6]


def table(head: str, rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join([head, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def document(results: dict[str, Found]) -> str:
    """The Markdown file."""
    first = results["full"]
    names = " | ".join(f"`{name}`" for name in results)
    heads = f"| role | {names} |\n|---" + "|--:" * len(results) + "|"
    buffers = [
        [
            gigabytes(row["bytes"]),
            str(row["count"]),
            row["role"],
            f"`{row['shape']}`",
            row["source"],
        ]
        for row in first["buffers"]
    ]
    passes = ("forward", "recomputed", "backward")
    lines = [
        [line["source"], *(f"{line.get(name, 0):.2f}" for name in passes), f"{total(line):.2f}"]
        for line in first["lines"]
    ]
    versions = dict.fromkeys(str(found["versions"]) for found in results.values())
    parts = (
        ABOUT,
        table(HEAD_ARMS, arms(results)),
        ABOUT_ROLES,
        table(heads, roles(results)),
        ABOUT_BUFFERS,
        table(HEAD_BUFFERS, buffers),
        ABOUT_LINES,
        table(HEAD_LINES, lines),
        CONCLUSION.format(**shares()),
        *(f"- {one}" for one in versions),
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if asked.missing and RESULTS.exists() else {}
    for name, row in zip(ARMS, rows(), strict=True):
        results[name] = results.get(name) or measured(row)
        write_rows(RESULTS, results)
    write_text(str(RESULTS.with_suffix(".md")), document(results))


if __name__ == "__main__":
    main()
