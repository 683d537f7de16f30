"""What a checkpoint holds, from its metadata alone: no array is read."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from linen_compat.damage import METADATA, check_index, read_metadata, unreadable, was_orbax
from linen_compat.layouts import NNX, Layout, find_layout
from linen_compat.stored import array_specs
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
    when there is one that was not written to its end, has lost its metadata or cannot be read.
    Which step is the latest is decided by the names: an earlier one is never taken instead.
    """
    folder = Path(checkpoint).absolute()
    if not str(checkpoint):
        raise InputError("the checkpoint's name is empty; give a run, a step or its items folder")
    if not folder.is_dir():
        raise InputError(f"{checkpoint} is not a folder; give a run, a step or its items folder")
    steps = _steps(folder)
    if steps:
        return _items_of_latest(steps)
    for candidate in (folder / "items", folder):
        try:
            if _has_metadata(candidate):
                return candidate
        except OSError as error:
            raise unreadable(str(candidate / METADATA), error) from error
    for candidate in (folder / "items", folder):
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
    """What is named as the steps of a run are, in their order, folder or not."""
    try:
        steps = [child for child in run.iterdir() if re.fullmatch("[0-9]+", child.name)]
    except PermissionError as error:
        raise unreadable(str(run), error) from error
    return sorted(steps, key=lambda step: int(step.name))


def _items_of_latest(steps: list[Path]) -> Path:
    """The folder with the arrays of the last of these steps, or Mismatch with what is wrong."""
    step, earlier = steps[-1], [other for other in steps if int(other.name) < int(steps[-1].name)]
    example = f", such as {earlier[-1]}" if earlier else ""
    give = f"give another step by its name{example}"
    if len(steps) - len(earlier) > 1:
        raise Mismatch(
            f"{steps[-2]} and {step} are both step {int(step.name)}, the latest; "
            "give the one that is meant"
        )
    if not step.is_dir():
        kind = "a link to nothing" if step.is_symlink() and not step.exists() else "no folder"
        raise Mismatch(f"{step}, the latest step, is {kind}; {give}")
    try:
        os.listdir(step)
        for candidate in (step / "items", step):
            if _has_metadata(candidate):
                return candidate
    except OSError as error:
        raise Mismatch(f"{unreadable(f'{step}, the latest step,', error)}; or {give}") from error
    raise Mismatch(
        f"{step}, the latest step, has no {METADATA} in {step.name}/items: it was not written "
        f"to its end, or has lost it; {give}"
    )


def _has_metadata(folder: Path) -> bool:
    """Whether there is the file. Raises OSError where that cannot be seen."""
    try:
        os.stat(folder / METADATA)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def inspect(checkpoint: str | Path) -> Inspection:
    """Reads names, shapes and dtypes, and finds the layout out.

    Raises InputError when there is no checkpoint, and Mismatch when it cannot be read or has no
    layout of MaxText's decoder.
    """
    items = find_items(checkpoint)
    check_index(items)  # which names what is lost more clearly than opening an array does
    found: dict[str, Leaves] = {PARAMETERS: {}, "scalars": {}, "ignored": {}, "unknown": {}}
    for stored, spec in array_specs(items).items():
        group, name = _group(stored)
        first = found.get(group, {}).get(name)
        if first is not None:
            raise Mismatch(
                f"{items} holds {name} twice, as {first.stored} and as {stored}; it cannot be said "
                "which one is meant"
            )
        found.setdefault(group, {})[name] = Leaf(spec.shape, str(spec.dtype), stored)
    parameters = found[PARAMETERS]
    layout = find_layout({name: leaf.shape for name, leaf in parameters.items()}, items)
    scale = read_metadata(items).attention_scale
    if layout.format == NNX and scale is None:
        raise Mismatch(
            f"{items / METADATA} does not say the attention_scale that the query kernels are for; "
            "the checkpoint is damaged: take another one"
        )
    return Inspection(
        items=items,
        layout=layout,
        parameters=parameters,
        moments={moment: found[moment] for moment in MOMENTS if moment in found},
        scalars=found["scalars"],
        ignored=found["ignored"],
        unknown=found["unknown"],
        attention_scale=1.0 if scale is None else scale,
    )


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
