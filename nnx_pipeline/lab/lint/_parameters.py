"""Which inputs of a program are its parameters, where nobody says so."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import jax

from nnx_pipeline.lab._tracing.nnx_state import is_nnx
from nnx_pipeline.lab.lint import _facts as facts
from nnx_pipeline.lab.lint._facts import LintedProgram


def parameters_of(program: LintedProgram, arguments: Sequence[object]) -> frozenset[int]:
    """The numbers of the inputs that are parameters.

    They are the `nnx.Param`s of all arguments where there are NNX variables. Otherwise they are the
    floating-point arrays of the arguments with several that a program with a backward pass
    multiplies by and returns in their shapes; if there are none, of the first one with arrays.
    """
    leaves = jax.tree.leaves(arguments, is_leaf=lambda leaf: is_nnx(leaf, "Variable"))
    variables = [leaf for leaf in leaves if is_nnx(leaf, "Variable")]
    if variables:
        params = jax.tree.leaves([leaf for leaf in variables if is_nnx(leaf, "Param")])
        wanted = set(map(id, params))
        return frozenset(n for n, one in enumerate(program.inputs) if id(one.leaf) in wanted)
    floats: dict[object, list[int]] = defaultdict(list)
    for number, one in enumerate(program.inputs):
        own = floats[one.argument]
        own += [number] if facts.is_float(program.input(number)) else []
    states = _multiplied_and_returned(program, list(floats.values()))
    first = next(iter(floats.values()), [])
    return frozenset(number for own in states or [first] for number in own)


def _multiplied_and_returned(program: LintedProgram, trees: list[list[int]]) -> list[list[int]]:
    if not program.has_backward:
        return []
    free = Counter(facts.kind_of(result)[0] for result in program.results())
    found = []
    # The largest tree first, so that no batch takes the place of a parameter of its shape.
    for own in sorted(trees, key=lambda own: -len(own)):
        if len(own) < 2:
            break  # the gradient of a single array may be that of an activation
        inputs = [program.input(number) for number in own]
        shapes = Counter(facts.kind_of(value)[0] for value in inputs)
        if not shapes - free and any(map(facts.feeds_product, inputs)):
            free -= shapes
            found.append(own)
    return found
