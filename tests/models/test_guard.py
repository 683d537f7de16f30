"""Steps that are skipped: which, what they leave, and where a training ends for them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_close,
    fresh_state,
    mesh_of,
    optax_promotion,
    replace,
    small_config,
)

from nnx_pipeline import Config, TrainConfig
from nnx_pipeline.experiments import floor
from nnx_pipeline.train import Batch, jit_train_step, learnable_batches, make_optimizer

GUARD = {"max_skipped_steps": 2, "adam_eps": 1e-3}


def of_maxtext(series: np.ndarray, interval: int, factor: float) -> list[bool]:
    """Which steps MaxText's `skip_step_on_spikes` skips; rows are losses and norms, in float64."""
    skipped = []
    for step in range(series.shape[1]):
        before = series[:, max(0, step - interval) : step]
        begins = step + 1 < max(2, interval // 2)
        count = before.shape[1]
        mean = before.sum(axis=1) / max(1, count)
        deviation = np.sqrt(((before.T - mean) ** 2).sum(axis=0) / max(1, count - 1))
        skipped.append(not begins and bool(np.any(series[:, step] - mean > factor * deviation)))
    return skipped


@pytest.mark.parametrize(("interval", "factor"), [(4, 1.0), (7, 2.0), (20, 2.5)])
def test_spikes_are_maxtexts(interval: int, factor: float) -> None:
    """Of random losses and norms with spikes in either; the moments are of the other steps."""
    generator = np.random.default_rng(interval)
    series = generator.normal(size=(2, 60)).astype(np.float32)
    series[0, 30] += 40
    series[1, 45] += 40
    want = of_maxtext(series.astype(np.float64), interval, factor)
    assert 2 <= sum(want) < 40
    assert want[30]
    assert want[45]
    config = TrainConfig(
        max_skipped_steps=60, spike_factor=factor, spike_interval=interval, clip_norm=None
    )
    guarded, plain = make_optimizer(config), optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)
    weights = expected = jnp.ones(3)
    state, bare = guarded.init(weights), plain.init(weights)
    update = jax.jit(guarded.update)
    with optax_promotion():
        for step, (loss, norm) in enumerate(series.T):
            gradient = jnp.asarray([loss, norm, 1.0])
            changes, state = update(gradient, state, weights, loss=loss, norm=norm)
            weights = optax.apply_updates(weights, changes)
            if not want[step]:
                changes, bare = plain.update(gradient, bare, expected)
                expected = optax.apply_updates(expected, changes)
            assert int(state.skipped) == sum(want[: step + 1]), step
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert_close(state.inner[1][0].mu, bare[0].mu, 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_no_part_of_what_spikes_are_compared_with(bad: float) -> None:
    """In MaxText a loss that is NaN has every step skipped until it has left the interval."""
    config = TrainConfig(max_skipped_steps=9, spike_factor=3.0, spike_interval=8)
    optimizer, weights = make_optimizer(config), jnp.ones(3)
    state, losses = optimizer.init(weights), [1.0, 1.1, 0.9, 1.0, bad, 1.05, 90.0, 1.0]
    with optax_promotion():
        for loss in losses:
            step = {"loss": jnp.float32(loss), "norm": jnp.float32(1.0)}
            _, state = optimizer.update(jnp.full(3, loss), state, weights, **step)
    assert (int(state.skipped), int(state.spike_seen)) == (2, 7)
    assert np.all(np.isfinite(state.spike_losses))
    assert np.all(np.isfinite(state.inner[1][0].nu))


def poisoned(batch: Batch) -> Batch:
    return dataclasses.replace(batch, weights=batch.weights * jnp.float32(np.nan))


def trained(config: Config, mesh: str, poison: tuple[int, ...], *, leave: bool) -> Any:
    """The state after five batches, of which some are poisoned or left out; and `skipped`."""
    on, skipped = mesh_of(mesh), []
    state, feed = fresh_state(config, on), learnable_batches(config, on)
    with jax.set_mesh(on), optax_promotion():
        step = jit_train_step(state, on)
        for number, batch in zip(range(5), feed, strict=False):
            if number in poison and leave:
                continue
            state, metrics = step(state, poisoned(batch) if number in poison else batch)
            skipped.append(None if metrics.skipped is None else int(metrics.skipped))
    return state, skipped


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("stage=2,fsdp=2", {"schedule": "1f1b", "num_microbatches": 2}),
        ("stage=2,fsdp=2", {"num_repeats": 2, "num_microbatches": 4}),
    ],
    ids=str,
)
def test_a_batch_that_is_skipped_might_not_have_been(mesh: str, pipeline: dict[str, Any]) -> None:
    """To the bit what a training leaves that never saw it, and near it without a guard."""
    config = small_config(train=GUARD, pipeline=pipeline)
    state, skipped = trained(config, mesh, (1, 2), leave=False)
    want, _ = trained(config, mesh, (1, 2), leave=True)
    assert skipped == [0, 1, 2, 0, 0]
    assert_close(state.model, want.model, 0.0)
    assert_close(state.optimizer.inner, want.optimizer.inner, 0.0)
    assert (int(state.step), int(want.step), int(state.optimizer.skipped)) == (5, 3, 2)
    plain, none = trained(replace(config, "train", max_skipped_steps=0), mesh, (1, 2), leave=True)
    assert none == [None] * 3
    assert_close(state.model, plain.model, 1e-5)


def test_the_floor_counts_the_state_of_a_guard() -> None:
    """Two counts and one of spikes, and the losses and norms; on each device."""
    config = small_config(pipeline={"num_microbatches": 2})
    held = {}
    for name, fields in {
        "none": {},
        "guard": {"max_skipped_steps": 2},
        "spikes": {"max_skipped_steps": 2, "spike_factor": 6.0, "spike_interval": 50},
    }.items():
        arguments = floor(replace(config, "train", **fields), "stage=2,fsdp=2").arguments
        (held[name],) = [term.bytes for term in arguments if term.name == "optimizer state"]
    assert held["guard"] - held["none"] == 3 * 4
    assert held["spikes"] - held["guard"] == 2 * 50 * 4
