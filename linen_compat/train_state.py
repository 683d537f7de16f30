"""Training states in and out: parameters, Adam's moments and count, the step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from linen_compat.checkpoint import Inspection, inspect
from linen_compat.loading import open_source
from linen_compat.model_source import ModelSource
from linen_compat.placing import fill, for_mesh, mesh_in_use
from linen_compat.saving import layout_for, write
from linen_compat.scalars import check_scalars
from linen_compat.streams import MOMENTS, PARAMETERS, Mismatch
from nnx_pipeline import Config, MeshConfig, make_mesh
from nnx_pipeline.train import TrainState, abstract_state


def load_train_state(
    checkpoint: str | Path, config: Config, *, mesh: Mesh | None = None
) -> TrainState:
    """The training state of a checkpoint, placed on the mesh; training goes on where it stopped.

    checkpoint, errors: as for `load`, of a full training state. mesh: None for that of
    `jax.set_mesh`, and without one a mesh of one device; it is `state.step.sharding.mesh`.

    Moments take the dtype that the optimizer gives them, that of the parameters. MaxText counts the
    steps of training, of Adam and of its learning rate apart; here they are one number, and a
    checkpoint in which they differ is refused, as is a second moment below 0 and a moment that is
    no finite number.
    """
    found = inspect(checkpoint)
    _check_state(found)
    source = open_source(found, config)
    check_scalars(source.scalars)
    mesh = mesh or mesh_in_use() or _one_device(config)
    config = for_mesh(config, mesh)
    with jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
        optimizer = state.optimizer
        for moment in MOMENTS:
            tree = _moment(optimizer, moment)
            optimizer = _with(optimizer, **{moment: fill(tree, _places(tree), source, moment)})
        count = _placed(source.scalars["count"], _moment(optimizer, "count"))
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
    """Writes a training state as `save` writes a model, with MaxText's `opt_state` and `step`."""
    trees = {PARAMETERS: state.model, **{m: _moment(state.optimizer, m) for m in MOMENTS}}
    count = np.asarray(_moment(state.optimizer, "count"))
    scalars = {"step": np.asarray(state.step), "count": count}
    source = ModelSource(state.model, trees, scalars)
    write(source, checkpoint, layout_for(state.model, format, stages, repeats))


def _check_state(found: Inspection) -> None:
    absent = [name for name in MOMENTS if name not in found.moments]
    absent += [name for name in ("step", "count") if name not in found.scalars]
    if absent:
        raise Mismatch(
            f"{found.items} is no full training state, {', '.join(absent)} of the optimizer is "
            "missing; load the parameters alone with linen_compat.load"
        )


def _moment(optimizer: optax.OptState, name: str) -> Any:
    return optax.tree.get(optimizer, name)


def _with(optimizer: optax.OptState, **values: Any) -> Any:
    return optax.tree.set(optimizer, **values)


def _places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _placed(value: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.device_put(value.astype(like.dtype), like.sharding)


def _one_device(config: Config) -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1], sharding=config.pipeline.sharding)
