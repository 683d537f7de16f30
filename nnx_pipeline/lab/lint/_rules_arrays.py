"""Rules about single arrays: hidden upcasts, one-hot arrays and trivial sharding constraints."""

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from nnx_pipeline.lab._tracing.installed import package_of
from nnx_pipeline.lab._tracing.jaxpr import (
    function_of,
    is_differentiated,
    is_promotion,
    is_recomputed,
    is_transposed,
)
from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import (
    JaxprScope,
    Value,
    as_loop,
    calls_of,
    loops_around,
    step_back,
)

_BINARY = {"add", "sub", "mul", "div", "max", "min", "pow", "atan2", "rem", "select_n", "nextafter"}
# A mask of NumPy is a constant too.
_OF_NUMPY = 4
_SHAPING = facts.SAME | facts.FORM
_CUTS = {"slice", "dynamic_slice", "gather"}


def hidden_upcasts(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds arrays of 8 or 16 bits that become float32 because another operand is float32.

    Not reported are:

    - casts that are written in the source;
    - reductions that JAX computes in float32;
    - an update of a parameter outside of what is differentiated, which is cast back;
    - the product with a float32 parameter that a softmax, or a choice of experts, is taken of;
    - an elementwise operation with a float32 array that is as large itself, unless it is made from
      an iota, as a mask is;
    - one with a statistic of the array, in a function that returns to the smaller dtype, as a layer
      norm does with its mean; in a function of an installed package, with any operand;
    - the gradient of a cast to the smaller dtype, which is float32 because what was cast is.

    A matrix product that JAX makes in a backward pass is the transpose of one in the forward pass,
    which has the same line and is checked there. One in a backward pass that is written by hand has
    no such counterpart at its line, so it is checked itself.
    """
    looked_at = [
        (scope, equation, is_transposed([equation, *scope.calls()]))
        for scope, equation in program.scope.equations()
        if equation.primitive.name in ("convert_element_type", "dot_general")
    ]
    forward = {
        (equation.primitive.name, scope.locate(equation))
        for scope, equation, backward in looked_at
        if not backward
    }
    for scope, equation, backward in looked_at:
        made_by_jax = backward and (equation.primitive.name, scope.locate(equation)) in forward
        for value, size in _upcasts(program, scope, equation, made_by_jax):
            if size.bytes >= limit:
                yield Waste(
                    scope.locate(equation),
                    size,
                    f"{facts.array_text(value)} becomes float32, as the other operand is; so does "
                    "what is computed from it",
                    "cast the other operand to the smaller dtype, or write .astype(float32) "
                    "where float32 is meant; jax_numpy_dtype_promotion='strict' makes it an error",
                )


def _upcasts(
    program: LintedProgram, scope: JaxprScope, equation: JaxprEqn, transposed: bool
) -> Iterator[tuple[Value, facts.ArraySize]]:
    name = equation.primitive.name
    operands = [scope.value(variable) for variable in equation.invars]
    if name == "convert_element_type":
        result = scope.value(equation.outvars[0])
        # A cast to more bits in a backward pass is the transpose of a cast to fewer bits.
        meant = transposed or not is_promotion(equation)
        if _is_small(operands[0]) and _is_float32(result) and not meant:
            readers = scope.readers.get(equation.outvars[0], [])
            widening = [reader for reader in readers if _widens(scope, reader, result)]
            meant = any(_is_head(program, scope, one) for one in widening)
            if widening and not meant and not _is_update(program, operands[0], widening[0]):
                yield operands[0], program.device_bytes(result)
    elif name == "dot_general" and _is_float32(scope.value(equation.outvars[0])) and not transposed:
        # With two small operands float32 is the dtype that the product was asked to add up in.
        small = [one for one in operands if _is_small(one)]
        if len(small) == 1:
            size, per_device = program.device_bytes(small[0])
            yield small[0], facts.ArraySize(size * 4 // small[0].aval.dtype.itemsize, per_device)


def _widens(scope: JaxprScope, reader: JaxprEqn, value: Value) -> bool:
    """Whether a reader of a cast array needs it in float32 only because of another operand.

    That is a matrix product, or an elementwise operation with a float32 array that is a mask or
    smaller, other than a statistic of the array.
    """
    if reader.primitive.name == "dot_general":
        return True
    if reader.primitive.name not in _BINARY:
        return False
    array = facts.made_from(value, _SHAPING)
    others = [scope.value(v) for v in reader.invars if v is not value.variable]
    floats = [facts.made_from(one, _SHAPING) for one in others if _is_float32(one)]
    literals = [one.variable for one in floats if isinstance(one.variable, Literal)]
    if reader.primitive.name in ("add", "sub") and not all(one.val for one in literals):
        return False  # a sum in float32 begins here, or a mean that a norm leaves out is taken off
    made_of = [
        made
        for one in floats
        if (made := _made_of(one, array)) & {"iota", "inside"} or one.aval.size < value.aval.size
    ]
    if not made_of:
        return False
    # A layer of a package computes in float32 on purpose where it returns to the smaller dtype.
    is_meant = all("array" in made for made in made_of) or package_of(function_of(reader)[0])
    return not (is_meant and _comes_back(scope, reader))


def _is_head(program: LintedProgram, scope: JaxprScope, product: JaxprEqn) -> bool:
    """Whether a product with a parameter makes what a softmax or a choice of experts is taken of,
    which is meant to be in float32."""
    if product.primitive.name != "dot_general":
        return False
    if not any(program.is_parameter(scope.value(operand)) for operand in product.invars):
        return False
    waiting = [scope.value(product.outvars[0])]
    for one in each_once(waiting):
        for equation in one.scope.readers.get(one.variable, []):
            if equation.primitive.name in ("exp", "top_k"):
                return True
            if equation.primitive.name in _SHAPING | {"add", "sub", "mul", "div"}:
                waiting += [one.scope.value(result) for result in equation.outvars]
        waiting += calls_of(one)
    return False


def _is_update(program: LintedProgram, value: Value, reader: JaxprEqn) -> bool:
    """Whether an optimizer computes in float32, and returns to the dtype of the parameters."""
    if not program.has_backward or is_differentiated([reader, *value.scope.calls()]):
        return False
    is_state = program.is_parameter(value) or program.is_gradient(value)
    return is_state and _comes_back(value.scope, reader)


def _made_of(value: Value, array: Value) -> set[str]:
    """What a value is computed from: `array`, `iota`, `inside` where no array of numbers that the
    function is given has a part in it, `literal`; empty for anything else."""
    waiting, origins = [value], set()
    for operand in each_once(waiting):
        one = facts.made_from(operand, _SHAPING)
        if one == array or not isinstance(one.variable, Var):
            origins.add("array" if one == array else "literal")
            continue
        if not facts.is_float(one):
            origins.add("inside")  # a mask, or random bits, which has become numbers
        step = step_back(one)
        if step.way != "made":
            if facts.is_float(one):
                return set()
            continue
        if step.primitive == "iota":
            origins.add("iota")
        if facts.is_float(one):
            waiting += step.values
    if origins == {"literal"}:
        origins.add("inside")
    return origins


def _comes_back(scope: JaxprScope, reader: JaxprEqn) -> bool:
    """Whether the function that makes the float32 array returns to a smaller dtype.

    A recomputation of a backward pass need not have the cast back. It is taken to return, since the
    forward pass has the whole function and is checked itself. A cast in the backward pass is the
    gradient of what was widened, and no return of the forward pass.
    """
    if is_recomputed(reader):
        return True
    calls = [*scope.calls()]
    in_backward = is_transposed([reader, *calls])
    function, waiting = function_of(reader), list(reader.outvars)
    for variable in each_once(waiting):
        for equation in scope.readers.get(variable, []):
            if not equation.outvars:
                continue  # it prints, or calls back
            result = scope.value(equation.outvars[0])
            if is_transposed([equation, *calls]) and not in_backward:
                continue
            if equation.primitive.name == "convert_element_type" and _is_small(result):
                # Only a cast in the function itself counts, not one in what uses its result.
                if function_of(equation) == function:
                    return True
            elif _is_float32(result):
                waiting.append(equation.outvars[0])
    return False


def casts_before_loops(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds arrays that are cast whole to a wider dtype, and of which loops then read parts."""
    for scope, equation in program.scope.equations():
        if equation.primitive.name != "convert_element_type":
            continue
        if is_transposed([equation, *scope.calls()]):
            continue
        narrow, wide = (scope.value(v) for v in (equation.invars[0], equation.outvars[0]))
        size = program.device_bytes(wide)
        widens = wide.aval.dtype.itemsize > narrow.aval.dtype.itemsize
        if size.bytes >= limit and widens and _is_read_in_parts(wide):
            yield Waste(
                scope.locate(equation),
                size,
                f"{facts.array_text(narrow)} becomes {wide.aval.dtype.name} whole, and a loop then "
                "reads it part by part",
                "keep it as it is, and cast each part where it is used: .astype in the body of the "
                "loop, after the slice or the index",
            )


def _is_read_in_parts(wide: Value) -> bool:
    """Whether only loops read an array, or what is computed from it alone elementwise: they take it
    entry by entry, or cut out or look up a part in their bodies."""
    around, waiting, is_cut = len(loops_around(wide.scope)), [wide], False
    for one in each_once(waiting):
        scope = one.scope
        for equation in scope.readers.get(one.variable, []):
            loop, name = as_loop(scope, equation), equation.primitive.name
            # What a loop takes whole is followed into its body.
            if loop and any(whole == one for whole, _ in loop.sliced):
                is_cut = True
            elif name in _CUTS and equation.invars[0] is one.variable:
                if len(loops_around(scope)) == around:
                    return False
                is_cut = True
            elif name in _SHAPING or (name in _BINARY and _is_alone(equation)):
                waiting += [scope.value(result) for result in equation.outvars]
            elif not scope.inner.get(id(equation)):
                return False
        waiting += calls_of(one)
    return is_cut


def _is_alone(equation: JaxprEqn) -> bool:
    """Whether the other operand of an equation is a number."""
    return any(getattr(operand.aval, "size", 0) == 1 for operand in equation.invars)


def captured_constants(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds arrays that a function does not take, but holds: they are part of the program.

    One of NumPy, such as a mask, is reported from four times the limit.
    """
    seen: set[int] = set()
    consts = {var: const for closed in _closed(program) for var, const in _constants(closed)}
    for scope in program.scope.scopes():
        for variable in scope.jaxpr.constvars:
            const = consts.get(variable)
            size = getattr(const, "nbytes", 0)
            least = limit * (1 if isinstance(const, jax.Array) else _OF_NUMPY)
            if size < least or id(const) in seen:
                continue
            seen.add(id(const))
            value = scope.value(variable)
            yield Waste(
                facts.first_use(value) or program.function,
                facts.ArraySize(size, True),
                f"{facts.array_text(value)} is not an argument: the function holds it, and so it "
                "becomes a constant of the program, beside the array of the caller",
                "pass it as an argument of the jitted function (a module too), or compute it "
                "inside with jax.numpy",
            )


def _closed(program: LintedProgram) -> Iterator[ClosedJaxpr]:
    yield program.traced
    for _, equation in program.scope.equations():
        for parameter in equation.params.values():
            for one in parameter if isinstance(parameter, tuple | list) else (parameter,):
                if isinstance(one, ClosedJaxpr):
                    yield one


def _constants(closed: ClosedJaxpr) -> Iterator[tuple[Var, object]]:
    yield from zip(closed.jaxpr.constvars, closed.consts, strict=False)


def trivial_constraints(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds sharding constraints that shard no axis, unless they gather an array.

    One before or after a constraint that does shard an axis is half of a gather, and is intended.
    """
    if program.devices == 1:
        return
    for scope, equation in program.scope.equations():
        if equation.primitive.name != "sharding_constraint":
            continue
        if is_transposed([equation, *scope.calls()]):
            continue  # JAX constrains the cotangent as the program does the value
        sharding = equation.params["sharding"]
        if not isinstance(sharding, NamedSharding) or not facts.spreads_nothing(sharding.spec):
            continue
        before, after = (scope.value(v) for v in (equation.invars[0], equation.outvars[0]))
        size = program.device_bytes(before)
        if size.bytes >= limit and not _gathers(program, before, after):
            yield Waste(
                scope.locate(equation),
                size,
                f"the constraint on {facts.array_text(before)} shards no axis: {sharding.spec}",
                "leave it out when every axis of the spec is None, or name the mesh axes; as "
                "it is, it stays in the program, holds the array whole on each device, and may be "
                "carried through a loop",
            )


def _gathers(program: LintedProgram, before: Value, after: Value) -> bool:
    # A part of a sharded array is taken to be sharded.
    known = program.sharding_of(facts.made_from(before, _SHAPING | facts.PART))
    if known is not None and not facts.spreads_nothing(known.spec):
        return True
    return any(not facts.spreads_nothing(sharding.spec) for sharding in _constrained_next(after))


def _constrained_next(value: Value) -> Iterator[NamedSharding]:
    """The sharding constraints on a value or on casts of it, also in and outside calls."""
    waiting = [value]
    for one in each_once(waiting):
        scope, variable = one.scope, one.variable
        for reader in scope.readers.get(variable, []):
            if reader.primitive.name == "sharding_constraint":
                if isinstance(reader.params["sharding"], NamedSharding):
                    yield reader.params["sharding"]
            elif reader.primitive.name in facts.SAME:
                waiting += [scope.value(result) for result in reader.outvars]
        waiting += calls_of(one)


def _is_small(value: Value) -> bool:
    return facts.is_float(value) and value.aval.dtype.itemsize < 4


def _is_float32(value: Value) -> bool:
    return facts.is_float(value) and value.aval.dtype.itemsize == 4
