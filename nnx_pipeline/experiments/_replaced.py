"""Functions of the library that an arm of an experiment runs with others in their place.

The library has no seams for experiments. An arm that is neither a config nor a subclass names the
functions that it replaces, where they are looked up, and the program is traced under them.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Replaced:
    """One function, or constant, that another one stands for while a program is traced.

    - `module`: the module that looks it up, dotted; where several do, each needs an entry.
    - `name`: its name there.
    - `by`: what stands in its place; a function has the same result.
    """

    module: str
    name: str
    by: object


@contextlib.contextmanager
def replaced(functions: Sequence[Replaced]) -> Iterator[None]:
    """A context in which these functions are replaced; AttributeError where one is not there."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            module = importlib.import_module(function.module)
            stack.enter_context(mock.patch.object(module, function.name, function.by))
        yield
