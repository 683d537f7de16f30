"""Estimates the time of a compiled program from its text."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nnx_pipeline.lab._hlo.cost import Unread, collective_of, unread
from nnx_pipeline.lab._hlo.dataflow import Flow
from nnx_pipeline.lab._hlo.loops import Runs, Shares, branch_shares, loop_trips, running
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._timing import xla_model
from nnx_pipeline.lab._timing.cost import Cost, Costs, done_of
from nnx_pipeline.lab._timing.links import Links, called_inside, collectives_in
from nnx_pipeline.lab._timing.result import Basis, Pass, Time, TimeRow
from nnx_pipeline.lab._timing.schedule import BusySeconds, ScheduleWalk
from nnx_pipeline.lab._tracing.jaxpr import RECOMPUTED
from nnx_pipeline.lab.attribution._origins import Origins
from nnx_pipeline.lab.errors import counted

Key = tuple[str, str]  # an instruction: the names of its computation and of itself

AT_LINKS = "XLA's model has no figure, and its bytes count at the rate of the links"


@dataclass(frozen=True)
class Estimate:
    module: Module
    runs: Runs
    links: Links
    shares: Shares | None = None
    one_line: frozenset[str] = frozenset()  # as for `Origins`

    @property
    def time(self) -> Time:
        """The estimate; what depends on an instruction of `unread` is None."""
        span, device = self._walk.step(), self.links.device
        whole, all_sent = not self._unknown_compute, not self._unknown_collectives
        known = whole and all_sent
        busy = span.compute + span.stalled
        at_peak = self._seconds_at_peak
        is_roofline, is_open = self._basis == "roofline", bool(self._guessed)
        counts_least = is_roofline or bool(self.bounds)
        return Time(
            basis=self._basis,
            known_seconds=span.compute,
            compute_seconds=span.compute if whole else None,
            collective_seconds=span.collective if all_sent else None,
            exposed_seconds=span.exposed if known else None,
            memory_wait_seconds=span.stalled if known else None,
            host_seconds=span.to_host + span.from_host if whole else None,
            step_seconds=span.total if known else None,
            range_seconds=(max(busy, span.collective), busy + span.collective) if known else None,
            hfu=at_peak / span.total if known and at_peak is not None and span.total else None,
            launches=sum(row.launches for row in self.rows) if whole else None,
            is_lower_bound=is_roofline and not is_open,
            is_partial=counts_least and not is_roofline and not is_open,
            is_open=counts_least and is_open,
            peak_flops=device.flops["bf16"],
            rows=self.rows,
        )

    @cached_property
    def rows(self) -> tuple[TimeRow, ...]:
        found: dict[tuple[str | None, str | None, str, Pass], list[float]]
        found = defaultdict(lambda: [0.0, 0])
        origins = Origins(Flow(self.module), self.one_line)
        for computation, instruction, times in self._taken():
            cost = self._costs.get((computation.name, instruction.name))
            if isinstance(cost, Cost):
                line = origins.of_work(instruction)
                # A copy that the compiler made has no name; it is of the pass of its loop.
                loop = None if instruction.op_name else origins.flow.loop_of(instruction.name)
                row = found[*line, cost.kind, pass_of(loop or instruction)]
                row[0] += times * cost.seconds
                row[1] += times
        rows = (
            TimeRow(*key, seconds=seconds, launches=int(count))
            for key, (seconds, count) in found.items()
        )
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    @property
    def unread(self) -> tuple[Unread, ...]:
        return (*self._unknown_compute, *self._unknown_collectives)

    @property
    def _basis(self) -> Basis:
        if self.links.device.clock is not None:
            return "cycles"
        return "xla-model" if self._cost_model.by_xla else "roofline"

    @property
    def assumed(self) -> tuple[Unread, ...]:
        """The instructions of which XLA's model has no figure, so that a rule stands for it."""
        return tuple(
            unread(instruction, "time_rule", times, reason)
            for computation, instruction, times in self._taken()
            if times and (reason := self._assumed(computation, instruction))
        )

    @cached_property
    def bounds(self) -> tuple[Unread, ...]:
        """The instructions of which the estimate has no more than the least that they take."""
        return tuple(
            unread(instruction, "time_bound", times, reason)
            for computation, instruction, times in self._taken()
            if times and (reason := self._bound(computation, instruction))
        )

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._guessed:
            return ()
        which = counted(self._guessed, "conditional")
        return (
            f"the estimated time takes the longest branch of {which}, and less where another runs",
        )

    @cached_property
    def _guessed(self) -> int:
        """How many conditionals may run another branch than the longest, which takes less."""
        return sum(
            bool(times) and self._walk.guessed(computation, instruction)
            for computation, instruction, times in self._taken()
        )

    def _assumed(self, computation: Computation, instruction: Instruction) -> str:
        key = computation.name, instruction.name
        cost = self._costs.get(key)
        if isinstance(cost, Cost) and cost.assumed:
            return cost.assumed
        if not self._cost_model.by_xla or not self._sent.get(key):
            return ""
        parts = collectives_in(self.module, computation, instruction)
        said = (xla_model.collective_seconds(found, instruction) for _, found in parts)
        return AT_LINKS if None in said else ""

    def _bound(self, computation: Computation, instruction: Instruction) -> str:
        cost = self._costs.get((computation.name, instruction.name))
        if isinstance(cost, Cost):
            return cost.bound
        return self._cost_model.bound_beside(computation, instruction)

    @cached_property
    def _unknown_compute(self) -> tuple[Unread, ...]:
        found = []
        for computation, instruction, times in self._all():
            cost = self._costs[computation.name, instruction.name]
            if isinstance(cost, Cost) and times is None:
                cost = "it runs an unknown number of times"
            if isinstance(cost, str):
                found.append(unread(instruction, "time", times, cost))
        return tuple(found)

    @cached_property
    def _unknown_collectives(self) -> tuple[Unread, ...]:
        found = []
        for computation, instruction, times in self._all():
            if self._sent[computation.name, instruction.name] is None:
                reason = "a collective over devices or links that are not known"
                found.append(unread(instruction, "time", times, reason))
            elif times is None and collectives_in(self.module, computation, instruction):
                reason = "a collective that runs an unknown number of times"
                found.append(unread(instruction, "time", None, reason))
        return tuple(found)

    @cached_property
    def _seconds_at_peak(self) -> float | None:
        total = 0.0
        for computation, instruction, times in self._taken():
            found = self._cost_model.at_peak(computation, instruction)
            if isinstance(found, str):
                return None
            total += times * found
        return total

    def _all(self) -> Iterator[tuple[Computation, Instruction, int | None]]:
        every = running(self.module, self.runs)
        return (one for one in every if one[0].name not in self._parts)

    def _taken(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """The same, for the branches that the walk takes and loops of a known number of trips."""
        return running(self.module, self._walk.runs())

    @cached_property
    def _parts(self) -> frozenset[str]:
        every = self.module.instructions()
        return frozenset(part for _, instruction in every for part in called_inside(instruction))

    @cached_property
    def _walk(self) -> ScheduleWalk:
        shares = branch_shares(self.module) if self.shares is None else self.shares
        return ScheduleWalk(self.module, loop_trips(self.module), shares, self._work)

    @cached_property
    def _cost_model(self) -> Costs:
        return Costs(self.module, self.links.device)

    @cached_property
    def _costs(self) -> dict[Key, Cost | str | None]:
        return {
            (home.name, item.name): self._cost_model.of(home, item) for home, item, _ in self._all()
        }

    @cached_property
    def _sent(self) -> dict[Key, float | None]:
        return {(home.name, item.name): self._on_links(home, item) for home, item, _ in self._all()}

    def _work(self, computation: Computation, instruction: Instruction) -> BusySeconds:
        key = computation.name, instruction.name
        cost = self._costs.get(key)
        return BusySeconds(
            cost.seconds if isinstance(cost, Cost) else 0.0,
            self._sent.get(key) or 0.0,
            self._cost_model.transfer(computation, instruction),
        )

    def _on_links(self, computation: Computation, instruction: Instruction) -> float | None:
        total = 0.0
        for home, found in collectives_in(self.module, computation, instruction):
            done, in_fusion = done_of(home, found), home.name in self._parts
            kind, size = collective_of(home, done, in_fusion=in_fusion)
            seconds = self.links.takes(found, kind, size)
            if self._cost_model.by_xla and self.links.are_as_in_xla and seconds != 0:
                said = xla_model.collective_seconds(found, instruction)
                seconds = seconds if said is None else said
            if seconds is None:
                return None
            total += seconds
        return total


def pass_of(instruction: Instruction) -> Pass:
    if RECOMPUTED in instruction.op_name:
        return "recomputed"
    return "backward" if "transpose(" in instruction.op_name else "forward"
