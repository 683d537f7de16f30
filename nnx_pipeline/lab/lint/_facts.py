"""What the rules ask about a value: whether it is a parameter, whether a gradient, how large."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab._tracing.calls import Input
from nnx_pipeline.lab._tracing.jaxpr import NOWHERE, Location, is_transposed
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint._walk import (
    Derivation,
    JaxprScope,
    Value,
    calls_of,
    entries_of,
    maker_of,
    program_scope,
    reader_of,
    step_back,
)
from nnx_pipeline.lab.mesh import spec_axes

# Primitives that return their first operand in its shape, with the same numbers up to rounding.
SAME = {
    *("convert_element_type", "copy", "name", "reduce_precision", "optimization_barrier"),
    *("sharding_constraint", "layout_constraint", "reshard", "pvary", "pbroadcast"),
    *("stop_gradient", "device_put"),
}
# Primitives that return the numbers of their first operand, or some of them, in another shape.
FORM = {"reshape", "squeeze", "transpose", "expand_dims", "broadcast_in_dim", "rev"}
PART = {"slice", "dynamic_slice", "split", "all_gather", "all_gather_invariant"}
FACTORS = {"mul", "div", "neg"}
SUMS = {"add", "add_any", "sub", "select_n", "concatenate", "stack", "dynamic_update_slice", "pad"}
PRODUCTS = {"dot_general", "conv_general_dilated"}
_LINKS = ("same", "slice", "stack", "carry")
_REDUCES = {"reduce_sum", "psum", "psum_invariant", "reduce_scatter", "cumsum"}


class ArraySize(NamedTuple):
    bytes: int
    per_device: bool


class Waste(NamedTuple):
    """What a rule has found: where, how large it is, what it is and what to do about it."""

    location: Location
    size: ArraySize
    what: str
    cure: str


@dataclass(eq=False)
class LintedProgram:
    """A traced program.

    - `parameters`: the indices of its parameters among its inputs.
    - `function`: where the function is defined.
    - `jit`: what jitted it, such as `nnx.jit`; empty if nothing did.
    - `mesh`: the sizes of the axes of its mesh.
    """

    traced: ClosedJaxpr
    parameters: frozenset[int]
    inputs: Sequence[Input]
    function: Location = NOWHERE
    jit: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    _is_parameter: dict[Value, bool] = field(default_factory=dict)

    @cached_property
    def scope(self) -> JaxprScope:
        return program_scope(self.traced)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @cached_property
    def given_bytes(self) -> int:
        """The bytes of all arguments, of one device where their sharding is known."""
        return sum(self.device_bytes(self.input(n)).bytes for n in range(len(self.inputs)))

    @cached_property
    def has_backward(self) -> bool:
        return any(is_transposed([equation]) for _, equation in self.scope.equations())

    def input(self, number: int) -> Value:
        return self.scope.value(self.traced.jaxpr.invars[number])

    def results(self) -> list[Value]:
        return [self.scope.value(variable) for variable in self.traced.jaxpr.outvars]

    def is_parameter(self, value: Value) -> bool:
        """Whether a value is a parameter or part of one, perhaps cast, moved or reshaped."""
        if value not in self._is_parameter:
            self._is_parameter[value] = self._comes_from_parameters(value)
        return self._is_parameter[value]

    def _comes_from_parameters(self, value: Value) -> bool:
        is_reached = False
        for step in history(value, _of_parameter):
            if step.way == "argument" and step.number in self.parameters:
                is_reached = True
            elif step.way not in _LINKS and not _of_parameter(step):
                return False
        return is_reached

    def is_gradient(self, value: Value) -> bool:
        """Whether a value adds up products of two arrays that are not parameters.

        The gradient of a weight is made that way: for y = x·w it is the product of x and the
        cotangent of y. A product with a parameter is an activation, or the cotangent of one.
        """
        for step in history(value, _of_gradient):
            if step.primitive in PRODUCTS and not any(map(self.is_parameter, step.values[:2])):
                return True
            # The gradient of a table: cotangents of rows are added where the rows were read.
            if step.primitive == "scatter-add" and not self.is_parameter(step.values[2]):
                return True
        return False

    def device_bytes(self, value: Value) -> ArraySize:
        """The size of a value in bytes, and whether that is the size on one device.

        It is, where the sharding is known: on a single device, in explicit mode, inside a
        `shard_map` over the whole mesh, and in auto mode for arguments, for constrained values and
        for what is computed from these elementwise. Otherwise it is the size on all devices.
        """
        aval = value.aval
        if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
            return ArraySize(0, True)  # not an array, such as a token
        dtype = jnp.dtype(aval.dtype) if hasattr(aval.dtype, "kind") else aval.dtype
        whole = math.prod(aval.shape) * getattr(dtype, "itemsize", 0)
        if self.devices == 1:
            return ArraySize(whole, True)
        parts = self.parts(value)
        return ArraySize(whole // (parts or 1), parts is not None)

    def parts(self, value: Value) -> int | None:
        """Over how many devices a value is split; None if that is not known."""
        sharding = getattr(value.aval, "sharding", None)
        if sharding is not None and not sharding.mesh.empty:
            kinds = set(sharding.mesh.axis_types)
            # In explicit mode the type has the sharding; inside a shard_map it is already a part.
            if AxisType.Auto not in kinds:
                return _split(sharding.spec, sharding.mesh.shape)
            # A shard_map over some of the axes: the compiler chooses the sharding over the others.
            if AxisType.Manual in kinds:
                return None
        sharding = self.sharding_of(value)
        return None if sharding is None else _split(sharding.spec, sharding.mesh.shape)

    def spec_of(self, value: Value) -> P | None:
        """The spec of a value, in explicit mode from its type; None if it is not known."""
        sharding = getattr(value.aval, "sharding", None)
        if sharding is None or sharding.mesh.empty or AxisType.Auto in sharding.mesh.axis_types:
            sharding = self.sharding_of(value)
        return None if sharding is None else _trimmed(sharding.spec)

    def sharding_of(self, value: Value) -> NamedSharding | None:
        """The sharding that the program gives a value in auto mode; None if it gives none.

        An argument or a constraint has it, and what is computed elementwise has that of its
        operand. An entry of a stack has that of the stack, if that is whole along its first axis.
        """
        while True:
            step = step_back(value)
            if declared := _declared(value):
                return declared
            if step.way == "slice":
                return _of_entry(self.sharding_of(step.values[0]))
            if step.way == "argument":
                return _named(getattr(self.inputs[step.number].leaf, "sharding", None))
            if step.primitive == "sharding_constraint":
                return _named(step.equation.params["sharding"])
            is_same = step.way == "same" and len(step.values) == 1
            if not is_same and step.primitive not in SAME | SUMS | FACTORS:
                return None
            before = returned_operand(step)
            if before.aval.shape != value.aval.shape:
                return None  # such as inside a shard_map, which has the part of one device
            value = before


def _declared(value: Value) -> NamedSharding | None:
    """What `out_shardings` of a jit says of its result."""
    if not isinstance(value.variable, Var) or value.variable not in value.scope.made:
        return None
    equation, index = value.scope.made[value.variable]
    declared = equation.params.get("out_shardings")
    return _named(declared[index]) if isinstance(declared, tuple | list) else None


def _of_entry(stack: NamedSharding | None) -> NamedSharding | None:
    if stack is None or (stack.spec and stack.spec[0] not in (None, ())):
        return None
    return NamedSharding(stack.mesh, P(*stack.spec[1:]))


def _trimmed(spec: P) -> P:
    """A spec without what says nothing: trailing axes that are not split."""
    entries = list(spec)
    while entries and entries[-1] in (None, ()):
        entries.pop()
    return P(*entries)


def feeds_product(value: Value) -> bool:
    """Whether a matrix product reads a value, or a part of it, in whatever loop."""
    through, waiting = SAME | FORM | PART | FACTORS | {"gather"}, [value]
    for one in each_once(waiting):
        for equation in one.scope.readers.get(one.variable, []):
            if equation.primitive.name in PRODUCTS:
                return True
            if equation.primitive.name in through:
                waiting += [one.scope.value(result) for result in equation.outvars]
        waiting += [*calls_of(one), *entries_of(one)]
    return False


def line_of(value: Value) -> Location | None:
    """The line that makes a value; None for an input, or where it is not known."""
    made = maker_of(value)
    location = made[0].locate(made[1]) if made else NOWHERE
    return None if location == NOWHERE else location


def first_use(value: Value) -> Location | None:
    """The line that reads a value first; None where it is not known."""
    reader = reader_of(value)
    location = reader[0].locate(reader[1]) if reader else NOWHERE
    return None if location == NOWHERE else location


def kind_of(value: Value) -> tuple[object, object]:
    return getattr(value.aval, "shape", None), getattr(value.aval, "dtype", None)


def is_float(value: Value) -> bool:
    return hasattr(value.aval, "dtype") and jnp.issubdtype(value.aval.dtype, jnp.floating)


def _named(sharding: object) -> NamedSharding | None:
    return sharding if isinstance(sharding, NamedSharding) else None


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def made_from(value: Value, through: set[str]) -> Value:
    """The value that this one is made from by calls and by primitives of SAME or FORM alone."""
    while True:
        step = step_back(value)
        is_same = step.way == "same" and len(step.values) == 1
        if not is_same and step.primitive not in through:
            return value
        value = returned_operand(step)


def array_text(value: Value) -> str:
    return f"{value.aval.dtype.name}[{','.join(map(str, value.aval.shape))}]"


def spreads_nothing(spec: P) -> bool:
    """Whether a spec shards no axis, or leaves all axes to the compiler."""
    return all(entry in (None, (), P.UNCONSTRAINED) for entry in spec)


def _split(spec: P, sizes: Mapping[str, int]) -> int | None:
    if P.UNCONSTRAINED in spec:
        return None  # the compiler chooses
    return math.prod(sizes[name] for name in spec_axes(spec) if name in sizes)


def history(value: Value, through: Callable[[Derivation], Sequence[Value]]) -> Iterator[Derivation]:
    """Every step back from a value, also to the operands that `through` gives of an equation."""
    # A carry comes from its own value after an iteration: visited again, this would not end.
    waiting = [value]
    for one in each_once(waiting):
        step = step_back(one)
        yield step
        waiting += step.values if step.way in _LINKS else through(step)


def _of_parameter(step: Derivation) -> Sequence[Value]:
    """The operands that must be parameters for a result to be one; none if it cannot be."""
    name = step.primitive
    if name in SAME | FORM | PART or (name == "gather" and _chooses(step.equation)):
        return (returned_operand(step),)
    # The first operand of a select chooses between the others.
    return step.values[1:] if name == "select_n" else ()


def _of_gradient(step: Derivation) -> Sequence[Value]:
    """The operands that a result is a sum of, up to factors and reductions; none if it is not."""
    if step.primitive in SAME | FORM | PART | _REDUCES:
        return (returned_operand(step),)
    return step.values if step.primitive in SUMS | FACTORS else ()


def returned_operand(step: Derivation) -> Value:
    """The operand that a call, or an equation of `SAME`, `FORM` or `PART`, returns."""
    return step.values[step.number if step.primitive == "optimization_barrier" else 0]


def _chooses(equation: JaxprEqn) -> bool:
    """Whether a gather reads one piece for each entry of a batch, and is no lookup of many rows."""
    numbers = equation.params["dimension_numbers"]
    batches = len(getattr(numbers, "operand_batching_dims", ()))
    # The last axis of the indices is a position in the operand; the others count the pieces.
    axes = len(getattr(equation.invars[1].aval, "shape", ()))
    return axes - 1 <= batches
