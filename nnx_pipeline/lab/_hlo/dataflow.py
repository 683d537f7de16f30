"""Follows the values of a compiled program to their sources and readers, across computations. A
value is an instruction and an index into its result: `while.3{4}` is the fifth element of a loop's
state. Most instructions with a large buffer only pass on what another one computed."""

from collections.abc import Iterator
from functools import cached_property

from nnx_pipeline.lab._hlo.module import Instruction, Module
from nnx_pipeline.lab._hlo.slices import kind_between_slices
from nnx_pipeline.lab._tracing.visits import each_once

Index = tuple[int, ...]
Value = tuple[str, Index]

# They pass their operand on as it is: under another name, in another buffer or within a tuple.
MOVES = ("bitcast", "copy", "copy-done", "copy-start", "get-tuple-element", "opt-barrier", "tuple")
# Their result is the numbers of their operand in another dtype, order or shape, or some of them.
RESHAPES = (
    *("bitcast-convert", "convert", "dynamic-slice", "reshape"),
    *("reverse", "slice", "transpose"),
)
COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
)
_STARTS = ("async-start", "call-start", "fusion-start")
_DONES = ("async-done", "call-done", "fusion-done")
_CALLS = ("call", "fusion", *_STARTS)


def collective(instruction: Instruction) -> str | None:
    plain = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return plain if plain in COLLECTIVES else kind_between_slices(instruction) or None


