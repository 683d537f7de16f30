"""Adds NNX state that a function changes in place, as `nnx.Optimizer.update` does, to its results.
A program that has not imported Flax has none of its objects, so it is not imported here."""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from nnx_pipeline.lab._tracing.jaxpr import with_bodies
from nnx_pipeline.lab.errors import InputError

Tree = TypeVar("Tree")


def is_nnx(value: object, *kinds: str) -> bool:
    """Whether a value is of one of these classes of `flax.nnx`, such as `Variable`."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, tuple(getattr(nnx, kind) for kind in kinds))


def name_of(function: Callable[..., object]) -> str:
    """The name `module:function`, of a partial that of its function; else the name of the type."""
    innermost = [function, *_within(function)][-1]
    name = getattr(innermost, "__qualname__", type(innermost).__name__)
    return f"{getattr(innermost, '__module__', '')}:{name}"


def settings_of(function: Callable[..., object]) -> dict[str, object]:
    """What partials bind by name, but arrays: numbers, texts, True, False and None."""
    found: dict[str, object] = {}
    for one in (function, *_within(function)):
        found = {**(getattr(one, "keywords", None) or {}), **found}
    return {name: one for name, one in found.items() if isinstance(one, _SETTINGS)}


_SETTINGS = (bool, int, float, str, type(None))


def _within(function: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """The functions that a partial, a jit of a partial, and so on, were made of, in order."""
    while True:
        inner = None
        if not hasattr(function, "__qualname__"):
            inner = getattr(function, "func", None)  # a partial of Python, JAX or Equinox
        elif function.__module__ == "functools":
            inner = getattr(function, "__wrapped__", None)  # such as a jit of a partial
        if not callable(inner):
            return
        yield inner
        function = inner


def holds_itself(tree: object, around: frozenset[int] = frozenset()) -> bool:
    """Whether a tree has a cycle. To be asked before JAX flattens it: that would run into Python's
    recursion limit, and Python then stays close to it, so that later calls fail."""
    if id(tree) in around:
        return True
    # JAX asks first whether the tree itself is a leaf (no), then the same of its children (yes).
    root = iter([False])
    inside = jax.tree.leaves(tree, is_leaf=lambda _: next(root, True))
    # The tree is a leaf, or a module that holds nothing but itself.
    if len(inside) == 1 and inside[0] is tree:
        return is_nnx(tree, "Pytree") and any(own is tree for own in vars(tree).values())
    return any(holds_itself(one, around | {id(tree)}) for one in inside)


def without_repeats(tree: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The tree with each NNX variable only once, and a function that restores the shared ones. A
    module whose embedding is also the weight of its head has that array twice. The function takes a
    tree of the same structure as the first result, such as its traced form."""
    treedef: jax.tree_util.PyTreeDef
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_variable)
    first: dict[int, int] = {}
    # For each leaf, the index of the leaf to take for it: that of the first place of a variable.
    places = [
        first.setdefault(id(leaf), number) if _is_variable(leaf) else number
        for number, leaf in enumerate(leaves)
    ]
    if places == list(range(len(leaves))):
        return tree, lambda other: other

    def restored(other: Tree) -> Tree:
        found = treedef.flatten_up_to(other)
        tree: Tree = treedef.unflatten([found[place] for place in places])
        return tree

    once = [leaf if places[number] == number else None for number, leaf in enumerate(leaves)]
    return treedef.unflatten(once), restored


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Static:
    """A leaf that JAX does not trace."""

    value: object


def without_static(tree: Tree, *, numbers: bool) -> Tree:
    """The tree with what is no array, and no number where `numbers` are to be traced, out of sight
    of JAX. In modules of Equinox numbers are settings, which `equinox.filter_jit` does not trace
    either."""

    def changed(node: Any) -> Any:
        keep = is_traced if numbers and not _is_equinox(node) else is_array
        return jax.tree.map(lambda leaf: leaf if keep(leaf) else _Static(leaf), node)

    found: Tree = jax.tree.map(changed, tree, is_leaf=_is_equinox)
    return found


