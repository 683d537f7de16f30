"""Rotary position embedding (Su et al., 2021), with angles that may be slowed down."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnx_pipeline.config.model import ModelConfig


def timescales(config: ModelConfig) -> Float[Array, "half"]:
    """How many positions each pair of a head takes to turn by one radian, in float32.

    Of d rotated numbers pair i takes theta^(2i / d). `rope_scaling` multiplies that by up to
    `rope_factor`: `linear` in full (Chen et al., 2023), `llama3` by how often the pair turns in the
    original length, as in the reference implementation of Llama 3.1. Between the two limits the
    frequency is the mean of the slowed and the original one, weighted by where between them the
    number of turns lies. `yarn` (Peng et al., 2023, section 3.2) weighs by where the number i lies
    between those of the pairs at the limits, rounded outwards with `rope_truncate`.
    """
    half, of_window = config.rope_dim // 2, _theta_of_window(config)
    theta = config.rope_theta if of_window is None else of_window
    plain = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling is None or of_window is not None:
        return plain
    slowed = plain * config.rope_slowing
    if config.rope_scaling == "linear":
        return slowed
    length, low, high = config.rope_limits
    if config.rope_scaling == "yarn":
        share = 1.0 - _slowed_share(config)
    else:
        turns = length / (2 * math.pi * plain)
        share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / slowed + share / plain)


def _theta_of_window(config: ModelConfig) -> float | None:
    """The base of a layer with a window, which has no scaling; None for another layer."""
    return None if config.sliding_window is None else config.rope_window_theta


def _slowed_share(config: ModelConfig) -> Float[Array, "half"]:
    """By how much of the whole `yarn` slows each pair down, from 0 to 1."""
    length, low, high = config.rope_limits

    def pair_with(turns: float) -> float:
        """The number, with a fraction, of the pair that turns so often in the original length."""
        turned = math.log(length / (2 * math.pi * turns))
        return config.rope_dim * turned / (2 * math.log(config.rope_theta))

    limits = pair_with(high), pair_with(low)
    if config.rope_truncate:
        limits = math.floor(limits[0]), math.ceil(limits[1])
    first, last = max(limits[0], 0), min(limits[1], config.rope_dim - 1)
    width = max(last - first, 0.001)  # where both are one pair, all after it are slowed in full
    return jnp.clip((jnp.arange(config.rope_dim // 2, dtype=jnp.float32) - first) / width, 0.0, 1.0)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "#batch seq"],
    *,
    timescale: Float[Array, "half"],
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair of values of a head by position / timescale radians, times the amplitude.

    The pairs are of the first numbers of a head; others, if there are more, stay as they are. One
    row of positions may serve the whole batch. If `interleaved` pair i is (x[2i], x[2i + 1])
    rather than (x[i], x[i + head_dim/2]). Sine and cosine are computed in float32 and cast to the
    dtype of `x`.
    """
    half = timescale.shape[0]
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    angle = positions[:, :, None, None].astype(jnp.float32) / timescale
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    if amplitude != 1.0:
        sine, cosine = sine * amplitude, cosine * amplitude
    sine, cosine = sine.astype(x.dtype), cosine.astype(x.dtype)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cosine - second * sine, second * cosine + first * sine
    if not interleaved:
        return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def rotary_of(config: ModelConfig) -> Callable[[Array, Array], Array]:
    return functools.partial(
        rotate,
        timescale=timescales(config),
        interleaved=config.rope_interleaved,
        amplitude=config.rope_amplitude if _theta_of_window(config) is None else 1.0,
    )
