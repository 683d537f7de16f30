"""AdamW as MaxText sets it up."""

import optax

from nnx_pipeline.config import TrainConfig


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clips by the global norm, then AdamW with decay on every parameter."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            config.learning_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        ),
    )
