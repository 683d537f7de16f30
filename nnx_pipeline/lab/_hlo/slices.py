"""Collectives between the slices of a TPU.

The compiler makes one program for each slice. What crosses slices is in it as a send to the host
and a recv from it (libtpu 0.0.42.1), whose attributes say which collective they are and between
which devices: `"{1,2}x{0:3}"` are the devices 0 to 3 of the slices 1 and 2, each with the devices
of its number; otherwise groups or pairs of numbers are given, in which a slice is the number above
100,000. The recv stands for the collective, and its first array is the result.
"""

import re

from nnx_pipeline.lab._hlo.module import Instruction

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_ALIKE = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{')
_GROUPS = re.compile(r"_xla_megascale_target=\{(\{[\d,{}>-]+\})\}")
_IN_SLICE = 100_000


def kind_between_slices(instruction: Instruction) -> str:
    """The collective that a send or a recv is part of; "" for anything else."""
    if instruction.opcode not in ("send", "recv"):
        return ""
    found = _TYPE.search(instruction.attributes.get("frontend_attributes", ""))
    return _KINDS.get(found[1], "") if found else ""


def names_slices(instruction: Instruction) -> bool:
    """Whether a transfer goes to another slice, whatever its kind."""
    return "_xla_megascale_" in instruction.attributes.get("frontend_attributes", "")


def slices_joined(recv: Instruction) -> int | None:
    """How many slices a collective joins; None where the text is not understood."""
    text = recv.attributes.get("frontend_attributes", "")
    if found := _ALIKE.search(text):
        return sum(map(_count, found[1].split(",")))
    if found := _GROUPS.search(text):
        groups = [re.findall(r"\d+", group) for group in found[1].split("},{")]
        return max(len({int(number) // _IN_SLICE for number in group}) for group in groups)
    return None


def _count(numbers: str) -> int:
    first, _, last = numbers.partition(":")
    return int(last or first) - int(first) + 1
