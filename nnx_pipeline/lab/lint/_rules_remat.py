"""The rule about `jax.checkpoint` policies that save nothing, or that save everything."""

import inspect
from collections.abc import Iterator
from typing import Literal

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import remat_p

from nnx_pipeline.lab._tracing.jaxpr import is_recomputed
from nnx_pipeline.lab.lint._facts import (
    FORM,
    SAME,
    ArraySize,
    LintedProgram,
    Waste,
    returned_operand,
)
from nnx_pipeline.lab.lint._walk import JaxprScope, Value, step_back

# Computing these again costs no matrix product and saves no array from being stored.
_FREE = (
    SAME | FORM | {"iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "pjit", "jit"}
)
# JAX marks what a policy saves with one of these: a rounding of the value to its own dtype, where
# the forward pass goes on to use it, or a copy to the host.
_SAVED = {"reduce_precision", "device_put"}
_CHOICES = {"dynamic_slice", "gather", "dynamic_index", "select_n", "dynamic_update_slice"}
_NEGLIGIBLE = 0.02  # of the bytes saved: a smaller recomputation counts as none


def remat_policies(program: LintedProgram, limit: float) -> Iterator[Waste]:
    """Finds policies of `jax.checkpoint` under which nothing is saved, or nothing is recomputed.

    Both happen silently:

    - a policy saves by name, and no value has the name;
    - a policy saves products without batch axes, under `vmap`, which gives every product one;
    - a policy saves all but a name, and no value has the name.

    Only the backward pass shows it, by what it recomputes and by what it receives.
    """
    there = {e.params["name"] for _, e in program.scope.equations() if e.primitive.name == "name"}
    for scope, equation in program.scope.equations():
        if not _is_backward(equation) or any(map(_is_backward, scope.calls())):
            continue  # one inside another only changes the order of recomputation
        policy = equation.params["policy"]
        chosen = saved_names(policy)
        # None, `nothing_saveable`, or a policy of no names saves nothing on purpose.
        if policy in (None, jax.checkpoint_policies.nothing_saveable) or chosen == set():
            continue
        saved, is_complete = _saved(program, scope, equation)
        again = _recomputed(program, scope, equation)
        stored = sum(size.bytes for size in saved)
        # If the program has a name that the policy saves, nothing is wrong with the policy: the
        # backward pass does not need the value.
        if not saved and is_complete and not (chosen or set()) & there and again.bytes >= limit:
            yield Waste(
                scope.locate(equation),
                again,
                "the policy of this jax.checkpoint saves nothing; everything is recomputed",
                _why(scope, equation),
            )
        elif stored >= limit and again.bytes <= _NEGLIGIBLE * stored:
            yield Waste(
                scope.locate(equation),
                ArraySize(stored, all(size.per_device for size in saved)),
                "the policy of this jax.checkpoint saves everything; nothing expensive is "
                "recomputed",
                "name what to save (save_only_these_names) rather than what not to save: a "
                "name marks the copy that checkpoint_name returns, not the value that it was given",
            )


def _is_backward(equation: JaxprEqn) -> bool:
    return equation.primitive is remat_p and equation.params["differentiated"]


def saved_names(policy: object) -> set[str] | None:
    """The names in the closure or fields of a policy; None if it does not go by names."""
    values = dict(getattr(policy, "__dict__", {}))
    if inspect.isfunction(policy):
        values |= inspect.getclosurevars(policy).nonlocals
    collections = [h for h in values.values() if isinstance(h, set | frozenset | list | tuple)]
    # A policy may combine others; it goes by names only if all of these do.
    inner = [saved_names(h) for h in values.values() if callable(h)]
    if not collections or any(names is None for names in inner):
        return None
    return {n for names in (*collections, *inner) for n in names or () if isinstance(n, str)}


def _recomputed(program: LintedProgram, scope: JaxprScope, equation: JaxprEqn) -> ArraySize:
    total, known = 0, True
    for body, one in _again(scope, equation):
        if one.primitive.name not in _FREE:
            for variable in one.outvars:
                size, per_device = program.device_bytes(body.value(variable))
                total, known = total + size, known and per_device
    return ArraySize(total, known)


def _again(
    scope: JaxprScope, equation: JaxprEqn, marked: bool = False
) -> Iterator[tuple[JaxprScope, JaxprEqn]]:
    """The recomputed equations inside one, all if it is `marked` so, also in inner checkpoints."""
    for body in scope.inner[id(equation)]:
        for one in body.jaxpr.eqns:
            is_again = marked or is_recomputed(one)
            if body.inner.get(id(one)):
                yield from _again(body, one, is_again)
            elif is_again:
                yield body, one


def _saved(
    program: LintedProgram, scope: JaxprScope, equation: JaxprEqn
) -> tuple[list[ArraySize], bool]:
    """The sizes of what the policy saved, and whether the origin of every operand is known."""
    saved, complete = [], True
    names = saved_names(equation.params["policy"]) or set()
    for operand in equation.invars:
        origin, whole = _origin(scope.value(operand), names)
        if origin == "saved":
            saved.append(program.device_bytes(whole))
        complete = complete and origin != "unknown"
    return saved, complete


def _origin(value: Value, names: set[str]) -> tuple[Literal["saved", "input", "unknown"], Value]:
    """Whether a policy saved this operand of the backward pass, and the array it is a part of.

    It was saved if it has one of `names`, if JAX marks it (see `_SAVED`), or if a forward loop
    stacks it without using it itself, as it uses every input. The origin is unknown for what is
    read out of a buffer that a loop carries, and for what a loop inside the checkpoint stacked.
    """
    whole, via = value, None
    depth = 0  # backward loops left on the way back, less forward loops entered
    forward = used = unknown = False
    while True:
        step = step_back(value)
        if forward:
            # `via` is the equation that led here; any other reader is a use in the forward loop.
            used = used or any(e is not via for e in value.scope.readers.get(value.variable, []))
        if step.way == "made":
            via, name = step.equation, step.equation.primitive.name
            is_named = name == "name" and via.params["name"] in names
            if is_named or name in _SAVED or (forward and not used):
                return "saved", whole
            if name not in SAME | FORM | _CHOICES:
                return "unknown" if unknown else "input", whole
            unknown = unknown or (name in _CHOICES and not forward)
            value = step.values[1] if name == "select_n" else returned_operand(step)
        elif step.way in ("same", "slice", "stack"):
            value, via = step.values[-1], None
            depth += {"slice": 1, "stack": -1}.get(step.way, 0)
            forward = forward or step.way == "stack"
            # More loops entered than left: one of them is inside the checkpoint.
            unknown = unknown or depth < 0
            if step.way == "slice":
                whole = value  # with the entries of all iterations
        else:
            return "unknown" if unknown else "input", whole


def _why(scope: JaxprScope, equation: JaxprEqn) -> str:
    again = [one for _, one in _again(scope, equation)]
    there = sorted({one.params["name"] for one in again if one.primitive.name == "name"})
    chosen = saved_names(equation.params["policy"])
    if chosen:
        return (
            f"the policy saves {', '.join(sorted(chosen))}, and the names inside the checkpoint "
            f"are {', '.join(there) or 'none'}; name values with jax.ad_checkpoint.checkpoint_name"
        )
    products = [one for one in again if one.primitive.name == "dot_general"]
    if products and all(one.params["dimension_numbers"][1][0] for one in products):
        return (
            "under vmap every product has a batch axis, which dots_with_no_batch_dims_saveable "
            "does not save; save by name (jax.ad_checkpoint.checkpoint_name)"
        )
    return "save by name (jax.ad_checkpoint.checkpoint_name), or leave the policy out"
