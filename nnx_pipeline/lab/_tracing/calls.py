"""Traces calls of user functions, afresh each time, with the donation that they declare."""

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from nnx_pipeline.lab._tracing import nnx_state
from nnx_pipeline.lab._tracing.jaxpr import raised_in_pmap, with_bodies
from nnx_pipeline.lab.errors import InputError, nearest

# Its value is part of the keys of JAX's caches, also for jitted functions inside others.
_TURN = jax.make_user_context(None)
# Part of Flax's message where a module of an outer trace is used in an inner one.
_OUTSIDE = "Cannot extract graph node from different trace level"


def traced_afresh() -> contextlib.AbstractContextManager[object]:
    """A context in which JAX reuses no trace from before, and traces each function once. JAX caches
    a trace by the identity of the function, and does not notice when a flag, a helper or a default
    argument that the function reads has changed."""
    context: contextlib.AbstractContextManager[object] = _TURN(object())
    return context


def this_turn() -> object:
    """The current context of `traced_afresh`, to be part of the keys of other caches."""
    return _TURN.value


class Keywords(dict[str, object]):
    """What a function is given by name, as the last of its arguments. `instead` are the arguments
    to take where the function does not take these names, which then are a guess."""

    def __init__(self, named: Mapping[str, object], instead: tuple[object, ...] | None = None):
        super().__init__(named)
        self.instead = instead


def _flat(named: Keywords) -> tuple[list[tuple[Any, Any]], Any]:
    return [(jax.tree_util.DictKey(name), one) for name, one in named.items()], tuple(named)


jax.tree_util.register_pytree_with_keys(
    Keywords, _flat, lambda names, values: Keywords(dict(zip(names, values, strict=True)))
)


@dataclass(frozen=True)
class Donating:
    """A function, jitted or not, that is to donate further arguments, by number or name."""

    func: Callable[..., object]
    donated: tuple[int | str, ...]


@dataclass(frozen=True)
class Call:
    """A function with everything that it is called with. A jitted function is taken out of the
    partial or method around it, and the arrays that these bind are arguments like any others. So is
    a `jax.ShapeDtypeStruct` that a partial binds by name to a function without jit."""

    function: Callable[..., object]
    arguments: tuple[object, ...]  # bound ones first
    keywords: dict[str, object] = field(default_factory=dict)
    bound: int = 0  # how many arguments were bound to the function
    settings: dict[str, object] = field(default_factory=dict)  # what is given by name, but arrays
    donated: tuple[int | str, ...] = ()  # what is donated beside what the function's jit donates

    @classmethod
    def of(cls, function: Callable[..., object], arguments: tuple[object, ...]) -> "Call":
        """The call of a function, of whose arguments the last may be `Keywords`. Raises InputError
        for names that it does not have, and for a function that `nnx.jit_partial` made."""
        if isinstance(function, Donating):
            return replace(cls.of(function.func, arguments), donated=function.donated)
        arguments, named = _named(function, arguments)
        settings = nnx_state.settings_of(functools.partial(function, **named))
        inner: Any = function
        bound: tuple[object, ...] = ()
        keywords: dict[str, object] = {}
        while isinstance(inner, MethodType) or _is_partial(inner):
            if isinstance(inner, MethodType):
                inner, bound = inner.__func__, (inner.__self__, *bound)
            else:
                keywords = {**inner.keywords, **keywords}
                inner, bound = inner.func, (*inner.args, *bound)
        if getattr(inner, "partial_args", ()):
            raise InputError(
                f"{nnx_state.name_of(function)} was made by nnx.jit_partial, which keeps arrays of "
                "this process; wrap the function in nnx.jit instead, and pass all of its arguments"
            )
        if not _lowers(inner):
            constants = {name: one for name, one in named.items() if not _has_arrays(one)}
            inner, bound = functools.partial(function, **constants) if constants else function, ()
            named = {name: one for name, one in named.items() if name not in constants}
            keywords = {name: one for name, one in keywords.items() if _is_abstract(one)}
        given, all_named = _by_name(inner, (*bound, *arguments), {**keywords, **named})
        return cls(inner, given, all_named, len(bound) + len(keywords), settings)

    @property
    def given(self) -> tuple[tuple[object, ...], dict[str, object]]:
        return self.arguments, self.keywords


