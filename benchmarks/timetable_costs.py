"""Counts what the step of a program with branches costs, by the branches that its ranks take.

A compiled program says what a branch costs, and its timetable says which rank takes it how often.
So the program is taken apart (`Parts`): what each branch of its conditionals costs when it runs
once, what a tick costs beside them, and what runs outside the loop. A rank's operations and traffic
are those of the branches that it takes. The time of a tick is that of the rank that takes longest,
because ranks exchange activations with their neighbours after every tick.

`timetables.py` compiles the programs, and makes a page of what is counted here.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nnx_pipeline import MeshConfig
from nnx_pipeline.experiments.timetables import make_timetable
from nnx_pipeline.experiments.timetables.executor._plan import (
    Branch,
    TimetablePlan,
    make_timetable_plan,
)
from nnx_pipeline.lab._hlo.cost import collective_counts, products_of
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import Instruction, Module, parse
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab._timing.estimate import Estimate
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.pipeline._timetable.actions import (
    BACKWARD,
    OF_INPUT,
    OF_WEIGHTS,
    Actions,
    actions_of,
)
from nnx_pipeline.pipeline.schedule import (
    CircularSchedule,
    OneForwardOneBackward,
    Schedule,
    make_schedule,
)

MESH, STAGES = "stage=4,fsdp=2", 4


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


def timetable_of(schedule: str, microbatches: int) -> Actions:
    """The timetable called `schedule` for the ranks of the mesh."""
    repeats = 2 if schedule == "interleaved" else 1
    return make_timetable(schedule, ranks=STAGES, microbatches=microbatches, repeats=repeats)


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
        bare, conditionals = _without_conditionals(module)
        links = _links(Platform.parse(row.platform))
        ends, switch = Cost(), ()
        for conditional in conditionals:
            branches = tuple(_cost(module, links, name) for name in conditional.called())
            if len(branches) > 2:
                switch = branches
            else:
                ends = ends.plus(max(branches, key=lambda one: one.step))
        runs, entry = executions(bare), bare.computations[bare.entry].instructions.values()
        bodies = [item.called("body")[0] for item in entry if item.opcode == "while"]
        loops = tuple((runs[one] or 0, _cost(bare, links, one)) for one in bodies)
        beside = _cost(bare, links, bare.entry)
        names = names_of(plan_of(row, row.microbatches)) if row.ends else []
        return cls(beside, loops, ends, dict(zip(names, switch, strict=True)))

    def at(self, row: Row, microbatches: int) -> Cost:
        """What a step of the same loop with so many microbatches costs, without its branches."""
        total = self.beside.plus(self.ends, microbatches)
        trips = dict(zip(trips_of(row, row.microbatches), trips_of(row, microbatches), strict=True))
        for before, trip in self.loops:
            total = total.plus(trip, trips.get(before, before) - before)
        return total


def _without_conditionals(module: Module) -> tuple[Module, list[Instruction]]:
    """The program with nothing in the place of its conditionals, and the conditionals that run."""
    runs = executions(module)
    found: list[Instruction] = []
    computations = dict(module.computations)
    for name, computation in module.computations.items():
        instructions = dict(computation.instructions)
        for item in computation.instructions.values():
            if item.opcode == "conditional":
                found += [item] if name in runs else []
                instructions[item.name] = dataclasses.replace(item, opcode="tuple", attributes={})
        computations[name] = dataclasses.replace(computation, instructions=instructions)
    return dataclasses.replace(module, computations=computations), found


def _cost(module: Module, links: Links, entry: str) -> Cost:
    """The cost of one computation with all that it calls, as the lab counts it."""
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


def plan_of(row: Row, microbatches: int, actions: Actions | None = None) -> TimetablePlan:
    """The plan of a timetable, by default that of the row."""
    actions = actions or timetable_of(row.schedule, microbatches)
    return make_timetable_plan(actions, [0] * actions.stages, "own" if row.ends == "own" else "all")


def names_of(plan: TimetablePlan) -> list[str]:
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


def by_branches(beside: Cost, branches: Mapping[str, Cost], plan: TimetablePlan) -> Step:
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
    actions = actions_of(OneForwardOneBackward(STAGES, microbatches))
    if not split:
        return actions
    back = actions.kind == BACKWARD
    (after,) = np.nonzero(back[0])
    kind = np.insert(np.where(back, OF_INPUT, actions.kind), after + 1, OF_WEIGHTS, axis=1)
    stage = np.insert(actions.stage, after + 1, np.arange(STAGES)[:, None], axis=1)
    of_first = actions.microbatch[0, after]
    return Actions(kind, stage, np.insert(actions.microbatch, after + 1, of_first, axis=1))


def to_json(parts: Parts) -> dict[str, Any]:
    """What is written down of a program."""
    return {
        "beside": parts.beside._asdict(),
        "loops": [[trips, trip._asdict()] for trips, trip in parts.loops],
        "ends": parts.ends._asdict(),
        "branches": {name: one._asdict() for name, one in parts.branches.items()},
    }


def from_json(found: Mapping[str, Any]) -> Parts:
    """The inverse."""
    return Parts(
        Cost(**found["beside"]),
        tuple((trips, Cost(**trip)) for trips, trip in found["loops"]),
        Cost(**found["ends"]),
        {name: Cost(**one) for name, one in found["branches"].items()},
    )
