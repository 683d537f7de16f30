"""The schedule of the learning rate: MaxText's numbers, and the weights that it leaves."""

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import (
    assert_close,
    fresh_state,
    mesh_of,
    new_model,
    optax_promotion,
    replace,
    small_config,
)
from maxtext_data import DATA

import linen_compat
from nnx_pipeline import Config, TrainConfig
from nnx_pipeline.train import TrainState, jit_train_step, learnable_batches, loss_of
from nnx_pipeline.train.optimizer import clip_by_global_norm, learning_rate

RATE = 3e-3


def as_maxtext(keys: dict[str, Any], step: int) -> float:
    """The formulas of `create_learning_rate_schedule` in MaxText, in Python's own numbers."""
    total = keys["learning_rate_schedule_steps"]
    warmup, last = int(total * keys["warmup_steps_fraction"]), RATE * keys["final"]
    wsd = keys["kind"] != "cosine"
    fall = int(total * keys["wsd_decay_steps_fraction"]) if wsd else total - warmup
    if step < warmup:
        return RATE * step / warmup
    if step >= total:
        return 0.0
    if step < total - fall:
        return RATE
    at = step - (total - fall)
    if keys["kind"] == "wsd linear":
        return RATE + (last - RATE) * at / (fall - 1) if fall > 1 else RATE
    share = 0.5 * (math.cos(math.pi * (at / (fall - 1) if fall > 1 else 1.0)) + 1)
    return RATE * share + last * (1 - share)


@pytest.mark.parametrize("kind", ["cosine", "wsd linear", "wsd cosine"])
@pytest.mark.parametrize(
    ("total", "warmup", "fall"),
    [(100, 0.1, 0.1), (100, 0.0, 0.37), (40, 0.5, 0.5), (10, 0.1, 0.1), (10, 0.0, 0.0), (7, 1, 0)],
)
def test_it_is_maxtexts(kind: str, total: int, warmup: float, fall: float) -> None:
    """Every step of the schedule and two after it, where the training goes on."""
    keys = {
        "learning_rate_schedule_steps": total,
        "warmup_steps_fraction": warmup,
        "wsd_decay_steps_fraction": fall,
    }
    given = {
        **keys,
        "learning_rate": RATE,
        "steps": total + 2,
        "lr_schedule_type": kind.split()[0],
        "wsd_decay_style": kind.split()[-1].replace("wsd", "linear"),
        "learning_rate_final_fraction": 0.2,
    }
    rate = learning_rate(linen_compat.config_from_maxtext(given).train)
    want = [as_maxtext({**keys, "kind": kind, "final": 0.2}, step) for step in range(total + 2)]
    with optax_promotion():
        found = [float(rate(step)) for step in range(total + 2)]
    assert found == pytest.approx(want, rel=2e-6, abs=1e-9)
    assert len(set(found)) > 1


def test_it_is_what_maxtext_trained_with() -> None:
    """The rates that were recorded while MaxText made the kept checkpoints."""
    rate = learning_rate(linen_compat.config_from_maxtext(DATA / "unscanned" / "config.yml").train)
    recorded = np.load(DATA / "unscanned" / "train_batch.npz")["learning_rate"]
    with optax_promotion():
        found = [float(rate(step)) for step in range(len(recorded))]
    assert found == pytest.approx(recorded, rel=1e-6)


def test_a_warmup_alone_leaves_the_rate_where_it_is() -> None:
    rate = learning_rate(TrainConfig(learning_rate=RATE, warmup_steps=4))
    with optax_promotion():
        found = [float(rate(step)) for step in (0, 1, 4, 5, 1000)]
    assert found == pytest.approx([0, RATE / 4, RATE, RATE, RATE])


SCHEDULE = {
    "learning_rate": 0.03,
    "warmup_steps": 2,
    "learning_rate_decay": "cosine",
    "schedule_steps": 5,
    "adam_eps": 1e-3,
}


@functools.cache
def by_optax(config: Config, steps: int) -> tuple[Any, list[float]]:
    """The loop of a user of optax, on one device, with optax's own schedule up to its end."""
    train = config.train
    rate = optax.warmup_cosine_decay_schedule(
        0.0, train.learning_rate, 2, 4, end_value=train.learning_rate * train.final_fraction
    )
    optimizer = optax.chain(
        clip_by_global_norm(train.clip_norm or math.inf),
        optax.adamw(rate, 0.9, 0.95, train.adam_eps, weight_decay=train.weight_decay),
    )
    model, losses = new_model(config), []
    state, feed = optimizer.init(model), learnable_batches(config, mesh_of(""))

    @jax.jit
    def step(model: Any, state: Any, batch: Any) -> Any:
        (_, (loss, _)), gradients = jax.value_and_grad(loss_of, has_aux=True)(model, batch)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    with optax_promotion():
        for _ in range(steps):
            model, state, loss = step(model, state, next(feed))
            losses.append(float(loss))
    return model, losses


def trained(config: Config, mesh: str, steps: int) -> tuple[TrainState, list[float]]:
    on, losses = mesh_of(mesh), []
    state, feed = fresh_state(config, on), learnable_batches(config, on)
    with jax.set_mesh(on), optax_promotion():
        step = jit_train_step(state, on)
        for _ in range(steps):
            state, metrics = step(state, next(feed))
            losses.append(float(metrics.loss))
    return state, losses


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("stage=2,fsdp=2", {"schedule": "1f1b", "num_microbatches": 2}),
        ("stage=2,fsdp=2", {"num_repeats": 2, "num_microbatches": 4}),
        ("data=2,fsdp=2", {}),
    ],
    ids=str,
)
def test_training_is_that_of_optax(mesh: str, pipeline: dict[str, Any]) -> None:
    plain = small_config(train=SCHEDULE)
    want, losses = by_optax(plain, 5)
    config = replace(plain, "pipeline", **pipeline)
    state, found = trained(config, mesh, 5)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(state.model, want, 1e-4)
    # After its end the rate is 0.
    later, _ = trained(config, mesh, 6)
    assert_close(later.model, state.model, 0.0)
