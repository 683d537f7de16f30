"""The rule about checkpoints whose policy comes to nothing, or to everything."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import remat_p

from nnx_pipeline.equations import is_recomputed
from nnx_pipeline.lint.facts import FORM, SAME, Program, passed_on
from nnx_pipeline.lint.finding import Finding, Limits
from nnx_pipeline.lint.walk import Scope, Value, step_back

REMAT = "remat-policy"

# Computing these again costs no product and keeps no array from being kept.
_FREE = (
    SAME | FORM | {"iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "pjit", "jit"}
)
# JAX marks what a policy saves by one of these: a rounding to its own dtype, where the forward pass
# goes on with the value, or a copy to the host.
_SAVED = {"reduce_precision", "device_put"}
_CHOICES = {"dynamic_slice", "gather", "dynamic_index", "select_n", "dynamic_update_slice"}
_NEGLIGIBLE = 0.02  # of what is kept


def remat_policies(program: Program, limits: Limits) -> Iterator[Finding]:
    """A policy of `jax.checkpoint` under which nothing is saved, or nothing is computed again.

    Both happen silently: a policy on names where no value has the name, one on products without
    batch axes under `vmap`, which gives every product one, and one that excepts a name which is
    not there. Only the backward pass shows it: what it computes again, and what it is handed.
    """
    there = {e.params["name"] for _, e in program.scope.equations() if e.primitive.name == "name"}
    for scope, equation in program.scope.equations():
        if not _is_backward(equation) or any(map(_is_backward, scope.calls())):
            continue  # one within another only says in which order things are done again
        policy = equation.params["policy"]
        if _saves_nothing_on_purpose(policy):
            continue
        saved, is_complete = _saved(program, scope, equation)
        again, again_per_device = _recomputed(program, scope, equation)
        kept = sum(size for size, _ in saved)
        per_device = all(known for _, known in saved)
        asked = names_of(policy) or set()
        # A name that is there marks something that the backward pass can do without.
        if not saved and is_complete and not asked & there and again >= limits.large:
            yield Finding(
                rule=REMAT,
                severity="warning",
                location=scope.locate(equation),
                bytes=again,
                per_device=again_per_device,
                what="the policy of this jax.checkpoint saves nothing; all is computed again",
                cure=_why(scope, equation),
            )
        elif kept >= limits.large and again <= _NEGLIGIBLE * kept:
            yield Finding(
                rule=REMAT,
                severity="warning",
                location=scope.locate(equation),
                bytes=kept,
                per_device=per_device,
                what="the policy of this jax.checkpoint saves everything; nothing that costs "
                "something is computed again",
                cure="name what to save (save_only_these_names) rather than what not to; a name "
                "that is to be left out marks the copy it makes, not the value before it",
            )


def _is_backward(equation: JaxprEqn) -> bool:
    return equation.primitive is remat_p and equation.params["differentiated"]


def _saves_nothing_on_purpose(policy: Any) -> bool:
    """Whether a policy is none, `nothing_saveable`, or one on names that is given no names."""
    if policy is None or policy is jax.checkpoint_policies.nothing_saveable:
        return True
    asked = names_of(policy)
    return asked is not None and not asked


def names_of(policy: Any) -> set[str] | None:
    """The names that a policy was made with, None if it is not one on names.

    JAX keeps them in the closure of a function or in the fields of an object, by version.
    """
    held = dict(getattr(policy, "__dict__", {}))
    if inspect.isfunction(policy):
        held |= inspect.getclosurevars(policy).nonlocals
    collections = [h for h in held.values() if isinstance(h, set | frozenset | list | tuple)]
    inner = [names_of(h) for h in held.values() if callable(h)]
    if not collections or any(names is None for names in inner):
        return None
    return {n for names in (*collections, *inner) for n in names or () if isinstance(n, str)}


def _recomputed(program: Program, scope: Scope, equation: JaxprEqn) -> tuple[int, bool]:
    """Bytes of the values that the backward pass computes again, and whether per device."""
    total, known = 0, True
    for place, one in _again(scope, equation):
        if one.primitive.name not in _FREE:
            for variable in one.outvars:
                size, per_device = program.device_bytes(place.value(variable))
                total, known = total + size, known and per_device
    return total, known


def _again(
    scope: Scope, equation: JaxprEqn, marked: bool = False
) -> Iterator[tuple[Scope, JaxprEqn]]:
    """What is computed again in what an equation calls, checkpoints within it included."""
    for body in scope.inner[id(equation)]:
        for one in body.jaxpr.eqns:
            is_again = marked or is_recomputed(one)
            if body.inner.get(id(one)):
                yield from _again(body, one, is_again)
            elif is_again:
                yield body, one


def _saved(
    program: Program, scope: Scope, equation: JaxprEqn
) -> tuple[list[tuple[int, bool]], bool]:
    """Sizes of the values that the policy saved, and whether the origin of every operand is known.

    What a loop stacks counts with all its turns.
    """
    saved, complete = [], True
    names = names_of(equation.params["policy"]) or set()
    for operand in equation.invars:
        origin, whole = _origin(scope.value(operand), names)
        if origin == "saved":
            saved.append(program.device_bytes(whole))
        complete = complete and origin != "unknown"
    return saved, complete


def _origin(value: Value, names: set[str]) -> tuple[Literal["saved", "input", "unknown"], Value]:
    """Whether a policy saved this operand of the backward pass, and the array it is a part of.

    Saved is what has one of `names`, what JAX marks (see `_SAVED`), and what a forward loop stacks
    without a use of its own for it, as it has one for every input. Not known is what was read out
    of a buffer that a loop carries, and what a loop within the checkpoint stacked.
    """
    whole, via = value, None
    depth = 0  # loops of the backward pass less those of the forward pass that were left
    forward = used = unknown = False
    while True:
        step = step_back(value)
        if forward:
            used = used or any(e is not via for e in value.scope.readers.get(value.variable, []))
        if step.way == "made":
            via, name = step.equation, step.equation.primitive.name
            is_named = name == "name" and via.params["name"] in names
            if is_named or name in _SAVED or (forward and not used):
                return "saved", whole
            if name not in SAME | FORM | _CHOICES:
                return "unknown" if unknown else "input", whole
            unknown = unknown or (name in _CHOICES and not forward)
            value = step.values[1] if name == "select_n" else passed_on(step)
        elif step.way in ("same", "slice", "stack"):
            value, via = step.values[-1], None
            depth += {"slice": 1, "stack": -1}.get(step.way, 0)
            forward = forward or step.way == "stack"
            unknown = unknown or depth < 0
            if step.way == "slice":
                whole = value
        else:
            return "unknown" if unknown else "input", whole


def _why(scope: Scope, equation: JaxprEqn) -> str:
    again = [one for _, one in _again(scope, equation)]
    there = sorted({one.params["name"] for one in again if one.primitive.name == "name"})
    asked = names_of(equation.params["policy"])
    if asked:
        return (
            f"it saves {', '.join(sorted(asked))}, and the names in here are "
            f"{', '.join(there) or 'none'}: give them with jax.ad_checkpoint.checkpoint_name"
        )
    products = [one for one in again if one.primitive.name == "dot_general"]
    if products and all(one.params["dimension_numbers"][1][0] for one in products):
        return (
            "under vmap every product has a batch axis, which dots_with_no_batch_dims_saveable "
            "does not save; save by name (jax.ad_checkpoint.checkpoint_name)"
        )
    return "save by name (jax.ad_checkpoint.checkpoint_name), or leave the policy out"
