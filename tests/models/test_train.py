"""Training: the data, one step by hand, fifty steps on different meshes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    arrays_by_path,
    assert_close,
    mesh_of,
    new_model,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import Config, InputError
from nnx_pipeline.train import (
    TrainState,
    abstract_batch,
    abstract_state,
    jit_train_step,
    loss_of,
    make_optimizer,
    make_state,
)
from nnx_pipeline.train.data import Rule, Sequences, batches, learnable_batches
from nnx_pipeline.train.loop import train
from nnx_pipeline.train.step import train_step


def by_hand(config: Config, steps: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """AdamW with clipping in float64; gradients from JAX, everything else from the formulas."""
    settings = config.train
    model, batch = new_model(config), jax.tree.map(jnp.asarray, packed_batch(config))
    gradient = jax.jit(jax.grad(lambda model, batch: loss_of(model, batch)[0]))
    weights = {k: np.asarray(v, np.float64) for k, v in arrays_by_path(model).items()}
    first = {path: np.zeros_like(value) for path, value in weights.items()}
    second, norms = {**first}, []
    for count in range(1, steps + 1):
        leaves = [value.astype(np.float32) for value in weights.values()]
        gradients = gradient(jax.tree.unflatten(jax.tree.structure(model), leaves), batch)
        gradients = {k: np.asarray(v, np.float64) for k, v in arrays_by_path(gradients).items()}
        norms.append(math.sqrt(sum(np.sum(g**2) for g in gradients.values())))
        for path, g in gradients.items():
            g = g * min(1.0, (settings.clip_norm or math.inf) / norms[-1])
            first[path] = settings.adam_b1 * first[path] + (1 - settings.adam_b1) * g
            second[path] = settings.adam_b2 * second[path] + (1 - settings.adam_b2) * g**2
            mean = first[path] / (1 - settings.adam_b1**count)
            spread = np.sqrt(second[path] / (1 - settings.adam_b2**count))
            update = mean / (spread + settings.adam_eps) + settings.weight_decay * weights[path]
            weights[path] = weights[path] - settings.learning_rate * update
    return weights, norms


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("clip_norm", [0.05, 1e3, None])
def test_a_step_is_adamw_with_clipping(clip_norm: float | None) -> None:
    """Two steps, so that the moments and their correction count."""
    # The large epsilon keeps gradients near zero from deciding the sign of a whole update.
    config = small_config(
        model={"num_layers": 1},
        train={
            "learning_rate": 0.05,
            "adam_b1": 0.8,
            "adam_b2": 0.9,
            "adam_eps": 1e-3,
            "weight_decay": 0.3,
            "clip_norm": clip_norm,
        },
    )
    model, batch = new_model(config), jax.tree.map(jnp.asarray, packed_batch(config))
    optimizer = make_optimizer(config.train).init(model)
    state = TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer)
    step, norms = jax.jit(train_step), []
    with optax_promotion():
        for _ in range(2):
            state, metrics = step(state, batch)
            norms.append(float(metrics.gradient_norm))
    weights, want_norms = by_hand(config, 2)
    assert norms == pytest.approx(want_norms, rel=1e-4)
    assert norms[0] > 0.05  # so that it is clipped where the limit is that low
    assert clip_norm is None or (norms[0] > clip_norm) == (clip_norm < 1)
    assert_close(state.model, dict(weights), 1e-4)
    assert int(state.step) == 2


def test_the_bias_of_a_router_is_left_as_it_is() -> None:
    """Weight decay changes every parameter but that one, which has no gradient."""
    config = small_config(
        model={"num_layers": 1, "router_bias": True},
        train={"learning_rate": 0.1, "weight_decay": 0.3},
    )
    model, batch = new_model(config), jax.tree.map(jnp.asarray, packed_batch(config))
    bias = model.pipeline.layers.feed_forward.router_bias
    bias[...] = jnp.arange(1.0, 5.0).reshape(bias.shape)
    optimizer = make_optimizer(config.train).init(model)
    state = TrainState(step=jnp.zeros((), jnp.int32), model=model, optimizer=optimizer)
    with optax_promotion():
        new = jax.jit(train_step)(state, batch)[0]
    changed = {
        path: bool(jnp.any(leaf != arrays_by_path(state.model)[path]))
        for path, leaf in arrays_by_path(new.model).items()
    }
    assert [path for path in changed if not changed[path]] == [
        path for path in changed if "router_bias" in path
    ]


@pytest.mark.slow
def test_the_state_is_donated() -> None:
    """The old state is gone after the step, and the program writes the new one in its place."""
    config = small_config(pipeline={"num_microbatches": 2})
    mesh = mesh_of("stage=2,fsdp=2")
    with jax.set_mesh(mesh), optax_promotion():
        state = make_state(config, mesh)
        batch = next(learnable_batches(config, mesh))
        compiled = jit_train_step(state, mesh).lower(state, batch).compile()
        new, metrics = compiled(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, batch)))
    per_device = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(new)
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= per_device
    assert all(metric.dtype == jnp.float32 for metric in jax.tree.leaves(metrics))


def test_abstract_arguments_are_the_real_ones() -> None:
    """What `compile` lowers with has the shapes, dtypes and shardings of what `train` runs with."""
    config = small_config(pipeline={"num_microbatches": 4})
    for mode in ("explicit", "auto"):
        mesh = mesh_of("stage=4,fsdp=2", mode)
        with jax.set_mesh(mesh):
            batch, abstract = next(learnable_batches(config, mesh)), abstract_batch(config, mesh)
            state = abstract_state(config, mesh)
        for real, want in zip(jax.tree.leaves(batch), jax.tree.leaves(abstract), strict=True):
            assert (real.shape, real.dtype) == (want.shape, want.dtype)
            assert real.sharding.is_equivalent_to(want.sharding, real.ndim)
        assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(state))


def test_batches_follow_a_rule_and_are_the_same_on_every_mesh() -> None:
    config = small_config(train={"sequence_length": 128})
    one, spread = mesh_of(""), mesh_of("stage=2,fsdp=2")
    batch = next(learnable_batches(config, one, seed=3))
    other = next(learnable_batches(config, spread, seed=3))
    assert_close(other, batch, 0.0)
    tokens, targets = np.asarray(batch.tokens), np.asarray(batch.targets)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    follower = {
        token: np.bincount(targets[tokens == token], minlength=32).argmax() for token in range(32)
    }
    assert len(set(follower.values())) == 32  # a permutation
    followed = np.mean([follower[t] == n for t, n in zip(tokens.flat, targets.flat, strict=True)])
    assert 0.8 < followed < 0.97
    assert not np.array_equal(tokens, next(learnable_batches(config, one, seed=4)).tokens)


@pytest.mark.parametrize("make", [make_state, abstract_state])
def test_a_state_of_a_mesh_that_is_not_set_is_refused(make: Any) -> None:
    """It would have one stage, and be whole on every device."""
    config, mesh = small_config(), mesh_of("stage=2,fsdp=2")
    with pytest.raises(InputError, match=r"stage=2,fsdp=2, .* one device; .* jax.set_mesh\(mesh\)"):
        make(config, mesh)
    with (
        jax.set_mesh(mesh_of("stage=4")),
        pytest.raises(InputError, match=r"that is set is stage=4"),
    ):
        make(config, mesh)


def test_a_step_for_a_mesh_that_is_not_set_is_refused() -> None:
    """It would leave all parameters whole on every device."""
    config, mesh = small_config(), mesh_of("fsdp=2", "auto")
    with jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
    with pytest.raises(InputError, match="the mesh fsdp=2, and the mesh that is set is one device"):
        jit_train_step(state, mesh)


def test_a_batch_that_does_not_split() -> None:
    with pytest.raises(InputError, match=r"global_batch=8 does not split over the 3 devices.*9"):
        learnable_batches(small_config(), mesh_of("stage=3"))


class Given:
    """A source that gives what a function makes of the shape that is asked for."""

    def __init__(self, make: Callable[[tuple[int, int]], Any]) -> None:
        self.make = make

    def sequences(self, batch: int, rows: range, length: int) -> Any:
        return self.make((len(rows), length))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda shape: np.zeros((shape[0], shape[1] - 1), np.int32),
            r"Given gave int32\[2, 8\] for 2 rows of 9 tokens; .* must return .* integers \[2, 9\]",
        ),
        (lambda shape: np.zeros(shape), r"Given gave float64\[2, 9\] .*integers \[2, 9\]"),
        (lambda shape: np.zeros(shape, bool), r"Given gave bool\[2, 9\]"),
        (lambda shape: np.zeros(shape, int).tolist(), "Given gave list for 2 rows"),
        (lambda shape: np.full(shape, 32), "Given gave the token 32, .* give tokens from 0 to 31"),
        (lambda shape: np.full(shape, -1), r"Given gave the token -1, .* \(model.vocab_size=32\)"),
        (
            lambda shape: Sequences(np.zeros(shape, int), positions=np.zeros(shape, int)),
            r"Given gave positions int64\[2, 9\]; give a number for each .* row, \[2, 8\]",
        ),
        (
            lambda shape: Sequences(np.zeros(shape, int), weights=1.0),
            "Given gave weights float; give a number",
        ),
    ],
)
def test_a_source_that_gives_no_tokens_is_named(make: Any, message: str) -> None:
    given = batches(small_config(), mesh_of("stage=2,fsdp=2"), Given(make))
    with pytest.raises(InputError, match=message):
        next(given)
    with pytest.raises(InputError, match=message):
        next(train(small_config(), mesh_of("stage=2,fsdp=2"), steps=1, source=Given(make)))


def test_a_source_may_give_other_integers() -> None:
    """Every token of the vocabulary, from the first to the last; a batch is int32."""
    for dtype in (np.uint8, np.int64):
        source = Given(lambda shape, dtype=dtype: np.linspace(0, 31, shape[1], dtype=dtype)[None])
        batch = next(batches(small_config(train={"global_batch": 1}), mesh_of(""), source))
        assert (batch.tokens.dtype, batch.targets.dtype) == (jnp.int32, jnp.int32)
        assert (int(batch.tokens.min()), int(batch.targets.max())) == (0, 31)


def test_a_process_can_make_its_own_sequences_alone() -> None:
    """A sequence does not depend on which others are made with it."""
    rule = Rule(seed=3, vocab_size=32)
    whole = rule.sequences(2, range(8), 17)
    np.testing.assert_array_equal(rule.sequences(2, range(3, 5), 17), whole[3:5])
    assert not np.array_equal(whole, rule.sequences(1, range(8), 17))


@pytest.mark.slow
def test_the_mesh_does_not_change_the_losses() -> None:
    config = replace(small_config(pipeline={"num_microbatches": 2}), "train", learning_rate=1e-2)
    found = []
    for mesh in ("", "stage=2,tensor=2"):
        with optax_promotion():
            found.append(
                [float(step.metrics.loss) for step in train(config, mesh_of(mesh), steps=4)]
            )
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_the_next_batch_is_made_while_a_step_runs() -> None:
    """And none after the last."""
    config, made = small_config(), 0

    def make(shape: tuple[int, int]) -> np.ndarray:
        nonlocal made
        made += 1
        return np.zeros(shape, int)

    steps = train(config, mesh_of(""), steps=3, source=Given(make))
    with optax_promotion():
        of_all = [made for _ in steps]
    assert [count / of_all[0] for count in of_all] == [1, 1.5, 1.5]


@pytest.mark.parametrize(("error", "raised"), [(OSError, OSError), (StopIteration, RuntimeError)])
def test_a_source_that_fails(error: type[Exception], raised: type[Exception]) -> None:
    """The steps before its batch are yielded, and a training that stops early is no success."""

    class Failing:
        def sequences(self, batch: int, rows: range, length: int) -> np.ndarray:
            if batch == 2:
                raise error
            return np.zeros((len(rows), length), int)

    steps = train(small_config(), mesh_of(""), steps=6, source=Failing())
    with optax_promotion():
        assert len([next(steps) for _ in range(2)]) == 2
        with pytest.raises(raised):
            next(steps)
