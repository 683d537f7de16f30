"""The marker `memory_budget`: limits that stand in the test itself. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx_pipeline.lab.comparison.limit import parse_limit
from nnx_pipeline.lab.errors import InputError, nearest

if TYPE_CHECKING:
    import pytest

MARKER = "memory_budget"
ABOUT = (
    f"{MARKER}(account, *, platform, heap, temp, peak, step): the most that each program may need "
    'that the test compiles by `compile_memory`, such as "24 MB", "1.5 GiB" or step="20 ms"; with '
    "`platform` those alone that are compiled for it, and it is what the test compiles for."
)
_FIGURES = {name: f"{name}_bytes" for name in ("account", "heap", "temp", "peak")}
_FIGURES["step"] = "step_seconds"


@dataclass(frozen=True)
class MarkedBudget:
    """One marker: the platform that it is for, "" for any, and the limit of each figure."""

    platform: str
    limits: Mapping[str, float]


def marked_budgets(markers: Iterable[pytest.Mark]) -> list[MarkedBudget]:
    """The limits of a test; raises InputError for a marker that says none."""
    return [_budget(*marker.args, **marker.kwargs) for marker in markers]


def _budget(*args: object, platform: object = "", **limits: object) -> MarkedBudget:
    if len(args) > 1 or (args and "account" in limits):
        raise InputError(f"@{MARKER} takes one limit without a name, of the account; name others")
    if args:
        limits["account"] = args[0]
    if not limits:
        raise InputError(f'@{MARKER} has no limit; give one, such as {MARKER}("24 MB")')
    for name in limits:
        if name not in _FIGURES:
            raise InputError(f"@{MARKER}({name}=…) is no figure; {nearest(name, _FIGURES)}")
    return MarkedBudget(
        str(platform), {_FIGURES[name]: _amount(name, limit) for name, limit in limits.items()}
    )


def _amount(name: str, text: object) -> float:
    limit = parse_limit(f"@{MARKER}", f"{name}={text}")
    if limit.share is not None:
        raise InputError(f"@{MARKER}: {name}={text!r} is a share of nothing; write 24 MB or 20 ms")
    return limit.value if name == "step" else math.floor(limit.value)