class Threaded:
    """A function that returns its result and the NNX state that it changes in place. Call it with
    what `take` returns. What `without_static` takes away is not traced."""

    def __init__(self, function: Callable[..., object], *, numbers: bool) -> None:
        self.__name__ = type(function).__name__
        functools.update_wrapper(self, function, updated=())
        self.function, self._numbers = function, numbers
        self.results: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._kinds: dict[str, str] = {}

    def take(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """The arguments and keywords to call this with, which have each variable only once."""
        once, self._restored = without_repeats(given)
        self._counters = set(_leaves_in(given, "RngState"))
        return without_static(once, numbers=self._numbers)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given = self._restored(_with_static((arguments, keywords)))
        before = arrays_of_state(given)
        with _changed_copies(given) as copies:
            result, _ = without_repeats(self.function(*given[0], **given[1]))
        # A module that is returned may have functions and texts, as it has where it is given.
        result = jax.tree.map(lambda leaf: leaf if is_traced(leaf) else None, result)
        seen = {id(leaf) for leaf in jax.tree.leaves(result)}
        changed = {}
        for path, leaf in arrays_of_state(given).items():
            # An array that is also returned, or is in two places, is one result and not two.
            if leaf is not before.get(path) and id(leaf) not in seen:
                changed[path] = leaf
                seen.add(id(leaf))
        self.results = described_arrays(result)
        self.changed = {path: _described(leaf) for path, leaf in changed.items()}
        # JAX runs a function that is jitted inside only once, so a second call sees no change.
        self.lost = self.lost or self._lost(copies, before, [result, changed])
        return (result, changed) if changed else result

    def _lost(
        self, copies: Iterable[str], before: dict[str, object], given: object
    ) -> dict[str, str]:
        """The state whose copies were changed, without what the function may have returned. A new
        array of the same dtype and shape among its results is taken for the changed state."""
        old = {id(leaf) for leaf in before.values()}
        new = [_described(leaf) for leaf in jax.tree.leaves(given) if id(leaf) not in old]
        places = (place for path in copies for place in before if _is_in(path, place))
        # Dropped counters of random numbers drop no work, and `changed` is in the results already.
        quiet = self._counters.union(self.changed)
        self._kinds = {place: _described(leaf) for place, leaf in before.items()}
        return without({place: self._kinds[place] for place in places if place not in quiet}, new)

    def refuse_lost(self, program: ClosedJaxpr) -> None:
        """Raises InputError if a transformation of JAX inside the function drops changed state. An
        array of state is not dropped if an equation that takes all arrays of the modules also
        returns one of its dtype and shape. What the function does with that later is up to it."""
        lost = self.lost
        modules = {place.removesuffix(".value").rpartition(".")[0] for place in lost}
        whole = {
            place: kind
            for place, kind in self._kinds.items()
            if any(_is_in(module, place) for module in modules)
        }
        for equation in with_bodies(program) if lost else ():
            if not without(whole, [_described(taken.aval) for taken in equation.invars]):
                lost = without(lost, [_described(made.aval) for made in equation.outvars])
        if lost:
            raise InputError(
                f"{name_of(self.function)} changes {', '.join([*lost][:3])} of its arguments in "
                "place inside of a transformation such as jax.jit or jax.checkpoint, which drops "
                "the change; use nnx.jit or nnx.remat there, or return the new state"
            )

    def refuse_changes(self) -> None:
        """Raises InputError if the function changed state in place, which its `jax.jit` drops."""
        dropped = [path for path in self.changed if path not in self._counters]
        if dropped:
            raise InputError(
                f"{name_of(self.function)} changes {', '.join(dropped[:3])} of its arguments in "
                "place, which jax.jit drops; use nnx.jit, or return the new state"
            )


def _is_equinox(node: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def is_array(leaf: object) -> bool:
    """Whether a leaf has shape and dtype, which classes such as `numpy.float32` seem to have."""
    return isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype")


def is_traced(leaf: object) -> bool:
    """Whether `jax.jit` takes a leaf: an array or a number."""
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _with_static(tree: Tree) -> Tree:
    def shown(leaf: object) -> object:
        return leaf.value if isinstance(leaf, _Static) else leaf

    found: Tree = jax.tree.map(shown, tree, is_leaf=lambda leaf: isinstance(leaf, _Static))
    return found


def without(kinds: dict[str, str], others: Iterable[str]) -> dict[str, str]:
    """The entries of `kinds` that are left when each of the others has taken away an equal one."""
    counts = Counter(others)
    left = {}
    for path, kind in kinds.items():
        if counts[kind]:
            counts[kind] -= 1
        else:
            left[path] = kind
    return left


def described_arrays(tree: object) -> dict[str, str]:
    """The dtype and shape of each array of a tree, such as `float32[8,128]`, by its path."""
    return {
        jax.tree_util.keystr(path): _described(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(leaf: Any) -> str:
    array = leaf if hasattr(leaf, "shape") else jax.typeof(leaf)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def arrays_of_state(given: object) -> dict[str, object]:
    """The arrays of modules and variables in a tuple of arguments and keywords, by their paths.
    Those of an `nnx.State` are left out: code that takes modules apart returns what it keeps."""
    return _leaves_in(given, "Pytree", "Variable", apart=("State",))


def _leaves_in(given: object, *kinds: str, apart: tuple[str, ...] = ()) -> dict[str, object]:
    nodes = jax.tree_util.tree_leaves_with_path(
        given, is_leaf=lambda node: is_nnx(node, *kinds, *apart)
    )
    return {
        _path((*path, *inside)): leaf
        for path, node in nodes
        if is_nnx(node, *kinds)
        for inside, leaf in jax.tree_util.tree_leaves_with_path(node)
    }


def _changed_copies(given: object) -> contextlib.AbstractContextManager[Iterable[str]]:
    """A context that gives the paths of variables of which a copy is changed meanwhile."""
    nodes = jax.tree_util.tree_leaves_with_path(
        given, is_leaf=lambda node: is_nnx(node, "Variable", "State")
    )
    variables = {_path(path): node for path, node in nodes if is_nnx(node, "Variable")}
    if not variables:
        return contextlib.nullcontext(())
    from nnx_pipeline.lab._tracing.nnx_copies import changed_copies

    return changed_copies(variables)


def _is_in(path: str, place: str) -> bool:
    """Whether a place is what a path names or is inside it; `[0].w_q` is not inside `[0].w`."""
    return place.startswith(path) and place[len(path) : len(path) + 1] in ("", ".", "[")


def _path(keys: tuple[object, ...]) -> str:
    # The first key tells arguments from keywords.
    return jax.tree_util.keystr(keys[1:])


def _is_variable(leaf: object) -> bool:
    return is_nnx(leaf, "Variable")
