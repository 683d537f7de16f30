"""Loads and saves training states: parameters, Adam's moments and count, the step."""

from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from linen_compat.checkpoints.loading import open_source
from linen_compat.checkpoints.saving import layout_for, write_orbax
from linen_compat.formats import _arguments as arguments
from linen_compat.formats._in_memory import ModelSource, fill, for_mesh, mesh_in_use
from linen_compat.formats._intact import Unchanged
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._orbax.layouts import FORMATS, HUGGINGFACE
from linen_compat.formats._plausible import check_scalars
from linen_compat.formats._streams import MOMENTS, PARAMETERS, Mismatch
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
        optimizer = state.optimizer
        for moment in MOMENTS:
            tree = moment_of(optimizer, moment)
            optimizer = _with(optimizer, **{moment: fill(tree, _places(tree), source, moment)})
        count = _placed(source.scalars["count"], moment_of(optimizer, "count"))
        return TrainState(
            step=_placed(source.scalars["step"], state.step),
            model=fill(state.model, _places(state.model), source),
            optimizer=_with(optimizer, count=count),
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

    - `state`: may be sharded over the devices of this process.
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
    trees = {PARAMETERS: state.model, **{m: moment_of(state.optimizer, m) for m in MOMENTS}}
    count = np.asarray(moment_of(state.optimizer, "count"))
    scalars = {"step": np.asarray(state.step), "count": count}
    source = ModelSource(state.model, trees, scalars)
    write_orbax(source, checkpoint, layout_for(state.model, format, stages, repeats))


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
    return optax.tree.get(optimizer, name)


def _with(optimizer: optax.OptState, **values: PyTree) -> optax.OptState:
    return optax.tree.set(optimizer, **values)


def _places(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _placed(value: np.ndarray, like: jax.Array) -> jax.Array:
    placed: jax.Array = jax.device_put(value.astype(like.dtype), like.sharding)
    return placed
