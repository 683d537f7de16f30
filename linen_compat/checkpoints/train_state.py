"""Loads and saves training states: parameters, Adam's moments and count, the step."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from linen_compat.checkpoints.loading import open_source
from linen_compat.checkpoints.saving import layout_for, write_orbax
from linen_compat.formats import _arguments as arguments
from linen_compat.formats._in_memory import Copies, ModelSource, fill, for_mesh, mesh_in_use
from linen_compat.formats._intact import Unchanged
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._orbax.layouts import FORMATS, HUGGINGFACE, NNX
from linen_compat.formats._plausible import check_scalars
from linen_compat.formats._streams import (
    COPIES,
    COPY_WORDS,
    GUARD,
    MOMENTS,
    PARAMETERS,
    SEVERAL,
    Mismatch,
    ours_alone,
)
from nnx_pipeline import Config, InputError, MeshConfig, make_mesh
from nnx_pipeline.train import TrainState, abstract_state


def load_train_state(
    checkpoint: str | Path, config: Config, *, mesh: Mesh | None = None
) -> TrainState:
    """The training state of a checkpoint, placed on a mesh, from which training continues.

    - `checkpoint`: an Orbax checkpoint as for `load`, with the step and AdamW's state as
      `optax.adamw` makes it and as MaxText and this project save it (`opt_state/0/mu`, `nu` and
      `count`, or for `nnx` `optimizer/mu`, `nu` and `count`).
    - `config`: the config of the model, the pipeline and the training.
    - `mesh`: None for the mesh of `jax.set_mesh`, and without one a mesh of one device. The result
      is on `state.step.sharding.mesh`.

    What a guard of `train.max_skipped_steps` holds is read from `nnx`, and begins anew elsewhere.
    Moments get the dtype of the parameters, as the optimizer makes them. MaxText counts the steps
    of training, of Adam and of its learning rate; here all three are one number.

    Raises the errors of `load`, also for leaves of the state, and refuses the state of another
    optimizer, counts that differ, a second moment below 0, and a moment that is NaN or infinite.
    """
    arguments.check_to_load(checkpoint, config, mesh)
    arguments.check_config("config", config, Config)  # a training state needs one
    contents = inspect(checkpoint)
    _check_state(contents)
    source = open_source(contents, config)
    check_scalars(source.scalars)
    sharding = config.pipeline.sharding
    mesh = mesh or mesh_in_use() or make_mesh(MeshConfig(), jax.devices()[:1], sharding=sharding)
    config = for_mesh(config, mesh)
    with Unchanged(contents.items), jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
        optimizer, stack = state.optimizer, state.model.pipeline.runner.stack
        for part in _parts_of(optimizer, contents):
            tree = moment_of(optimizer, part)
            origin = PARAMETERS if part == "master" and part not in contents.moments else part
            filled = fill(tree, _places(tree), source, stack, origin)
            optimizer = _with(optimizer, **{part: filled})
        # Each count is an array of its own: a step that is given one array twice cannot donate it.
        optimizer = jax.tree.map(
            _placed, _with(optimizer, **_numbers(source.scalars, optimizer)), optimizer
        )
        return TrainState(
            step=_placed(source.scalars["step"], state.step),
            model=fill(state.model, _places(state.model), source, stack),
            optimizer=optimizer,
        )


def save_train_state(
    state: TrainState,
    checkpoint: str | Path,
    format: str = "maxtext:scanned",
    *,
    stages: int | None = None,
    repeats: int | None = None,
) -> None:
    """Writes a training state as `save` writes a model, with the optimizer's state and the step.

    - `state`: may be sharded over the devices of several processes, which then all call this.
    - `checkpoint`: the folder to make; it must not exist yet, or be empty.
    - `format`: one of the Orbax formats of `save`. The moments and the count are in MaxText's
      `opt_state`, or for `nnx` in `optimizer`.
    - `stages`, `repeats`: as for `save`.

    Raises InputError for `huggingface`, which has no optimizer's state, and what `save` raises.
    """
    arguments.check_savable_state(state)
    arguments.check_folder(checkpoint)
    if format == HUGGINGFACE:
        raise InputError(
            f"format={format!r} has no place for the optimizer's state and the step; save the "
            "model alone by linen_compat.save(state.model, …), or give one of: "
            f"{', '.join(FORMATS)}"
        )
    write_orbax(
        source_of(state, format), checkpoint, layout_for(state.model, format, stages, repeats)
    )


def source_of(state: TrainState, format: str, *, copies: Copies | None = None) -> ModelSource:
    """What is stored of a training state; `copies` is as for `ModelSource`.

    Raises InputError for what a format has no place for.
    """
    parts = [part for part in (*MOMENTS, *COPIES) if _has(state.optimizer, part)]
    trees = {PARAMETERS: state.model, **{m: moment_of(state.optimizer, m) for m in parts}}
    names = [name for name in ("count", *GUARD, *SEVERAL) if _has(state.optimizer, name)]
    numbers = {name: np.asarray(moment_of(state.optimizer, name)) for name in names}
    if format != NNX and (more := ours_alone(parts, numbers)):
        raise InputError(
            f"format={format!r} has no place for {more}; save the state as 'nnx', or the model "
            "alone by linen_compat.save(state.model, …)"
        )
    scalars = {"step": np.asarray(state.step), **{n: v for n, v in numbers.items() if v.size}}
    return ModelSource(state.model, trees, scalars, copies=copies)


def _check_state(contents: Inspection) -> None:
    """Raises Mismatch unless there are AdamW's moments and count, nothing else, and the step."""
    if other := contents.other_optimizer:
        raise Mismatch(
            f"{contents.items} is not a training state that is read: {other}; "
            "load the parameters alone with linen_compat.load"
        )
    absent = [name for name in MOMENTS if name not in contents.moments]
    absent += [name for name in ("step", "count") if name not in contents.scalars]
    if absent:
        raise Mismatch(
            f"{contents.items} is not a complete training state: it lacks {', '.join(absent)}; "
            "load the parameters alone with linen_compat.load"
        )