@dataclass(frozen=True)
class Traced:
    """A traced call, with what it returns and changes: dtypes and shapes by path."""

    program: jax.stages.Traced
    results: dict[str, str]
    changed: dict[str, str] | None  # NNX state; None where bound arguments shift the paths
    notes: tuple[str, ...]  # on what the function declares and the program lacks


def calls_pmap_inside(call: Call) -> bool:
    """Whether a call that cannot be traced fails in a function that `jax.pmap` made."""
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with traced_afresh():
            trace(call)
    except Exception as error:  # the function of a user may raise anything
        return raised_in_pmap(error)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    return False


def trace(call: Call) -> Traced:
    """Traces a call with the function's own jit, or with `jax.jit` if it has none. A function
    without jit donates nothing. NNX state that it changes in place is added to the results. Raises
    InputError if a `jax.jit` drops such changes, and for changes of state that is no argument."""
    with _changes_are_of_arguments(call.function):
        is_whole = hasattr(call.function, "trace") and not call.donated
        return _trace_jitted(call) if is_whole else _trace_plain(call)


class Input(NamedTuple):
    """One array that a program takes: a leaf of the arguments of a call.

    - `argument`: which argument it is or is part of: its place, or its name if given by name.
    - `name`: how its path is written in the function, such as `params['w']`.
    - `donated`: whether the function's jit donates it.
    """

    leaf: object
    argument: int | str
    name: str
    donated: bool

    @property
    def parameter(self) -> str:
        """The name of the function's parameter, such as `params`."""
        return re.split(r"[.\[]", self.name)[0]


def jit_of(function: Callable[..., object]) -> str:
    """What jitted a function: `jax.jit`, `nnx.jit`, the name of another library, or "" for none."""
    if _is_nnx_jit(function):
        return "nnx.jit"
    if hasattr(function, "trace"):
        return "jax.jit"
    return type(function).__module__.partition(".")[0] if _lowers(function) else ""


def jit_for(call: Call) -> str:
    """`jit_of` the function; where nothing jitted it, "no " and what could, or "" for `jax.jit`."""
    arguments, keywords = call.given
    every = [*arguments, *keywords.values()]
    if (found := jit_of(call.function)) or not every:
        return found
    if any(nnx_state.is_nnx(one, "Module", "Optimizer", "Metric") for one in every):
        return "no nnx.jit"
    equinox = sys.modules.get("equinox")
    is_own = equinox and any(isinstance(one, equinox.Module) for one in every)
    return "no eqx.filter_jit" if is_own else ""


def jaxpr_of(call: Call) -> tuple[ClosedJaxpr, list[Input]]:
    """The jaxpr of a call and its inputs in order. Raises InputError as `trace` does."""
    used = nnx_state.Threaded(call.function, numbers=not _lowers(call.function))
    treedef: object
    given, treedef = jax.tree_util.tree_flatten_with_path(used.take(call.given))

    def flat(*arrays: object) -> object:
        arguments, keywords = treedef.unflatten(arrays)
        return used(*arguments, **keywords)

    with _changes_are_of_arguments(call.function):
        if hasattr(call.function, "trace"):
            _changes_of(call)
        program = jax.make_jaxpr(flat)(*(leaf for _, leaf in given))
    used.refuse_lost(program)
    donated = _given_up(program) if _lowers(call.function) else set()
    parameters = _parameters(call.function)
    return program, [
        Input(leaf, *_place(path, parameters), id(variable) in donated)
        for (path, leaf), variable in zip(given, program.jaxpr.invars, strict=True)
    ]


