"""The training loop."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from nnx_pipeline.config import Config
from nnx_pipeline.train.data import learnable_batches
from nnx_pipeline.train.step import Metrics, jit_train_step, make_state


def train(config: Config, mesh: Mesh, *, steps: int, seed: int = 0) -> Iterator[Metrics]:
    """Trains a fresh model on generated sequences and yields the metrics of each step.

    The losses depend on config and seed; the mesh changes them by rounding alone. The load balance
    is that of the microbatches; if the config leaves their number open, it is as many as fill the
    pipeline, and an InputError where that would be part of the loss.
    """
    with jax.set_mesh(mesh):
        state = make_state(config, mesh, seed=seed)
        step = jit_train_step(state, mesh)
    batches = learnable_batches(config, mesh, seed=seed)
    for _ in range(steps):
        with jax.set_mesh(mesh):
            state, metrics = step(state, next(batches))
        yield metrics
