"""Which devices a collective joins, and how long it takes on the links between them.

The three spellings of groups are `{{0,1},{2,3}}`, the iota `[2,4]<=[4,2]T(1,0)` and the axes of a
mesh, `mesh['a'=2,'b'=4] {'b'}`, with an order of the devices beside it if they are not in order.

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

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from nnx_pipeline.lab._hlo.cost import COLLECTIVES
from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module
from nnx_pipeline.lab._hlo.opcodes import plain
from nnx_pipeline.lab._timing.devices import Device

Place = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]

_ARRANGED = re.compile(r"\[([\d,]+)\]\s*(?:T\(([\d,]+)\))?")
_IOTA = re.compile(r"\[([\d,]+)\]\s*<=\s*(\[[\d,]+\]\s*(?:T\([\d,]+\))?)$")
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*(\(\[.*\].*\))?\s*\{([^}]*)\}$")
_LISTS = re.compile(r"\{([\d,\s]*)\}")
_GROUPS = re.compile(r"\{(\{[\d,\s]+\}[,\s]*)+\}$")
_PAIRS = re.compile(r"\{(\{\d+,\s*\d+\}[,\s]*)*\}$")


def collectives_in(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """The collectives that an instruction is, starts, or has fused, each with what holds it."""
    return [
        (home, found)
        for home, found in _inside(module, computation, instruction)
        if plain(found.opcode).removeprefix("ragged-") in COLLECTIVES
        and not found.opcode.endswith(("-done", "-update"))
    ]


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


def groups_of(instruction: Instruction, devices: int) -> Groups | None:
    """The groups of devices that a collective joins, as numbers in the order of the program's mesh;
    all of them where none are named, None where the text is not understood."""
    text = instruction.attributes.get("replica_groups", "{}").strip()
    if text == "{}":
        return (tuple(range(devices)),)
    if found := _IOTA.match(text):
        numbers, shape = _arranged(found[2]), _numbers(found[1])
        return _rows(numbers.reshape(shape)) if numbers.size == math.prod(shape) else None
    # The text says `mesh[…], device_ids=(…) {…}`, of which the last part belongs to the mesh.
    if found := _MESH.match(f"{text} {instruction.attributes.get('device_ids', '')}".strip()):
        return _axes(found[1], found[3], found[2] or "")
    if _GROUPS.match(text):
        return tuple(_numbers(group) for group in _LISTS.findall(text[1:-1]))
    return None


def pairs_of(instruction: Instruction) -> Groups | None:
    """The (source, target) pairs of a permutation; None where the text is not understood."""
    text = instruction.attributes.get("source_target_pairs", "").strip()
    if not _PAIRS.match(text):
        return None
    return tuple(_numbers(pair) for pair in _LISTS.findall(text[1:-1]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _arranged(text: str) -> np.ndarray:
    """The numbers 0, 1, … in the order of a text such as `[4,2]T(1,0)`."""
    found = _ARRANGED.search(text)
    sizes = _numbers(found[1]) if found else ()
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_numbers(found[2])) if found and found[2] else numbers


def _axes(mesh: str, joined: str, order: str) -> Groups | None:
    """The groups of devices that differ only along the joined axes of a mesh."""
    named = re.findall(r"'([^']+)'=(\d+)", mesh)
    names, sizes = [name for name, _ in named], [int(size) for _, size in named]
    inside = [names.index(name) for name in re.findall(r"'([^']+)'", joined) if name in names]
    plain = re.fullmatch(r"\s*'[^']+'(?:\s*,\s*'[^']+')*\s*", joined)
    if not plain or not inside or len(inside) != joined.count("'") // 2:
        return None  # such as a part of an axis, 'a':(2)4
    numbers = _arranged(order) if order else np.arange(math.prod(sizes))
    if numbers.size != math.prod(sizes):
        return None
    outside = [place for place in range(len(sizes)) if place not in inside]
    numbers = numbers.reshape(sizes).transpose(outside + inside)
    return _rows(numbers.reshape(-1, math.prod(sizes[place] for place in inside)))


@dataclass(frozen=True)
class _Line:
    """The part of a group that lies along one dimension."""

    members: int  # how many different coordinates it has there
    stride: int  # between two neighbours, and so the number of groups that share a link
    ways: int  # 2 where the line is closed, 1 where it has ends


@dataclass(frozen=True)
class Links:
    device: Device
    shape: Place  # the sizes of the slice; of a switch, the number of devices
    places: tuple[Place, ...]  # coordinates of each device, in the order of the mesh

    @classmethod
    def of(cls, device: Device, topology: str, devices: Sequence[jax.Device]) -> "Links":
        """The links between the devices of the mesh, in its order; `topology` is `2x2x2` or a
        number."""
        shape = tuple(map(int, topology.split("x")))
        if not device.dimensions:
            return cls(device, shape, tuple((number,) for number in range(len(devices))))
        return cls(device, shape, tuple(tuple(each.coords)[: len(shape)] for each in devices))

    def seconds(self, kind: str, size: int, groups: Groups) -> float | None:
        """How long a collective takes with a result of so many bytes per device, over the groups of
        `groups_of` or the pairs of a permutation; None where nothing is known of its links."""
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
        received = {"reduce-scatter": members - 1, "all-reduce": 2 * share}.get(kind, share)
        rate = link * sum(line.ways / line.stride for line in lines)
        return received * size / rate + latency * (2 if kind == "all-reduce" else 1)

    def _lines(self, group: Sequence[int]) -> list[_Line]:
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
