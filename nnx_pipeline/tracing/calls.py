"""Calls of people's functions as JAX traces them: afresh each time, with what they declare.

JAX keeps what it traced under the identity of a function and knows nothing of what the function
read meanwhile: a flag of a module, a helper, a default argument.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import ClosedJaxpr, JaxprEqn

from nnx_pipeline.equations import with_bodies
from nnx_pipeline.errors import InputError
from nnx_pipeline.nnx_state import Threaded, described, name_of, state_of, without_repeats

# Part of the keys of JAX's caches, of jitted functions inside of others too.
_TURN = jax.make_user_context(None)
_OUTSIDE = "Cannot extract graph node from different trace level"
_NNX_JIT = tuple(
    type(nnx.jit(lambda: None, graph=True, graph_updates=updates)) for updates in (True, False)
)


def traced_afresh() -> Any:
    """A context in which JAX uses nothing that it has traced before, and keeps all of it.

    Within one such context a function is traced once, as ever.
    """
    return _TURN(object())


def this_turn() -> Any:
    """What stands for the present context of `traced_afresh`, for the keys of other caches."""
    return _TURN.value


@dataclass(frozen=True)
class Call:
    """A function with all that it is given.

    function: where it is jitted, without the `functools.partial` or the method around it, whose
    arrays are arguments like others then. static: identities of what else is bound. bound: whether
    there is such.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    static: frozenset[int] = frozenset()
    bound: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> "Call":
        """The call of a function; what is bound to a plain one stays bound.

        Raises InputError for what `nnx.jit_partial` made.
        """
        inner: Any = function
        bound: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        while isinstance(inner, functools.partial | MethodType):
            if isinstance(inner, MethodType):
                inner, bound = inner.__func__, (inner.__self__, *bound)
            else:
                keywords = {**inner.keywords, **keywords}
                inner, bound = inner.func, (*inner.args, *bound)
        if getattr(inner, "partial_args", ()):
            raise InputError(
                f"{name_of(function)} is made by nnx.jit_partial and holds arrays of this process; "
                "give nnx.jit of the function and all its arguments"
            )
        if not _lowers(inner):
            return cls(function, arguments)
        leaves = jax.tree.leaves((bound, keywords))
        static = frozenset(id(leaf) for leaf in leaves if not hasattr(leaf, "shape"))
        return cls(inner, (*bound, *arguments), keywords, static, bool(bound or keywords))

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords, one tree."""
        return self.arguments, self.keywords


@dataclass(frozen=True)
class Traced:
    """A traced call.

    program: what JAX traced, to be lowered. results: dtype and shape of each array that the
    function returns, by its place in what is returned. changed: those of the NNX state that it
    changes in place; None where it is jitted and something is bound to it, which shifts the places.
    notes: what was declared and is not in the program, a sentence each.
    """

    program: jax.stages.Traced
    results: dict[str, str]
    changed: dict[str, str] | None
    notes: tuple[str, ...]


def trace(call: Call) -> Traced:
    """Traces a call, jitted as the function is, a plain one by `jax.jit` without donation.

    NNX state that a plain function changes in place is among the results of the program.

    Raises InputError where a function that `jax.jit` made drops such changes, and where state is
    changed that is not among the arguments.
    """
    with _changes_are_of_arguments(call.function):
        return _trace_jitted(call) if hasattr(call.function, "trace") else _trace_plain(call)


def jaxpr_of(call: Call) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr of a call, and the arrays and numbers that are its inputs, in order; see `trace`.

    What the function was jitted with has no part in it.
    """
    jitted = hasattr(call.function, "trace")
    used = Threaded(vars(call.function)["__wrapped__"] if jitted else call.function)
    treedef: Any
    leaves, treedef = jax.tree.flatten(used.take(call.given))

    def flat(*arrays: Any) -> Any:
        arguments, keywords = treedef.unflatten(arrays)
        return used(*arguments, **keywords)

    with _changes_are_of_arguments(call.function):
        program = jax.make_jaxpr(flat)(*leaves)
    used.refuse_lost(program)
    if jitted and not isinstance(call.function, _NNX_JIT):
        used.refuse_changes()
    return program, leaves


