"""Changes of copies: what a transformation of JAX inside of a function makes of NNX modules.

`jax.jit`, `jax.checkpoint` and their like give the function inside copies of the modules and forget
them after its call, and with them all that it changed in place. Those of NNX write it back.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from flax import nnx
from flax.errors import TraceContextError

# Metadata that every variable has, a bool. Metadata goes with the copies that JAX makes.
_FLAG = "eager_sharding"


class _Watch:
    """What was found during one call. own: the variables that are no copies, so that they live."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.own: dict[int, nnx.Variable[Any]] = {}

    def mark(self, variable: nnx.Variable[Any], path: str) -> None:
        """Marks a variable of the present trace, and so the copies that JAX makes of it."""
        mark = _Mark(variable.get_metadata(_FLAG))
        mark.path, mark.variable, mark.watch = path, variable, self
        variable.set_metadata(_FLAG, mark)
        self.own[id(variable)] = variable

    def note(self, variable: nnx.Variable[Any]) -> None:
        """Notes that a variable has another value, if it is a copy at a deeper trace."""
        mark = variable.get_metadata(_FLAG, None)
        if _is_of(self, mark) and id(variable) not in self.own and _is_deeper(mark.variable):
            self.found[mark.path] = None


class _Mark(int):
    """The value of `_FLAG` with the variable that copies are of, its path, and who asks for them.

    It equals the plain value, so that trees and graph definitions stay as equal as they were.
    """

    path: str
    variable: nnx.Variable[Any]
    watch: _Watch


_WATCH: ContextVar[_Watch | None] = ContextVar("watch", default=None)
_LOCK = threading.Lock()
_watches = 0  # how many there are in all threads: while there is one, the methods are replaced


@contextlib.contextmanager
def changed_copies(variables: Mapping[str, nnx.Variable[Any]]) -> Iterator[dict[str, None]]:
    """Yields the paths of the variables of which a copy is set meanwhile, at a deeper trace.

    variables: made in the trace that is going on, by path. What `nnx.merge` and `nnx.clone` make
    there is no such copy: who takes modules apart says himself what is kept. An attribute of a
    module that is another variable afterwards is not seen.
    """
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
        for variable in variables.values():
            variable.set_metadata(_FLAG, bool(variable.get_metadata(_FLAG)))


# Both are public, but Flax's own hooks would be metadata that a variable made inside lacks: trees
# that were equal would be so no more, and scans over them would fail. Every way to set a value in
# place goes through `__setattr__`, whatever the attribute is called.
_METHODS = {name: vars(nnx.Variable)[name] for name in ("__setattr__", "from_metadata")}


def _set(self: Any, name: str, value: Any) -> None:
    before = self.get_raw_value()
    _METHODS["__setattr__"](self, name, value)
    watch = _WATCH.get()
    if watch is not None and self.get_raw_value() is not before:
        watch.note(self)


def _from_metadata(cls: Any, value: Any, attributes: dict[str, Any]) -> Any:
    mark = attributes.get(_FLAG)
    if not isinstance(mark, _Mark):
        return _METHODS["from_metadata"].__func__(cls, value, attributes)
    made = _METHODS["from_metadata"].__func__(cls, value, {**attributes, _FLAG: bool(mark)})
    # A transformation of NNX gives its function this one and writes back what becomes of it.
    watch = _WATCH.get()
    if watch is not None and _is_of(watch, mark) and _is_deeper(mark.variable):
        watch.mark(made, mark.path)
    return made


_REPLACED = {"__setattr__": _set, "from_metadata": classmethod(_from_metadata)}


def _replace_methods(change: int) -> None:
    """Counts the watches of all threads: the first changes the methods, the last puts them back."""
    global _watches
    with _LOCK:
        _watches += change
        if _watches == max(change, 0):
            for name, method in (_REPLACED if change > 0 else _METHODS).items():
                setattr(nnx.Variable, name, method)


def _is_of(watch: _Watch, mark: Any) -> bool:
    return isinstance(mark, _Mark) and mark.watch is watch


def _is_deeper(variable: nnx.Variable[Any]) -> bool:
    """Whether JAX is in another trace now than when the variable was made."""
    try:
        variable.set_metadata(_FLAG, variable.get_metadata(_FLAG))
    except TraceContextError:
        return True
    return False
