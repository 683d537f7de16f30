"""Walks a program in the order in which it runs, and overlaps what it lets overlap.

Compute, collectives on the links, those between slices, and transfers (between memory and chip, to
the host, from it) go on beside each other, each kind one after the other. A collective that is one
instruction stops the compute. A start and a done, or a recv and its done, run beside what is
between them, and the compute waits at the done. The TPU compiler also spreads a collective over
several fusions of one `chain_id`: it starts with the first, and the last waits. A loop takes its
trips, a conditional the shares of its branches, or the longest.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from nnx_pipeline.lab._hlo.cost import CHAIN
from nnx_pipeline.lab._hlo.loops import Shares
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._timing.links import collectives_in

Way = Literal["on-chip", "to host", "from host"]  # what a transfer goes over
Network = Literal["links", "slices"]  # what a collective goes over: links, or between slices


class Transfer(NamedTuple):
    """A transfer that a start begins, and that its done waits for."""

    way: Way
    seconds: float


class BusySeconds(NamedTuple):
    """Seconds for which an instruction keeps the compute and the links busy, and its transfer."""

    compute: float = 0.0
    links: float = 0.0
    transfer: Transfer | None = None


@dataclass
class Duration:
    """How long a part of a program takes, in seconds."""

    total: float = 0.0  # from its beginning to its end
    compute: float = 0.0  # in which instructions run
    collective: float = 0.0  # in which the links are in use
    exposed: float = 0.0  # in which the compute waits for the links
    stalled: float = 0.0  # in which it waits for transfers of the memory
    to_host: float = 0.0
    from_host: float = 0.0

    def times(self, runs: Fraction | int) -> "Duration":
        """The span of so many runs, one after the other."""
        return Duration(*(float(runs) * part for part in dataclasses.astuple(self)))


@dataclass
class _Clock(Duration):
    """What was spent until now (`total`), and when the links and the transfers are free."""

    links_free: dict[Network, float] = field(default_factory=dict)
    free: dict[Way, float] = field(default_factory=dict)  # when the next transfer may begin
    sent: dict[str, float] = field(default_factory=dict)  # ends of collectives, by their start
    moved: dict[str, float] = field(default_factory=dict)  # ends of transfers

    def run(self, seconds: float) -> None:
        self.total += seconds
        self.compute += seconds

    def send(self, name: str, seconds: float, over: Network = "links") -> None:
        self.links_free[over] = max(self.total, self.links_free.get(over, 0.0)) + seconds
        self.collective += seconds
        self.sent[name] = self.links_free[over]

    def move(self, name: str, transfer: Transfer) -> None:
        way, seconds = transfer
        self.free[way] = max(self.total, self.free.get(way, 0.0)) + seconds
        self.to_host += seconds * (way == "to host")
        self.from_host += seconds * (way == "from host")
        self.moved[name] = self.free[way]

    def wait(self, name: str) -> None:
        self._expose(self.sent.pop(name, self.total))
        waited = max(0.0, self.moved.pop(name, self.total) - self.total)
        self.total += waited
        self.stalled += waited

    def rename(self, old: str, new: str) -> None:
        for finishes in (self.sent, self.moved):
            if old in finishes:
                finishes[new] = finishes.pop(old)

    def add(self, span: Duration) -> None:
        """A loop, a branch or a call, in which everything that is started also ends."""
        if span.collective:
            # The links carry one collective after the other.
            self._expose(self.links_free.get("links", self.total))
        for name, seconds in dataclasses.asdict(span).items():
            setattr(self, name, getattr(self, name) + seconds)

    def span(self) -> Duration:
        for name in [*self.sent, *self.moved]:
            self.wait(name)
        return Duration(*(getattr(self, part.name) for part in dataclasses.fields(Duration)))

    def _expose(self, end: float) -> None:
        waited = max(0.0, end - self.total)
        self.total += waited
        self.exposed += waited


@dataclass(frozen=True)
class ScheduleWalk:
    module: Module
    trips: Mapping[tuple[str, str], int | None]  # from `loop_trips`; unknown loops are left out
    shares: Shares
    work: Callable[[Computation, Instruction], BusySeconds]  # of an instruction itself
    _spans: dict[str, Duration] = field(default_factory=dict, repr=False)

    def step(self) -> Duration:
        return self._span(self.module.entry)

    def guessed(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether a conditional takes another time where another branch than the longest runs."""
        if instruction.opcode != "conditional":
            return False
        if self.shares.get((computation.name, instruction.name)) is not None:
            return False
        return len({self._span(name).total for name in instruction.called()}) > 1

    def runs(self) -> dict[str, int]:
        """How often each computation runs on the way that the walk takes."""
        counts: dict[str, Fraction] = {}
        pending = [(self.module.entry, Fraction(1))]
        while pending:
            name, times = pending.pop()
            counts[name] = counts.get(name, Fraction(0)) + times
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                inside = self._inside(computation, instruction)
                pending += [(callee, times * runs) for callee, runs in inside]
        return {name: int(times) for name, times in counts.items()}

    def _inside(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[str, Fraction | int]]:
        called = instruction.called()
        if instruction.opcode == "while":
            trips = self.trips.get((computation.name, instruction.name))
            if trips is None:
                return []
            (condition,), (body,) = instruction.called("condition"), instruction.called("body")
            return [(condition, trips + 1), (body, trips)]
        if instruction.opcode == "conditional":
            shares = self.shares.get((computation.name, instruction.name))
            if shares is not None:
                return list(zip(called, shares, strict=True))
            return [(max(called, key=lambda name: self._span(name).total), 1)]
        return [(called[0], 1)] if instruction.opcode == "call" else []

    def _span(self, name: str) -> Duration:
        if name not in self._spans:
            clock, computation = _Clock(), self.module.computations[name]
            chains = _chains(self.module, computation)
            for instruction in computation.instructions.values():
                self._advance(clock, computation, instruction, chains.get(instruction.name))
            self._spans[name] = clock.span()
        return self._spans[name]

    def _advance(
        self,
        clock: _Clock,
        computation: Computation,
        instruction: Instruction,
        chain: tuple[str, str] | None,
    ) -> None:
        opcode, name = instruction.opcode, instruction.name
        for callee, times in self._inside(computation, instruction):
            clock.add(self._span(callee).times(times))
        if opcode.endswith("-done"):
            clock.wait(instruction.operands[0])
        elif opcode.endswith("-update"):
            clock.rename(instruction.operands[0], name)
        else:
            compute, links, transfer = self.work(computation, instruction)
            if transfer is not None:
                clock.move(name, transfer)
                if not opcode.endswith("-start"):
                    clock.wait(name)
            if chain is None and links:
                clock.send(name, links, "slices" if opcode == "recv" else "links")
                if not opcode.endswith("-start") and opcode != "recv":
                    clock.wait(name)
            elif chain is not None and chain[1] == "first":
                clock.send(chain[0], links)
            clock.run(compute)
            if chain is not None and chain[1] == "last":
                clock.wait(chain[0])


def _chains(module: Module, computation: Computation) -> dict[str, tuple[str, str]]:
    """The instructions that carry parts of one collective: its chain, and which part each is."""
    members: dict[str, list[str]] = {}
    for instruction in computation.instructions.values():
        for _, found in collectives_in(module, computation, instruction)[:1]:
            text = found.attributes.get("frontend_attributes", "")
            if named := CHAIN.search(text):
                members.setdefault(named[1], []).append(instruction.name)
    parts: dict[str, tuple[str, str]] = {}
    for chain, names in members.items():
        if len(names) > 1:
            parts |= dict.fromkeys(names, (chain, "between"))
            parts[names[0]], parts[names[-1]] = (chain, "first"), (chain, "last")
    return parts
