"""What a traced program says of lines that a compiler may lose.

That are arrays that `jax.lax.with_sharding_constraint` places, and casts. Where an operation only
moves the numbers that a cast makes, compilers move first and cast then, and give the cast the name
and the line of the move.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from nnx_pipeline.lab._tracing.jaxpr import Location, inner_jaxprs, location_of
from nnx_pipeline.lab._tracing.visits import each_once

Atom = Var | Literal  # what an equation reads

_CONSTRAINT = "sharding_constraint"
_CAST = "convert_element_type"
_MOVES = ("broadcast_in_dim", "copy", "reshape", "rev", "squeeze", "transpose")
_CALLS = (
    *("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    *("jit", "pjit", "remat2"),
)
_LOOPS = ("cond", "scan", "shard_map", "while")
# The arrays among the operands of these have the sharding of the result.
_ELEMENTWISE = (
    *("abs", "add", "convert_element_type", "copy", "cos", "div", "erf", "exp", "exp2", "expm1"),
    *("integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "round"),
    *("rsqrt", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh", _CONSTRAINT),
)


@dataclass(frozen=True)
class Constraint:
    """One constraint, and one of the operations that have to give what it asks for."""

    at: Location
    made: Location
    operation: str  # with it the names of its instructions end
    operands: int  # arrays among them, sharded as the result; 0 if not elementwise
    shape: tuple[int, ...]
    part: tuple[int, ...]  # the sizes of what a device then holds
    spec: str
    certain: bool  # whether only constraints of this line read what `operation` makes

    @property
    def is_own(self) -> bool:
        return self.operation == _CONSTRAINT and self.made == self.at


def constraints_of(program: ClosedJaxpr) -> tuple[Constraint, ...]:
    """The constraints of a program at any depth, each with the operation that made the array, and
    with those before it as long as they are elementwise and no constraint."""
    search = _Search(program)
    found = list(search.found())
    names = {one.operation for _, one in found}
    readers: dict[tuple[str, int, str], set[tuple[str, int] | None]] = defaultdict(set)
    known: dict[int, set[tuple[str, int] | None]] = defaultdict(set)
    for made, one in found:
        if not one.is_own:
            known[made].add((one.at.file, one.at.line) if one.certain else None)
    for equation, _ in search.equations:
        if equation.primitive.name in names:
            line = search.line(equation)
            place = line.file, line.line, equation.primitive.name
            readers[place] |= known.get(id(equation), {None})

    def is_certain(one: Constraint) -> bool:
        place = one.made.file, one.made.line, one.operation
        return one.is_own or readers[place] == {(one.at.file, one.at.line)}

    return tuple(replace(one, certain=is_certain(one)) for _, one in found)


class _Search:
    """All equations of a program, each with those around it, and how often each jaxpr is used."""

    def __init__(self, program: ClosedJaxpr) -> None:
        self.equations: list[tuple[JaxprEqn, tuple[JaxprEqn, ...]]] = []
        self.jaxprs: list[Jaxpr] = []
        self.uses: Counter[int] = Counter()
        pending: list[tuple[Jaxpr, tuple[JaxprEqn, ...]]] = [(program.jaxpr, ())]
        while pending:
            jaxpr, around = pending.pop()
            self.uses[id(jaxpr)] += 1
            if self.uses[id(jaxpr)] > 1:
                continue
            self.jaxprs.append(jaxpr)
            for equation in jaxpr.eqns:
                self.equations.append((equation, around))
                pending += [(inner, (equation, *around)) for inner in inner_jaxprs(equation)]
        self.around = {id(equation): around for equation, around in self.equations}

    def found(self) -> Iterator[tuple[int, Constraint]]:
        """Each constraint, with the identity of the equation of the operation."""
        for jaxpr in self.jaxprs:
            makers, readers = _makers_and_readers(jaxpr)
            for equation in jaxpr.eqns:
                sharding = equation.params.get("sharding")
                if equation.primitive.name == _CONSTRAINT and isinstance(sharding, NamedSharding):
                    yield from self._of(equation, sharding, makers, readers)

    def _of(
        self,
        equation: JaxprEqn,
        sharding: NamedSharding,
        makers: dict[Atom, JaxprEqn],
        readers: Counter[Atom],
    ) -> Iterator[tuple[int, Constraint]]:
        shape = _shape(equation.invars[0])
        constraint = Constraint(
            at=self.line(equation),
            made=self.line(equation),
            operation=_CONSTRAINT,
            operands=1,
            shape=shape,
            part=_part(shape, sharding),
            spec=str(sharding.spec).replace("PartitionSpec", "P"),
            certain=True,
        )
        yield id(equation), constraint
        variable: Atom = equation.invars[0]
        certain = True
        while call := makers.get(variable):
            maker, around = _inside(call, variable)
            if maker is None or maker.primitive.name in _LOOPS:
                return
            once = all(self.uses[id(inner)] == 1 for _, inner in around)
            certain = certain and once and readers[variable] == 1
            name, arrays = maker.primitive.name, _arrays(maker)
            count = len(arrays) if name in _ELEMENTWISE else 0
            one = replace(constraint, made=self.line(maker), operation=name, operands=count)
            yield id(maker), replace(one, certain=certain)
            if name == _CONSTRAINT or name not in _ELEMENTWISE or len(arrays) != 1:
                return
            outside = _outside(arrays[0], around)
            if outside is None:
                return
            variable = outside

    def line(self, equation: JaxprEqn) -> Location:
        return location_of((equation, *self.around[id(equation)]))


def _inside(
    equation: JaxprEqn, variable: Atom
) -> tuple[JaxprEqn | None, list[tuple[JaxprEqn, Jaxpr]]]:
    """The equation that computes a variable inside calls, and these calls with their jaxprs."""
    maker: JaxprEqn | None = equation
    around = []
    while maker and maker.primitive.name in _CALLS:
        inner = next(inner_jaxprs(maker), None)
        if inner is None:
            return None, []
        around.append((maker, inner))
        results: list[Atom] = list(maker.outvars)
        variable = inner.outvars[results.index(variable)]
        makers, _ = _makers_and_readers(inner)
        maker = None if isinstance(variable, Literal) else makers.get(variable)
    return maker, around


def _outside(variable: Atom, around: list[tuple[JaxprEqn, Jaxpr]]) -> Atom | None:
    """The operand of the outermost call that a variable inside is; None for anything else."""
    for call, inner in reversed(around):
        places = list(inner.invars)
        if variable not in places or len(places) != len(call.invars):
            return None
        variable = call.invars[places.index(variable)]
    return None if isinstance(variable, Literal) else variable


def _makers_and_readers(jaxpr: Jaxpr) -> tuple[dict[Atom, JaxprEqn], Counter[Atom]]:
    makers: dict[Atom, JaxprEqn] = {}
    readers: Counter[Atom] = Counter()
    for equation in jaxpr.eqns:
        makers.update(dict.fromkeys(equation.outvars, equation))
        readers.update(one for one in equation.invars if not isinstance(one, Literal))
    readers.update(one for one in jaxpr.outvars if not isinstance(one, Literal))
    return makers, readers


def _arrays(equation: JaxprEqn) -> list[Atom]:
    return [one for one in equation.invars if not isinstance(one, Literal) and _shape(one)]


def _shape(variable: Atom) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(variable.aval, "shape", ())
    return shape


def _part(shape: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """The sizes of what a device holds, rounded up; whole along what is left to the compiler."""
    sizes = sharding.mesh.shape
    counts = []
    for names in sharding.spec:
        axes = names if isinstance(names, tuple) else (names,)
        counts.append(math.prod(sizes[name] for name in axes if isinstance(name, str)))
    whole = [1] * (len(shape) - len(counts))
    return tuple(-(-size // count) for size, count in zip(shape, counts + whole, strict=True))


@dataclass(frozen=True)
class Cast:
    """A cast, and an operation that moves its result.

    - `at`, `moved`: their lines.
    - `operation`: the name of the operation.
    - `bits`, `old_bits`: of the numbers, after the cast and before it.
    """

    at: Location
    moved: Location
    operation: str
    bits: int
    old_bits: int


def casts_of(program: ClosedJaxpr) -> tuple[Cast, ...]:
    """Each cast with each operation that moves its result in the same jaxpr."""
    found: list[Cast] = []
    pending = [program.jaxpr]
    calls: dict[Jaxpr, tuple[JaxprEqn, ...]] = {program.jaxpr: ()}
    for jaxpr in each_once(pending):
        around = calls[jaxpr]
        casts: dict[Any, JaxprEqn] = {}  # by the variables that hold their numbers
        for equation in jaxpr.eqns:
            for inner in inner_jaxprs(equation):
                pending.append(inner)
                calls.setdefault(inner, (equation, *around))
            name, operand = equation.primitive.name, next(iter(equation.invars), None)
            if name == _CAST and not isinstance(operand, Literal):
                casts[equation.outvars[0]] = equation
            elif name in _MOVES and not isinstance(operand, Literal) and operand in casts:
                cast = casts[equation.outvars[0]] = casts[operand]
                at, moved = (location_of((one, *around)) for one in (cast, equation))
                found.append(Cast(at, moved, name, *map(_bits, (cast.outvars[0], cast.invars[0]))))
    return tuple(dict.fromkeys(found))


def _bits(variable: Any) -> int:
    return 8 * int(getattr(variable.aval.dtype, "itemsize", 0))
