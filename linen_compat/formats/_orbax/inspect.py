"""What a checkpoint holds, from its metadata alone: no array is read but the step of a run."""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from linen_compat.formats._names import BIASES, KV_DOWN, QK_NORMS
from linen_compat.formats._orbax import corruption, layouts
from linen_compat.formats._orbax.arrays import StoredArrays
from linen_compat.formats._orbax.corruption import METADATA, unreadable
from linen_compat.formats._orbax.layouts import NNX, slashed
from linen_compat.formats._orbax.leaves import LORA, Leaves, leaves_of
from linen_compat.formats._run_files import is_run, steps_of
from linen_compat.formats._store_folder import COMMITTED, is_committed, require_done
from linen_compat.formats._streams import (
    COPIES,
    MOMENTS,
    PARAMETERS,
    Mismatch,
    Rotary,
)
from nnx_pipeline import InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath


@dataclass(frozen=True)
class Inspection:
    """The layout and the leaves of a checkpoint.

    Parameters, moments and matrices of LoRA are by their paths below `params/params`, or below
    `model` in the format `nnx`; scalars by the names of `streams.SCALARS`; ignored and unknown
    leaves by whole paths.
    `attention_scale` is None with latent attention, where the config says it. `rotary` is what
    `nnx` says; older ones do not, and MaxText's layouts never.
    """

    items: Path
    layout: layouts.TreeLayout
    parameters: Leaves
    moments: dict[str, Leaves]
    scalars: Leaves
    ignored: Leaves
    unknown: Leaves
    lora: Leaves = dataclasses.field(default_factory=dict)
    attention_scale: float | None = 1.0
    rotary: Rotary | None = None

    @property
    def is_latent(self) -> bool:
        return self.attention_scale is None

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.parameters.values())

    @property
    def other(self) -> Leaves:
        """Every leaf that is not a parameter, by its whole path."""
        groups = (*self.moments.values(), self.scalars, self.ignored, self.unknown, self.lora)
        return {leaf.stored: leaf for group in groups for leaf in group.values()}

    @property
    def optimizer(self) -> Leaves:
        """Every leaf of the state of any optimizer, by its whole path."""
        return {name: leaf for name, leaf in self.other.items() if _OPTIMIZER.match(name)}

    @property
    def other_optimizer(self) -> str | None:
        """A sentence about the state of another optimizer than AdamW, if any.

        A state with both moments and no other leaf is AdamW's. If not complete, it is damaged.
        """
        known = set(MOMENTS) <= self.moments.keys()
        if not self.optimizer or (known and not any(map(_OPTIMIZER.match, self.unknown))):
            return None
        prefix = "optimizer" if self.layout.format == NNX else "opt_state/0"
        return (
            f"the optimizer's state is {_some(optimizer_names(self.optimizer))}, and only that of "
            f"optax.adamw is read ({prefix}/mu, {prefix}/nu and {prefix}/count)"
        )

    @property
    def parameters_alone(self) -> "Inspection":
        """The same with the optimizer's state among the leaves of no use."""
        state = self.optimizer

        def rest(leaves: Leaves) -> Leaves:
            return {name: leaf for name, leaf in leaves.items() if leaf.stored not in state}

        return dataclasses.replace(
            self,
            moments={},
            scalars=rest(self.scalars),
            ignored={**self.ignored, **state},
            unknown=rest(self.unknown),
        )

    @property
    def parts(self) -> dict[str, Leaves]:
        return {PARAMETERS: self.parameters, **self.moments}


_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what Orbax writes, until it is whole
# Where the state of an optimizer is, and the end of a path that names its parameter.
_OPTIMIZER = re.compile("(?:opt_state|optimizer)/")
_OF_PARAMETER = re.compile(
    "/(?:params|model|decoder|token_embedder|embedding|norm|pipeline|dense_layers|head|value)"
    "(?:/.*)?$"
)


_CURE = "give a run, a step or its folder of arrays"
_ADAPTER = "it is an adapter; give the folder of its model, and this one as --adapter"
_UNMARKED = f"has no {COMMITTED}, which is written last: it was not finished"
_COPIED = "where it is a copy known to be whole, put an empty file of that name into it"


def optimizer_names(state: Leaves) -> list[str]:
    """The names of the parts of an optimizer's state, such as `opt_state/0/mu`, each once."""
    return list(dict.fromkeys(_OF_PARAMETER.sub("", name) for name in state))


