"""Timetables that ranks carry out by branches, beside the loops in which all do the same.

    python benchmarks/timetables.py
    python benchmarks/timetables.py cuda:h100:8 --missing

compile the training step of mixtral-small, the second what is for one platform and has no result
yet, and write benchmarks/results/timetables.json and, from it, timetables.md. After a row its
result is on disk, so a call that was stopped goes on with --missing, and makes the page again if
nothing is missing. How a program is counted is in `timetable_costs.py`.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from timetable_costs import (
    MESH,
    STAGES,
    Cost,
    Parts,
    Row,
    Step,
    bubble_of,
    from_json,
    in_step,
    step_of,
    timetable_of,
    to_json,
)

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._programs import prepare
from nnx_pipeline.experiments.timetables import run_timetable
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.pipeline import Accumulation, LoopOptions
from nnx_pipeline.pipeline import _runner as runner
from nnx_pipeline.pipeline.schedule import OneForwardOneBackward

RESULTS = Path(__file__).parent / "results" / "timetables.json"
TPU, H100 = "tpu:v5p:2x2x2", "cuda:h100:8"
TIMETABLES = ("1f1b", "zb-h1", "interleaved", "zb-v")


def rows_of(platform: str, microbatches: int) -> list[Row]:
    """The rows of one batch, the lockstep loops first."""
    lockstep = [
        Row(platform, schedule, "", chunks, microbatches)
        for schedule in ("circular", "1f1b")
        for chunks in (1, 2)
    ]
    timetables = [
        Row(platform, name, "all", 2 if name in ("interleaved", "zb-v") else 1, microbatches)
        for name in TIMETABLES
    ]
    return [*lockstep, *timetables]


ROWS = (
    *rows_of(TPU, 8),
    *rows_of(H100, 8),
    Row(H100, "1f1b", "own", 1, 8),
    *(Row(H100, "1f1b", ends, 1, 8, "none") for ends in ("", "all")),
    Row(H100, "zb-h1", "all", 1, 8, "none"),
    *rows_of(TPU, 32),
    *rows_of(H100, 32),
)


# ---- programs ----------------------------------------------------------------------------------


@contextlib.contextmanager
def by_timetable(row: Row) -> Iterator[None]:
    """A context in which what the model gives to the 1F1B loop is run by a timetable.

    Layers of zb-v then lie in the order of its ranks and not in that of the model, which makes no
    difference to what they cost.
    """
    before = runner.run_one_f_one_b

    def run(functions: Any, weights: Any, inputs: Any, *, schedule: Any, options: Any) -> Any:
        del schedule
        return run_timetable(
            functions,
            weights,
            inputs,
            actions=timetable_of(row.schedule, row.microbatches),
            ends_on=row.ends,  # type: ignore[arg-type]
            options=LoopOptions(
                remat=options.remat,
                saved_in_stage=options.saved_in_stage,
                accumulate=Accumulation(grad_dtype=options.accumulate.grad_dtype),
            ),
        )

    runner.run_one_f_one_b = run
    try:
        yield
    finally:
        runner.run_one_f_one_b = before


def compiled(row: Row) -> Measurement:
    """Compiles a row."""
    config: Config = apply_overrides(
        preset("mixtral-small"),
        {
            "train.global_batch": str(2 * row.microbatches),
            "pipeline.num_microbatches": str(row.microbatches),
            "pipeline.num_repeats": str(row.chunks),
            "pipeline.schedule": row.schedule if not row.ends else "1f1b",
            "pipeline.sharding": "auto",
            "pipeline.remat": row.remat,
        },
    )
    under = functools.partial(by_timetable, row) if row.ends else None
    program = Program(config, under=under)
    return prepare(program, MeshConfig.parse(MESH), Platform.parse(row.platform))()


# ---- results -------------------------------------------------------------------------------------


def result_of(row: Row, compiled: Measurement) -> dict[str, Any]:
    """What is written down of a compiled row."""
    return {
        "memory": compiled.memory.to_json(),
        **to_json(Parts.of(compiled.hlo, row)),
        "versions": {k: v for k, v in compiled.versions.items() if v},
    }


Results = Mapping[str, Mapping[str, Any]]
ABOUT = """# Timetables beside the lockstep loops

Made by `python benchmarks/timetables.py`: training steps of mixtral-small on stage=4,fsdp=2 in auto
mode, microbatches of two sequences, compiled without hardware. No hardware has run them. `loop` is
`lockstep` where all stages do the same at a tick (`schedule=circular` and `schedule=1f1b`). Else it
says who runs embedding, head and loss while ranks carry out a timetable by branches
(`run_timetable`, `ends_on`).

