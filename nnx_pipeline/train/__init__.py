"""Training: generated data, the optimizer, the training step and the loop over steps."""

from nnx_pipeline.train.optimizer import make_optimizer
from nnx_pipeline.train.step import (
    Batch,
    Metrics,
    TrainState,
    abstract_batch,
    abstract_state,
    jit_train_step,
    loss_and_gradients,
    loss_of,
    make_state,
)

__all__ = [
    "Batch",
    "Metrics",
    "TrainState",
    "abstract_batch",
    "abstract_state",
    "jit_train_step",
    "loss_and_gradients",
    "loss_of",
    "make_optimizer",
    "make_state",
]
