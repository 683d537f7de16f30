"""How the next token is chosen from its logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from nnx_pipeline.lab.errors import InputError, at_least, number, whole
from nnx_pipeline.sharding.layout import PORTABLE

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Raises InputError for values that are out of range or have no effect.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token, of equal ones that with the lowest id.

    It is 0 or at least `_SMALLEST`: float32 has no smaller number by which logits could be divided.
    """

    top_k: int | None = None
    """Only so many of the likeliest tokens are drawn from, and those as likely as the last."""
    top_p: float | None = None
    """Only the likeliest tokens that together have this probability are drawn from.

    Those are the fewest whose probability is `top_p` or more (nucleus sampling, Holtzman et al.,
    2020), and the tokens as likely as the last of them. Where `top_k` is given too, probabilities
    are those among the tokens that it leaves.
    """

    seed: int = 0
    """Seed of the draws, from 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        at_least(self, 0.0, "temperature")
        if 0 < self.temperature < _SMALLEST:
            raise InputError(
                f"temperature={self.temperature} is below {_SMALLEST:.2g}, the smallest float32 "
                "that divides logits; set it to 0, which takes the likeliest token"
            )
        if self.top_k is not None:
            whole(self, "top_k")
        if self.top_p is not None and not 0 < number(self, "top_p") <= 1:
            raise InputError(
                f"top_p={self.top_p} is out of range; choose a number above 0, up to 1"
            )
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise InputError(f"seed={seed!r} is not a whole number from 0 to 2**32 - 1")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise InputError(
                    f"{name}={getattr(self, name)} has no effect with temperature=0, which takes "
                    "the likeliest token; set a temperature above 0, or leave it out"
                )


def keys_of(seed: int, sequences: int) -> Array:
    """A random key for each sequence, which depends on the seed and its number alone."""
    key = jax.random.key(seed, impl=PORTABLE)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(sequences, dtype=jnp.uint32))


def next_tokens(logits: Array, sampling: Sampling, keys: Array, positions: Array) -> Array:
    """The next token of each sequence, int32 `[batch]`; each place has random numbers of its own.

    `logits` are float32 `[batch, vocab]`, whole on every device, and `positions` int32 `[batch]`.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # With the largest logit at 0, division by a small temperature gives -inf, and no inf, of which
    # several would be equally likely.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    candidates = restricted(logits / sampling.temperature, sampling)
    folded = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.categorical)(folded, candidates).astype(jnp.int32)


def restricted(logits: Array, sampling: Sampling) -> Array:
    """The logits, divided by the temperature, with -inf for what `top_k` and `top_p` leave out."""
    if sampling.top_k is None and sampling.top_p is None:
        return logits
    descending = jnp.sort(logits, axis=-1, descending=True)
    if sampling.top_k is not None:
        last = descending[:, min(sampling.top_k, logits.shape[-1]) - 1, None]
        logits = jnp.where(logits >= last, logits, -jnp.inf)
        descending = jnp.where(descending >= last, descending, -jnp.inf)
    if sampling.top_p is not None and sampling.top_p < 1:  # all together have a probability of 1
        likely = jnp.exp(descending - descending[:, :1])
        # Added up from the least likely one, in pairs: one after the other, float32 loses what is
        # small beside the sum, which for 32,000 equal tokens is 128 of them.
        rest = jax.lax.associative_scan(jnp.add, likely, axis=1, reverse=True)
        # A token is needed while it and those after it have more than is left out; the first one
        # always is.
        needed = (rest > (1 - sampling.top_p) * rest[:, :1]).at[:, 0].set(True)
        last = jnp.min(jnp.where(needed, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= last, logits, -jnp.inf)
    return logits
