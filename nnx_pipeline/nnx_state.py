"""NNX state that a function changes in place, as `nnx.Optimizer.update` does, among its results.

`jax.jit` sees the arrays that a function returns and drops such changes; `nnx.jit` hands them out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from nnx_pipeline.errors import InputError


def name_of(function: Callable[..., Any]) -> str:
    """`module:function`, as far as it has a name."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}:{name}"


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
    function itself returned and `changed` what it changed, dtype and shape by path.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = type(function).__name__
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.results: dict[str, str] = {}
        self.changed: dict[str, str] = {}

    def take(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Arguments and keywords, with each variable once."""
        once, self._restored = without_repeats(given)
        self._counters = _paths_of(nnx.RngState, given)
        return once

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given = self._restored((arguments, keywords))
        before = state_of(given)
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
        return (result, changed) if changed else result

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


def _paths_of(kind: type[nnx.Variable[Any]], given: Any) -> set[str]:
    """The paths, as `_state` has them, of the arrays of one kind of variable."""
    variables = jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_variable)
    return {
        _path((*path, *inside))
        for path, variable in variables
        if isinstance(variable, kind)
        for inside, _ in jax.tree_util.tree_leaves_with_path(variable)
    }


def _path(keys: tuple[Any, ...]) -> str:
    """Without the first key, which tells arguments from keywords."""
    return jax.tree_util.keystr(keys[1:])


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
