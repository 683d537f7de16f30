"""One training step, and its state and batch as real or as abstract arrays."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import ambient_mesh
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.ops._router import RouterMetrics
from nnx_pipeline.sharding.layout import Layout, variable_shardings
from nnx_pipeline.train._guard import skipped_in_a_row
from nnx_pipeline.train.optimizer import (
    from_master,
    global_norm,
    in_dtype,
    make_optimizer,
    rate_of_step,
    without_selection_bias,
)

MakeModel = Callable[..., Mixtral]  # (config, rngs=…) to a model of that config


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch; every array is `[batch, seq]`.

    - `tokens`, `targets`: int32 token ids.
    - `weights`: float32, the weight of each target in the loss; 0 where it does not count.
    - `positions`: int32, the place of each token in its document; None counts from 0 in each row.
    - `segment_ids`: int32, the document of each token in the row; None for one document per row.
    """

    tokens: Array
    targets: Array
    weights: Array
    positions: Array | None = None
    segment_ids: Array | None = None


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a training step changes, and that is donated to the step.

    - `step`: int32 scalar, the number of steps done.
    - `optimizer`: the state of the optimizer, sharded over `data` too with ZeRO-1.
    """

    step: Array
    model: Mixtral
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """What a step reports, in float32.

    - `loss`: the cross-entropy.
    - `gradient_norm`: the global norm before clipping, summed in float32.
    - `skipped`: with `train.max_skipped_steps`, how many steps in a row were skipped, this one
      among them; 0 where it was not.
    - `learning_rate`: of this step, where the config has a schedule.
    """

    loss: Array
    gradient_norm: Array
    router: RouterMetrics
    skipped: Array | None = None
    learning_rate: Array | None = None


def loss_of(
    model: Mixtral, batch: Batch, key: Array | None = None, shards: Mixtral | None = None
) -> tuple[Array, tuple[Array, RouterMetrics]]:
    """The loss to minimise, the cross-entropy in it, and what the routers report.

    Cross-entropy is Σ weights · entropy / (Σ weights + 1e-8), as in MaxText. The arguments are as
    of `Mixtral.loss`.
    """
    return model.loss(
        batch.tokens,
        batch.targets,
        batch.weights / (jnp.sum(batch.weights) + 1e-8),
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        key=key,
        shards=shards,
    )


def loss_and_gradients(
    model: Mixtral, batch: Batch, key: Array | None = None
) -> tuple[tuple[Array, tuple[Array, RouterMetrics]], Mixtral]:
    """The values of `loss_of`, and the gradients as the optimizer gets them.

    They are in `train.grad_dtype`, and with `train.shard_optimizer_over_data` sharded over `data`
    too.
    """
    if model.zero1:  # with respect to the shards
        of_shards = functools.partial(loss_of, model, batch, key)
        values, gradients = jax.value_and_grad(of_shards, has_aux=True)(model.shards())
    else:
        values, gradients = jax.value_and_grad(loss_of, has_aux=True)(model, batch, key)
    return values, in_dtype(gradients, model.config.train.grad_dtype)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One step: forward pass, backward pass and AdamW; to be jitted by `jit_train_step`.

    With `train.shard_optimizer_over_data` everything from the gradients to the updates is sharded
    over `data` too; the updates are then gathered. If the new parameters were, XLA for TPU would
    copy the parameters before the step and the new ones after it (Llama2-7B: 13 GB).
    """
    model, train = state.model, state.model.config.train
    key = jax.random.fold_in(jax.random.key(train.dropout_seed), state.step)
    (_, (entropy, router)), gradients = loss_and_gradients(model, batch, key)
    optimizer = optax.with_extra_args_support(make_optimizer(train))
    norm = global_norm(gradients)
    updates, optimizer_state = optimizer.update(
        gradients, state.optimizer, optimized(model), loss=entropy, norm=norm
    )
    metrics = Metrics(
        entropy,
        norm,
        router,
        skipped=skipped_in_a_row(optimizer_state),
        learning_rate=rate_of_step(train, state.optimizer),
    )
    rounded = from_master(optimized(model), optimizer_state)
    if rounded is None:
        updates = without_selection_bias(updates.whole() if model.zero1 else updates)
        model = optax.apply_updates(model, updates)
    else:
        model = rounded.whole() if model.zero1 else rounded
    return TrainState(step=state.step + 1, model=model, optimizer=optimizer_state), metrics


