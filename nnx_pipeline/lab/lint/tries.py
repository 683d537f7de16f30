"""Finds what can be changed of a function, without its source, to make its program smaller."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import jax
from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import name_p, remat_p

from nnx_pipeline.lab._tracing.calls import Call, Input, jit_for
from nnx_pipeline.lab._tracing.jaxpr import equations_of, place_of
from nnx_pipeline.lab.comparison.changes import Change, Watched, loop_changes, policy_changes
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.lint._facts import LintedProgram, kind_of
from nnx_pipeline.lab.lint._rules_donation import donation_words, updated_arguments
from nnx_pipeline.lab.lint._walk import as_loop
from nnx_pipeline.lab.search.choices import Fate, Kind, Space

TracedCall = Callable[[], tuple[Call, ClosedJaxpr, Sequence[Input]]]
_KEPT_OR_NOT: tuple[Fate, ...] = ("recompute", "keep")

_NO_DONATION = (
    "donation: no argument comes back updated, or is like results that are new and have no donor"
)
_NO_BACKWARD = "checkpoints: the function has no backward pass"
_NO_LOOPS = (
    "checkpoints in loops: none is called as jax.lax.scan, jax.lax.map or jax.lax.fori_loop (one "
    "that was imported by its own name is not seen)"
)
_NOT_SMALLER = "checkpoints in loops: no loop stores less with one than it does"
_NO_CHECKPOINTS = "policies: the function calls no jax.checkpoint (or does so with jax_remat3)"


def changes_of(traced_call: TracedCall) -> tuple[list[Change], list[str]]:
    """What can be changed of a function; and why there is nothing, for each kind of change.

    - `traced_call`: traces a call of it, see `api.traced_call`; called several times.

    Settings of the compiler are not among the changes.
    """
    watched = Watched()
    with watched.watching():
        program = _traced(traced_call)
    changes = [*_donations(program)]
    left_out = [] if changes else [_NO_DONATION]
    if not program.has_backward:
        return changes, [*left_out, _NO_BACKWARD]
    if lines := _loops_worth(traced_call, program, watched.lines):
        changes += loop_changes(lines)
    else:
        left_out.append(_NOT_SMALLER if watched.lines else _NO_LOOPS)
    changes += policy_changes(watched.policies, program.traced)
    return changes, left_out if watched.policies else [*left_out, _NO_CHECKPOINTS]


def space_of(traced_call: TracedCall, *, offloads: bool) -> tuple[Space, Watched]:
    """What can be kept, computed again or offloaded in a function, and what it calls.

    - `traced_call`: as for `changes_of`.
    - `offloads`: whether the platform has memory of a host.

    Raises InputError where there is nothing to choose.
    """
    watched = Watched()
    with watched.watching():
        program = _traced(traced_call)
    plain = [line for line in watched.lines if line not in watched.checkpointed]
    loops = _loops_worth(traced_call, program, plain) if program.has_backward else []
    nothing = jax.checkpoint_policies.nothing_saveable
    least = Change(kinds=("policy",), name="", cure="", loops=frozenset(loops), policy=nothing)
    with least.applied():
        names = _recomputed_names(_traced(traced_call).traced)
    if not loops and not names:
        function = program.function.function
        raise InputError(f"{function} {_nothing_to_choose(program, watched)}")
    fates: tuple[Fate, ...] = ("recompute", "offload", "keep") if offloads else _KEPT_OR_NOT
    kinds = [Kind(line, _KEPT_OR_NOT, is_loop=True) for line in loops]
    kinds += [Kind(name, fates) for name in names]
    return Space(tuple(kinds), has_checkpoint=bool(watched.policies)), watched


def _nothing_to_choose(program: LintedProgram, watched: Watched) -> str:
    if not program.has_backward:
        return (
            "has no backward pass, so that nothing is kept for one; give a step with its gradient"
        )
    if watched.policies:
        return (
            "names no value that its jax.checkpoint computes again, and has no loop that stores "
            "less with one; give values names with jax.ad_checkpoint.checkpoint_name"
        )
    return (
        "calls no jax.checkpoint, and has no loop that stores less with one; put what jax.grad is "
        "given, or its layers, in jax.checkpoint, and name values with checkpoint_name"
    )


def _recomputed_names(program: ClosedJaxpr) -> list[str]:
    """The names of the values that the backward pass computes again, in order."""
    found: dict[str, None] = {}
    for equation in equations_of(program):
        if equation.primitive is remat_p and equation.params["differentiated"]:
            inner = ClosedJaxpr(equation.params["jaxpr"], ())
            names = (one.params["name"] for one in equations_of(inner) if one.primitive is name_p)
            found.update(dict.fromkeys(names))
    return [*found]


def _traced(traced_call: TracedCall) -> LintedProgram:
    call, program, inputs = traced_call()
    place = place_of(call.function)
    return LintedProgram(program, frozenset(), inputs, place, jit_for(call))


def _loops_worth(
    traced_call: TracedCall, program: LintedProgram, lines: Iterable[str]
) -> list[str]:
    """The lines of the loops that store less with a checkpoint around their body."""

    def is_smaller(line: str) -> bool:
        (change,) = loop_changes([line], keeping=False)
        try:
            with change.applied():
                return _stacked_bytes(_traced(traced_call)) < _stacked_bytes(program)
        except Exception:  # such as of effects that a checkpoint cannot have: its row says why
            return True

    return list(filter(is_smaller, lines))


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
        yield _donation([inputs[at] for at in updated], program.jit, name)
    if others := _fitting(program, {inputs[at].argument for at in updated}):
        kept = [inputs[at] for at in sorted([*updated, *others])]
        yield _donation(kept, program.jit, name, unread=[inputs[at] for at in others])


def _donation(kept: Sequence[Input], jit: str, name: str, unread: Sequence[Input] = ()) -> Change:
    """The donation of the arguments that arrays are part of.

    - `kept`, `jit`, `name`: as for `donation_words`.
    - `unread`: those of them of which nobody knows whether the caller reads them again.
    """
    names = [*dict.fromkeys(one.parameter for one in kept)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    strange = ", ".join(dict.fromkeys(one.parameter for one in unread))
    return Change(
        kinds=("donation",),
        name=f"donate {', '.join(names[:3])}{more}",
        cure=donation_words(kept, jit, name),
        assumes=f"{strange} of no use to the caller afterwards" if unread else "",
        donated=tuple(dict.fromkeys(one.argument for one in kept)),
    )


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
