"""The optimizer: AdamW with the same setup as in MaxText."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from nnx_pipeline.config.train import TrainConfig
from nnx_pipeline.modules.moe import SelectionBias
from nnx_pipeline.sharding.layout import Variable, is_variable
from nnx_pipeline.train._guard import guarded

_Tree = TypeVar("_Tree", bound=PyTree)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, followed by AdamW with weight decay on every parameter.

    The state is the same with and without clipping; a schedule adds a count of its own, which is
    always equal to Adam's. It may be within that of a master copy (`on_master`), that within what
    accumulates gradients (`optax.MultiSteps`), and that within a guard (`_guard`), for which an
    update needs `loss` and `norm`.
    """
    largest = config.clip_norm
    optimizer = optax.chain(
        optax.identity() if largest is None else clip_by_global_norm(largest),
        optax.adamw(
            learning_rate(config) if is_scheduled(config) else config.learning_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        ),
    )
    if config.master_dtype is not None:
        optimizer = on_master(optimizer, config.master_dtype)
    if config.accumulate_steps > 1:
        optimizer = accumulated(optimizer, config)
    if config.max_skipped_steps:
        return guarded(optimizer, config)
    return optax.with_extra_args_support(optimizer)


class WithMaster(NamedTuple):
    """The state of `on_master`: the parameters in its dtype, and the state of the optimizer."""

    master: PyTree
    inner: optax.OptState


def on_master(optimizer: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """An optimizer of a copy of the parameters in another dtype, see `from_master`."""

    def init(params: PyTree) -> WithMaster:
        master = in_dtype(params, dtype)
        return WithMaster(master, optimizer.init(master))

    def update(
        updates: PyTree, state: WithMaster, params: PyTree = None
    ) -> tuple[PyTree, WithMaster]:
        del params
        changes, inner = optimizer.update(in_dtype(updates, dtype), state.inner, state.master)
        changes = without_selection_bias(changes)
        return changes, WithMaster(optax.apply_updates(state.master, changes), inner)

    return optax.GradientTransformation(init, update)


def from_master(params: _Tree, state: optax.OptState) -> _Tree | None:
    """The parameters as a master copy in a state has them, in their own dtypes; None without one.

    To add the change of the copy to them would round twice, and drift from it.
    """
    found = optax.tree.get_all_with_path(state, "master")
    if not found:
        return None
    rounded: _Tree = jax.tree.map(
        lambda new, old: cast_to_other(new, old.dtype), found[0][1], params
    )
    return rounded


def accumulated(
    optimizer: optax.GradientTransformation, config: TrainConfig
) -> optax.GradientTransformation:
    """The mean of the gradients of some steps, for an optimizer that works at the last of them."""
    several = optax.MultiSteps(optimizer, config.accumulate_steps)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        # It gives the mean in the dtype of the gradients, which a master copy has no use for.
        changes, after = several.update(in_dtype(updates, config.master_dtype), state, params)
        return changes, after

    return optax.GradientTransformation(several.init, update)


def without_selection_bias(updates: _Tree) -> _Tree:
    """The updates with 0 for what is not trained, which weight decay would change."""

    def frozen(leaf: Array | Variable) -> Array | Variable:
        if not isinstance(leaf, SelectionBias):
            return leaf
        return leaf.replace(jnp.zeros_like(leaf.get_value()))

    without: _Tree = jax.tree.map(frozen, updates, is_leaf=is_variable)
    return without


def in_dtype(tree: _Tree, dtype: jax.typing.DTypeLike | None) -> _Tree:
    if dtype is None:
        return tree
    cast: _Tree = jax.tree.map(lambda x: cast_to_other(x, dtype), tree)
    return cast


def cast_to_other(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """`x` in `dtype`, without a cast if it has that dtype already."""
    return x if x.dtype == dtype else x.astype(dtype)


def is_scheduled(config: TrainConfig) -> bool:
    """Whether the learning rate differs between steps."""
    return config.learning_rate_decay is not None or config.warmup_steps > 0


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The learning rate of each step, counted from 0: the numbers of MaxText's schedules.

    A warmup, the whole rate, a decay whose last step has the final fraction, then 0. Pieces may be
    empty. `optax.warmup_cosine_decay_schedule` is one of these without an end.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(0.0, rate, max(1, warmup))
    pieces, ends = [rise, optax.constant_schedule(rate)], [warmup]
    if (total := config.schedule_steps) is not None:
        steps = total - warmup if config.decay_steps is None else config.decay_steps
        pieces += [_decay(config, steps), optax.constant_schedule(0.0)]
        ends += [total - steps, total]
    return optax.join_schedules(pieces, ends)


def rate_of_step(config: TrainConfig, state: optax.OptState) -> Array | None:
    """The learning rate of the step that follows a state, float32; None where it is constant."""
    if not is_scheduled(config):
        return None
    (_, count), *_ = optax.tree.get_all_with_path(state, "count")
    return jnp.asarray(learning_rate(config)(count), jnp.float32)


def _decay(config: TrainConfig, steps: int) -> optax.Schedule:
    rate, last = config.learning_rate, config.final_fraction
    if config.learning_rate_decay == "linear":
        return optax.linear_schedule(rate, rate * last, max(1, steps - 1))
    if steps <= 1:  # as in MaxText, where a linear decay of one step has the whole rate
        return optax.constant_schedule(rate * last)
    return optax.cosine_decay_schedule(rate, steps - 1, alpha=last)


def global_norm(gradients: PyTree) -> Array:
    """The Euclidean norm of all arrays as one vector, summed in float32 whatever their dtypes."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in leaves), jnp.float32(0)))


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Scales gradients down so that their `global_norm` is at most `largest`; keeps their dtypes.

    For bfloat16 `optax.clip_by_global_norm` rounds the norm, to an error of several percent.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        norm = global_norm(updates)

        def clipped(leaf: Array) -> Array:
            scaled = (leaf.astype(jnp.float32) / norm * largest).astype(leaf.dtype)
            return jnp.where(norm < largest, leaf, scaled)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
