"""Training: batches, the optimizer, the training step and the loop over steps.

`make_state`, `jit_train_step` and `batches` of a `Source` are for a loop of your own, `train` is
the whole. `linen_compat` saves and loads their states.
"""

from typing import TYPE_CHECKING

from nnx_pipeline.lab._lazy import lazy

if TYPE_CHECKING:
    from nnx_pipeline.train._text import Data, read_data
    from nnx_pipeline.train.data import Sequences, Source, batches, learnable_batches
    from nnx_pipeline.train.lint import lint_step
    from nnx_pipeline.train.loop import Step, train
    from nnx_pipeline.train.optimizer import make_optimizer
    from nnx_pipeline.train.processes import several_processes
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
    "Data",
    "Metrics",
    "Sequences",
    "Source",
    "Step",
    "TrainState",
    "abstract_batch",
    "abstract_state",
    "batches",
    "jit_train_step",
    "learnable_batches",
    "lint_step",
    "loss_and_gradients",
    "loss_of",
    "make_optimizer",
    "make_state",
    "read_data",
    "several_processes",
    "train",
]

__getattr__, __dir__ = lazy(__name__)