def _parameters(function: Callable[..., object]) -> list[str]:
    try:
        named = inspect.signature(function).parameters.values()
    except ValueError:
        return []  # it has no signature that Python knows
    return [one.name for one in named if one.kind is not one.VAR_POSITIONAL]


def _place(path: tuple[Any, ...], parameters: Sequence[str]) -> tuple[int | str, str]:
    """Which argument a leaf is part of, and the name of the leaf; the path starts with 0 for
    arguments by place, and 1 for those by name."""
    kind, which, *inside = path
    argument: int | str = which.idx if kind.idx == 0 else which.key
    named = argument if isinstance(argument, str) else f"argument {argument}"
    if isinstance(argument, int) and argument < len(parameters):
        named = parameters[argument]
    return argument, named + jax.tree_util.keystr(tuple(inside))


def _trace_jitted(call: Call) -> Traced:
    own: Any = call.function
    changed = _changes_of(call)
    traced = own.trace(*call.arguments, **call.keywords)
    if isinstance(traced, jax.stages.Traced):
        results = traced.out_info
    else:
        traced = traced.traced  # Flax keeps what JAX traced in a wrapper of its own
        results, _ = nnx_state.without_repeats(own.eval_shape(*call.arguments, **call.keywords))
    kept, notes = None if call.bound else changed, _ignored_donations(traced.jaxpr)
    return Traced(traced, nnx_state.described_arrays(results), kept, notes)


def _trace_plain(call: Call) -> Traced:
    # A function that another library jitted, or that is to donate more, goes here too.
    used = nnx_state.Threaded(call.function, numbers=not _lowers(call.function))
    arguments, keywords = used.take(call.given)
    donated: list[int | str] = []
    if lowers := _lowers(call.function):
        once = jax.make_jaxpr(used)(*arguments, **keywords)
        donated, notes = _donated_arguments(once, arguments, keywords)
    donated = [*{*donated, *call.donated}]
    numbers = [one for one in donated if isinstance(one, int)]
    names = [one for one in donated if isinstance(one, str)]
    jitted = jax.jit(used, donate_argnums=numbers, donate_argnames=names)
    program = jitted.trace(*arguments, **keywords)
    used.refuse_lost(program.jaxpr)
    notes = notes if lowers else _ignored_donations(program.jaxpr)
    return Traced(program, used.results, used.changed, notes)


def _changes_of(call: Call) -> dict[str, str]:
    """What a jitted function changes in place in its arguments: dtypes and shapes by path. This
    must be the first trace in a context of `traced_afresh`, because JAX runs a function that is
    jitted inside only once there. Raises InputError if a transformation of JAX drops a change."""
    inner = getattr(call.function, "__wrapped__", None)
    if inner is None or not nnx_state.arrays_of_state(call.given):
        return {}
    used = nnx_state.Threaded(inner, numbers=False)
    arguments, keywords = used.take(call.given)
    program = jax.make_jaxpr(used)(*arguments, **keywords)
    used.refuse_lost(program)
    if _is_nnx_jit(call.function):
        return used.changed
    used.refuse_changes()
    return {}


@contextlib.contextmanager
def _changes_are_of_arguments(function: Callable[..., object]) -> Iterator[None]:
    """Raises InputError if NNX state is changed inside that is not among the arguments."""
    try:
        yield
    except Exception as error:
        # For a gradient or an `nnx.jit` of a module from outside, Flax raises a plain ValueError.
        plain = isinstance(error, ValueError) and _OUTSIDE in str(error)
        flax_errors = sys.modules.get("flax.errors")
        if not plain and not (flax_errors and isinstance(error, flax_errors.TraceContextError)):
            raise
        raise InputError(
            f"{nnx_state.name_of(function)} changes NNX state that is not among its arguments, or "
            "not among those of a transformation inside of it; pass the module as an argument. A "
            "module in a closure or in nnx.cached_partial is not an argument, nor is one that a "
            "partial or a method binds to a function without nnx.jit"
        ) from error


