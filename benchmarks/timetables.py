"""Timetables that ranks carry out by branches, beside the loops in which all do the same.

    python benchmarks/timetables.py
    python benchmarks/timetables.py cuda:h100:8 --missing

compile the training step of mixtral-small, the second what is for one platform and has no result
yet, and write benchmarks/results/timetables.json and, from it, timetables.md. After a row its
result is on disk, so a call that was stopped goes on with --missing.

A compiled program says what a branch costs, and its timetable says which rank takes it how often.
So the program is taken apart (`Parts`): what each branch of its conditionals costs when it runs
once, what a tick costs beside them, and what runs outside the loop. A rank's operations and traffic
are those of the branches that it takes. The time of a tick is that of the rank that takes longest,
because ranks exchange activations with their neighbours after every tick.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nnx_pipeline import Config, MeshConfig, preset
from nnx_pipeline.config.overrides import apply_overrides
from nnx_pipeline.experiments.arms import Program
from nnx_pipeline.experiments.programs import measure
from nnx_pipeline.files import write_text
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.hlo.cost import collective_counts, products_of
from nnx_pipeline.lab.hlo.loops import executions
from nnx_pipeline.lab.hlo.module import Module, parse
from nnx_pipeline.lab.report.tables import megabytes
from nnx_pipeline.lab.timing.devices import device_of
from nnx_pipeline.lab.timing.estimate import Estimate
from nnx_pipeline.lab.timing.links import Links
from nnx_pipeline.pipeline import Accumulation, LoopOptions, make_timetable, run_timetable, runner
from nnx_pipeline.pipeline.executor.plan import Branch, Plan, make_plan
from nnx_pipeline.pipeline.schedule import (
    CircularSchedule,
    OneForwardOneBackward,
    Schedule,
    make_schedule,
)
from nnx_pipeline.pipeline.timetable.actions import Action, Actions, actions_of

RESULTS = Path(__file__).parent / "results" / "timetables.json"
TPU, H100 = "tpu:v5p:2x2x2", "cuda:h100:8"
MESH, STAGES = "stage=4,fsdp=2", 4
TIMETABLES = ("1f1b", "zb-h1", "interleaved", "zb-v")


class Row(NamedTuple):
    """A training step of mixtral-small in auto mode.

    schedule: of the lockstep loops `circular` or `1f1b`, else a timetable.
    ends: "" for a lockstep loop, else who runs embedding, head and loss in a timetable.
    """

    platform: str
    schedule: str
    ends: str
    chunks: int
    microbatches: int
    remat: str = "full"

    @property
    def name(self) -> str:
        """What it is called in the file of results."""
        return " ".join(str(part) for part in self if part != "")


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


def timetable_of(schedule: str, microbatches: int) -> Actions:
    """The timetable called `schedule` for the ranks of the mesh."""
    repeats = 2 if schedule == "interleaved" else 1
    return make_timetable(schedule, ranks=STAGES, microbatches=microbatches, repeats=repeats)


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
    return measure(program, MeshConfig.parse(MESH), Platform.parse(row.platform))


# ---- what the parts of a program cost ------------------------------------------------------------


class Cost(NamedTuple):
    """What a part of a program costs a device.

    flops: of matrix products.
    traffic: bytes that collectives give.
    collectives: how many there are.
    compute: seconds for which instructions run.
    step: seconds with the waits for collectives and transfers.
    """

    flops: float = 0.0
    traffic: float = 0.0
    collectives: float = 0.0
    compute: float = 0.0
    step: float = 0.0

    def plus(self, other: "Cost", times: float = 1) -> "Cost":
        """This cost, and another one so many times."""
        return Cost(*(mine + times * its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Parts:
    """A program taken apart.

    - `beside`: everything but the branches of conditionals.
    - `loops`: for each loop of the program's entry its trips, and what a trip costs, which is part
      of `beside`.
    - `ends`: what a microbatch costs on all devices where it enters, leaves and is back. Loops in
      which every tick does this have it in their trips.
    - `branches`: what one run of each branch of a timetable costs, by its name.
    """

    beside: Cost
    loops: tuple[tuple[int, Cost], ...]
    ends: Cost
    branches: Mapping[str, Cost]

    @classmethod
    def of(cls, hlo: str, row: Row) -> "Parts":
        """Reads them from the text of a compiled program.

        A conditional of two branches is one that does its work once for each microbatch.
        """
        module = parse(hlo)
        cost = functools.partial(_cost, module, _links(Platform.parse(row.platform)))
        runs = executions(module)
        beside, ends, switch = cost(module.entry), Cost(), ()
        inside: dict[str, Cost] = {}  # of each computation, what its conditionals cost by the lab
        for name, times in runs.items():
            for item in module.computations[name].instructions.values():
                if item.opcode == "conditional":
                    assert times is not None, "a conditional in a loop of unknown trips"
                    branches = tuple(map(cost, item.called()))
                    beside = beside.plus(_by_lab(branches), -times)
                    inside[name] = inside.get(name, Cost()).plus(_by_lab(branches))
                    if len(branches) > 2:
                        switch = branches
                    else:
                        ends = ends.plus(max(branches, key=lambda one: one.step))
        entry = module.computations[module.entry].instructions.values()
        bodies = [item.called("body")[0] for item in entry if item.opcode == "while"]
        loops = [(runs[one] or 0, cost(one).plus(inside.get(one, Cost()), -1)) for one in bodies]
        names = names_of(plan_of(row, row.microbatches)) if row.ends else []
        return cls(beside, tuple(loops), ends, dict(zip(names, switch, strict=True)))

    def at(self, row: Row, microbatches: int) -> Cost:
        """What a step of the same loop with so many microbatches costs, without its branches."""
        total = self.beside.plus(self.ends, microbatches)
        trips = dict(zip(trips_of(row, row.microbatches), trips_of(row, microbatches), strict=True))
        for before, trip in self.loops:
            total = total.plus(trip, trips.get(before, before) - before)
        return total


def _cost(module: Module, links: Links, entry: str) -> Cost:
    """The cost of one computation with all that it calls, as the lab counts it.

    Of a conditional that is operations and collectives of every branch, and the longest one's time.
    """
    part = dataclasses.replace(module, entry=entry)
    runs = executions(part)
    time = Estimate(part, runs, links).time
    assert time.compute_seconds is not None, time.rows
    assert time.step_seconds is not None, time.rows
    sent = collective_counts(part, runs).values()
    return Cost(
        products_of(part, runs).known,
        sum(one["bytes"] or 0 for one in sent),
        sum(one["executed"] or 0 for one in sent),
        time.compute_seconds,
        time.step_seconds,
    )


def _by_lab(branches: tuple[Cost, ...]) -> Cost:
    longest = max(branches, key=lambda cost: cost.step)
    everything = functools.reduce(Cost.plus, branches)
    return everything._replace(compute=longest.compute, step=longest.step)


def _links(platform: Platform) -> Links:
    device = device_of(platform.kind, platform.target)
    assert device is not None, "nothing is known of the device"
    devices = platform.devices(1)[: MeshConfig.parse(MESH).num_devices]
    return Links.of(device, platform.topology, devices)


def trips_of(row: Row, microbatches: int) -> list[int]:
    """The trips of the loops over ticks."""
    if row.ends:
        return [timetable_of(row.schedule, microbatches).steps]
    schedule = lockstep_of(row, microbatches)
    if isinstance(schedule, CircularSchedule):
        return [schedule.ticks]
    return [len(ticks) for ticks in schedule.phases]


def lockstep_of(row: Row, microbatches: int) -> Schedule:
    """The schedule of a lockstep loop."""
    return make_schedule(row.schedule, stages=STAGES, microbatches=microbatches, repeats=row.chunks)


# ---- what ranks do -------------------------------------------------------------------------------


def plan_of(row: Row, microbatches: int, actions: Actions | None = None) -> Plan:
    """The plan of a timetable, by default that of the row."""
    actions = actions or timetable_of(row.schedule, microbatches)
    return make_plan(actions, [0] * actions.stages, "own" if row.ends == "own" else "all")


def names_of(plan: Plan) -> list[str]:
    """The names of the branches of a plan, the idle one first."""

    def name(branch: Branch) -> str:
        return branch.kind + " enters" * branch.enters + " leaves" * branch.leaves

    return ["idle", *map(name, plan.branches)]


class Step(NamedTuple):
    """What a training step costs by the branches that ranks take.

    cost: operations and collectives of the rank with the most, and the time of all.
    waiting: the share of the time of branches for which a rank idles or waits, on average.
    """

    cost: Cost
    waiting: float


def by_branches(beside: Cost, branches: Mapping[str, Cost], plan: Plan) -> Step:
    """Weighs branches by how often ranks take them; a tick takes as long as its slowest rank.

    - `beside`: what the step costs without branches.
    - `branches`: what each costs, by its name.
    """
    costs = [branches[name] for name in names_of(plan)]
    taken = plan.rows.branch
    ranks = [functools.reduce(Cost.plus, [costs[one] for one in own], Cost()) for own in taken.T]
    slowest = [max((costs[one] for one in row), key=lambda cost: cost.step) for row in taken]
    compute, step = (sum(getattr(one, name) for one in slowest) for name in ("compute", "step"))
    total = beside.plus(max(ranks)._replace(compute=compute, step=step))
    return Step(total, 1 - sum(rank.step for rank in ranks) / len(ranks) / step)


def step_of(row: Row, parts: Parts, microbatches: int, actions: Actions | None = None) -> Step:
    """What a step costs.

    - `parts`: of the row's program.
    - `microbatches`: how many there are.
    - `actions`: a timetable other than that of the row, of the same kinds of actions.
    """
    beside = parts.at(row, microbatches)
    if not row.ends:
        return Step(beside, lockstep_of(row, microbatches).bubble_share)
    if actions is not None:
        ((_, tick),) = (loop for loop in parts.loops if loop[0] in trips_of(row, row.microbatches))
        beside = beside.plus(tick, actions.steps - trips_of(row, microbatches)[0])
    return by_branches(beside, parts.branches, plan_of(row, microbatches, actions))


def bubble_of(row: Row) -> float:
    """The idle share of a schedule, where every action takes one step."""
    if row.ends:
        return timetable_of(row.schedule, row.microbatches).idle_share
    return lockstep_of(row, row.microbatches).bubble_share


def in_step(microbatches: int, *, split: bool) -> Actions:
    """The lockstep 1F1B as a timetable: forward visits in one step, backward ones in the next.

    - `split`: whether the weights' gradients of a microbatch are computed on all ranks in one step,
      after the first stage has the gradient of its input: (M + S - 1) · (F + I) + M · W.
    """
    columns: list[tuple[Action | None, ...]] = []
    actions = actions_of(OneForwardOneBackward(STAGES, microbatches))
    for column in zip(*actions.rows, strict=True):
        first = column[0]
        kinds = {"F": "F", "B": "I" if split else "B"}
        columns.append(tuple(one and one._replace(kind=kinds[one.kind]) for one in column))
        if split and first is not None and first.kind == "B":
            own = [Action(rank, "W", first.microbatch) for rank in range(STAGES)]
            columns.append(tuple(own))
    return Actions(tuple(zip(*columns, strict=True)))


# ---- results -------------------------------------------------------------------------------------


def to_json(row: Row, result: Measurement) -> dict[str, Any]:
    """What is written down of a compiled row."""
    parts = Parts.of(result.hlo, row)
    return {
        "memory": result.memory.to_json(),
        "beside": parts.beside._asdict(),
        "loops": [[trips, trip._asdict()] for trips, trip in parts.loops],
        "ends": parts.ends._asdict(),
        "branches": {name: one._asdict() for name, one in parts.branches.items()},
        "versions": {k: v for k, v in result.versions.items() if v},
    }


def parts_of(found: Mapping[str, Any]) -> Parts:
    """The inverse, of what is written down of the program."""
    return Parts(
        Cost(**found["beside"]),
        tuple((trips, Cost(**trip)) for trips, trip in found["loops"]),
        Cost(**found["ends"]),
        {name: Cost(**one) for name, one in found["branches"].items()},
    )


Results = Mapping[str, Mapping[str, Any]]
ABOUT = """# Timetables beside the lockstep loops