No timetable is a schedule of the config, because none of them wins. With 1f1b and interleaved a
rank computes less than in the lockstep loop, where it computes in the bubble too, but no step is
over sooner. In 1F1B one rank goes forward while its neighbour goes back, so that each step takes as
long as a backward visit, which with remat is almost three forward ones. zb-h1 and zb-v need visits
that take equally long, and here W computes again what I has computed. interleaved has little more
than half the bubble of 1f1b and yet takes longer: it has nearly twice the steps, a visit of half
the layers takes more than half as long, and after each step ranks exchange activations. Memory is a
little less than in lockstep with one chunk, and not with two: with remat full a visit keeps little,
so that fewer visits kept save little. Timetables stay in reach by `run_timetable`.

How a program with branches is counted: which branch a rank takes depends on the rank, so that no
reading of the program tells how often it does. Each computation that a conditional runs is measured
as if it were a program, and so is the whole without its conditionals, which all ranks do. Then
operations, traffic and collectives are those of the rank that has the most of them, each branch as
often as its row of the timetable takes it. A tick takes as long as the branch of its slowest rank,
since each rank exchanges activations with its neighbours after each tick. What enters and what
leaves is counted once per microbatch.

Checked once by hand: zb-h1 on H100 has 59.07, 107.41 and 162.19 GFLOP in F, I and W, and 25.17 in
head and loss; 8 · (59.07 + 107.41 + 162.19 + 25.17) = 2830.7.
"""
HEAD = (
    "| platform | schedule | loop | chunks | microbatches | remat | temp | heap | peak | account "
    "| of lockstep | TFLOP | traffic | collectives | compute, ms | step, ms | of lockstep | bubble "
    "| waiting |\n" + "|---" * 6 + "|--:" * 13 + "|"
)
ABOUT_ROWS = """## Compiled steps

MB (10⁶ bytes), TFLOP and collectives per device and step. `compute` is the sum of the TPU
compiler's cycles at 1.75 GHz, or on H100 a roofline; `step` has the waits for collectives and
transfers. `bubble` is the idle share by the schedule, every action taking one step; `waiting` is
the share of the branches' time that a rank idles or waits for a slower one, on average (in a
lockstep loop, where ranks compute in the bubble too, the share that they discard). `of lockstep` is
the share of what lockstep 1F1B has with as many chunks and microbatches, and the same remat.
"""
ABOUT_BRANCHES = """## What a visit costs

One run of each branch of a timetable, and what a microbatch costs at both ends.
"""
ABOUT_OTHERS = """## Other timetables of the same branches

Steps by the costs of the branches above, not compiled: with 8 and with 32 microbatches, one chunk
per rank, all devices at both ends.

- `in step` is lockstep 1F1B as a timetable: forward visits in one step, backward ones in the next.
- `in step, W later` computes the gradients of weights on all ranks in one step, after the first
  stage has the gradient of its input: (M + S - 1) · (F + I) + M · W.
- `W alone` takes B - I for W, as if W computed nothing that I has computed. I would have to keep
  all that W reads, and the loop would have to hold it for up to S visits. So it is a bound and no
  program.
- `lockstep 1f1b, W later, W alone` is what the lockstep loop would take with the same bound: its
  time less S - 1 times W.
