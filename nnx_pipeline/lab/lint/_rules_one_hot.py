"""Rules about one-hot arrays: lookups, and the dispatch of tokens to experts."""

from collections.abc import Iterator

from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import LintedProgram, Waste
from nnx_pipeline.lab.lint._walk import Value, calls_of, entries_of, stacks_of, step_back

_SHAPING = facts.SAME | facts.FORM
# What masks are made of one-hot arrays by, and what their indices are counted by.
_MASKS = _SHAPING | facts.PART | facts.FACTORS | facts.SUMS
_MASKS |= {"and", "or", "reduce_sum", "reduce_max", "reduce_or"}
_SUMS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_or", "argmax"}
_ELEMENTWISE = _SHAPING | facts.FACTORS | {"add", "add_any", "sub", "select_n", "and", "or", "gt"}
_COUNTS = _MASKS | {"cumsum", "gather", "lt", "gt", "le", "ge", "max", "dot_general"}


def one_hot_arrays(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds one-hot arrays above a limit: an iota compared with indices, and cast to numbers.

    Not those of which only sums are taken, which a compiler makes without storing the array. Those
    of places in the buffers of experts are of `dispatch_stored`.
    """
    for scope, equation in program.scope.equations():
        if equation.primitive.name != "convert_element_type":
            continue
        value = scope.value(equation.outvars[0])
        size = program.device_bytes(value)
        indices = _indices(scope.value(equation.invars[0]))
        if size.bytes < limit or indices is None or _is_counted(indices):
            continue
        if not _is_only_summed(value):
            yield Waste(
                scope.locate(equation),
                size,
                f"{facts.array_text(value)} is one-hot",
                "read the rows by their index (table[ids], jnp.take_along_axis), or work on a "
                "part of the ids at a time",
            )


def _is_only_summed(value: Value) -> bool:
    """Whether all that reads an array elementwise ends in a sum, or the like, over an axis."""
    waiting = [value]
    for one in each_once(waiting):
        for equation in one.scope.readers.get(one.variable, []):
            name = equation.primitive.name
            if name in _ELEMENTWISE:
                waiting += [one.scope.value(result) for result in equation.outvars]
            elif name not in _SUMS and not one.scope.inner.get(id(equation)):
                return False
        if any(stacks_of(one)) or any(entries_of(one)):
            return False
        waiting += calls_of(one)
    return True


def _indices(value: Value) -> Value | None:
    """The indices of a one-hot array before its cast; None if it is none."""
    step = step_back(facts.made_from(value, _SHAPING))
    made = [facts.made_from(one, _SHAPING) for one in step.values]
    others = [one for one in made if step_back(one).primitive != "iota"]
    # Two iotas make an identity matrix, which is no lookup.
    return others[0] if step.primitive == "eq" and len(made) == 2 and len(others) == 1 else None


def dispatch_stored(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds one-hot arrays of tokens, experts and places in their buffers, which are multiplied.

    Such an array is one-hot in places that are counted by a cumulative sum of another one-hot
    array, or the product of two one-hot arrays.
    """
    for scope, equation in program.scope.equations():
        if equation.primitive.name != "dot_general":
            continue
        for operand in equation.invars:
            value = scope.value(operand)
            size = program.device_bytes(value)
            if size.bytes < limit or len(facts.squeezed(value.aval.shape)) < 3:
                continue
            if not _is_dispatch(value):
                continue
            made = facts.made_from(value, _SHAPING)
            yield Waste(
                facts.line_of(made) or scope.locate(equation),
                size,
                f"{facts.array_text(value)} has an entry for each token, expert and place in its "
                "buffer, and nearly all are zero",
                "move tokens by index: sort them by expert and use jax.lax.ragged_dot, or scatter "
                "them into [experts, capacity, …] and gather them back with take_along_axis",
            )


def _is_dispatch(value: Value) -> bool:
    indices = {_indices(one) for one in _behind(value, _MASKS)} - {None}
    return len(indices) > 1 or any(_is_counted(one) for one in indices if one is not None)


def _is_counted(indices: Value) -> bool:
    """Whether indices are how many of a one-hot array came before, as places in a buffer are."""
    sums = (step_back(one) for one in _behind(indices, _COUNTS))
    return any(
        _indices(one) is not None
        for step in sums
        if step.primitive == "cumsum"
        for one in _behind(step.values[0], _COUNTS)
    )


def _behind(value: Value, through: set[str]) -> Iterator[Value]:
    """A value and all that it is computed from by these primitives."""
    waiting = [value]
    for one in each_once(waiting):
        yield one
        step = step_back(one)
        if step.way in ("same", "slice") or step.primitive in through:
            waiting += step.values
