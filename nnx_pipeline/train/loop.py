"""The training loop, on generated data or on a text."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from nnx_pipeline.config.config import Config
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.train.data import Rule, Source, batches
from nnx_pipeline.train.step import Metrics, TrainState, jit_train_step, make_state


class Step(NamedTuple):
    """What a step leaves; the state is donated to the next step, so read it before that begins."""

    state: TrainState
    metrics: Metrics


@jax.jit
def is_finite(state: TrainState) -> Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


@jax.jit
def largest_weight(model: Mixtral) -> Array:
    leaves = [x for x in jax.tree.leaves(model) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in leaves]))


def train(
    config: Config,
    mesh: Mesh,
    *,
    steps: int,
    seed: int = 0,
    source: Source | None = None,
    state: TrainState | None = None,
) -> Iterator[Step]:
    """Trains a new or a saved model, and yields what each step leaves.

    - `mesh`: the JAX mesh to train on.
    - `steps`: the number of the last step, counted from the beginning of training.
    - `seed`: of the initial values and of generated sequences.
    - `source`: of the sequences; None for sequences that a `Rule` generates.
    - `state`: after which training goes on, on the mesh; it is donated to the first step. None for
      a new one.

    The losses depend on config, seed and source; the mesh changes them by rounding only. Batches
    and random numbers are functions of seed and step, so that the losses after a state that was
    saved and loaded again on the same mesh are those of training without a stop, to the bit. Raises
    InputError where the loss would depend on the number of stages (`check_objective`), and where
    Adam would divide by zero in the dtype of the parameters.
    """
    _check_eps(config)
    with jax.set_mesh(mesh):
        state = make_state(config, mesh, seed=seed) if state is None else state
        step = jit_train_step(state, mesh)
    done = int(state.step)
    source = source or Rule(seed, config.model.vocab_size)
    feed = batches(config, mesh, source, first=done)
    batch = next(feed) if done < steps else None
    for number in range(done + 1, steps + 1):
        # The mesh is set for each step only: the caller's code runs between the steps.
        with jax.set_mesh(mesh):
            state, metrics = step(state, batch)
        failed = None
        try:
            batch = next(feed) if number < steps else None  # made while the step runs
        except Exception as error:
            failed = error
        yield Step(state, metrics)
        if failed is not None:
            raise failed


def _check_eps(config: Config) -> None:
    """Raises InputError where Adam would divide by zero in the dtype of the parameters."""
    stored = config.train.master_dtype or config.model.param_dtype
    eps = config.train.adam_eps

    def is_zero(number: float, dtype: str) -> bool:
        # XLA takes float32 numbers below the smallest normal one for zero.
        too_small = number < jnp.finfo(jnp.float32).tiny
        return bool(too_small or not np.asarray(number, jnp.dtype(dtype)))

    if not is_zero(eps, stored):
        return
    cure = "model.param_dtype=float32"
    if is_zero(eps, "float32"):
        larger = next(number for number in (1e-8, 1e-4) if not is_zero(number, stored))
        cure = f"train.adam_eps to a larger number, such as {larger:g}"
    raise InputError(
        f"train.adam_eps={eps:g} is zero in model.param_dtype={stored!r}, as are second moments, "
        f"so that Adam divides zero by zero; set {cure}"
    )