"""


def row_line(row: Row, results: Results) -> str:
    """The line of a compiled row."""
    memory, step = results[row.name]["memory"], step_by(row, results)
    sizes = [memory[f"{name}_bytes"] for name in ("temp", "heap", "peak", "account")]
    base = row._replace(schedule="1f1b", ends="")
    beside = ["–", "–"]
    if base.name in results:
        account = results[base.name]["memory"]["account_bytes"]
        times = step.cost.step / step_by(base, results).cost.step
        beside = [f"{memory['account_bytes'] / account:.2f}", f"{times:.2f}"]
    cells = [
        *(row.platform, row.schedule, row.ends or "lockstep", row.chunks, row.microbatches),
        row.remat,
        *map(megabytes, sizes),
        beside[0],
        f"{step.cost.flops / 1e12:.2f}",
        megabytes(int(step.cost.traffic)),
        int(step.cost.collectives),
        f"{step.cost.compute * 1e3:.2f}",
        f"{step.cost.step * 1e3:.2f}",
        beside[1],
        f"{bubble_of(row):.1%}",
        f"{step.waiting:.1%}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def step_by(row: Row, results: Results) -> Step:
    """What the step of a compiled row costs."""
    return step_of(row, from_json(results[row.name]), row.microbatches)


def branch_lines(results: Results) -> Iterator[str]:
    """The table of branches."""
    yield "| platform | schedule | loop | chunks | remat | what | GFLOP | traffic, MB | step, ms |"
    yield "|---" * 6 + "|--:" * 3 + "|"
    for row in ROWS:
        if not row.ends or row.microbatches != 8 or row.name not in results:
            continue
        parts = from_json(results[row.name])
        for name, cost in {**parts.branches, "both ends": parts.ends}.items():
            cells = [row.platform, row.schedule, row.ends, row.chunks, row.remat, name]
            cells += [f"{cost.flops / 1e9:.1f}", f"{cost.traffic / 1e6:.1f}"]
            yield "| " + " | ".join(map(str, [*cells, f"{cost.step * 1e3:.3f}"])) + " |"


def other_lines(results: Results, platform: str) -> Iterator[str]:
    """The lines of other timetables of one platform; none where a program is missing."""
    loop, whole, split = (
        Row(platform, name, ends, 1, 8)
        for name, ends in (("1f1b", ""), ("1f1b", "all"), ("zb-h1", "all"))
    )
    if not all(row.name in results for row in (loop, whole, split)):
        return
    of_loop, of_whole, of_split = (from_json(results[row.name]) for row in (loop, whole, split))
    later = of_whole.branches["B"].plus(of_split.branches["I"], -1)  # W alone
    alone = dataclasses.replace(of_split, branches={**of_split.branches, "W": later})
    steps: dict[str, list[Cost]] = {}
    for count in (8, 32):
        lockstep = step_of(loop, of_loop, count).cost
        together, apart = in_step(count, split=False), in_step(count, split=True)
        found = {
            "lockstep 1f1b": lockstep,
            "lockstep 1f1b, W later, W alone": lockstep.plus(later, 1 - STAGES),
            "1f1b": step_of(whole, of_whole, count).cost,
            "1f1b in step": step_of(whole, of_whole, count, together).cost,
            "zb-h1": step_of(split, of_split, count).cost,
            "zb-h1, W alone": step_of(split, alone, count).cost,
            "in step, W later": step_of(split, of_split, count, apart).cost,
            "in step, W later, W alone": step_of(split, alone, count, apart).cost,
        }
        for name, cost in found.items():
            steps.setdefault(name, []).append(cost)
    for name, costs in steps.items():
        cells = [platform, name]
        for cost, base in zip(costs, steps["lockstep 1f1b"], strict=True):
            cells += [f"{cost.flops / 1e12:.2f}", f"{cost.compute * 1e3:.2f}"]
            cells += [f"{cost.step * 1e3:.2f}", f"{cost.step / base.step:.2f}"]
        yield "| " + " | ".join(cells) + " |"


def kept_lines(results: Results) -> list[str]:
    """What a visit keeps that is not computed again, in sentences; nothing before it is known."""
    full, none = (Row(H100, "1f1b", "", 1, 8, remat) for remat in ("full", "none"))
    turns = none._replace(ends="all")
    if not {row.name for row in (full, none, turns)} <= {*results}:
        return []
    heaps = [results[row.name]["memory"]["heap_bytes"] / 1e6 for row in (none, full)]
    more, slots = heaps[0] - heaps[1], OneForwardOneBackward(STAGES, 8).ring_slots
    took = [step_by(row, results).cost.step * 1e3 for row in (turns, none)]
    idle = from_json(results[turns.name]).branches["idle"].step * 1e3
    text = (
        f"What W reads of a visit is about what remat none keeps of it: on H100 {slots} visits "
        f"take {more:,.0f} MB of heap more than with remat full, {more / slots:,.0f} MB "
        f"each, and W later would hold up to {STAGES} of them. With remat none the compiler for "
        "H100 also copies what a rank keeps in each branch of a timetable: an idle step takes "
        f"{idle:.2f} ms, and 1F1B by turns {took[0]:.1f} ms where lockstep takes {took[1]:.1f}."
    )
    return [textwrap.fill(text, 100) + "\n"]


def document(results: Results) -> str:
    """The page of what has been measured."""
    there = [(row, results[row.name]) for row in ROWS if row.name in results]
    rows = [row_line(row, results) for row, _ in there]
    of_batch = "TFLOP | compute, ms | step, ms | of lockstep"
    others = [
        f"| platform | timetable | 8: {of_batch} | 32: {of_batch} |",
        "|---" * 2 + "|--:" * 8 + "|",
        *(line for platform in (TPU, H100) for line in other_lines(results, platform)),
    ]
    compilers = dict.fromkeys(f"- {row.platform}: {found['versions']}" for row, found in there)
    parts = [ABOUT, ABOUT_ROWS, "\n".join([HEAD, *rows]) + "\n", ABOUT_BRANCHES]
    parts += ["\n".join(branch_lines(results)) + "\n", ABOUT_OTHERS, "\n".join(others) + "\n"]
    parts += kept_lines(results)
    return "\n".join([*parts, *compilers]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platforms", nargs="*", default=[TPU, H100])
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in ROWS:
        if row.platform not in asked.platforms or (asked.missing and row.name in results):
            continue
        results[row.name] = result_of(row, compiled(row))
        write_text(str(RESULTS), json.dumps(results, indent=1) + "\n")
        print(row_line(row, results), file=sys.stderr, flush=True)
    write_text(str(RESULTS.with_suffix(".md")), document(results))


if __name__ == "__main__":
    main()