def moment_of(optimizer: optax.OptState, name: str) -> PyTree:
    """One field of Adam's state: `count`, or `mu` or `nu` in the structure of the model."""
    (_, found), *_ = optax.tree.get_all_with_path(optimizer, name)  # a schedule counts the same
    return found


def _parts_of(optimizer: optax.OptState, contents: Inspection) -> list[str]:
    """What an optimizer has for each parameter; accumulated gradients that are not stored begin
    as zeros. Raises Mismatch for a part that is stored and has no place."""
    for part, words in COPY_WORDS.items():
        if part in contents.moments and not _has(optimizer, part):
            name = words.partition("(")[2].rstrip(")")
            raise Mismatch(
                f"{contents.items} has {words}, for which this config has no place; set {name} as "
                "in its training, or load the parameters alone with linen_compat.load"
            )
    parts = [part for part in (*MOMENTS, *COPIES) if _has(optimizer, part)]
    return [part for part in parts if part != "acc_grads" or part in contents.moments]


def _has(optimizer: optax.OptState, name: str) -> bool:
    return bool(optax.tree.get_all_with_path(optimizer, name))


def _numbers(stored: Mapping[str, np.ndarray], optimizer: optax.OptState) -> dict[str, np.ndarray]:
    """The count, and what a guard holds: as it begins where that is not stored in its shape."""
    if stored.get("skipped") and not _has(optimizer, "skipped"):
        raise Mismatch(
            f"{stored['skipped']} steps of this training were skipped, and this config skips none; "
            "set train.max_skipped_steps to 1 or more"
        )
    names = [name for name in ("count", *SEVERAL, *GUARD) if _has(optimizer, name)]
    begins = {name: moment_of(optimizer, name) for name in names}
    numbers = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in begins.items()}
    known = {"gradient_step": stored["count"], **stored}
    numbers |= {name: known[name] for name in names if name in known and name not in GUARD[2:]}
    if "skipped" not in names:
        return numbers
    spikes = {name: stored[name] for name in GUARD[2:] if name in stored}
    if all(value.shape == numbers[name].shape for name, value in spikes.items()):
        numbers |= spikes  # else those of another interval, which ends here
    return numbers


def _with(optimizer: optax.OptState, **values: PyTree) -> optax.OptState:
    for name, value in values.items():  # one by one: optax looks into no node that has a name
        optimizer = optax.tree.set(optimizer, **{name: value})
    return optimizer


def _places(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _placed(value: np.ndarray | jax.Array, like: jax.Array) -> jax.Array:
    """A number where `like` is; an array that is there stays, and one that is not is of zeros."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jnp.zeros(value.shape, value.dtype, device=value.sharding)
    placed: jax.Array = jax.device_put(value.astype(like.dtype), like.sharding)
    return placed
