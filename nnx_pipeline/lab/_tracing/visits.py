"""A search through what is found on the way: calls, operands, readers."""

from collections.abc import Hashable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def each_once(pending: list[T]) -> Iterator[T]:
    """What is pending, the last first and each once; the loop appends what an element leads to."""
    seen: set[T] = set()
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            yield one
