"""A jaxpr as a graph that tells where each value comes from, through calls and loops."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from nnx_pipeline.lab._tracing.jaxpr import Location, inner_jaxprs, location_of, open_jaxpr

# Primitives that call a jaxpr with their operands and return its results. Others that hold a jaxpr,
# such as a scatter with its sum or a kernel, use it in another way.
_CALLS = {
    *("jit", "pjit", "call", "core_call", "closed_call", "shard_map", "cond"),
    *("checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
}
_LOOPS = {"scan", "while"}

Way = Literal["argument", "same", "slice", "stack", "carry", "made", "constant", "unknown"]


@dataclass(frozen=True, eq=False)
class Value:
    scope: "JaxprScope"
    variable: Any

    @property
    def aval(self) -> Any:
        return self.variable.aval

    def __eq__(self, other: object) -> bool:  # by identity: a literal has no hash
        return isinstance(other, Value) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[int, int]:
        return id(self.scope), id(self.variable)


class Derivation(NamedTuple):
    """How a value was made, one step back: the values it comes from and the equation or the loop.

    `number` is its index among the arguments, the results or the carries. The ways are:

    - `argument`: the value is the argument `number` of the program.
    - `same`: it is one of `values`; there are several for a condition, one from each branch, and
      for a carry after its loop, which is the initial one if there was no iteration.
    - `slice`: it is one entry along the first axis of the only one of `values`.
    - `stack`: a loop made it, with one entry per iteration; `values` is that entry in the body.
    - `carry`: a loop carries it; `values` are its values before the loop and after each iteration.
    - `made`: it is the result `number` of `equation`, which has the operands `values`.
    - `constant`: a literal, or an array that was captured when the program was traced.
    - `unknown`: an input of a jaxpr that is called in a way that is not understood.
    """

    way: Way
    values: tuple[Value, ...] = ()
    equation: Any = None
    number: int = 0

    @property
    def primitive(self) -> str:
        """The name of the primitive that made the value; "" unless the way is `made`."""
        return self.equation.primitive.name if self.way == "made" else ""


@dataclass(eq=False)
class JaxprScope:
    """A jaxpr where an equation of its parent calls it; the program itself has no parent."""

    jaxpr: Jaxpr
    parent: "JaxprScope | None" = None
    equation: JaxprEqn | None = None
    inlets: dict[Var, Derivation] = field(default_factory=dict)

    @functools.cached_property
    def inner(self) -> dict[int, list["JaxprScope"]]:
        """The scopes that each equation calls, by the `id` of the equation."""
        callers = [e for e in self.jaxpr.eqns if e.primitive.name in _CALLS | _LOOPS]
        return {id(equation): _called(self, equation) for equation in callers}

    @functools.cached_property
    def readers(self) -> dict[Var, list[JaxprEqn]]:
        found: dict[Var, list[JaxprEqn]] = {}
        for equation in self.jaxpr.eqns:
            for variable in dict.fromkeys(v for v in equation.invars if isinstance(v, Var)):
                found.setdefault(variable, []).append(equation)
        return found

    @functools.cached_property
    def made(self) -> dict[Var, tuple[JaxprEqn, int]]:
        return {
            variable: (equation, index)
            for equation in self.jaxpr.eqns
            for index, variable in enumerate(equation.outvars)
        }

    def scopes(self) -> Iterator["JaxprScope"]:
        yield self
        for scope in itertools.chain.from_iterable(self.inner.values()):
            yield from scope.scopes()

    def equations(self) -> Iterator[tuple["JaxprScope", JaxprEqn]]:
        for scope in self.scopes():
            for equation in scope.jaxpr.eqns:
                yield scope, equation

    def value(self, variable: object) -> Value:
        return Value(self, variable)

    def calls(self) -> Iterator[JaxprEqn]:
        """The equations that call this scope, innermost first."""
        scope = self
        while scope.parent is not None and scope.equation is not None:
            yield scope.equation
            scope = scope.parent

    def locate(self, equation: JaxprEqn) -> Location:
        return location_of([equation, *self.calls()])


def step_back(value: Value) -> Derivation:
    scope, variable = value.scope, value.variable
    if not isinstance(variable, Var):
        return Derivation("constant")
    if variable in scope.inlets:
        return scope.inlets[variable]
    if variable not in scope.made:
        return Derivation("constant" if variable in scope.jaxpr.constvars else "unknown")
    equation, index = scope.made[variable]
    # The result of a call or loop is followed into the jaxpr that computes it.
    if loop := as_loop(scope, equation):
        inside = loop.body.value(loop.body.jaxpr.outvars[index])
        if index >= loop.carry:
            return Derivation("stack", (inside,))
        # Without a single iteration the result is the initial carry.
        return Derivation("same", (loop.carried[index][0], inside))
    called = scope.inner.get(id(equation), [])
    if called and all(len(one.jaxpr.outvars) == len(equation.outvars) for one in called):
        return Derivation("same", tuple(one.value(one.jaxpr.outvars[index]) for one in called))
    operands = tuple(scope.value(operand) for operand in equation.invars)
    return Derivation("made", operands, equation, index)


def maker_of(value: Value) -> tuple["JaxprScope", JaxprEqn] | None:
    """The equation that makes a value, inside of the calls that return it; None for an input."""
    found = None
    while isinstance(value.variable, Var) and value.variable in value.scope.made:
        equation, index = value.scope.made[value.variable]
        found = value.scope, equation
        called = value.scope.inner.get(id(equation), [])
        if len(called) != 1 or equation.primitive.name in _LOOPS:
            break
        if len(called[0].jaxpr.outvars) != len(equation.outvars):
            break
        value = called[0].value(called[0].jaxpr.outvars[index])
    return found


def reader_of(value: Value) -> tuple["JaxprScope", JaxprEqn] | None:
    """The first equation that reads a value, inside of the calls that take it."""
    readers = value.scope.readers.get(value.variable, [])
    for equation in readers:
        for called in value.scope.inner.get(id(equation), []):
            for inlet, step in called.inlets.items():
                if value in step.values and (found := reader_of(called.value(inlet))):
                    return found
        if equation.primitive.name not in _CALLS:
            return value.scope, equation
    return None


def loops_around(scope: "JaxprScope") -> list[JaxprEqn]:
    return [equation for equation in scope.calls() if equation.primitive.name in _LOOPS]


def calls_of(value: Value) -> Iterator[Value]:
    """The same value inside the jaxprs that take it, and outside the call that returns it."""
    scope, variable = value.scope, value.variable
    for equation in scope.readers.get(variable, []):
        for called in scope.inner.get(id(equation), []):
            for inlet, step in called.inlets.items():
                if step.way == "same" and value in step.values:
                    yield called.value(inlet)
    around = scope.equation
    if scope.parent is not None and around is not None and around.primitive.name in _CALLS:
        for inside, outside in zip(scope.jaxpr.outvars, around.outvars, strict=False):
            if inside is variable:
                yield scope.parent.value(outside)


def entries_of(value: Value) -> Iterator[Value]:
    """The value in the bodies of the loops that take it entry by entry, or carry it."""
    for equation in value.scope.readers.get(value.variable, []):
        for called in value.scope.inner.get(id(equation), []):
            for inlet, step in called.inlets.items():
                if step.way in ("slice", "carry") and value in step.values:
                    yield called.value(inlet)


def stacks_of(value: Value) -> Iterator[Value]:
    """The arrays in which a loop stacks this value of its body, one entry per iteration."""
    loop = loop_of(value.scope)
    if loop is not None:
        yield from (whole for whole, entry in loop.stacked if entry == value)


def program_scope(program: ClosedJaxpr) -> JaxprScope:
    jaxpr = program.jaxpr
    arguments = {
        variable: Derivation("argument", number=i) for i, variable in enumerate(jaxpr.invars)
    }
    return JaxprScope(jaxpr, inlets=arguments)


@dataclass(frozen=True)
class JaxprLoop:
    """A `scan` or `while`; the inputs of its body are constants, then carries, then slices."""

    scope: JaxprScope
    equation: JaxprEqn
    body: JaxprScope
    consts: int
    carry: int

    @property
    def carried(self) -> list[tuple[Value, Value, Value]]:
        """Each carried value: before the loop, at the start of an iteration, and at its end."""
        # Counted from the back: a `while` has the constants of its condition in front, too.
        slices = len(self.body.jaxpr.invars) - self.consts - self.carry
        before = self.equation.invars[len(self.equation.invars) - slices - self.carry :]
        begin = self.body.jaxpr.invars[self.consts : self.consts + self.carry]
        end = self.body.jaxpr.outvars[: self.carry]
        return [
            (self.scope.value(a), self.body.value(b), self.body.value(c))
            for a, b, c in zip(before[: self.carry], begin, end, strict=True)
        ]

    @property
    def sliced(self) -> list[tuple[Value, Value]]:
        """Each operand with one entry per iteration: the whole array, and the entry in the body."""
        first = self.consts + self.carry
        if self.equation.primitive.name != "scan":
            return []
        whole, entry = self.equation.invars[first:], self.body.jaxpr.invars[first:]
        return [
            (self.scope.value(a), self.body.value(b)) for a, b in zip(whole, entry, strict=True)
        ]

    @property
    def stacked(self) -> list[tuple[Value, Value]]:
        """Each result with one entry per iteration: the whole array, and the entry in the body."""
        whole, entry = self.equation.outvars[self.carry :], self.body.jaxpr.outvars[self.carry :]
        return [
            (self.scope.value(a), self.body.value(b)) for a, b in zip(whole, entry, strict=True)
        ]


def as_loop(scope: JaxprScope, equation: JaxprEqn) -> JaxprLoop | None:
    """The equation as a loop; None if it is not a loop.

    By their shapes, in every version of JAX: an array that a `scan` stacks or slices has one axis
    more outside the body than in it.
    """
    name, bodies = equation.primitive.name, scope.inner.get(id(equation), [])
    if name == "scan" and bodies:
        body = bodies[0].jaxpr
        carry = _same_rank(equation.outvars, body.outvars)
        # Inputs of the same rank inside and outside are the constants and the carries.
        return JaxprLoop(
            scope, equation, bodies[0], _same_rank(equation.invars, body.invars) - carry, carry
        )
    if name == "while" and len(bodies) == 2:
        carry = len(equation.outvars)
        return JaxprLoop(scope, equation, bodies[1], len(bodies[1].jaxpr.invars) - carry, carry)
    return None


def loop_of(scope: JaxprScope) -> JaxprLoop | None:
    """The loop that has this scope as its body."""
    loop = as_loop(scope.parent, scope.equation) if scope.parent and scope.equation else None
    return loop if loop is not None and loop.body is scope else None


def _same_rank(outside: list[Any], inside: list[Any]) -> int:
    return sum(
        a.aval.ndim == b.aval.ndim if hasattr(a.aval, "ndim") else True
        for a, b in zip(outside, inside, strict=True)
    )


def _called(scope: JaxprScope, equation: JaxprEqn) -> list[JaxprScope]:
    """The scopes that an equation calls, with their inputs linked to its operands."""
    name, operands = equation.primitive.name, [scope.value(v) for v in equation.invars]
    if name == "while":
        jaxprs = [open_jaxpr(equation.params[key]) for key in ("cond_jaxpr", "body_jaxpr")]
        condition, body = (JaxprScope(jaxpr, scope, equation) for jaxpr in jaxprs)
        # The operands are the constants of the condition, those of the body, and the carry.
        carry = len(equation.outvars)
        fixed = condition.jaxpr.invars[: len(condition.jaxpr.invars) - carry]
        condition.inlets |= _passed_in(fixed, operands)
        count = len(body.jaxpr.invars)
        body.inlets |= _loop_inlets(body, operands[-count:], count - carry, carry)
        return [condition, body]
    if name == "cond":
        operands = operands[1:]  # the first one chooses the branch
    scopes = [JaxprScope(jaxpr, scope, equation) for jaxpr in inner_jaxprs(equation)]
    for one in scopes:
        inputs = one.jaxpr.invars
        if name == "scan":
            carry = _same_rank(equation.outvars, one.jaxpr.outvars)
            consts = _same_rank(equation.invars, inputs) - carry
            one.inlets |= _loop_inlets(one, operands, consts, carry)
        # A call whose inputs are not its operands one by one leaves them unknown.
        elif len(inputs) == len(operands):
            one.inlets |= _passed_in(inputs, operands)
    return scopes


def _passed_in(inputs: list[Var], operands: list[Value]) -> dict[Var, Derivation]:
    pairs = zip(inputs, operands, strict=False)
    return {variable: Derivation("same", (operand,)) for variable, operand in pairs}


def _loop_inlets(
    one: JaxprScope, operands: list[Value], consts: int, carry: int
) -> dict[Var, Derivation]:
    """How a body's inputs get their values, in the order constants, carries, slices."""
    found: dict[Var, Derivation] = {}
    for index, (variable, operand) in enumerate(zip(one.jaxpr.invars, operands, strict=True)):
        if index < consts:
            found[variable] = Derivation("same", (operand,))
        elif index < consts + carry:
            after = one.value(one.jaxpr.outvars[index - consts])
            found[variable] = Derivation("carry", (operand, after), one.equation, index - consts)
        else:
            found[variable] = Derivation("slice", (operand,))
    return found
