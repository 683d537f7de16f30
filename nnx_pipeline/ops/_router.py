"""The router: which experts each token goes to, with which weights, and how evenly."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nnx_pipeline.config.model import ModelConfig


@dataclass(frozen=True)
class Routing:
    """How `chosen` experts are chosen for a token, and what weights they get.

    They are of `groups_per_token` of `groups` groups of consecutive experts. Weights contain the
    bias if `weighs_bias`, and are divided by their sum if `normalize`. A `sigmoid` is of each
    expert alone, a `softmax` over all.
    """

    chosen: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    weighs_bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "Routing":
        return cls(
            config.num_experts_per_token,
            config.router_score,
            config.router_normalize,
            config.router_scale,
            config.router_groups,
            config.router_groups_per_token,
            config.router_bias_in_weights,
        )


def route(
    logits: Float[Array, "*batch experts"],
    routing: Routing,
    bias: Float[Array, "experts"] | None = None,
) -> tuple[Float[Array, "*batch chosen"], Int[Array, "*batch chosen"]]:
    """The weights of the experts chosen for each token, and their numbers, the best one first.

    A token goes to the experts with its largest scores, after the bias and within its best groups.
    The bias has no gradient, unless `routing.weighs_bias`. Weights are computed in float32 and cast
    back to the dtype of the logits:

        softmax, normalized:  the softmax of the chosen logits (Mixtral, and Qwen3-MoE with
                              `norm_topk_prob`)
        softmax:              the softmax of all logits (Qwen3-MoE without it)
        sigmoid:              that of each logit, divided by their sum if normalized (DeepSeek-V3)
    """
    if bias is None and routing.groups == 1:  # the largest scores are those of the largest logits
        top, experts = jax.lax.top_k(logits, routing.chosen)
        top = top.astype(jnp.float32)
    else:
        wide = logits.astype(jnp.float32)
        sigmoid = routing.score == "sigmoid"
        scores = jax.nn.sigmoid(wide) if sigmoid else jax.nn.softmax(wide, axis=-1)
        experts = choose_experts(jax.lax.stop_gradient(scores), routing, bias)
        takes = jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32)
        weighed = scores + bias if bias is not None and routing.weighs_bias else wide
        top = jnp.sum(takes * weighed[..., None, :], axis=-1)
    if routing.weighs_bias:
        weights = _shares(top) if routing.normalize else top
    elif routing.score == "sigmoid":
        weights = jax.nn.sigmoid(top)
        if routing.normalize:
            weights = _shares(weights)
    elif routing.normalize:
        weights = jax.nn.softmax(top, axis=-1)
    else:
        every = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        weights = jnp.exp(top - every)
    if routing.scale != 1.0:
        weights = weights * routing.scale
    return weights.astype(logits.dtype), experts


def _shares(weights: Float[Array, "*batch chosen"]) -> Float[Array, "*batch chosen"]:
    """The weights divided by their sum, which may underflow to 0 where every sigmoid does."""
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)


def choose_experts(
    scores: Float[Array, "*batch experts"], routing: Routing, bias: Float[Array, "experts"] | None
) -> Int[Array, "*batch chosen"]:
    """The experts with the largest scores, the best one first, as DeepSeek chooses them."""
    # The best groups are those in which the two largest scores have the largest sum, or with a
    # softmax those that have the largest score.
    if bias is not None:
        scores = scores + jax.lax.stop_gradient(bias)
    if routing.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], routing.groups, -1)
        top = jax.lax.top_k(grouped, 2 if routing.score == "sigmoid" else 1)[0]
        best = jax.lax.top_k(jnp.sum(top, axis=-1), routing.groups_per_token)[1]
        among = jnp.sum(jax.nn.one_hot(best, routing.groups, dtype=jnp.int32), axis=-2) > 0
        scores = jnp.where(among[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, routing.chosen)[1]


def combine_weights(
    weights: Float[Array, "*batch chosen"], experts: Int[Array, "*batch chosen"], num_experts: int
) -> Float[Array, "*batch experts"]:
    """The weight of every expert for every token, 0 where it was not chosen."""
    chosen = jax.nn.one_hot(experts, num_experts, dtype=weights.dtype)
    return jnp.sum(weights[..., None] * chosen, axis=-2)


def not_padding(segment_ids: Int[Array, "batch seq"] | None) -> Bool[Array, "batch seq"] | None:
    """False for padding, which is segment 0; None without segments."""
    return None if segment_ids is None else segment_ids != 0


class Usage(NamedTuple):
    """How a router used its experts, as means over the tokens of one or several sequences.

    Padding has zeros in the first two, and its choices are not dropped. The properties are means
    over the other tokens, and 0 where there are none.
    """

    # One array, because a TPU takes more than a microsecond for each that is averaged on its own.
    numbers: Float[Array, "*sequences 4 experts"]  # see `expert_usage`
    share_dropped: Float[Array, "*sequences"] | None = None  # None if all choices were taken
    share_real: Float[Array, "*sequences"] | None = None  # not padding; None if there is none

    def _of_real(self, means: Array) -> Array:
        """Means over the tokens that are not padding, of means over all tokens."""
        if self.share_real is None:
            return means
        share = jnp.maximum(self.share_real, 1e-20)
        return means / share.reshape(*share.shape, *[1] * (means.ndim - share.ndim))

    @property
    def chosen(self) -> Float[Array, "*sequences experts"]:
        """How often each expert was chosen per token; sums to the number of choices."""
        return self._of_real(self.numbers[..., 0, :])

    @property
    def probability(self) -> Float[Array, "*sequences experts"]:
        """The mean probability of each expert: its score by the sum of all scores."""
        return self._of_real(self.numbers[..., 1, :])

    @property
    def entropy(self) -> Float[Array, "*sequences"]:
        """The mean of -Σ_e p_e · log p_e over the probabilities of a token; it has no gradient."""
        return self._of_real(jnp.sum(self.numbers[..., 2, :], axis=-1))

    @property
    def squared_log_sum(self) -> Float[Array, "*sequences"]:
        """The mean of (log Σ_e exp(logit_e))²."""
        return self._of_real(jnp.sum(self.numbers[..., 3, :], axis=-1))

    @property
    def dropped(self) -> Float[Array, "*sequences"]:
        # If there are none, 0 is computed from an array that a map over stages maps: in explicit
        # mode JAX joins no array that is mapped with one that is not.
        if self.share_dropped is None:
            return self.numbers[..., 0, 0] * 0
        return self._of_real(self.share_dropped)


def expert_usage(
    logits: Float[Array, "batch seq experts"],
    experts: Int[Array, "batch seq chosen"],
    dropped: Float[Array, "batch"] | None = None,
    *,
    score: str = "softmax",
    real: Bool[Array, "batch seq"] | None = None,
) -> Usage:
    """The usage of the experts by each sequence, in float32; the router's losses are made of it.

    Its four numbers of a token and an expert are whether the expert was chosen, its probability
    p_e, its part -p_e · log p_e of the entropy, and its part s_e · (log Σ_e exp(logit_e))² of the
    squared log-sum, where s is the softmax, whose sum is 1. The mean over the sequences of a
    microbatch is the usage of that microbatch. `real` is False for padding, which does not count.
    """
    logits = logits.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_sum = largest + jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    softmax = probability = jnp.exp(logits - log_sum)
    entropy = softmax * (log_sum - logits)
    if score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probability = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        entropy = jax.scipy.special.entr(probability)
    chosen = jnp.sum(jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.float32), axis=-2)
    each = (chosen, probability, jax.lax.stop_gradient(entropy), softmax * log_sum**2)
    numbers, share = jnp.stack(each, axis=-2), None
    if real is not None:
        numbers = jnp.where(real[..., None, None], numbers, 0)
        share = jnp.mean(real.astype(jnp.float32), axis=1)
    return Usage(jnp.mean(numbers, axis=1), dropped, share)


def load_balance_loss(usage: Usage) -> Float[Array, "*microbatches"]:
    """experts · Σ_e (choices of e per token) · (mean probability of e).

    This is the auxiliary loss of Switch Transformer (Fedus et al., 2021, equation 4), extended to k
    choices per token. It is k when the experts are used evenly, and usually more when they are not.
    """
    num_experts = usage.chosen.shape[-1]
    return num_experts * jnp.sum(usage.chosen * usage.probability, axis=-1)


class RouterMetrics(NamedTuple):
    """What routers report, as float32 means over layers and microbatches; 0 without a router."""

    load_balance: Float[Array, ""]  # `load_balance_loss`, which depends on the microbatches
    z_loss: Float[Array, ""]  # the mean of (log Σ_e exp(logit_e))² (ST-MoE, Zoph et al., 2022)
    dropped: Float[Array, ""]  # the share of the choices that no expert took
    entropy: Float[Array, ""]  # of a token's distribution, in nats; log(experts) at most
    load: Float[Array, "experts"]  # each one's share of the choices; empty without a router

    @classmethod
    def unpacked(cls, metrics: Float[Array, "numbers"] | None) -> "RouterMetrics":
        """Of the one array that a pipeline returns; None if the layers have no router."""
        metrics = jnp.zeros(4, jnp.float32) if metrics is None else metrics
        return cls(metrics[0], metrics[1], metrics[2], metrics[3], metrics[4:])


def router_metrics(usage: Usage) -> Float[Array, "metrics"]:
    """The `RouterMetrics` of one microbatch in one layer, as one array."""
    first = (load_balance_loss(usage), usage.squared_log_sum, usage.dropped, usage.entropy)
    choices = jnp.sum(usage.chosen)
    if usage.share_real is not None:  # a microbatch may be padding alone
        choices = jnp.maximum(choices, 1e-20)
    return jnp.concatenate([jnp.stack(first), usage.chosen / choices])


def loss_weights(load_balance: float, z_loss: float, experts: int) -> np.ndarray:
    """The weight of each number of `router_metrics` in the loss, float32."""
    return np.array([load_balance, z_loss, *[0.0] * (2 + experts)], np.float32)
