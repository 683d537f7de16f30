"""What a MaxText checkpoint holds, from its metadata alone: no array is read."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nnx_pipeline import InputError

_QUERY = "self_attention/query/kernel"
_QUERY_RANK = 3  # [embed, heads, head_dim] in one layer


@dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's layout and leaves.

    layout: `maxtext:unscanned`, `maxtext:scanned` or `maxtext:pipelined`. stages, repeats: 1 unless
    pipelined. parameters: path below `params/params` to leaf. other: every other leaf (optimizer
    state, step, state of random number generators), by its whole path.
    """

    items: Path
    layout: str
    num_layers: int
    stages: int
    repeats: int
    parameters: dict[str, Leaf]
    other: dict[str, Leaf]

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in self.parameters.values())


def find_items(checkpoint: str | Path) -> Path:
    """The `items` folder of a run (its latest step), of one step, or the folder itself.

    Raises InputError when there is no Orbax checkpoint.
    """
    folder = Path(checkpoint).absolute()
    if not folder.is_dir():
        raise InputError(f"{checkpoint} is not a folder; give a run, a step or its items folder")
    steps = [child for child in folder.iterdir() if child.name.isdecimal() and child.is_dir()]
    if steps:
        folder = max(steps, key=lambda step: int(step.name))
    for candidate in (folder / "items", folder):
        if (candidate / "_METADATA").is_file():
            return candidate
    raise InputError(
        f"{checkpoint} holds no Orbax checkpoint (no _METADATA in it, in items, or in a step); "
        "give a run, a step or its items folder"
    )


def inspect(checkpoint: str | Path) -> Inspection:
    """Reads names, shapes and dtypes, and finds the layout out.

    Raises InputError when the checkpoint cannot be read or has no layout of MaxText's decoder.
    """
    items = find_items(checkpoint)
    try:
        metadata: Any = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(items)
        tree = metadata.item_metadata.tree
    except Exception as error:  # Orbax and its formats raise many kinds for a broken checkpoint
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{items} cannot be read as an Orbax checkpoint: {reason[:200]}"
        ) from error
    parameters, other = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "shape"):
            continue  # an empty node, such as the state of a transformation that has none
        name = "/".join(_key(entry) for entry in path)
        found = Leaf(tuple(leaf.shape), str(leaf.dtype))
        parameter = _parameter_name(name)
        if parameter is None:
            other[name] = found
        else:
            parameters[parameter] = found
    layout, layers, stages, repeats = _layout(items, parameters)
    return Inspection(items, layout, layers, stages, repeats, parameters, other)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _parameter_name(name: str) -> str | None:
    """The path below `params/params`; parameters alone may lack it and end in `value`."""
    for prefix in ("params/params/", "params/"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    if name.startswith(("token_embedder/", "decoder/")):
        return name.removesuffix("/value")
    return None


def _layout(items: Path, parameters: dict[str, Leaf]) -> tuple[str, int, int, int]:
    """Layout, number of layers, stages and repeats, from where the query kernels are."""
    queries = {name: leaf.shape for name, leaf in parameters.items() if name.endswith(_QUERY)}
    pipelined = "decoder/pipeline_module/layers"
    if f"decoder/layers/{_QUERY}" in queries:
        return "maxtext:scanned", queries[f"decoder/layers/{_QUERY}"][1], 1, 1
    inside = [shape for name, shape in queries.items() if name.startswith(pipelined)]
    if inside:
        leading = inside[0][: len(inside[0]) - _QUERY_RANK]
        repeats, stages = leading if len(leading) == 2 else (1, *leading)
        return "maxtext:pipelined", len(inside) * repeats * stages, stages, repeats
    unscanned = [name for name in queries if re.match(r"decoder/layers_\d+/", name)]
    if unscanned:
        return "maxtext:unscanned", len(unscanned), 1, 1
    raise InputError(
        f"{items} has no layers of MaxText's decoder (decoder/layers_0, decoder/layers or "
        "decoder/pipeline_module/layers); is it a checkpoint of another model?"
    )
