"""What each array of a checkpoint is, by its path in the tree; none is read."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linen_compat.formats._orbax import corruption
from linen_compat.formats._orbax.arrays import array_specs
from linen_compat.formats._streams import (
    COPIES,
    GUARD,
    MOMENTS,
    PARAMETERS,
    SCALARS,
    SEVERAL,
    ArraySpec,
    Mismatch,
)

LORA = "lora"  # the group of the matrices of an adapter of MaxText


@dataclass(frozen=True)
class Leaf:
    """One stored array, without its values: its whole shape, its dtype's name, and its path."""

    shape: tuple[int, ...]
    dtype: str
    stored: str

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.shape, np.dtype(self.dtype))


Leaves = dict[str, Leaf]


def leaves_of(items: Path) -> dict[str, Leaves]:
    """Every stored array by its name in its group; none is read."""
    corruption.check_index(items)  # names what is lost more clearly than opening an array does
    groups: dict[str, Leaves] = {
        name: {} for name in (PARAMETERS, LORA, "scalars", "ignored", "unknown")
    }
    for stored, spec in array_specs(items).items():
        group, name = _group(stored)
        leaves = groups.setdefault(group, {})
        if name in leaves:
            raise Mismatch(
                f"{items} holds {name} twice, as {leaves[name].stored} and as {stored}; "
                "take a checkpoint that holds only one of them"
            )
        leaves[name] = Leaf(spec.shape, str(spec.dtype), stored)
    return groups


# What a leaf is, by its path in the tree; the first pattern that matches decides. Where MaxText's
# NNX path saves parameters alone, there may be no `params` around them and a `value` at the end.
_OURS = r"((?:embedding|norm|pipeline/layers|dense_layers)/.+|head)"
_GROUPS = (
    ("ignored", r"(nnx_aux/.+)"),
    ("ignored", r"((?:.+/)?rngs/[^/]+/(?:count|key)(?:/value)?)"),
    (
        LORA,
        r"(?:params/)*((?!opt_state/|optimizer/).+(?:/lora_[ab]\.kernel|_lora_[ab]))(?:/value)?",
    ),
    (PARAMETERS, rf"model/{_OURS}"),
    *((part, rf"optimizer/{part}/{_OURS}") for part in (*MOMENTS, *COPIES)),
    *((moment, rf"opt_state/0/{moment}/(?:params/)*(.+?)(?:/value)?") for moment in MOMENTS),
    (PARAMETERS, r"(?:params/)+(.+?)(?:/value)?"),
    (PARAMETERS, r"((?:token_embedder|decoder)/.+?)(?:/value)?"),
)
SCALAR_PATHS = {
    "maxtext": dict(zip(SCALARS, ("step", "opt_state/0/count", "opt_state/2/count"), strict=True)),
    "nnx": {
        **dict(zip(SCALARS, ("step", "optimizer/count", "optimizer/schedule_count"), strict=True)),
        **{name: f"optimizer/{name}" for name in (*GUARD, *SEVERAL)},
    },
}


def _group(stored: str) -> tuple[str, str]:
    """The group that a leaf belongs to, and its name in that group."""
    for paths in SCALAR_PATHS.values():
        for name, path in paths.items():
            if stored in (path, f"{path}/value"):
                return "scalars", name
    for group, pattern in _GROUPS:
        if match := re.fullmatch(pattern, stored):
            return group, match.group(1)
    return "unknown", stored
