"""How many bytes an instruction reads and makes, at the least. A slice reads what it makes, an
update in place touches what it writes, a gather reads and a scatter writes its table once at most.
In a fusion this holds of what lies between an argument and its slice, and of fusions in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from nnx_pipeline.lab._hlo.module import Computation, Instruction, Module, Shape
from nnx_pipeline.lab._hlo.opcodes import plain

LIBRARIES = ("__cublas", "__cudnn", "__onednn")  # how the names of their calls begin
SLICES = ("dynamic-slice", "slice", "gather")
UPDATE = "dynamic-update-slice"
# What makes of each element one element: of what is sliced behind it no more is read.
_AS_IT_IS = ("bitcast", "reshape")
_ONE_BY_ONE = (*_AS_IT_IS, "copy", "transpose", "convert", "negate")

Counted = Callable[[Shape], int]  # the bytes of an array that count


@dataclass(frozen=True)
class Traffic:
    module: Module
    counted: Counted = lambda shape: shape.bytes  # such as nothing of what lies on the chip

    def of(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes that an instruction reads and makes, without a library's workspace."""
        if plain(instruction.opcode) == "fusion":
            return self._of_fusion(self.module.computations[instruction.called()[0]])
        read = [list(found) for found in computation.operand_shapes(instruction)]
        if instruction.opcode in SLICES:
            return self._part(read[0], instruction.shapes) + self._all(instruction.shapes)
        if (written := updated_in_place(instruction)) is not None:
            updates = [shape for place in written for shape in read[place]]
            return self._all(updates) + self._part(read[0], updates)
        is_library = instruction.target.startswith(LIBRARIES)
        made = instruction.shapes[:1] if is_library else instruction.shapes
        return self._all(made) + sum(map(self._all, read))

    def _all(self, shapes: Iterable[Shape]) -> int:
        return sum(map(self.counted, shapes))

    def _part(self, whole: Iterable[Shape], part: Iterable[Shape]) -> int:
        return min(self._all(whole), sum(shape.bytes for shape in part))

    def _of_fusion(self, fused: Computation) -> int:
        read = 0
        for item in fused.instructions.values():
            if item.opcode == "parameter":
                share = min(Fraction(1), self._read(fused, item))
                read += int(share * self._all(item.shapes))
        return read + sum(self._made(fused, item) for item in _results(fused))

    def _read(self, fused: Computation, item: Instruction, *, stored: bool = True) -> Fraction:
        """The share of a value that its readers in a fusion take; 1 or more for all of it.
        `stored`: whether it is an argument, and not made of one."""
        size = item.result_bytes
        if not size:
            return Fraction(0)
        if item.name == fused.root or not fused.users[item.name]:
            return Fraction(1)
        users = fused.users[item.name]
        return sum((self._read_by(fused, item, one, stored) for one in users), Fraction(0))

    def _read_by(
        self, fused: Computation, item: Instruction, user: Instruction, stored: bool
    ) -> Fraction:
        places = [at for at, name in enumerate(user.operands) if name == item.name]
        if places == [0] and user.opcode in SLICES:
            return Fraction(_elements(user), _elements(item) or 1)
        if places == [0] and updated_in_place(user) is not None:
            return Fraction(0 if stored else 1)  # what is not in memory is written there whole
        if user.opcode in _ONE_BY_ONE and user.name != fused.root:
            return self._read(fused, user, stored=stored and user.opcode in _AS_IT_IS)
        if user.opcode == "fusion":
            inner = self.module.computations[user.called()[0]]
            own = (_parameter(inner, place) for place in places)
            parts = [self._read(inner, one, stored=stored) for one in own]
            return sum(parts, Fraction(0))
        return Fraction(1)

    def _made(self, fused: Computation, item: Instruction) -> int:
        """Bytes that a result of a fusion writes: of an update in place what it puts there."""
        _, update = self._updated(fused, item)
        return self._part(item.shapes, update) if update else self._all(item.shapes)

    def _updated(
        self, fused: Computation, item: Instruction
    ) -> tuple[Instruction | None, list[Shape]]:
        """The argument of a fusion that a value is an update of, and what is put there; nothing for
        what is no update, or one of an array that the fusion makes."""
        if item.opcode in _AS_IT_IS:
            return self._updated(fused, fused.instructions[item.operands[0]])
        if item.opcode == "fusion":
            inner = self.module.computations[item.called()[0]]
            root = inner.instructions[inner.root]
            into, update = self._updated(inner, root) if root.opcode != "tuple" else (None, [])
            if into is None:
                return None, []
            found = _argument(fused, fused.instructions[item.operands[int(into.literal)]])
            return (found, update) if found else (None, [])
        places = updated_in_place(item)
        if places is None:
            return None, []
        target = _argument(fused, fused.instructions[item.operands[0]])
        if target is None and item.opcode == "scatter":
            return None, []
        update = [
            shape for place in places for shape in fused.instructions[item.operands[place]].shapes
        ]
        return target, update


def updated_in_place(instruction: Instruction) -> range | None:
    """The operands that an instruction writes into its first ones; None if it writes elsewhere."""
    if instruction.opcode == UPDATE:
        return range(1, 2)
    if instruction.opcode == "scatter":
        return range(len(instruction.operands) // 2 + 1, len(instruction.operands))
    return None


def _elements(instruction: Instruction) -> int:
    return sum(shape.elements for shape in instruction.shapes)


def _results(fused: Computation) -> list[Instruction]:
    root = fused.instructions[fused.root]
    if root.opcode != "tuple":
        return [root]
    return [fused.instructions[name] for name in root.operands]


def _parameter(computation: Computation, number: int) -> Instruction:
    return next(
        item
        for item in computation.instructions.values()
        if item.opcode == "parameter" and int(item.literal) == number
    )


def _argument(fused: Computation, item: Instruction) -> Instruction | None:
    """The argument of a fusion that a value is, updated or not; None if it is made there."""
    while item.opcode in _AS_IT_IS or updated_in_place(item) is not None:
        item = fused.instructions[item.operands[0]]
    return item if item.opcode == "parameter" else None
