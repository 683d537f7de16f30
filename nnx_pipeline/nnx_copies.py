"""Changes of copies: what a transformation of JAX inside of a function makes of NNX modules.

`jax.jit`, `jax.checkpoint` and their like give the function inside copies of the modules and forget
them after its call, and with them all that it changed in place. Those of NNX write it back.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx
from flax.errors import TraceContextError

# Metadata that every variable has, a bool. Metadata goes with the copies that JAX makes.
_FLAG = "eager_sharding"


class _Mark(int):
    """The value of `_FLAG` with the path of its variable.

    It equals the plain value, so that trees and graph definitions stay as equal as they were.
    """

    path: str

    @classmethod
    def of(cls, flag: bool, path: str) -> "_Mark":
        mark = cls(flag)
        mark.path = path
        return mark


@contextlib.contextmanager
def changed_copies(variables: Mapping[str, nnx.Variable[Any]]) -> Iterator[dict[str, None]]:
    """Yields the paths of the variables of which a copy is set meanwhile, at a deeper trace.

    variables: made in the trace that is going on, by path. What `nnx.merge` and `nnx.clone` make
    is no such copy: who takes modules apart says himself what is kept.
    """
    own = set(map(id, variables.values()))
    found: dict[str, None] = {}
    for path, variable in variables.items():
        variable.set_metadata(_FLAG, _Mark.of(variable.get_metadata(_FLAG), path))
    # Both are public, but Flax's own hooks would be metadata that a variable made inside lacks:
    # trees that were equal would be so no more, and scans over them would fail.
    methods = {name: vars(nnx.Variable)[name] for name in ("set_value", "from_metadata")}

    def noted(self: Any, *arguments: Any, **keywords: Any) -> None:
        mark = self.get_metadata(_FLAG, None)
        if isinstance(mark, _Mark) and id(self) not in own and _is_deeper(variables[mark.path]):
            found[mark.path] = None
        methods["set_value"](self, *arguments, **keywords)

    def unmarked(cls: Any, value: Any, attributes: dict[str, Any]) -> Any:
        flag = attributes.get(_FLAG)
        plain = {**attributes, _FLAG: bool(flag)} if isinstance(flag, _Mark) else attributes
        return methods["from_metadata"].__func__(cls, value, plain)

    _set_methods({"set_value": noted, "from_metadata": classmethod(unmarked)})
    try:
        yield found
    finally:
        _set_methods(methods)
        for variable in variables.values():
            variable.set_metadata(_FLAG, bool(variable.get_metadata(_FLAG)))


def _set_methods(methods: Mapping[str, Any]) -> None:
    for name, method in methods.items():
        setattr(nnx.Variable, name, method)


def _is_deeper(variable: nnx.Variable[Any]) -> bool:
    """Whether JAX is in another trace now than when the variable was made."""
    try:
        variable.set_metadata(_FLAG, variable.get_metadata(_FLAG))
    except TraceContextError:
        return True
    return False
