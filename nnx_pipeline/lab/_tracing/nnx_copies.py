"""Finds changes of NNX modules that a transformation of JAX inside a function drops. `jax.jit`,
`jax.checkpoint` and others pass copies of modules to the function inside, and discard them with all
that it changed in place. The transformations of NNX write such changes back."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from flax import nnx
from flax.errors import TraceContextError

# A bool in the metadata of every variable. JAX copies the metadata with a variable, so a mark in
# its place is found again on each copy.
_FLAG = "eager_sharding"


class _Watch:
    """The changed copies (`found`) during one call of a function, and the variables that are no
    copies (`own`), which stay alive here, so that no other object gets the same `id`."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.own: dict[int, nnx.Variable[object]] = {}

    def mark(self, variable: nnx.Variable[object], path: str) -> None:
        """Marks a variable of the current trace, and with it the copies that JAX makes of it."""
        mark = _Mark(variable.get_metadata(_FLAG))
        mark.path, mark.variable, mark.watch = path, variable, self
        variable.set_metadata(_FLAG, mark)
        self.own[id(variable)] = variable

    def note(self, variable: nnx.Variable[object]) -> None:
        """Records that a variable has a new value, if it is a copy in a deeper trace."""
        mark = variable.get_metadata(_FLAG, None)
        if _is_of(self, mark) and id(variable) not in self.own and _is_deeper(mark.variable):
            self.found[mark.path] = None


class _Mark(int):
    """The value of `_FLAG` on a marked variable and its copies. It equals the plain value, so that
    trees and graph definitions that were equal remain so."""

    path: str
    variable: nnx.Variable[object]  # that the copies are of
    watch: _Watch


_WATCH: ContextVar[_Watch | None] = ContextVar("watch", default=None)
_LOCK = threading.Lock()
_watches = 0  # in all threads; the methods are replaced while there are any


@contextlib.contextmanager
def changed_copies(variables: Mapping[str, nnx.Variable[object]]) -> Iterator[dict[str, None]]:
    """Yields a dict that fills with the paths of variables whose copies change in a deeper trace.
    What `nnx.merge` and `nnx.clone` make is no such copy: code that takes modules apart decides
    itself what it keeps. The replacement of an attribute by another variable is not noticed."""
    watch = _Watch()
    for path, variable in variables.items():
        watch.mark(variable, path)
    outer = _WATCH.set(watch)
    _replace_methods(1)
    try:
        yield watch.found
    finally:
        _replace_methods(-1)
        _WATCH.reset(outer)
        # A bool in place of each mark, as Flax had it.
        for variable in variables.values():
            variable.set_metadata(_FLAG, bool(variable.get_metadata(_FLAG)))


# Both methods are public. Flax's own hooks would not do: they are metadata, which a variable made
# inside the function lacks, so that trees that were equal would differ and a scan over them would
# fail. Every way to set a value in place goes through `__setattr__`, whatever the attribute's name.
_METHODS = {name: vars(nnx.Variable)[name] for name in ("__setattr__", "from_metadata")}


def _set(self: Any, name: str, value: Any) -> None:
    before = self.get_raw_value()
    _METHODS["__setattr__"](self, name, value)
    watch = _WATCH.get()
    if watch is not None and self.get_raw_value() is not before:
        watch.note(self)


def _from_metadata(cls: object, value: object, attributes: dict[str, object]) -> object:
    mark = attributes.get(_FLAG)
    if not isinstance(mark, _Mark):
        return _METHODS["from_metadata"].__func__(cls, value, attributes)
    made = _METHODS["from_metadata"].__func__(cls, value, {**attributes, _FLAG: bool(mark)})
    # A transformation of NNX passes this variable to its function and writes its new value back, so
    # it is not a copy, but JAX may make copies of it in turn.
    watch = _WATCH.get()
    if watch is not None and _is_of(watch, mark) and _is_deeper(mark.variable):
        watch.mark(made, mark.path)
    return made


_REPLACED = {"__setattr__": _set, "from_metadata": classmethod(_from_metadata)}


def _replace_methods(change: int) -> None:
    """Replaces the methods for the first watch of all threads, and restores them after the last."""
    global _watches
    with _LOCK:
        _watches += change
        if _watches == max(change, 0):
            for name, method in (_REPLACED if change > 0 else _METHODS).items():
                setattr(nnx.Variable, name, method)


def _is_of(watch: _Watch, mark: object) -> bool:
    return isinstance(mark, _Mark) and mark.watch is watch


def _is_deeper(variable: nnx.Variable[object]) -> bool:
    # Flax refuses to change a variable of another trace, so setting what is there already asks it.
    try:
        variable.set_metadata(_FLAG, variable.get_metadata(_FLAG))
    except TraceContextError:
        return True
    return False