Made by `python benchmarks/timetables.py`: training steps of mixtral-small on stage=4,fsdp=2 in auto
mode, microbatches of two sequences, compiled without hardware. No hardware has run them. `loop` is
`lockstep` where all stages do the same at a tick (`schedule=circular` and `schedule=1f1b`). Else it
says who runs embedding, head and loss while ranks carry out a timetable by branches
(`run_timetable`, `ends_on`).

No timetable is a schedule of the config, because none of them wins. With 1f1b and interleaved a
rank computes less than in the lockstep loop, where it computes in the bubble too, but no step is
over sooner. In 1F1B one rank
goes forward while its neighbour goes back, so that each step takes as long as a backward visit,
which with remat is almost three forward ones. zb-h1 and zb-v need visits that take equally long,
and here W computes again what I has computed. Memory is a little less than in lockstep with one
chunk, and not with two: with remat full a visit keeps little, so that fewer visits kept save
little. Timetables stay in reach by `run_timetable`.

How a program with branches is counted: each computation that a conditional runs is measured as if
it were a program, and taken from the whole as often as the lab has counted it (operations and
collectives of every branch, the time of the longest). What is left is what all ranks do. Then
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
    return step_of(row, parts_of(results[row.name]), row.microbatches)


def branch_lines(results: Results) -> Iterator[str]:
    """The table of branches."""
    yield "| platform | schedule | loop | chunks | remat | what | GFLOP | traffic, MB | step, ms |"
    yield "|---" * 6 + "|--:" * 3 + "|"
    for row in ROWS:
        if not row.ends or row.microbatches != 8 or row.name not in results:
            continue
        parts = parts_of(results[row.name])
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
    of_loop, of_whole, of_split = (parts_of(results[row.name]) for row in (loop, whole, split))
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
    idle = parts_of(results[turns.name]).branches["idle"].step * 1e3
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
        results[row.name] = to_json(row, compiled(row))
        write_text(str(RESULTS), json.dumps(results, indent=1) + "\n")
        write_text(str(RESULTS.with_suffix(".md")), document(results))
        print(row_line(row, results), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