def _trace_jitted(call: Call) -> Traced:
    """Of `jax.jit` or `nnx.jit`: as they jit it."""
    own: Any = call.function
    changed = _changes_of(call)
    traced = own.trace(*call.arguments, **call.keywords)
    if isinstance(traced, jax.stages.Traced):
        results = traced.out_info
    else:
        traced = traced.traced  # Flax keeps what JAX traced in a wrapper of its own
        results, _ = without_repeats(own.eval_shape(*call.arguments, **call.keywords))
    return Traced(
        traced,
        described(results),
        None if call.bound else changed,
        _ignored_donations(traced.jaxpr),
    )


def _trace_plain(call: Call) -> Traced:
    """Of a plain function, or of one that another library's jit made, with what it donates."""
    used = Threaded(call.function)
    arguments, keywords = used.take(call.given)
    numbers: tuple[int, ...] = ()
    notes: tuple[str, ...] | None = None
    if _lowers(call.function):
        numbers, notes = _donated_arguments(jax.make_jaxpr(used)(*arguments, **keywords), arguments)
    program = jax.jit(used, donate_argnums=numbers).trace(*arguments, **keywords)
    used.refuse_lost(program.jaxpr)
    if notes is None:
        notes = _ignored_donations(program.jaxpr)
    return Traced(program, used.results, used.changed, notes)


def _changes_of(call: Call) -> dict[str, str]:
    """What a jitted function changes in place of the modules that are passed to it.

    Raises InputError where the change is lost: `jax.jit` drops it, or what is jitted inside does.
    That must be the first trace of its turn: JAX runs what is jitted inside of it only once.
    """
    inner = getattr(call.function, "__wrapped__", None)
    if inner is None or not state_of(call.given):
        return {}
    used = Threaded(inner)
    treedef: Any
    leaves, treedef = jax.tree.flatten(used.take(call.given))
    numbers = [number for number, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def of_arrays(arrays: list[Any]) -> None:  # what is no array may be static: it stays as it is
        filled = list(leaves)
        for number, array in zip(numbers, arrays, strict=True):
            filled[number] = array
        arguments, keywords = treedef.unflatten(filled)
        used(*arguments, **keywords)

    program = jax.make_jaxpr(of_arrays)([leaves[number] for number in numbers])
    used.refuse_lost(program)
    if isinstance(call.function, _NNX_JIT):
        return used.changed
    used.refuse_changes()
    return {}


@contextlib.contextmanager
def _changes_are_of_arguments(function: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except (TraceContextError, ValueError) as error:
        # Flax has no class of its own for a gradient, or an `nnx.jit`, of a module from outside.
        if isinstance(error, ValueError) and _OUTSIDE not in str(error):
            raise
        raise InputError(
            f"{name_of(function)} changes NNX state that is not among its arguments, or not among "
            "those of a transformation inside of it; pass the module as an argument: what a "
            "closure, nnx.cached_partial, or a partial or method of a plain function holds is none"
        ) from error


def _donated_arguments(
    program: ClosedJaxpr, arguments: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Numbers of the arguments that the jitted functions of a call give up whole; and notes.

    program: of a function that another library jitted, which hands its arguments to `jax.jit`.
    """
    given_up = {
        id(variable)
        for equation in program.eqns
        for variable, donated in zip(equation.invars, _donations(equation), strict=False)
        if donated
    }
    inputs, numbers = list(program.jaxpr.invars), []
    honoured: set[int] = set()
    for number, argument in enumerate(arguments):
        count = len(jax.tree.leaves(argument))
        own, inputs = inputs[:count], inputs[count:]
        if own and all(id(variable) in given_up for variable in own):
            numbers.append(number)
            honoured.update(map(id, own))
    return tuple(numbers), _ignored_donations(program, honoured)


def _ignored_donations(program: ClosedJaxpr, honoured: Collection[int] = ()) -> tuple[str, ...]:
    """A sentence for each jitted function whose donation has no effect inside the program.

    honoured: identities of the variables that the program itself donates.
    """
    found: dict[str, None] = {}
    for equation in with_bodies(program):
        pairs = zip(equation.invars, _donations(equation), strict=False)
        if any(donated and id(variable) not in honoured for variable, donated in pairs):
            found[equation.params["name"]] = None
    return tuple(
        f"what {name} donates is not donated here: JAX ignores donation inside of another program; "
        "measure that function itself, or declare it on the outermost jit"
        for name in found
    )


def _donations(equation: JaxprEqn) -> tuple[bool, ...]:
    return tuple(equation.params.get("donated_invars", ()))


def _lowers(function: Any) -> bool:
    """Whether it is jitted: its program can be had without a call."""
    return callable(getattr(function, "lower", None))