def optimized(model: Mixtral) -> Mixtral:
    """The parameters in the sharding in which they are updated: with ZeRO-1 their shards."""
    return model.shards() if model.zero1 else model


def bytes_of_parameter(config: Config) -> int:
    """What a state holds for each parameter: itself, its moments, and further copies."""
    stored, train = jnp.dtype(config.model.param_dtype).itemsize, config.train
    if train.master_dtype is None:
        moments, master = 2 * stored, 0
    else:
        master = jnp.dtype(train.master_dtype).itemsize
        moments = 2 * master
    accumulated = 4 if train.accumulate_steps > 1 else 0
    return stored + moments + master + accumulated


def make_state(
    config: Config, mesh: Mesh, *, seed: int = 0, make_model: MakeModel = Mixtral
) -> TrainState:
    """A new training state, each array created in its sharding; call it under `jax.set_mesh`.

    - `seed`: of the initial values.
    - `make_model`: (config, rngs=…) to the model, such as `Mixtral` with a layout filled in.

    Raises InputError where another mesh is set, or none.
    """
    make = functools.partial(_make_state, config, make_model, seed)
    shardings = _state_shardings(jax.eval_shape(make), mesh)
    state: TrainState = jax.jit(make, out_shardings=shardings)()
    return state


def abstract_state(config: Config, mesh: Mesh, *, make_model: MakeModel = Mixtral) -> TrainState:
    """The shapes, dtypes and shardings of `make_state`, without allocating any array.

    Call it under `jax.set_mesh` too.
    """
    shapes = jax.eval_shape(functools.partial(_make_state, config, make_model, 0))
    state: TrainState = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        _state_shardings(shapes, mesh),
    )
    return state


def abstract_batch(
    config: Config, mesh: Mesh, *, layout: Layout = Layout(), segment_ids: bool = False
) -> Batch:
    """The shapes, dtypes and shardings of a batch without positions, with segment ids or not."""
    shape = (config.train.global_batch, config.train.sequence_length)
    sharding = batch_sharding(mesh, layout)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    weights: PyTree = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return Batch(tokens=ids, targets=ids, weights=weights, segment_ids=ids if segment_ids else None)


def batch_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """The sharding of `[batch, seq]` inputs over the mesh axes of the layout's `whole_batch`."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return NamedSharding(mesh, layout.spec("whole_batch", None))


def jit_train_step(state: TrainState, mesh: Mesh) -> jax.stages.Wrapped:
    """`train_step` jitted for states like `state`, real or abstract, which is donated to it.

    The new state has the shardings of the old one. Raises InputError unless `mesh` is set.
    """
    shardings = _state_shardings(state, mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def _make_state(config: Config, make_model: MakeModel, seed: int) -> TrainState:
    model = make_model(config, rngs=nnx.Rngs(seed))
    optimizer = make_optimizer(config.train).init(optimized(model))
    return TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer)


def _state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """A NamedSharding for every leaf of a state; with ZeRO-1 the optimizer's is over `data` too.

    Another mesh would give a state one stage, or leave it whole on every device: it is refused.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        wanted = ambient_mesh()
    if wanted != ambient_mesh():
        raise InputError(
            f"a training state is given the mesh {wanted}, and the mesh that is set is "
            f"{ambient_mesh()}; call make_state, abstract_state and jit_train_step under "
            "jax.set_mesh(mesh)"
        )
    model, layout = state.model, state.model.layout
    return TrainState(
        step=variable_shardings(state.step, layout, mesh),
        model=variable_shardings(model, layout, mesh),
        optimizer=variable_shardings(state.optimizer, layout.zero1(model.zero1), mesh),
    )
