"""The loss on the part of a text that is held out, and what a bigram model would have there."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.modules.decoder import Mixtral
from nnx_pipeline.train._packing import Packed
from nnx_pipeline.train._tokenizers import BYTE_VALUES
from nnx_pipeline.train.data import batches
from nnx_pipeline.train.step import Batch, loss_of


@jax.jit
def _entropy(model: Mixtral, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy and its weight; jitted here: it is compiled once for all saved steps."""
    return loss_of(model, batch)[1][0], jnp.sum(batch.weights)


def entropy_of(model: Mixtral, held_out: Packed, mesh: Mesh) -> float:
    """The mean cross-entropy of a model on all targets of some sequences, in nats per token."""
    total = weight = 0.0
    count = -(-len(held_out) // model.config.train.global_batch)
    for batch in itertools.islice(batches(model.config, mesh, held_out), count):
        with jax.set_mesh(mesh):
            mean, targets = map(float, _entropy(model, batch))
        total, weight = total + mean * targets, weight + targets
    return total / weight


def bigram_entropy(training: np.ndarray, contexts: np.ndarray, targets: np.ndarray) -> float:
    """The cross-entropy of a bigram model on some targets, each after its context, in nats.

    Its counts are from `training`. P(b | a) = (n(a, b) + k · P(b)) / (n(a) + k), with P(b) = (n(b)
    + 1) / (n + 256) for a text of n bytes. The k is the best of several for the held-out text
    itself, so that the entropy is as low as this smoothing can make it.
    """
    pairs = np.zeros((BYTE_VALUES, BYTE_VALUES))
    np.add.at(pairs, (training[:-1], training[1:]), 1)
    single = (np.bincount(training, minlength=BYTE_VALUES) + 1) / (len(training) + BYTE_VALUES)
    seen, after = pairs[contexts, targets], pairs.sum(axis=1)[contexts]
    return min(
        float(-np.mean(np.log((seen + k * single[targets]) / (after + k))))
        for k in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    )


def bigram_of(training: Packed, held_out: Packed) -> float:
    """`bigram_entropy` of texts whose tokens are bytes."""
    rows = held_out.numbered(range(len(held_out)))
    counts = np.asarray(rows.weights, bool)
    contexts, targets = rows.tokens[:, :-1][counts], rows.tokens[:, 1:][counts]
    return bigram_entropy(training.streams[0].tokens, contexts, targets)