def _donated_arguments(
    program: ClosedJaxpr, arguments: tuple[object, ...], keywords: dict[str, object]
) -> tuple[list[int | str], tuple[str, ...]]:
    """Which arguments, by number or name, a function of another library's jit donates whole, and
    notes on others."""
    given_up = _given_up(program)
    inputs, honoured = list(program.jaxpr.invars), set[int]()
    donated: list[int | str] = []
    named = sorted(keywords.items(), key=lambda item: item[0])  # the order in which JAX has them
    places: list[tuple[int | str, object]] = [*enumerate(arguments), *named]
    for place, argument in places:
        count = len(jax.tree.leaves(argument))
        # `jax.jit` donates whole arguments, so that all arrays of one must be given up.
        own, inputs = inputs[:count], inputs[count:]
        if own and all(id(variable) in given_up for variable in own):
            donated.append(place)
            honoured.update(map(id, own))
    return donated, _ignored_donations(program, honoured)


def _given_up(program: ClosedJaxpr) -> set[int]:
    """The `id`s of the variables that the outermost functions of a program donate."""
    return {
        id(variable)
        for equation in program.eqns
        for variable, donated in zip(equation.invars, _donations(equation), strict=False)
        if donated
    }


def _ignored_donations(program: ClosedJaxpr, honoured: Collection[int] = ()) -> tuple[str, ...]:
    """A sentence for each jitted function whose donation has no effect inside the program;
    `honoured` are the `id`s of variables that the program itself donates."""
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


def _by_name(
    function: Callable[..., object], arguments: tuple[object, ...], keywords: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Moves the last arguments under the names of keyword-only parameters without a default."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:
        return arguments, keywords  # it has no signature that Python knows
    names = [
        one.name
        for one in parameters
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in keywords
    ]
    places = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        places = max(places, len(arguments) - len(names))
    named = dict(zip(names, arguments[places:], strict=False))
    return arguments[:places] + arguments[places + len(names) :], {**keywords, **named}


def _named(
    function: Callable[..., object], arguments: tuple[object, ...]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments in order, and those by name; raises InputError for an unknown name."""
    last = arguments[-1] if arguments else None
    if not isinstance(last, Keywords):
        return arguments, {}
    given, named = arguments[:-1], {**last}
    try:
        signature = inspect.signature(function)
    except ValueError:
        return given, named  # it has no signature that Python knows
    parameters = signature.parameters.values()
    known = [
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    if last.instead is not None and not _takes(signature, given, named):
        other = _by_name(function, last.instead, {})
        if _takes(signature, *other):
            return other
    strangers = [name for name in named if name not in known]
    if strangers and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        cure = nearest(strangers[0], known) if known else "give its arguments in order"
        raise InputError(f"{nnx_state.name_of(function)} has no parameter {strangers[0]!r}; {cure}")
    return given, named


def _takes(
    signature: inspect.Signature, arguments: tuple[object, ...], keywords: dict[str, object]
) -> bool:
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _is_partial(function: object) -> bool:
    # Partials of Python, JAX and Equinox have the same fields.
    return all(hasattr(function, name) for name in ("func", "args", "keywords"))


def _is_abstract(tree: object) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _has_arrays(tree: object) -> bool:
    return any(map(nnx_state.is_array, jax.tree.leaves(tree)))


def _is_nnx_jit(function: object) -> bool:
    # Where `nnx.jit` has made the function, Flax is imported.
    return "flax.nnx" in sys.modules and isinstance(function, _nnx_jits())


@functools.cache
def _nnx_jits() -> tuple[type, ...]:
    from flax import nnx

    made = (nnx.jit(lambda: None, graph=True, graph_updates=updates) for updates in (True, False))
    return tuple(map(type, made))


def _lowers(function: object) -> bool:
    """Whether a function is jitted, by any library: it can be lowered without being called."""
    return callable(getattr(function, "lower", None))
