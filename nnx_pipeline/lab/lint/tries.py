"""Finds what can be changed of a function, without its source, to make its program smaller."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from nnx_pipeline.lab._tracing.calls import jaxpr_of, jit_of
from nnx_pipeline.lab._tracing.jaxpr import place_of
from nnx_pipeline.lab.api import abstract_call, target_of
from nnx_pipeline.lab.comparison.changes import (
    Change,
    Watched,
    donation,
    loop_changes,
    policy_changes,
)
from nnx_pipeline.lab.compile._functions import called_with
from nnx_pipeline.lab.compile._places import AnyMesh
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.lint._facts import LintedProgram, kind_of
from nnx_pipeline.lab.lint._rules_donation import updated_arguments
from nnx_pipeline.lab.lint._walk import as_loop

_NO_DONATION = "donation: no argument has the dtypes and shapes of results that have no donor yet"
_NO_BACKWARD = "checkpoints: the function has no backward pass"
_NO_LOOPS = (
    "checkpoints in loops: none is called as jax.lax.scan, jax.lax.map or jax.lax.fori_loop (one "
    "that was imported by its own name is not seen)"
)
_NOT_SMALLER = "checkpoints in loops: no loop stores less with one than it does"
_NO_CHECKPOINTS = "policies: the function calls no jax.checkpoint (or does so with jax_remat3)"


def changes_of(
    function: Callable[..., object],
    *arguments: object,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
) -> tuple[list[Change], list[str]]:
    """Traces a function and finds what to change; and why there is nothing, for each kind.

    The parameters are those of `measure`. Settings of the compiler are not among the changes.
    """
    target, watched = target_of(mesh, platform), Watched()

    def traced() -> LintedProgram:
        with abstract_call(function, arguments, target) as call, called_with(call):
            program, inputs = jaxpr_of(call)
        place = place_of(call.function)
        return LintedProgram(program, frozenset(), inputs, place, jit_of(call.function))

    def is_smaller(line: str) -> bool:
        (change,) = loop_changes([line], keeping=False)
        with change.applied():
            return _stacked_bytes(traced()) < _stacked_bytes(program)

    with watched.watching():
        program = traced()
    changes = [*_donations(program)]
    left_out = [] if changes else [_NO_DONATION]
    if not program.has_backward:
        return changes, [*left_out, _NO_BACKWARD]
    if lines := list(filter(is_smaller, watched.lines)):
        changes += loop_changes(lines)
    else:
        left_out.append(_NOT_SMALLER if watched.lines else _NO_LOOPS)
    changes += policy_changes(watched.policies, program.traced)
    return changes, left_out if watched.policies else [*left_out, _NO_CHECKPOINTS]


def _stacked_bytes(program: LintedProgram) -> int:
    """What the loops of a program store of their iterations, residuals among it."""
    loops = [as_loop(scope, equation) for scope, equation in program.scope.equations()]
    stacks = [whole for loop in loops if loop for whole, _ in loop.stacked]
    return sum(program.device_bytes(whole).bytes for whole in stacks)


def _donations(program: LintedProgram) -> Iterator[Change]:
    """That of all arguments which come back updated; and that of these and of others of which half
    has the dtypes and shapes of results, which no caller may need any more."""
    name = program.function.function
    inputs, updated = program.inputs, updated_arguments(program)
    if updated:
        yield donation([inputs[at] for at in updated], program.jit, name)
    if others := _fitting(program, {inputs[at].argument for at in updated}):
        kept = [inputs[at] for at in sorted([*updated, *others])]
        yield donation(kept, program.jit, name, unread=[inputs[at] for at in others])


def _fitting(program: LintedProgram, taken: Collection[int | str]) -> list[int]:
    """The numbers of arrays, but of these arguments, that could give their memory to results which
    no other argument gives it to. An argument is donated whole: half of it must be of use."""
    given = set(map(id, program.traced.jaxpr.invars))
    free = Counter(kind_of(one) for one in program.results() if id(one.variable) not in given)
    groups: dict[int | str, list[int]] = {}
    for number, one in enumerate(program.inputs):
        if one.donated or one.argument in taken:
            free[kind_of(program.input(number))] -= 1
        else:
            groups.setdefault(one.argument, []).append(number)
    found: list[int] = []
    for numbers in groups.values():
        left, fitting = Counter(free), []
        for number in numbers:
            if left[kind := kind_of(program.input(number))] > 0:
                left[kind] -= 1
                fitting.append(number)
        sizes = {number: program.device_bytes(program.input(number)).bytes for number in numbers}
        if fitting and 2 * sum(map(sizes.__getitem__, fitting)) >= sum(sizes.values()):
            free = left
            found += fitting
    return found