def existing_folder(checkpoint: str | Path) -> Path:
    """The folder of this name; raises InputError where there is none."""
    folder = place(checkpoint)
    if not str(checkpoint):
        raise InputError(f"the checkpoint's name is empty; {_CURE}")
    if not folder.is_dir():
        if isinstance(folder, StorePath):
            folder.require_bucket()
        why = "is a file and not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {why}; {_CURE}")
    require_done(folder)
    return folder


def find_items(checkpoint: str | Path, *, resuming: bool = False) -> Path:
    """The folder that holds the arrays of a checkpoint: a run, a step, or that folder itself.
    With `resuming` an error about the latest step says how a training goes on without it.

    Names alone decide which step of a run is the latest; an earlier one is never taken instead.
    Raises InputError when there is no Orbax checkpoint, or a step has several folders with arrays;
    and Mismatch when there is one that is not complete or cannot be read.
    """
    folder = existing_folder(checkpoint).absolute()
    if steps := _steps(folder):
        return _items_of_latest(steps, resuming)
    try:
        if items := _items_in(folder):
            of_step = items == folder and is_committed(folder.parent)
            if not (is_committed(folder) or of_step):
                raise Mismatch(f"{folder} {_UNMARKED}; {_COPIED}")
            return items
    except OSError as error:
        raise unreadable(str(folder / METADATA), error) from error
    for candidate in (folder / "items", *sorted(folder.iterdir()), folder):
        if corruption.was_orbax(candidate):
            raise Mismatch(
                f"{candidate / METADATA} is missing: the checkpoint was not finished, or has lost "
                "that file; take another step"
            )
    cure = _CURE
    if (folder / "config.json").is_file():
        cure = (
            "it looks like a Hugging Face folder, which inspect and load_train_state do not read; "
            "linen_compat.load, linen-compat check and linen-compat convert do"
        )
    elif (folder / "adapter_config.json").is_file():
        cure = _ADAPTER
    elif any(folder.glob("*.safetensors")):
        cure = "it has *.safetensors and no config.json, which says of what model they are; add it"
    deeper = {path.parents[1] for path in folder.glob(f"*/*/{METADATA}")}
    unfinished = {child for child in folder.iterdir() if _UNFINISHED in child.name}
    # A CheckpointManager may put a prefix before the number: `step_10` comes after `step_2`.
    if finished := sorted(deeper - unfinished, key=lambda sub: (len(sub.name), sub.name)):
        cure = f"it holds {_some([sub.name for sub in finished])}; give one, such as {finished[-1]}"
    elif unfinished:
        names = sorted(child.name for child in unfinished)
        cure = f"Orbax has not finished {_some(names)}; save it again"
    raise InputError(
        f"{checkpoint} holds no Orbax checkpoint (no {METADATA} in it, in a folder in it, or in a "
        f"step); {cure}"
    )


def is_orbax(checkpoint: str | Path) -> bool:
    """Whether a folder is an Orbax run, step or `items` folder, complete or not."""
    folder = place(checkpoint)
    return folder.is_dir() and (
        bool(_steps(folder))
        or any(
            (candidate / METADATA).is_file() or corruption.was_orbax(candidate)
            for candidate in (folder, *folder.iterdir())
        )
    )


def _items_in(folder: Path) -> Path | None:
    """The folder with the arrays of a step: `items`, the step itself, or the only other one."""
    for candidate in (folder / "items", folder):
        if _has_metadata(candidate):
            return candidate
    finished = (child for child in folder.iterdir() if _UNFINISHED not in child.name)
    inside = sorted(child for child in finished if _has_metadata(child))
    if len(inside) > 1:
        names = ", ".join(child.name for child in inside)
        raise InputError(
            f"{folder} has several folders with arrays ({names}); give that of the parameters"
        )
    return inside[0] if inside else None


def _steps(run: Path) -> list[Path]:
    """Everything in a run that is named like a step, in numerical order."""
    try:
        return steps_of(run)
    except PermissionError as error:
        raise unreadable(str(run), error) from error


