"""Generated token sequences with a rule that a model can learn."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.config.config import Config
from nnx_pipeline.sharding import Layout
from nnx_pipeline.train.step import Batch, batch_sharding

FOLLOWS_RULE = 0.9  # the share of tokens that follow the rule; the others are drawn uniformly


def learnable_batches(
    config: Config,
    mesh: Mesh,
    *,
    seed: int = 0,
    layout: Layout = Layout(),
    segment_ids: bool = False,
) -> Iterator[Batch]:
    """Endless batches in which nine tokens in ten are determined by the token before them.

    - `config`: gives the vocabulary, the number of sequences and their length.
    - `mesh`: where the batches are placed, see `batch_sharding`.
    - `seed`: of rule and tokens; the same seed gives the same batches on every mesh.
    - `layout`: which mesh axes the batch is sharded over.
    - `segment_ids`: whether batches have segment ids, which say that each row is one segment.

    The rule is a fixed permutation of the vocabulary, so that a model which learns it goes from an
    entropy of log(vocab) down to about 0.1 · log(vocab) + 0.33 nats.
    """
    model, train = config.model, config.train
    generator = np.random.default_rng(seed)
    follower = generator.permutation(model.vocab_size).astype(np.int32)
    shape = (train.global_batch, train.sequence_length)
    sharding = batch_sharding(mesh, layout)
    while True:
        drawn = generator.integers(model.vocab_size, size=(shape[0], shape[1] + 1), dtype=np.int32)
        ruled = generator.random(drawn.shape) < FOLLOWS_RULE
        # From left to right, because the token before may itself have been set by the rule.
        for place in range(1, drawn.shape[1]):
            drawn[:, place] = np.where(
                ruled[:, place], follower[drawn[:, place - 1]], drawn[:, place]
            )
        weights, segments = np.ones(shape, np.float32), np.ones(shape, np.int32)
        yield Batch(
            tokens=jax.device_put(drawn[:, :-1], sharding),
            targets=jax.device_put(drawn[:, 1:], sharding),
            weights=jax.device_put(weights, sharding),
            segment_ids=jax.device_put(segments, sharding) if segment_ids else None,
        )