class Flow:
    """Finds the sources and readers of the values of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.instructions: dict[str, Instruction] = {}
        self.home: dict[str, str] = {}
        self.callers: dict[str, list[Instruction]] = {}
        self._unchanged: dict[Value, bool] = {}
        for computation, instruction in module.instructions():
            self.instructions[instruction.name] = instruction
            self.home[instruction.name] = computation.name
            for called in instruction.called():
                self.callers.setdefault(called, []).append(instruction)

    def at(self, value: Value) -> Instruction | None:
        """None for what the program's text does not print."""
        return self.instructions.get(value[0])

    def root(self, computation: str, index: Index) -> Value:
        return self.module.computations[computation].root, index

    def loop_of(self, name: str) -> Instruction | None:
        """The innermost while loop in whose body or condition an instruction runs, or None."""
        computation = self.home.get(name, "")
        # No chain of calls is longer than the number of computations that are called.
        for _ in range(len(self.callers) + 1):
            callers = self.callers.get(computation, [])
            if not callers:
                return None
            if callers[0].opcode == "while":
                return callers[0]
            computation = self.home[callers[0].name]
        return None

    def sources(self, value: Value) -> list[Value]:
        """The values that an instruction passes on or computes from, most informative first: the
        value from a loop's body before the initial one, the values that an update writes before the
        buffer that it writes into, and larger operands before smaller ones."""
        name, index = value
        instruction = self.instructions.get(name)
        if instruction is None:
            return []
        opcode = instruction.opcode
        if opcode == "parameter":
            return self._arguments(instruction, index)
        if opcode == "while":
            return self._states(instruction, index)
        # Element 1 of a start's result is what the computation returns, element 0 the operands.
        if opcode in _STARTS and index[:1] != (1,):
            return self._operands(instruction, index)
        if opcode in _CALLS or opcode == "conditional":
            inner = index[1:] if opcode in _STARTS else index
            return [self.root(name, inner) for name in instruction.called()]
        return self._operands(instruction, index)

    def _operands(self, instruction: Instruction, index: Index) -> list[Value]:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            return [(operands[0], (int(instruction.attributes["index"]), *index))]
        if opcode == "tuple":
            return [(operands[index[0]], index[1:])] if index else []
        if opcode == "copy-start":  # its element 2 is a context, which holds no data
            return [(operands[0], ())] if index[:1] in ((0,), (1,)) else []
        if opcode == "copy-done":
            return [(operands[0], (0,))]
        if opcode == "dynamic-update-slice":
            return [(operands[1], ()), (operands[0], ())]
        if opcode in MOVES or opcode.endswith("-update"):
            return [(operand, index) for operand in operands[:1]]
        if opcode in RESHAPES:
            return [(operand, ()) for operand in operands[:1]]
        if opcode.endswith("-start") and len(operands) > 1 and len(index) == 2:
            return [(operands[index[1]], ())]
        if opcode.endswith("-done") and len(operands) == 1:
            return [(operands[0], (1, *index))]
        by_size = sorted(operands, key=lambda name: -self.instructions[name].result_bytes)
        return [(operand, ()) for operand in by_size]

    def _arguments(self, parameter: Instruction, index: Index) -> list[Value]:
        # Of a loop, the body's own result comes first.
        found: list[Value] = []
        computation = self.home[parameter.name]
        for caller in self.callers.get(computation, []):
            if caller.opcode == "while":
                found += self._states(caller, index)
            elif caller.opcode in _CALLS and int(parameter.literal) < len(caller.operands):
                found.append((caller.operands[int(parameter.literal)], index))
            elif caller.opcode == "conditional":
                branch = caller.called().index(computation)  # operand 0 chooses the branch
                found.append((caller.operands[branch + 1], index))
        return found

    def _states(self, loop: Instruction, index: Index) -> list[Value]:
        """The sources of an element of a loop's state: the value that the body puts there, unless
        it hands the element on unchanged, and then the initial value."""
        initial, carried = (loop.operands[0], index), self.root(loop.called("body")[0], index)
        key = (loop.name, index)
        if key not in self._unchanged:
            # Provisional during the search below: what comes from itself has no other source.
            self._unchanged[key] = True
            self._unchanged[key] = self._is_state(carried, loop, index)
        return [initial] if self._unchanged[key] else [carried, initial]

    def _is_state(self, value: Value, loop: Instruction, index: Index) -> bool:
        """Whether a value in a loop's body is the state with which the iteration began."""
        body, seen = loop.called("body")[0], set()
        while value not in seen:
            seen.add(value)
            instruction = self.instructions[value[0]]
            if instruction.opcode == "parameter" and self.home[value[0]] == body:
                return value[1] == index
            if instruction.opcode not in (*MOVES, "while"):
                return False
            following = self.sources(value)
            if not following or (instruction.opcode == "while" and len(following) > 1):
                return False  # an inner loop with a second source changes the value
            value = following[0]
        return True

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        every = self.module.computations.values()
        return {name: users for one in every for name, users in one.users.items()}

    @cached_property
    def _parameters(self) -> dict[tuple[str, int], str]:
        return {
            (self.home[name], int(instruction.literal)): name
            for name, instruction in self.instructions.items()
            if instruction.opcode == "parameter"
        }

    def readers(self, value: Value) -> Iterator[tuple[Instruction, Value | None]]:
        """Yields each instruction that reads a value, and the value as it is passed on, such as an
        element of a tuple; None where it computes from the value. What a loop's body leaves in the
        state is read by the next iteration and by what follows the loop."""
        name, index = value
        if (loop := self.at(value)) and loop.opcode == "while":
            for parameter in self._turns(loop):
                yield self.instructions[parameter], (parameter, index)
        for user in self._users.get(name, []):
            for passed_on in self._passed_on(user, name, index):
                yield user, passed_on
        computation = self.home.get(name, "")
        if computation and self.module.computations[computation].root == name:
            for caller in self.callers.get(computation, []):
                if caller.opcode == "while" and caller.called("body")[0] == computation:
                    yield caller, (caller.name, index)
                    for turn in self._turns(caller)[:1]:
                        yield self.instructions[turn], (turn, index)
                elif caller.opcode in (*_CALLS, "conditional"):
                    inside = (1, *index) if caller.opcode in _STARTS else index
                    yield caller, (caller.name, inside)

    def _passed_on(self, user: Instruction, name: str, index: Index) -> Iterator[Value | None]:
        opcode = user.opcode
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        if opcode == "get-tuple-element":
            number = int(user.attributes["index"])
            if index[:1] in ((number,), ()):  # () is the table of pointers, of which it reads one
                yield (user.name, index[1:]) if index else None
        elif opcode == "tuple":
            yield from ((user.name, (place, *index)) for place in places)
        elif opcode == "while":
            yield user.name, index
            yield from ((parameter, index) for parameter in self._turns(user))
        elif opcode in _CALLS and user.called():
            for place in places:
                parameter = self._parameters.get((user.called()[0], place))
                yield (parameter, index) if parameter else None
        elif opcode == "copy-start":
            yield user.name, (0,)
        elif opcode == "copy-done":
            yield (user.name, ()) if index == (0,) else None
        elif opcode in _DONES:
            yield (user.name, index[1:]) if index[:1] == (1,) else None
        elif opcode in MOVES or opcode.endswith("-update"):
            yield user.name, index
        elif opcode == "dynamic-update-slice" and places[0] == 0:
            yield user.name, ()
        else:
            yield None

    def _turns(self, loop: Instruction) -> list[str]:
        """The parameters of a loop's body and condition, both of which hold the loop's state."""
        called = (loop.called("body")[0], loop.called("condition")[0])
        found = [self._parameters.get((computation, 0)) for computation in called]
        return [name for name in found if name]

    def lineage(self, value: Value, *, reshaped: bool = True) -> list[Instruction]:
        """The instructions through which the numbers of a value came, up to one that computes, a
        collective or an argument; with `reshaped`, also through conversions, slices, transposes and
        all-gathers. It is never empty for a value that the text prints."""
        through = {*MOVES, *_CALLS, "parameter", "while", "conditional"}
        through.update(RESHAPES if reshaped else ())
        passed: list[Instruction] = []
        seen: set[Value] = set()
        following: Value | None = value
        while following is not None and (instruction := self.at(following)):
            passed.append(instruction)
            seen.add(following)
            opcode = instruction.opcode
            gathered = reshaped and collective(instruction) == "all-gather"
            followed = opcode in through or gathered or opcode.endswith("-done")
            choices = self.sources(following) if followed else []
            following = next((choice for choice in choices if choice not in seen), None)
        return passed

    def holds_state(self, value: Value, state: Value) -> bool:
        """Whether a value in the body of a loop is, or selects, an element of the loop's state. In
        TPU programs the first iteration of a sum selects zero instead of the state."""
        pending = [value]
        for here in each_once(pending):
            instruction = self.instructions[here[0]]
            if instruction.opcode == "parameter":
                callers = self.callers.get(self.home[instruction.name], [])
                if any(caller.name == state[0] for caller in callers) and here[1] == state[1]:
                    return True
                pending += [] if any(c.opcode == "while" for c in callers) else self.sources(here)
            elif instruction.opcode in (*MOVES, *RESHAPES, *_CALLS, "select"):
                pending += self.sources(here)
        return False
