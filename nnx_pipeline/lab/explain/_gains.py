"""What the heap of a program would hold at its peak if some of its values were smaller.

The gain is what the peak of live bytes falls, over the whole schedule: another moment becomes the
peak. Nothing else is assumed to change. What must take the place of the values counts at every
moment, so that the gain is rather too small.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nnx_pipeline.lab._hlo.buffers import Allocation, BufferText, BufferValue
from nnx_pipeline.lab._hlo.dataflow import Flow
from nnx_pipeline.lab._hlo.module import Instruction, Module, Shape, shapes_of
from nnx_pipeline.lab.attribution._peak import Slot, live_bytes, slots_of
from nnx_pipeline.lab.attribution.account import in_outputs
from nnx_pipeline.lab.explain._program import aliased_outputs

# What another place takes beside the bytes that it is for, on a TPU at the most: the place of a
# temporary, or of an array that is donated, which libtpu 0.0.50 copies through one.
_PLACE = 2**15
Kept = Callable[[BufferValue, Shape], int | None]  # the bytes that stay; None for all


@dataclass(frozen=True)
class Given:
    """An argument that could give its memory to results of its own shape."""

    number: int
    name: str
    bytes: int


@dataclass(frozen=True)
class Placed:
    """A program with the places of its values."""

    module: Module
    buffers: BufferText
    hlo: str

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.module)

    @cached_property
    def arguments(self) -> list[Instruction]:
        inside = self.module.computations[self.module.entry].instructions.values()
        found = [item for item in inside if item.opcode == "parameter"]
        return sorted(found, key=lambda item: int(item.literal))

    @cached_property
    def _peak(self) -> int:
        return max(live_bytes(slots_of(self.buffers)).values(), default=0)

    def gain(self, kept: Kept, instead: int = 0) -> int:
        """How much the peak falls where values keep only `kept` bytes, and `instead` bytes are
        there at every moment."""
        slots = []
        for slot in slots_of(self.buffers):
            value = slot.value
            shape = None if value.is_table else next(iter(shapes_of(value.type)), None)
            stays = kept(value, shape) if shape else None
            smaller = value if stays is None else replace(value, bytes=min(stays, value.bytes))
            slots.append(Slot(slot.allocation, smaller))
        peak = max(live_bytes(slots).values(), default=0)
        return max(0, self._peak - peak - instead)

    def donations(self, of: Container[str] | None = None) -> tuple[list[Given], int]:
        """Arguments that are not donated and could be, and what the account loses by that; `of` are
        the names of those that may be.

        An argument fits a result of its dtype, shape and layout that no other argument gives its
        memory to. It must be read for the last time where the result is made, or before. Where
        temporaries use the memory of the result first, they need another place.
        """
        free = self._free_results()
        found: list[Given] = []
        gain = 0
        for argument, part in self._kept_arguments():
            if of is not None and argument.op_name not in of:
                continue
            fitting = free.get(part.values[0].type, [])
            taken = next((one for one in fitting if self._is_free(argument, one)), None)
            if taken is not None:
                fitting.remove(taken)
                found.append(Given(int(argument.literal), argument.op_name, part.bytes))
                gain += max(0, taken.bytes - self._scratch(taken) - _PLACE)
        return found, gain

    def _free_results(self) -> dict[str, list[Allocation]]:
        """The results with memory of their own, by their type."""
        found: dict[str, list[Allocation]] = {}
        for part in self.buffers.allocations:
            own = part.is_output and not part.is_argument and part.color == 0
            if own and (result := self._result(part)):
                found.setdefault(result.type, []).append(part)
        return found

    def _kept_arguments(self) -> Iterator[tuple[Instruction, Allocation]]:
        aliased = set(aliased_outputs(self.hlo).values())
        arguments = [part for part in self.buffers.allocations if part.is_argument]
        by_name = {value.name: part for part in arguments for value in part.values}
        for argument in self.arguments:
            part = by_name.get(argument.name)
            own = part and not part.is_output and part.color == 0
            if part and own and int(argument.literal) not in aliased:
                yield argument, part

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: at for at, name in self.buffers.schedule.items()}

    @property
    def _last(self) -> int:
        return max(self.buffers.schedule, default=0)

    def _result(self, part: Allocation) -> BufferValue | None:
        """The value of an output's memory that lives past the last instruction."""
        alive = [value for value in part.values if value.last > self._last and not value.is_table]
        return alive[0] if len({value.type for value in alive}) == 1 else None

    def _is_free(self, argument: Instruction, part: Allocation) -> bool:
        result = self._result(part)
        read = [self._position.get(name, self._last + 1) for name in self._readers(argument)]
        return result is not None and max(read, default=0) <= result.first

    def _readers(self, argument: Instruction) -> list[str]:
        """The instructions of the entry computation that read an argument, also as a part of a
        tuple or under another name."""
        entry = self.module.computations[self.module.entry]
        pending, found = [argument.name], list[str]()
        while pending:
            for user in entry.users[pending.pop()]:
                passes = user.opcode in ("bitcast", "tuple", "get-tuple-element")
                (pending if passes and user.name != entry.root else found).append(user.name)
        return found

    def _scratch(self, part: Allocation) -> int:
        alone = BufferText((part,), self.buffers.schedule)
        return sum(temporary.bytes for temporary in in_outputs(alone))
