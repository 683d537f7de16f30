"""Which devices a collective joins, by its text.

The three spellings of groups are `{{0,1},{2,3}}`, the iota `[2,4]<=[4,2]T(1,0)` and the axes of a
mesh, `mesh['a'=2,'b'=4] {'b'}`, with an order of the devices beside it if they are not in order.
"""

import math
import re

import numpy as np

from nnx_pipeline.lab._hlo.module import Instruction

Groups = tuple[tuple[int, ...], ...]

_ARRANGED = re.compile(r"\[([\d,]+)\]\s*(?:T\(([\d,]+)\))?")
_IOTA = re.compile(r"\[([\d,]+)\]\s*<=\s*(\[[\d,]+\]\s*(?:T\([\d,]+\))?)$")
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*(\(\[.*\].*\))?\s*\{([^}]*)\}$")
_LISTS = re.compile(r"\{([\d,\s]*)\}")
_GROUPS = re.compile(r"\{(\{[\d,\s]+\}[,\s]*)+\}$")
_PAIRS = re.compile(r"\{(\{\d+,\s*\d+\}[,\s]*)*\}$")


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
