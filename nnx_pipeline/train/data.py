"""Generated token sequences that can be learned."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from nnx_pipeline.config import Config
from nnx_pipeline.sharding import Layout
from nnx_pipeline.train.step import Batch, batch_sharding

FOLLOWS_RULE = 0.9  # the share of tokens that follow the rule; the rest are uniform


def learnable_batches(
    config: Config,
    mesh: Mesh,
    *,
    seed: int = 0,
    layout: Layout = Layout(),
    segment_ids: bool = False,
) -> Iterator[Batch]:
    """Endless batches in which a token is, nine times in ten, decided by the one before.

    The rule is a fixed permutation of the vocabulary, so a model that learns it reaches an entropy
    of about 0.1 · log(vocab) + 0.33 nats where it began at log(vocab). The same seed gives the same
    batches on every mesh. segment_ids: whether to say that each row is one segment.
    """
    model, train = config.model, config.train
    generator = np.random.default_rng(seed)
    follower = generator.permutation(model.vocab_size).astype(np.int32)
    shape = (train.global_batch, train.sequence_length)
    sharding = batch_sharding(mesh, layout)
    while True:
        drawn = generator.integers(model.vocab_size, size=(shape[0], shape[1] + 1), dtype=np.int32)
        ruled = generator.random(drawn.shape) < FOLLOWS_RULE
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
