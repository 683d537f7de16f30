"""What a checkpoint holds, from its metadata alone: no array is read."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from linen_compat.damage import METADATA, check_index, was_orbax
from linen_compat.layouts import Layout, find_layout
from linen_compat.stored import StoredArrays
from linen_compat.streams import MOMENTS, PARAMETERS, SCALARS, Mismatch
from nnx_pipeline import InputError


@dataclass(frozen=True)
class Leaf:
    """One stored array. stored: its path in the checkpoint's tree, keys joined by `/`."""

    shape: tuple[int, ...]
    dtype: str
    stored: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Leaves = dict[str, Leaf]


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's layout and leaves.

    parameters, moments: paths below `params/params`, or below `model` for the format `nnx`; moments
    are there by `mu` and `nu`, or not at all. scalars: by the names of `streams.SCALARS`. ignored:
    what this project has no use for, by its whole path: the state of random number generators.
    unknown: everything else. attention_scale: `model.attention_scale` of what was saved, 1 for
    MaxText.
    """

    items: Path
    layout: Layout
    parameters: Leaves
    moments: dict[str, Leaves]
    scalars: Leaves
    ignored: Leaves
    unknown: Leaves
    attention_scale: float = 1.0

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in self.parameters.values())

    @property
    def other(self) -> Leaves:
        """Every leaf that is not a parameter, by its whole path."""
        groups = (*self.moments.values(), self.scalars, self.ignored, self.unknown)
        return {leaf.stored: leaf for group in groups for leaf in group.values()}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that `streams.Source` has of it."""
        return (PARAMETERS, *self.moments)

    def part(self, part: str) -> Leaves:
        """The leaves of one part."""
        return self.parameters if part == PARAMETERS else self.moments[part]


def find_items(checkpoint: str | Path) -> Path:
    """The `items` folder of a run (its latest step), of one step, or the folder itself.

    Raises InputError when there is no Orbax checkpoint, and Mismatch, naming the step or the file,
    when there is one that was not written to its end or has lost its metadata. An earlier step is
    never taken instead.
    """
    folder = Path(checkpoint).absolute()
    if not folder.is_dir():
        raise InputError(f"{checkpoint} is not a folder; give a run, a step or its items folder")
    steps = _steps(folder)
    step = steps[-1] if steps else folder
    for candidate in (step / "items", step):
        if (candidate / METADATA).is_file():
            return candidate
    if steps:
        earlier = f", such as {folder / steps[-2].name}" if len(steps) > 1 else ""
        raise Mismatch(
            f"{step}, the latest step, has no {METADATA} in {step.name}/items: it was not written "
            f"to its end, or has lost it; give another step{earlier}"
        )
    for candidate in (step / "items", step):
        if was_orbax(candidate):
            raise Mismatch(
                f"{candidate / METADATA} is missing: the checkpoint was not written to its end, or "
                "has lost it; take another step"
            )
    raise InputError(
        f"{checkpoint} holds no Orbax checkpoint (no {METADATA} in it, in items, or in a step); "
        "give a run, a step or its items folder"
    )


def is_orbax(checkpoint: str | Path) -> bool:
    """Whether a folder is a run, a step or the items of one, complete or not."""
    folder = Path(checkpoint)
    return any(
        (place / METADATA).is_file() or was_orbax(place) for place in (folder, folder / "items")
    ) or (folder.is_dir() and bool(_steps(folder)))


def _steps(run: Path) -> list[Path]:
    """The steps of a run, in their order."""
    steps = [child for child in run.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted(steps, key=lambda step: int(step.name))


def inspect(checkpoint: str | Path) -> Inspection:
    """Reads names, shapes and dtypes, and finds the layout out.

    Raises InputError when there is no checkpoint, and Mismatch when it cannot be read or has no
    layout of MaxText's decoder.
    """
    items = find_items(checkpoint)
    found: dict[str, Leaves] = {PARAMETERS: {}, "scalars": {}, "ignored": {}, "unknown": {}}
    for stored, (shape, dtype) in _metadata(items).items():
        group, name = _group(stored)
        first = found.get(group, {}).get(name)
        if first is not None:
            raise Mismatch(
                f"{items} holds {name} twice, as {first.stored} and as {stored}; it cannot be said "
                "which one is meant"
            )
        found.setdefault(group, {})[name] = Leaf(shape, dtype, stored)
    parameters = found[PARAMETERS]
    shapes = {name: leaf.shape for name, leaf in parameters.items()}
    return Inspection(
        items=items,
        layout=find_layout(shapes, items),
        parameters=parameters,
        moments={moment: found[moment] for moment in MOMENTS if moment in found},
        scalars=found["scalars"],
        ignored=found["ignored"],
        unknown=found["unknown"],
        attention_scale=float(StoredArrays(items).custom.get("attention_scale", 1.0)),
    )


def _metadata(items: Path) -> Mapping[str, tuple[tuple[int, ...], str]]:
    try:
        check_index(items)  # Orbax fails less clearly, and not always quietly
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata: Any = checkpointer.metadata(items)
        tree = metadata.item_metadata.tree
    except Mismatch:
        raise
    except Exception as error:  # Orbax and its formats raise many kinds for a broken checkpoint
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Mismatch(f"{items} cannot be read as an Orbax checkpoint: {reason[:200]}") from error
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "shape"):  # else an empty node, of a transformation without state
            name = "/".join(_key(entry) for entry in path)
            leaves[name] = (tuple(leaf.shape), str(leaf.dtype))
    return leaves


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


# What a leaf is, by its path in the tree. The first that matches decides. Parameters alone, as
# MaxText's NNX path saves them, may have no `params` around them and end in `value`.
_OURS = r"((?:embedding|norm|pipeline/layers)/.+|head)"
_GROUPS = (
    ("ignored", r"(nnx_aux/.+)"),
    ("ignored", r"((?:.+/)?rngs/[^/]+/(?:count|key)(?:/value)?)"),
    (PARAMETERS, rf"model/{_OURS}"),
    *((moment, rf"optimizer/{moment}/{_OURS}") for moment in MOMENTS),
    *((moment, rf"opt_state/0/{moment}/(?:params/)*(.+?)(?:/value)?") for moment in MOMENTS),
    (PARAMETERS, r"(?:params/)+(.+?)(?:/value)?"),
    (PARAMETERS, r"((?:token_embedder|decoder)/.+?)(?:/value)?"),
)
SCALAR_PATHS = {
    "maxtext": dict(zip(SCALARS, ("step", "opt_state/0/count", "opt_state/2/count"), strict=True)),
    "nnx": dict(zip(SCALARS, ("step", "optimizer/count", "optimizer/schedule_count"), strict=True)),
}


def _group(stored: str) -> tuple[str, str]:
    """Which group a leaf belongs to, and its name there."""
    for paths in SCALAR_PATHS.values():
        for name, path in paths.items():
            if stored in (path, f"{path}/value"):
                return "scalars", name
    for group, pattern in _GROUPS:
        if match := re.fullmatch(pattern, stored):
            return group, match.group(1)
    return "unknown", stored
