"""The initial values of query kernels."""

import jax
from jaxtyping import Array

from nnx_pipeline.config.model import ModelConfig


def query_gain(config: ModelConfig) -> float:
    """What initial query kernels, or the scales of their norms, are multiplied by.

    It is head_dim^-0.5 / attention_scale: the scores of a new model then have the same variance
    whatever `attention_scale` is.
    """
    gain: float = config.head_dim**-0.5 / config.attention_scale
    return gain


def query_initializer(
    initializer: jax.nn.initializers.Initializer, config: ModelConfig
) -> jax.nn.initializers.Initializer:
    """An initializer whose values are multiplied by `query_gain`."""
    gain = query_gain(config)

    def initial(*args: object, **options: object) -> Array:
        return initializer(*args, **options) * gain  # type: ignore[arg-type]

    return initial
