"""Steps that are skipped: what is not finite, and spikes, changes neither weights nor moments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from nnx_pipeline.config.train import TrainConfig


class Guarded(NamedTuple):
    """The state of `guarded`.

    - `inner`: the state of the optimizer within.
    - `skipped_in_a_row`, `skipped`: int32, how many of the last steps, and of all, were skipped.
    - `spike_losses`, `spike_norms`: float32 `[interval]`, finite losses and norms of the gradients
      of the last steps, in turn; `[0]` where spikes are not looked for.
    - `spike_seen`: int32, how many were written there.
    """

    inner: optax.OptState
    skipped_in_a_row: Array
    skipped: Array
    spike_losses: Array
    spike_norms: Array
    spike_seen: Array


def guarded(
    optimizer: optax.GradientTransformation, config: TrainConfig
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose update is 0, and whose state stays, at steps that are to be skipped.

    Its `update` needs `loss` and `norm`, float32. `optax.apply_if_finite` is not used: it takes an
    update after all when too many in a row are not finite, and puts the optimizer into a
    `lax.cond`, whose results are whole updates in memory; a choice for each number is a part of
    the operations that write weights and moments in place.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Guarded:
        zero = jnp.zeros((), jnp.int32)
        window = jnp.zeros(0 if config.spike_factor is None else config.spike_interval)
        return Guarded(inner.init(params), zero, zero, window, window, zero)

    def update(
        updates: PyTree, state: Guarded, params: PyTree = None, *, loss: Array, norm: Array
    ) -> tuple[PyTree, Guarded]:
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        takes = finite & ~_is_spike(state, loss, norm, config.spike_factor)
        new, changed = inner.update(updates, state.inner, params)

        def taken(now: Any, before: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(takes, a, b), now, before)

        skips = 1 - takes.astype(jnp.int32)
        after = Guarded(
            inner=taken(changed, state.inner),
            skipped_in_a_row=(state.skipped_in_a_row + 1) * skips,
            skipped=state.skipped + skips,
            spike_losses=_with(state.spike_losses, state.spike_seen, loss, finite),
            spike_norms=_with(state.spike_norms, state.spike_seen, norm, finite),
            spike_seen=state.spike_seen + finite.astype(jnp.int32),
        )
        return jax.tree.map(lambda a: jnp.where(takes, a, jnp.zeros_like(a)), new), after

    return optax.GradientTransformationExtraArgs(init, update)


def skipped_in_a_row(state: optax.OptState) -> Array | None:
    """How many of the last steps were skipped, float32; None for an optimizer without a guard."""
    guarded_state = isinstance(state, Guarded)
    return state.skipped_in_a_row.astype(jnp.float32) if guarded_state else None


def _is_spike(state: Guarded, loss: Array, norm: Array, factor: float | None) -> Array:
    """Whether loss or norm is so far above the mean of the last steps; not at the first ones."""
    if factor is None:
        return jnp.asarray(False)
    interval = len(state.spike_losses)
    begins = state.spike_seen + 1 < max(2, interval // 2)
    far = [
        value - mean > factor * deviation
        for value, kept in ((loss, state.spike_losses), (norm, state.spike_norms))
        for mean, deviation in [_mean_and_deviation(kept, state.spike_seen)]
    ]
    return ~begins & (far[0] | far[1])


def _mean_and_deviation(kept: Array, seen: Array) -> tuple[Array, Array]:
    """Of the numbers that were written, as MaxText and OLMo compute them."""
    count = jnp.minimum(seen, len(kept))
    written = jnp.arange(len(kept)) < count
    number = count.astype(jnp.float32)
    mean = jnp.sum(jnp.where(written, kept, 0.0)) / jnp.maximum(number, 1.0)
    squares = jnp.sum(jnp.where(written, (kept - mean) ** 2, 0.0))
    return mean, jnp.sqrt(squares / jnp.maximum(number - 1.0, 1.0))


def _with(kept: Array, seen: Array, value: Array, finite: Array) -> Array:
    """The numbers with one more, which takes the place of the oldest."""
    if not len(kept):
        return kept
    here = (jnp.arange(len(kept)) == seen % len(kept)) & finite
    return jnp.where(here, value, kept)
