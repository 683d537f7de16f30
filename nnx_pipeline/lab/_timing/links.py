"""How long a collective takes on the links between its devices.

With n devices in a group, each device receives

    all-gather      (n - 1) / n of the result
    reduce-scatter  (n - 1) times the result, which is one device's part
    all-reduce      as both of them: 2 (n - 1) / n of the result
    all-to-all      (n - 1) / n of the result

at the bandwidth of the links that the group has to itself (Chan et al., "Collective communication:
theory, practice, and experience", 2007). What that is:

- A switch gives each device its link. Where each pair of n GPUs has a link, a device has n - 1 of
  them, and a permutation uses one.
- A group that lies along lines of a torus sends along all of its dimensions at once, both ways
  round where the line closes. Of an all-to-all half of the data crosses the middle of each
  dimension: n / 8 of a device's data go over every link of a closed line of n devices, n / 4 over
  the middle link of a line with ends, and the slowest dimension decides. A permutation takes as
  long as its busiest link: each pair is routed along one dimension after the other, the shorter
  way.
- A group on h hosts with m devices on each is a collective within every host, and m at a time
  between the hosts, of each device with its counterparts over its own card:

                      within, n = m    between, n = h
      all-gather      result           result / m
      reduce-scatter  h × result       result
      all-reduce      result           result / m
      all-to-all      result / h       result

  Both go on at once, one piece after the other: the slower decides, and the latencies add up.
- The same holds of chips that are two devices, within a chip and between chips, where each device
  has its share of the links of a chip.
- Between slices of a TPU a collective is an instruction of its own, from one device of each slice.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from nnx_pipeline.lab._hlo.cost import COLLECTIVES
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import plain
from nnx_pipeline.lab._hlo.slices import kind_between_slices, slices_joined
from nnx_pipeline.lab._timing.devices import Device
from nnx_pipeline.lab._timing.groups import Groups, groups_of, pairs_of

Place = tuple[int, ...]


def collectives_in(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """The collectives that an instruction is, starts, or has fused, each with what holds it."""
    return [
        (home, found)
        for home, found in _inside(module, computation, instruction)
        if _is_collective(found)
    ]


def _is_collective(instruction: Instruction) -> bool:
    if instruction.opcode == "recv":
        return bool(kind_between_slices(instruction))
    is_later_part = instruction.opcode.endswith(("-done", "-update"))
    return plain(instruction.opcode).removeprefix("ragged-") in COLLECTIVES and not is_later_part


def _inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    yield computation, instruction
    for home, item in module.instructions(called_inside(instruction)):
        yield from _inside(module, home, item)


def called_inside(instruction: Instruction) -> tuple[str, ...]:
    """The computations that are part of an instruction, or that it starts and runs beside others.
    Those of a loop, a branch or a call run instruction by instruction instead."""
    opcode = instruction.opcode
    is_whole = plain(opcode) in ("fusion", "async") or opcode.endswith("-start")
    return instruction.called() if is_whole else ()


@dataclass(frozen=True)
class _Line:
    """The part of a group that lies along one dimension."""

    members: int  # how many different coordinates it has there
    stride: int  # between two neighbours, and so the number of groups that share a link
    ways: int  # 2 where the line is closed, 1 where it has ends


class _Sent(NamedTuple):
    seconds: float = 0.0  # in which data are sent
    latency: float = 0.0

    def beside(self, other: "_Sent") -> "_Sent":
        return _Sent(max(self.seconds, other.seconds), self.latency + other.latency)


_IN_XLA = 8  # GPUs of a host in XLA's model, whatever the topology says


@dataclass(frozen=True)
class Links:
    device: Device
    shape: Place  # the sizes of the slice; of a switch, the number of devices
    # Coordinates of each device that the program numbers, in the order of the mesh, with the number
    # in its chip where a chip is two. Of a TPU with several slices these are the devices of one.
    places: tuple[Place, ...]
    hosts: tuple[int, ...] = ()  # of each device; () where all are on one, or in one slice

    @classmethod
    def of(cls, device: Device, topology: str, devices: Sequence[jax.Device]) -> "Links":
        """The links between the devices of the mesh, in its order; `topology` is that of a
        platform."""
        shape = tuple(map(int, topology.partition("*")[0].split("x")))
        if not device.dimensions:
            places = tuple((number,) for number in range(len(devices)))
            return cls(device, shape, places, tuple(each.process_index for each in devices))
        slices = [getattr(each, "slice_index", None) for each in devices]
        own = [each for each, slice in zip(devices, slices, strict=True) if slice == slices[0]]
        axes = len(shape)
        if device.cores > 1:
            return cls(device, shape, tuple((*one.coords[:axes], one.core_on_chip) for one in own))
        return cls(device, shape, tuple(tuple(one.coords[:axes]) for one in own))

    @property
    def are_as_in_xla(self) -> bool:
        """Whether XLA's model of collectives knows these hosts: it puts eight GPUs on each."""
        counts = set(Counter(self.hosts).values())
        return len(set(self.hosts)) < 2 or counts == {_IN_XLA}

    def takes(self, collective: Instruction, kind: str, size: int) -> float | None:
        """How long an instruction takes that is a collective of this kind with a result of so many
        bytes per device; None where nothing is known of its devices or links."""
        if collective.opcode == "recv":
            return self._between_slices(kind, size, slices_joined(collective))
        if kind == "collective-permute":
            joined = pairs_of(collective)
        else:
            joined = groups_of(collective, len(self.places))
        return None if joined is None else self.seconds(kind, size, joined)

    def seconds(self, kind: str, size: int, groups: Groups) -> float | None:
        """The same over the groups of `groups_of` or the pairs of a permutation."""
        if any(not 0 <= number < len(self.places) for group in groups for number in group):
            return None
        if self.device.network is None and any(len(self._by_host(one)) > 1 for one in groups):
            return None
        if kind == "collective-permute":
            return self._permutation(size, groups)
        return max((sum(self._group(kind, size, group)) for group in groups), default=0.0)

    def _between_slices(self, kind: str, size: int, slices: int | None) -> float | None:
        if slices is None or self.device.network is None:
            return None
        if kind == "collective-permute":
            return size / self.device.network + self.device.launch
        return sum(self._ring(kind, size, slices, self.device.network))

    def _by_host(self, group: Sequence[int]) -> list[list[int]]:
        if not self.hosts:
            return [list(group)]
        parts: dict[int, list[int]] = {}
        for number in group:
            parts.setdefault(self.hosts[number], []).append(number)
        return list(parts.values())

    def _group(self, kind: str, size: float, group: Sequence[int]) -> _Sent:
        parts = self._by_host(group)
        within, between = _levels(kind, size, len(parts), min(map(len, parts)))
        inside = max(self._in_host(kind, within, part) for part in parts)
        return inside.beside(self._ring(kind, between, len(parts), self.device.network or 0.0))

    def _in_host(self, kind: str, size: float, group: Sequence[int]) -> _Sent:
        """A collective of GPUs in one host, or of devices in one slice of a TPU."""
        if not self.device.dimensions:
            links = max(1, len(group) - 1) if self.device.has_pairs else 1
            return self._ring(kind, size, len(group), links * self.device.link)
        chips = [*dict.fromkeys(map(self._chip, group))]
        cores = len(group) // len(chips)
        within, between = _levels(kind, size, len(chips), cores)
        inside = self._ring(kind, within, cores, self.device.between_cores)
        return inside.beside(self._torus(kind, between, chips))

    def _ring(self, kind: str, size: float, members: int, rate: float) -> _Sent:
        if members < 2:
            return _Sent()
        latency = self.device.launch * (members - 1) * (2 if kind == "all-reduce" else 1)
        return _Sent(_received(kind, size, members) / rate, latency)

    def _torus(self, kind: str, size: float, chips: Sequence[Place]) -> _Sent:
        if len(chips) < 2:
            return _Sent()
        lines, link = self._lines(chips), self.device.link / self.device.cores
        latency = self.device.launch * sum(line.members - 1 for line in lines)
        if kind == "all-to-all":
            crossed = max(line.members * line.stride / (4 * line.ways) for line in lines)
            return _Sent(crossed * size / link, latency)
        rate = link * sum(line.ways / line.stride for line in lines)
        received = _received(kind, size, len(chips))
        return _Sent(received / rate, latency * (2 if kind == "all-reduce" else 1))

    def _lines(self, chips: Sequence[Place]) -> list[_Line]:
        lines = []
        for at, size in enumerate(self.shape):
            seen = sorted({chip[at] for chip in chips})
            if len(seen) > 1:
                stride = min(b - a for a, b in itertools.pairwise(seen))
                closed = self._closes(size) and stride * len(seen) == size
                lines.append(_Line(len(seen), stride, 2 if closed else 1))
        return lines

    def _closes(self, size: int) -> bool:
        return size % self.device.closes_at == 0

    def _chip(self, number: int) -> Place:
        return self.places[number][: len(self.shape)]

    def _permutation(self, size: int, pairs: Groups) -> float:
        device, found = self.device, [0.0]
        moved = [(source, target) for source, target in pairs if source != target]
        near = [pair for pair in moved if len(self._by_host(pair)) == 1]
        if len(near) < len(moved) and device.network:
            found.append(size / device.network + device.launch)
        if near and not device.dimensions:
            found.append(size / device.link + device.launch)
        if near and device.dimensions:
            routes = [list(self._route(*map(self._chip, pair))) for pair in near]
            load = Counter(link for route in routes for link in route)
            hops = max(map(len, routes))
            found.append(max(load.values(), default=0) * size / device.link + hops * device.launch)
            if any(self.places[source][-1] != self.places[target][-1] for source, target in near):
                found.append(self._core_to_core(size))
        return max(found)

    def _core_to_core(self, size: int) -> float:
        if self.device.cores == 1:
            return 0.0
        return size / self.device.between_cores + self.device.launch

    def _route(self, place: Place, target: Place) -> Iterator[tuple[Place, int, int]]:
        here = list(place)
        for at, size in enumerate(self.shape):
            distance = target[at] - here[at]
            if self._closes(size) and abs(distance) > size / 2:
                distance -= int(math.copysign(size, distance))
            step = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                yield (*here,), at, step
                here[at] = (here[at] + step) % size


def _received(kind: str, size: float, members: int) -> float:
    """Bytes that each device of a group receives."""
    if kind == "reduce-scatter":
        return (members - 1) * size
    return (2 if kind == "all-reduce" else 1) * (members - 1) / members * size


def _levels(kind: str, size: float, outer: int, inner: int) -> tuple[float, float]:
    """The bytes of the result of a collective within each of `outer` parts of a group, and of the
    collective between these parts, in each of which the group has `inner` devices."""
    if kind == "reduce-scatter":
        return outer * size, size
    return (size / outer, size) if kind == "all-to-all" else (size, size / inner)
