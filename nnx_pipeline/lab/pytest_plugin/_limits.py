"""The marker `memory_budget`: limits that stand in the test itself. Imports no JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx_pipeline.lab.errors import InputError, nearest

if TYPE_CHECKING:
    import pytest

MARKER = "memory_budget"
ABOUT = (
    f"{MARKER}(account, *, platform, heap, temp, peak, step): the most that each program may need "
    'that the test compiles by `compile_memory`, such as "24 MB", "1.5 GiB" or step="20 ms"; with '
    "`platform` those alone that are compiled for it, and it is what the test compiles for."
)
_BYTES = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}
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


def _amount(name: str, limit: object) -> float:
    units = _SECONDS if name == "step" else _BYTES
    found = (
        re.fullmatch(r"([\d_]*\.?\d+)\s*([a-zA-Zµ]+)", limit) if isinstance(limit, str) else None
    )
    if not found or found[2] not in units:
        example = '"20 ms"' if name == "step" else '"24 MB" or "1.5 GiB"'
        raise InputError(f"@{MARKER}: {name}={limit!r} is no limit with a unit; write {example}")
    value = float(found[1]) * units[found[2]]
    return value if name == "step" else math.floor(value)
