"""What one of several processes does for all: process 0 writes what there is once."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from linen_compat.formats._streams import Mismatch

_LONGEST = 4_000  # bytes of what is told
_FAULT = "!"  # the first character of an error


def from_first(make: Callable[[], str]) -> str:
    """What `make` returns in process 0, in all processes, each of which must call this.

    An InputError or OSError of it is raised in process 0, and in the others as a Mismatch.
    """
    error: Exception | None = None
    said = ""
    if jax.process_index() == 0:
        try:
            said = f" {make()}"
        except (ValueError, OSError) as raised:  # InputError is a ValueError
            error, said = raised, f"{_FAULT}{raised}"
    if jax.process_count() > 1:
        message = np.zeros(_LONGEST, np.uint8)
        encoded = said.encode(errors="surrogateescape")[:_LONGEST]  # as a path may need
        message[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(message)))
        said = told.rstrip(b"\0").decode(errors="surrogateescape")
    if error is not None:
        raise error
    if said.startswith(_FAULT):
        raise Mismatch(said.removeprefix(_FAULT))
    return said.removeprefix(" ")


def check_in_all(is_right: bool, rule: Callable[[int], str]) -> None:
    """Raises Mismatch in all processes unless something holds in all; `rule` is given the number of
    one in which it does not."""
    if jax.process_count() == 1:
        return
    found = np.ravel(multihost_utils.process_allgather(np.asarray(is_right)))
    if not found.all():
        raise Mismatch(rule(int(np.argmin(found))))


def agree(write: Callable[[], None]) -> None:
    """Calls `write`, whose error in process 0 is raised in all; other processes tell theirs to it
    by their files."""
    error: Exception | None = None
    try:
        write()
    except (ValueError, OSError) as raised:
        error = raised

    def outcome() -> str:
        if error is not None:
            raise error
        return ""

    from_first(outcome)
