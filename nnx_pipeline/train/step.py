"""One training step, and what goes into it and comes out, real or abstract."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from nnx_pipeline.config import Config
from nnx_pipeline.decoder import Mixtral
from nnx_pipeline.modules import Parts
from nnx_pipeline.modules.parts import Cast, cast_to_other
from nnx_pipeline.sharding import Layout, P
from nnx_pipeline.train.optimizer import global_norm, make_optimizer


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch, every array `[batch, seq]`.

    tokens, targets: token ids. weights: float32, 0 where a target does not count. positions,
    segment_ids: where several documents share a row; absent for one document per row.
    """

    tokens: Array
    targets: Array
    weights: Array
    positions: Array | None = None
    segment_ids: Array | None = None


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything a step changes. All of it is donated to the step."""

    step: Array
    model: Mixtral
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """What a step reports, as float32 scalars.

    loss: the cross-entropy. load_balance: of the router, a mean over layers and microbatches, and
    so another one for another number of microbatches. gradient_norm: before clipping, summed in
    float32.
    """

    loss: Array
    load_balance: Array
    gradient_norm: Array


def loss_of(
    model: Mixtral, batch: Batch, key: Array | None = None, owned: Mixtral | None = None
) -> tuple[Array, tuple[Array, Array]]:
    """The loss to minimise, and its two parts: cross-entropy and load balance.

    Cross-entropy is Σ weights · entropy / (Σ weights + 1e-8), as in MaxText. key: for dropout.
    owned: see `Mixtral.loss`.
    """
    return model.loss(
        batch.tokens,
        batch.targets,
        batch.weights / (jnp.sum(batch.weights) + 1e-8),
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        key=key,
        owned=owned,
    )


def loss_and_gradients(
    model: Mixtral, batch: Batch, key: Array | None = None
) -> tuple[tuple[Array, tuple[Array, Array]], Mixtral]:
    """The values of `loss_of`, and the gradients as the optimizer gets them.

    They are in `train.grad_dtype`, and with `train.shard_optimizer_over_data` spread over `data`.
    """

    def loss(mine: Mixtral) -> tuple[Array, tuple[Array, Array]]:
        return loss_of(model, batch, key, owned=mine) if owns else loss_of(mine, batch, key)

    owns = bool(model.pipeline.runner.own)
    mine = model.owned() if owns else model
    values, gradients = jax.value_and_grad(loss, has_aux=True)(mine)
    return values, in_dtype(gradients, model.config.train.grad_dtype, model.parts.cast_gradient)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Forward, backward and AdamW; to be jitted by `jit_train_step`.

    With `train.shard_optimizer_over_data` everything from the gradients to the new parameters is
    spread over `data`; these are then gathered.
    """
    model, train = state.model, state.model.config.train
    key = jax.random.fold_in(jax.random.key(train.dropout_seed), state.step)
    (_, (entropy, balance)), gradients = loss_and_gradients(model, batch, key)
    owns = bool(model.pipeline.runner.own)
    mine = model.owned() if owns else model
    optimizer = make_optimizer(train)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, mine)
    metrics = Metrics(entropy, balance, global_norm(gradients))
    mine = optax.apply_updates(mine, updates)
    new = TrainState(
        step=state.step + 1,
        model=mine.stored() if owns else mine,
        optimizer=optimizer_state,
    )
    return new, metrics


def in_dtype(tree: Any, dtype: jax.typing.DTypeLike | None, cast: Cast = cast_to_other) -> Any:
    """The arrays in `dtype`; those that have it already are left alone, and all without one."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: cast(x, dtype), tree)


def make_state(
    config: Config,
    mesh: Mesh,
    *,
    seed: int = 0,
    layout: Layout = Layout(),
    parts: Parts = Parts(),
) -> TrainState:
    """A fresh state, every array made in its place on the mesh; call it under `jax.set_mesh`."""
    make = functools.partial(_make_state, config, seed, layout, parts)
    return jax.jit(make, out_shardings=_state_shardings(jax.eval_shape(make), mesh))()


def abstract_state(
    config: Config, mesh: Mesh, *, layout: Layout = Layout(), parts: Parts = Parts()
) -> TrainState:
    """The shapes, dtypes and shardings of a state, without a byte of it."""
    shapes = jax.eval_shape(functools.partial(_make_state, config, 0, layout, parts))
    return _with_shardings(shapes, _state_shardings(shapes, mesh))


def abstract_batch(
    config: Config, mesh: Mesh, *, layout: Layout = Layout(), segment_ids: bool = False
) -> Batch:
    """The shapes, dtypes and shardings of a batch without positions, and with segments if asked."""
    shape = (config.train.global_batch, config.train.sequence_length)
    sharding = batch_sharding(mesh, layout)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return Batch(
        tokens=ids,  # type: ignore[arg-type]
        targets=ids,  # type: ignore[arg-type]
        weights=weights,  # type: ignore[arg-type]
        segment_ids=ids if segment_ids else None,  # type: ignore[arg-type]
    )


def batch_sharding(mesh: Mesh, layout: Layout) -> NamedSharding:
    """Where a `[batch, seq]` array enters: the batch over every axis that can split it."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return NamedSharding(mesh, layout.spec("whole_batch", None))


def jit_train_step(state: TrainState, mesh: Mesh) -> Any:
    """`train_step` jitted for states like this one (real or abstract): donated, in place.

    The new state has the shardings of the old one in both modes.
    """
    shardings = _state_shardings(state, mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def _make_state(config: Config, seed: int, layout: Layout, parts: Parts) -> TrainState:
    model = Mixtral(config, rngs=nnx.Rngs(seed), layout=layout, parts=parts)
    mine = model.owned() if model.pipeline.runner.own else model
    optimizer = make_optimizer(config.train).init(mine)
    return TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer)


def _state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """A NamedSharding for every leaf of a state, the optimizer's where its owners are."""
    model = state.model
    return TrainState(
        step=_shardings(state.step, model.layout, mesh),
        model=_shardings(model, model.layout, mesh),
        optimizer=_shardings(state.optimizer, model.layout.owned(model.pipeline.runner.own), mesh),
    )


def _shardings(tree: Any, layout: Layout, mesh: Mesh) -> Any:
    """A NamedSharding for every leaf: by the logical axes of its variable, or whole."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            spec = layout.spec(*leaf.get_metadata("logical_axes"))
            return leaf.replace(NamedSharding(mesh, spec))
        return NamedSharding(mesh, P())

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
