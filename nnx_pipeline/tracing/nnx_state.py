"""NNX state that a function changes in place, as `nnx.Optimizer.update` does, among its results.

`jax.jit` sees the arrays that a function returns and drops such changes; `nnx.jit` hands them out.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr

from nnx_pipeline.equations import with_bodies
from nnx_pipeline.errors import InputError
from nnx_pipeline.nnx_copies import changed_copies


def name_of(function: Callable[..., Any]) -> str:
    """`module:function`, as far as it has a name."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}:{name}"


def holds_itself(tree: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether something in a tree leads back to what holds it, as attributes of modules may.

    To be asked first: where JAX has run into the limit of recursion, Python stays at it.
    """
    if id(tree) in around:
        return True
    root = iter([False])  # what is asked first is the tree itself, everything after is in it
    inside = jax.tree.leaves(tree, is_leaf=lambda _: next(root, True))
    if len(inside) == 1 and inside[0] is tree:  # a leaf, or what JAX never comes to the leaves of
        return isinstance(tree, nnx.Pytree) and any(own is tree for own in vars(tree).values())
    return any(holds_itself(one, around | {id(tree)}) for one in inside)


def without_repeats(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The tree with each NNX variable once, and what puts it back where it is shared.

    As a pytree, a module whose embedding is its head's weight too has that array twice. The second
    result takes a tree of the same structure as the first one, such as what a trace makes of it.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_variable)
    first: dict[int, int] = {}
    places = [
        first.setdefault(id(leaf), number) if _is_variable(leaf) else number
        for number, leaf in enumerate(leaves)
    ]
    if places == list(range(len(leaves))):
        return tree, lambda other: other

    def restored(other: Any) -> Any:
        found = treedef.flatten_up_to(other)
        return treedef.unflatten([found[place] for place in places])

    once = [leaf if places[number] == number else None for number, leaf in enumerate(leaves)]
    return treedef.unflatten(once), restored


class Threaded:
    """A function whose changes of NNX state are among its results.

    `take` gives the arguments as they are to be passed. After a call, `results` is what the
    function itself returned and `changed` what it changed, dtype and shape by path. lost: of what
    it changes inside of a transformation of JAX and does not give out.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = type(function).__name__
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.results: dict[str, str] = {}
        self.changed: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._kinds: dict[str, str] = {}

    def take(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Arguments and keywords, with each variable once."""
        once, self._restored = without_repeats(given)
        self._counters = _paths_of(nnx.RngState, given)
        return once

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given = self._restored((arguments, keywords))
        before = state_of(given)
        with changed_copies(_variables_of(given)) as copies:
            result, _ = without_repeats(self.function(*given[0], **given[1]))
        seen = {id(leaf) for leaf in jax.tree.leaves(result)}
        changed = {}
        for path, leaf in state_of(given).items():
            # What is returned too, or stands in two places, is one result and not two.
            if leaf is not before.get(path) and id(leaf) not in seen:
                changed[path] = leaf
                seen.add(id(leaf))
        self.results = described(result)
        self.changed = {path: _described(leaf) for path, leaf in changed.items()}
        # JAX runs what is jitted inside once: a second call would see no change.
        self.lost = self.lost or self._lost(copies, before, [result, changed])
        return (result, changed) if changed else result

    def _lost(self, copies: Iterable[str], before: dict[str, Any], given: Any) -> dict[str, str]:
        """The copies that were set, without those whose new value may be among what is given out.

        A function may well return the state that it changed: an array of that shape and dtype,
        other than those that came in, is taken for it.
        """
        old = {id(leaf) for leaf in before.values()}
        new = [_described(leaf) for leaf in jax.tree.leaves(given) if id(leaf) not in old]
        places = (place for path in copies for place in before if _is_in(path, place))
        quiet = self._counters.union(self.changed)
        self._kinds = {place: _described(leaf) for place, leaf in before.items()}
        return without({place: self._kinds[place] for place in places if place not in quiet}, new)

    def refuse_lost(self, program: ClosedJaxpr) -> None:
        """Raises InputError where a transformation of JAX inside drops changes of modules.

        program: the function as it was traced. What an equation in it that takes the modules whole
        also gives out is not dropped there; what comes of it later is the function's own affair.
        """
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
                "that; take nnx.jit or nnx.remat there, or return the new state"
            )

    def refuse_changes(self) -> None:
        """Raises InputError where a function that `jax.jit` made drops changes of modules.

        Counters of random numbers are let pass: dropping them drops no work.
        """
        dropped = [path for path in self.changed if path not in self._counters]
        if dropped:
            raise InputError(
                f"{name_of(self.function)} changes {', '.join(dropped[:3])} of its arguments in "
                "place, which jax.jit drops; make it with nnx.jit, or return the new state"
            )


def without(kinds: dict[str, str], others: Iterable[str]) -> dict[str, str]:
    """What is left of dtypes and shapes by path when each of the others stands for one of them."""
    counts = Counter(others)
    left = {}
    for path, kind in kinds.items():
        if counts[kind]:
            counts[kind] -= 1
        else:
            left[path] = kind
    return left


def described(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array by its path."""
    return {
        jax.tree_util.keystr(path): _described(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(leaf: Any) -> str:
    array = leaf if hasattr(leaf, "shape") else jax.typeof(leaf)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def state_of(given: Any) -> dict[str, Any]:
    """The arrays of the modules and variables in arguments and keywords, by their paths.

    Variables in an `nnx.State` are left out: who takes modules apart returns what is to be kept.
    """
    nodes = jax.tree_util.tree_leaves_with_path(
        given, is_leaf=lambda node: isinstance(node, nnx.Pytree | nnx.Variable | nnx.State)
    )
    return {
        _path((*path, *inside)): leaf
        for path, node in nodes
        if isinstance(node, nnx.Pytree | nnx.Variable)
        for inside, leaf in jax.tree_util.tree_leaves_with_path(node)
    }


def _variables_of(given: Any) -> dict[str, nnx.Variable[Any]]:
    """The variables of modules in arguments and keywords, as `state_of` has their arrays."""
    nodes = jax.tree_util.tree_leaves_with_path(
        given, is_leaf=lambda node: isinstance(node, nnx.Variable | nnx.State)
    )
    return {_path(path): node for path, node in nodes if isinstance(node, nnx.Variable)}


def _paths_of(kind: type[nnx.Variable[Any]], given: Any) -> set[str]:
    """The paths, as `_state` has them, of the arrays of one kind of variable."""
    variables = jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_variable)
    return {
        _path((*path, *inside))
        for path, variable in variables
        if isinstance(variable, kind)
        for inside, _ in jax.tree_util.tree_leaves_with_path(variable)
    }


def _is_in(path: str, place: str) -> bool:
    """Whether a place is what a path names or inside of it; `[0].w_q` is not inside of `[0].w`."""
    return place.startswith(path) and place[len(path) : len(path) + 1] in ("", ".", "[")


def _path(keys: tuple[Any, ...]) -> str:
    """Without the first key, which tells arguments from keywords."""
    return jax.tree_util.keystr(keys[1:])


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
