"""How long a collective takes on the links between devices.

A group that lies along lines of a torus sends along all of its dimensions at once, both ways round
where the line closes. With n devices in a group, each device receives

    all-gather      (n - 1) / n of the result
    reduce-scatter  (n - 1) times the result, which is one device's part
    all-reduce      as both of them: 2 (n - 1) / n of the result

at the bandwidth of the links that the group has to itself (Chan et al., "Collective communication:
theory, practice, and experience", 2007). Of an all-to-all half of the data crosses the middle of
each dimension: n / 8 of a device's data go over every link of a closed line of n devices, n / 4
over the middle link of a line with ends, and the slowest dimension decides. A permutation takes as
long as its busiest link: each pair is routed along one dimension after the other, the shorter way.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from nnx_pipeline.lab._timing.collectives import Groups
from nnx_pipeline.lab._timing.devices import Device

Place = tuple[int, ...]


@dataclass(frozen=True)
class Links:
    """The links of one slice of devices."""

    device: Device
    shape: Place  # the sizes of the slice; of a switch, the number of devices
    places: tuple[Place, ...]  # coordinates of each device, in the order of the mesh

    @classmethod
    def of(cls, device: Device, topology: str, devices: Sequence[jax.Device]) -> Links:
        """The links between devices of JAX in the order of the program's mesh; `topology` is the
        shape of a TPU slice, such as `2x2x2`, or the number of GPUs."""
        shape = tuple(map(int, topology.split("x")))
        if not device.dimensions:
            return cls(device, shape, tuple((number,) for number in range(len(devices))))
        return cls(device, shape, tuple(tuple(each.coords)[: len(shape)] for each in devices))

    def seconds(self, kind: str, size: int, groups: Groups) -> float | None:
        """How long a collective takes; None where nothing is known of the links that it needs.

        - `size`: bytes of its result on one device.
        - `groups`: from `groups_of`; the pairs of a `collective-permute`.
        """
        island = self.device.island
        if any(not 0 <= number < len(self.places) for group in groups for number in group):
            return None
        if island and any(len({number // island for number in group}) > 1 for group in groups):
            return None
        if kind == "collective-permute":
            return self._permutation(size, groups)
        return max((self._group(kind, size, group) for group in groups), default=0.0)

    def _group(self, kind: str, size: int, group: Sequence[int]) -> float:
        members = len(group)
        if members < 2:
            return 0.0
        lines, link = self._lines(group), self.device.link
        latency = self.device.launch * sum(line.members - 1 for line in lines)
        share = (members - 1) / members
        if kind == "all-to-all" and self.device.dimensions:
            crossed = max(line.members * line.stride / (4 * line.ways) for line in lines)
            return crossed * size / link + latency
        received = {
            "all-gather": share,
            "reduce-scatter": members - 1,
            "all-reduce": 2 * share,
            "all-to-all": share,
        }[kind]
        rate = link * sum(line.ways / line.stride for line in lines)
        return received * size / rate + latency * (2 if kind == "all-reduce" else 1)

    def _lines(self, group: Sequence[int]) -> list[_Line]:
        """The dimensions along which the places of a group differ."""
        if not self.device.dimensions:
            return [_Line(len(group), 1, 1)]
        lines = []
        for at, size in enumerate(self.shape):
            seen = sorted({self.places[number][at] for number in group})
            if len(seen) > 1:
                stride = min(b - a for a, b in itertools.pairwise(seen))
                closed = self._closes(size) and stride * len(seen) == size
                lines.append(_Line(len(seen), stride, 2 if closed else 1))
        return lines or [_Line(len(group), 1, 1)]

    def _closes(self, size: int) -> bool:
        return size % self.device.closes_at == 0

    def _permutation(self, size: int, pairs: Groups) -> float:
        moved = [(source, target) for source, target in pairs if source != target]
        if not moved:
            return 0.0
        if not self.device.dimensions:
            return size / self.device.link + self.device.launch
        routes = [list(self._route(*map(self.places.__getitem__, pair))) for pair in moved]
        load = Counter(link for route in routes for link in route)
        hops = max(map(len, routes))
        return max(load.values(), default=0) * size / self.device.link + hops * self.device.launch

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


@dataclass(frozen=True)
class _Line:
    """The part of a group that lies along one dimension."""

    members: int  # how many different coordinates it has there
    stride: int  # between two neighbours, and so the number of groups that share a link
    ways: int  # 2 where the line is closed, 1 where it has ends