def _items_of_latest(steps: list[Path], resuming: bool) -> Path:
    """The folder with the arrays of the last step; Mismatch where it cannot be read."""
    step, earlier = steps[-1], [other for other in steps if int(other.name) < int(steps[-1].name)]
    example = f", such as {earlier[-1]}" if earlier else ""
    give = f"give another step by its name{example}"
    if resuming:
        give = f"remove {step}, and {'go on with --resume' if steps[1:] else 'begin again'}"
    if len(steps) - len(earlier) > 1:  # such as 7 and 007
        raise Mismatch(
            f"{steps[-2]} and {step} are both step {int(step.name)}, the latest step; "
            f"{give if resuming else 'give the folder of one of them'}"
        )
    if not step.is_dir():
        kind = "a broken symlink" if step.is_symlink() and not step.exists() else "not a folder"
        raise Mismatch(f"{step}, the latest step, is {kind}; {give}")
    try:
        if items := _items_in(step):
            if not is_committed(step):
                raise Mismatch(f"{step}, the latest step, {_UNMARKED}; {give}, or {_COPIED}")
            return items
        there = sorted(child.name for child in step.iterdir())
    except OSError as error:
        raise Mismatch(f"{unreadable(f'{step}, the latest step,', error)}; or {give}") from error
    raise Mismatch(
        f"{step}, the latest step, has no {METADATA} in it or in a folder in it (it holds "
        f"{_some(there)}): it was not finished, or has lost that file; {give}"
    )


def _some(names: list[str]) -> str:
    return ", ".join([*names[:4], *(["…"] if len(names) > 4 else [])]) or "nothing"


def _has_metadata(folder: Path) -> bool:
    """Whether a folder has the file. Raises OSError where that cannot be seen."""
    if isinstance(folder, StorePath):
        return (folder / METADATA).is_file()
    try:
        os.stat(folder / METADATA)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def inspect(checkpoint: str | Path) -> Inspection:
    """Reads names, shapes and dtypes of a checkpoint, and works out its layout."""
    items = find_items(checkpoint)
    groups = leaves_of(items)
    _check_step(items, groups["scalars"])
    parameters = groups[PARAMETERS]
    if not parameters and groups[LORA]:
        raise InputError(f"{items} holds matrices of LoRA alone: {_ADAPTER}")
    if not parameters:
        raise _of_another_model(items, groups["unknown"])
    layout = layouts.find_layout({name: leaf.shape for name, leaf in parameters.items()}, items)
    metadata = corruption.read_metadata(items)
    scale = metadata.attention_scale
    of_latent = (KV_DOWN.linen, slashed(KV_DOWN.nnx))  # only latent attention has this parameter
    latent = any(path.endswith(of_latent) for path in parameters)
    if layout.format == NNX and scale is None and not latent:
        raise Mismatch(
            f"{items / METADATA} does not say the attention_scale that the query kernels are for: "
            "it is damaged, or Orbax alone wrote it; take another checkpoint, or restore this one "
            "by Orbax into nnx.state of a model of its config, and save that by linen_compat.save"
        )
    return Inspection(
        items=items,
        layout=layout,
        parameters=parameters,
        moments={part: groups[part] for part in (*MOMENTS, *COPIES) if part in groups},
        scalars=groups["scalars"],
        ignored=groups["ignored"],
        unknown=groups["unknown"],
        lora=groups[LORA],
        attention_scale=None if latent else scale or _scale_of_maxtext(parameters, layout),
        rotary=metadata.rotary,
    )


def _check_step(items: Path, scalars: Leaves) -> None:
    """Raises Mismatch where the step in a folder of a run is not the folder's number."""
    folder = items.parent
    if not (items.name == "items" and is_run(folder.parent) and "step" in scalars):
        return
    step = StoredArrays(items).read(scalars["step"].stored)
    if str(step) != folder.name:
        raise Mismatch(
            f"{folder} holds step {step} of a run, and not step {folder.name}: it was renamed or "
            f"copied; name it {step}, or remove it"
        )


def _of_another_model(items: Path, unknown: Leaves) -> Mismatch:
    """The error for a tree in which no parameter is found by its name."""
    names = list(dict.fromkeys(name.split("/")[0] for name in unknown))
    if any(name.startswith("pipeline/layers/") for name in unknown):
        cure = (
            "Orbax alone wrote a model of this project: restore it by Orbax into nnx.state of a "
            "model of its config, and save that by linen_compat.save"
        )
    else:
        cure = "give a checkpoint of MaxText or of linen_compat, or the folder in it that is one"
    return Mismatch(
        f"{items} has no parameters of a known model (params, model, decoder): it holds "
        f"{_some(names)}; {cure}"
    )


def _scale_of_maxtext(parameters: Leaves, layout: layouts.TreeLayout) -> float:
    first = 0 if layout.format == layouts.SCANNED else -1
    for name, axis in ((QK_NORMS[0].linen, first), (BIASES[0].linen, -1)):
        for path, leaf in parameters.items():
            if path.endswith(f"/{name}") and leaf.shape:
                return layouts.scale_of_maxtext(leaf.shape[axis])
    return layouts.scale_of_maxtext(None)
