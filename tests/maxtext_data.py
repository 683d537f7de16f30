"""Kept checkpoints of MaxText, and others made of them in plain Python, written by Orbax itself."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from linen_compat import config_from_maxtext
from nnx_pipeline import Config

logging.getLogger("absl").setLevel(logging.ERROR)
DATA = Path(__file__).parent / "data" / "maxtext"
KEPT = ("unscanned", "scanned_nnx", "scanned_params_only_bf16")
LAYERS = 4
# Stages and repeats of pipelined layouts of four layers, several layers per stage among them.
PIPELINES = ((2, 1), (4, 1), (2, 2), (1, 2), (1, 4), (1, 1))

Leaves = dict[str, np.ndarray]


def checkpoint(name: str) -> Path:
    """The run folder of a kept checkpoint."""
    return DATA / name / "checkpoint"


def config_of(name: str = "unscanned") -> Config:
    """The config of a kept checkpoint, from MaxText's own file."""
    return config_from_maxtext(DATA / name / "config.yml")


def reference(name: str = "unscanned") -> dict[str, np.ndarray]:
    """Inputs, and the logits that MaxText computed from them."""
    return dict(np.load(DATA / name / "reference.npz"))


def parameter_trees() -> dict[str, dict[str, tuple[int, ...]]]:
    """Layout to path below `params/params` to shape, as MaxText has them."""
    trees = json.loads((DATA / "param_trees.json").read_text(encoding="utf-8"))
    return {
        layout: {
            path.removeprefix("params/params/"): tuple(leaf["shape"]) for path, leaf in t.items()
        }
        for layout, t in trees.items()
    }


def read(folder: Path) -> Leaves:
    """Every leaf by its path, read by Orbax."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        return flat(checkpointer.restore(folder))


def write(folder: Path, leaves: Leaves) -> Path:
    """Writes leaves by Orbax; numbered keys become lists."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, lists(nested(leaves)))
    return folder


def full_state(step: int = 2) -> Leaves:
    """A kept training state, its layers apart."""
    return read(checkpoint("unscanned") / str(step) / "items")


def parameters(step: int = 2) -> Leaves:
    """Parameters by their path below `params/params`, layers apart."""
    prefix = "params/params/"
    state = full_state(step)
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def laid_out(apart: Leaves, layout: str, stages: int = 1, repeats: int = 1) -> Leaves:
    """Parameters whose layers are apart in another layout, by counting layers one by one."""
    result = {path: leaf for path, leaf in apart.items() if "/layers_" not in path}
    for name in sorted({path.split("/", 2)[2] for path in apart if "/layers_" in path}):
        layers = [apart[f"decoder/layers_{n}/{name}"] for n in range(LAYERS)]
        if layout == "unscanned":
            result |= {f"decoder/layers_{n}/{name}": layer for n, layer in enumerate(layers)}
        elif layout == "scanned":
            result[f"decoder/layers/{name}"] = np.stack(layers, axis=1)
        else:
            result |= _piped(name, layers, stages, repeats)
    return result


def _piped(name: str, layers: list[np.ndarray], stages: int, repeats: int) -> Leaves:
    each = LAYERS // (stages * repeats)
    base, result = "decoder/pipeline_module/layers", {}
    for j in range(each):
        rows = [
            np.stack([layers[(repeat * stages + stage) * each + j] for stage in range(stages)])
            for repeat in range(repeats)
        ]
        path = f"{base}/layers_{j}/{name}" if each > 1 else f"{base}/{name}"
        result[path] = np.stack(rows) if repeats > 1 else rows[0]
    return result


def state_in(layout: str, stages: int = 1, repeats: int = 1, step: int = 2) -> Leaves:
    """The kept training state in another layout."""
    result, state = {}, full_state(step)
    for prefix in ("params/params/", "opt_state/0/mu/params/", "opt_state/0/nu/params/"):
        part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        moved = laid_out(part, layout, stages, repeats)
        result |= {prefix + path: leaf for path, leaf in moved.items()}
        state = {k: v for k, v in state.items() if not k.startswith(prefix)}
    return {**result, **state}


def assert_same_leaves(found: Leaves, expected: Leaves) -> None:
    """Names, dtypes and every bit."""
    assert sorted(found) == sorted(expected)
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        assert np.array_equal(found[path], leaf), path


def flat(tree: Any, prefix: str = "") -> Leaves:
    """A nested tree as one dictionary; None is left out."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif tree is None:
        return {}
    else:
        is_key = jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key)
        return {prefix.removesuffix("/"): np.asarray(jax.random.key_data(tree) if is_key else tree)}
    return {k: v for key, child in items for k, v in flat(child, f"{prefix}{key}/").items()}


def nested(leaves: Leaves) -> dict[str, Any]:
    """One dictionary as a nested tree."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def lists(tree: Any) -> Any:
    """A nested tree whose numbered keys are places in lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(key.isdecimal() for key in tree):
        return [lists(tree.get(str(n))) for n in range(max(map(int, tree)) + 1)]
    return {key: lists(child) for key, child in tree.items()}


def prompts_of_reference() -> list[dict[str, object]]:
    """The first document of each row of the kept logits of MaxText, as prompts."""
    with np.load(DATA / "unscanned" / "reference.npz") as kept:
        tokens, segments, logits = (
            kept[name] for name in ("inputs", "inputs_segmentation", "logits_dense")
        )
    ends = [int(np.argmax(row != row[0]) or len(row)) for row in segments]
    return [
        {"prompt": "", "tokens": tokens[row, :end].tolist(), "logits": logits[row, :end].tolist()}
        for row, end in enumerate(ends)
    ]
