"""The training loop on generated data."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from nnx_pipeline.config.config import Config
from nnx_pipeline.train.data import learnable_batches
from nnx_pipeline.train.step import Metrics, jit_train_step, make_state


def train(config: Config, mesh: Mesh, *, steps: int, seed: int = 0) -> Iterator[Metrics]:
    """Trains a new model on generated sequences and yields the metrics of each step.

    - `config`: of the model, the pipeline and the training.
    - `mesh`: the JAX mesh to train on.
    - `steps`: number of training steps.
    - `seed`: of the initial values and of the data.

    The losses depend on config and seed; the mesh changes them by rounding only. The load balance
    is that of the microbatches, whose number follows from the number of stages if the config does
    not give it. Raises InputError where the loss would then depend on it (`check_objective`).
    """
    with jax.set_mesh(mesh):
        state = make_state(config, mesh, seed=seed)
        step = jit_train_step(state, mesh)
    batches = learnable_batches(config, mesh, seed=seed)
    for _ in range(steps):
        # The mesh is set for each step only: the caller's code runs between the steps.
        with jax.set_mesh(mesh):
            state, metrics = step(state, next(batches))
        yield metrics
