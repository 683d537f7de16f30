"""Mixtral in plain `jnp`, written from the rules and not from the package: no mesh, no pipeline."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx_pipeline import Config, Mixtral
from nnx_pipeline.config.model import ModelConfig

Layer = dict[str, jax.Array]
BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")


class Weights(NamedTuple):
    """All weights as plain arrays; those of the layers are `[layers, …]` each."""

    embedding: Any
    layers: dict[str, Any]
    norm: Any
    head: Any  # None with tied embeddings


class Side(NamedTuple):
    """What layers read beside activations, `[batch, seq]` each, and keys `[batch, words]`."""

    positions: Any
    segments: Any
    keys: Any = None


def weights_of(model: Mixtral) -> Weights:
    """The weights of a model, or the gradients in its structure, with the layers in order."""
    kinds = (
        model.pipeline.layers if len(model.config.model.of_kinds) > 1 else [model.pipeline.layers]
    )
    found = [_variables(model, part) for part in kinds]

    def stacked(*variables: Any) -> np.ndarray:
        arrays = [np.asarray(variable.get_value()) for variable in variables]
        in_turn = np.stack([array.reshape(-1, *array.shape[3:]) for array in arrays], axis=1)
        return in_turn.reshape(-1, *in_turn.shape[2:])[: model.config.model.num_layers]

    return Weights(
        np.asarray(model.embedding.embedding.get_value()),
        {name: stacked(*(each[name] for each in found)) for name in found[0]},
        np.asarray(model.norm.scale.get_value()),
        None if model.head is None else np.asarray(model.head.get_value()),
    )


def _variables(model: Mixtral, part: Any) -> dict[str, Any]:
    """The variables of all layers of one kind."""
    norms = {
        "first norm": part.attention_norm,
        "second norm": part.feed_forward_norm,
        "first post norm": part.attention_post_norm,
        "second post norm": part.feed_forward_post_norm,
    }
    variables = {
        **{name: found.scale for name, found in norms.items() if found is not None},
        **{name: getattr(part.attention, name) for name in ("query", "key", "value", "out")},
        **{name: getattr(part.feed_forward, name) for name in ("gate", "up", "down")},
    }
    if model.config.model.num_experts > 1:
        variables["router"] = part.feed_forward.router
        of_experts = {
            "logits bias": part.feed_forward.router_logits_bias,
            "gate bias": part.feed_forward.gate_bias,
            "up bias": part.feed_forward.up_bias,
            "down bias": part.feed_forward.down_bias,
        }
        variables |= {name: found for name, found in of_experts.items() if found is not None}
        if model.config.model.router_bias:
            variables["router bias"] = part.feed_forward.router_bias
        if model.config.model.num_shared_experts:
            shared = part.feed_forward.shared
            variables |= {
                f"shared {name}": getattr(shared, name) for name in ("gate", "up", "down")
            }
    if model.config.model.attention_sinks:
        variables["sinks"] = part.attention.sinks
    biased = {None: (), "qkv": BIASES[:3], "all": BIASES}[model.config.model.attention_bias]
    variables |= {name: getattr(part.attention, name) for name in biased}
    if model.config.model.qk_norm:
        variables["query norm"] = part.attention.query_norm.scale
        variables["key norm"] = part.attention.key_norm.scale
    return variables


def norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    axes = (-2, -1) if scale.ndim == 2 else -1
    root = jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True) + config.norm_epsilon)
    return x / root * (scale + config.norm_scale_offset)


def rotated(x: jax.Array, positions: Any, config: ModelConfig) -> jax.Array:
    """`[batch, seq, heads, head_dim]`, each pair of values as a complex number that is turned."""
    x, rest = x[..., : config.rope_dim], x[..., config.rope_dim :]
    half, speeds = x.shape[-1] // 2, []
    local = config.sliding_window and config.rope_window_theta
    for pair in range(half):
        speed = (local or config.rope_theta) ** (-pair / half)
        if local:
            pass
        elif config.rope_scaling == "yarn":
            share = yarn_share(pair, 2 * half, config)
            speed = (1 - share) * speed + share * speed / config.rope_factor
        elif config.rope_scaling == "linear":
            speed /= config.rope_factor
        elif config.rope_scaling == "llama3":
            turns = config.rope_original_length * speed / (2 * np.pi)
            low, high = config.rope_low_frequency, config.rope_high_frequency
            share = 0 if turns < low else 1 if turns > high else (turns - low) / (high - low)
            speed = share * speed + (1 - share) * speed / config.rope_factor
        speeds.append(speed)
    angle = positions[:, :, None, None] * np.asarray(speeds, x.dtype)
    if config.rope_interleaved:
        real, imaginary = x[..., 0::2], x[..., 1::2]
    else:
        real, imaginary = x[..., :half], x[..., half:]
    turned = jax.lax.complex(real, imaginary) * jax.lax.complex(jnp.cos(angle), jnp.sin(angle))
    turned = turned * config.rope_amplitude
    if config.rope_interleaved:
        return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return jnp.concatenate([turned.real, turned.imag, rest], axis=-1)


def yarn_share(pair: int, width: int, config: ModelConfig) -> float:
    """By how much of the whole a pair is slowed down: a line between two numbers of pairs."""

    def number(turns: float) -> float:
        length = config.rope_original_length
        return width * math.log(length / turns / 2 / math.pi) / 2 / math.log(config.rope_theta)

    first, last = number(config.rope_high_frequency), number(config.rope_low_frequency)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return min(max((pair - first) / (last - first), 0), 1)


def attention(x: jax.Array, layer: Layer, side: Side, config: ModelConfig) -> jax.Array:
    q, k, v = (
        jnp.einsum("bsd,dhk->bshk", x, layer[name]) + layer.get(f"{name}_bias", 0.0)
        for name in ("query", "key", "value")
    )
    if config.qk_norm:
        q, k = norm(q, layer["query norm"], config), norm(k, layer["key norm"], config)
    positions = jnp.asarray(side.positions, x.dtype)
    q, k = (rotated(each, positions, config) for each in (q, k))
    group = config.num_heads // config.num_kv_heads
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = config.attention_scale * jnp.einsum("bqhk,bphk->bhqp", q, k)
    if config.attention_soft_cap:
        scores = config.attention_soft_cap * jnp.tanh(scores / config.attention_soft_cap)
    same = side.segments[:, :, None] == side.segments[:, None, :]
    length = x.shape[1]
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= 0) & (apart < (config.sliding_window or length)) & same
    scores = jnp.where(seen[:, None], scores, -1e30)
    if config.attention_sinks:  # one more key, whose value is 0
        shape = (*scores.shape[:-1], 1)
        sinks = jnp.broadcast_to(layer["sinks"][None, :, None, None], shape)
        scores = jnp.concatenate([scores, sinks], axis=-1)
        v = jnp.concatenate([v, jnp.zeros_like(v[:, :1])], axis=1)
    mixed = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhqp,bphk,hkd->bqd", mixed, v, layer["out"]) + layer.get("out_bias", 0.0)


def gelu_tanh(x: jax.Array) -> jax.Array:
    return x / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped_swish(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.where(gate > 7, 7, gate), jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
    return gate / (1 + jnp.exp(-1.702 * gate)) * (1 + up)


ACTIVATIONS = {
    "silu": lambda gate, up: gate / (1 + jnp.exp(-gate)) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "clamped_swish": clamped_swish,
}


class Reported(NamedTuple):
    """What the routers report, under the names of `RouterMetrics`."""

    load_balance: Any
    z_loss: Any
    dropped: Any
    entropy: Any
    load: Any


def feed_forward(
    x: jax.Array, layer: Layer, segments: Any, config: ModelConfig
) -> tuple[jax.Array, Reported]:
    """Its output, and what the router reports of all of x as one microbatch (0 without one).

    Tokens of segment 0 are padding: they take no room of an expert, and the router does not report
    them.
    """
    act = ACTIVATIONS[config.activation]
    if config.num_experts == 1:
        hidden = act(x @ layer["gate"], x @ layer["up"])
        return hidden @ layer["down"], Reported(*jnp.zeros(4), jnp.zeros(0))
    logits = x @ layer["router"]
    logits = logits + layer["logits bias"] if config.router_logits_bias else logits
    score = jnp.exp(logits) if config.router_score == "softmax" else jax.nn.sigmoid(logits)
    total = jnp.sum(score, axis=-1, keepdims=True)
    rank = score if config.router_score == "sigmoid" else score / total
    if config.router_bias:
        rank = rank + layer["router bias"]
    if config.router_groups > 1:
        in_groups = jnp.stack(jnp.split(rank, config.router_groups, axis=-1), axis=-2)
        best = 2 if config.router_score == "sigmoid" else 1
        sums = jnp.sum(jnp.sort(in_groups, axis=-1)[..., -best:], axis=-1)
        least = jnp.sort(sums, axis=-1)[..., -config.router_groups_per_token, None]
        size = config.num_experts // config.router_groups
        rank = jnp.where(jnp.repeat(sums >= least, size, axis=-1), rank, -jnp.inf)
    takes = jax.nn.one_hot(
        jnp.argsort(-rank, axis=-1)[..., : config.num_experts_per_token],
        config.num_experts,
        dtype=logits.dtype,
    )
    real = (segments != 0).astype(logits.dtype)
    chosen = jnp.sum(takes, axis=-2)
    among = jnp.sum(score * chosen, axis=-1, keepdims=True)
    weights = score / (among if config.router_normalize else 1.0)
    if config.router_score == "softmax" and not config.router_normalize:
        weights = score / total
    reported = chosen * real[..., None]
    kept = chosen
    if config.experts == "capacity":
        kept = within_capacity(takes * real[..., None, None], config)
    share = config.router_scale * weights * kept
    out = jnp.zeros_like(x)
    for e in range(config.num_experts):
        opened, raised = x @ layer["gate"][e], x @ layer["up"][e]
        if config.expert_bias:
            opened, raised = opened + layer["gate bias"][e], raised + layer["up bias"][e]
        result = act(opened, raised) @ layer["down"][e]
        result += layer["down bias"][e] if config.expert_bias else 0.0
        out += share[..., e, None] * result
    if config.num_shared_experts:
        hidden = act(x @ layer["shared gate"], x @ layer["shared up"])
        out += hidden @ layer["shared down"]
    p, count = score / total, jnp.sum(real)
    often = jnp.sum(reported, axis=(0, 1)) / count
    mean_p = jnp.sum(p * real[..., None], axis=(0, 1)) / count
    return out, Reported(
        load_balance=config.num_experts * jnp.sum(often * mean_p),
        z_loss=jnp.sum(real * jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) ** 2) / count,
        dropped=1 - jnp.sum(kept * real[..., None]) / jnp.sum(reported),
        entropy=-jnp.sum(real * jnp.sum(p * jnp.log(p), axis=-1)) / count,
        load=often / config.num_experts_per_token,
    )


def within_capacity(takes: jax.Array, config: ModelConfig) -> jax.Array:
    """Which experts take which tokens, `[batch, seq, experts]`, counted as GShard does.

    - `takes`: one-hot `[batch, seq, chosen, experts]`.
    """
    _, length, chosen, experts = takes.shape
    capacity = math.ceil(length * chosen * (config.capacity_factor or 1.25) / experts)
    in_turn = jnp.swapaxes(takes, 1, 2).reshape(-1, chosen * length, experts)
    kept = jnp.where(jnp.cumsum(in_turn, axis=1) <= capacity, in_turn, 0)
    return jnp.sum(kept.reshape(-1, chosen, length, experts), axis=1)


def dropped(x: jax.Array, keys: Any, numbers: tuple[int, int], rate: float) -> jax.Array:
    """x with a mask for each sequence, from its key, the layer and the place in the layer."""
    if keys is None or not rate:
        return x

    def kept(words: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])

    return jnp.where(jax.vmap(kept)(keys), x / (1.0 - rate), 0.0)


def hidden(weights: Weights, tokens: Any, side: Side, config: ModelConfig) -> tuple[Any, Any]:
    """The output of the last norm, and the mean over layers of what their routers report."""
    x, reported = weights.embedding[tokens] * config.embedding_scale, []
    for number in range(config.num_layers):
        layer = {name: stack[number] for name, stack in weights.layers.items()}
        full = config.full_attention_every and (number + 1) % config.full_attention_every == 0
        full = full or number < config.full_attention_first
        own = dataclasses.replace(
            config,
            sliding_window=None if full else config.sliding_window,
            full_attention_every=None,
            full_attention_first=0,
        )

        def normed(x: jax.Array, name: str, layer: Layer = layer) -> jax.Array:
            return norm(x, layer[name], config) if name in layer else x

        update = attention(normed(x, "first norm"), layer, side, own)
        update = config.residual_scale * normed(update, "first post norm")
        x = x + dropped(update, side.keys, (number, 0), config.dropout_rate)
        update, router = feed_forward(normed(x, "second norm"), layer, side.segments, config)
        update = config.residual_scale * normed(update, "second post norm")
        x = x + dropped(update, side.keys, (number, 1), config.dropout_rate)
        reported.append(router)
    mean = jax.tree.map(lambda *each: sum(each) / config.num_layers, *reported)
    return norm(x, weights.norm, config), mean


def logits(weights: Weights, tokens: Any, side: Side, config: ModelConfig) -> jax.Array:
    return of_hidden(weights, hidden(weights, tokens, side, config)[0], config)


def of_hidden(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    """The logits of hidden states."""
    head = weights.head
    if head is None:
        head = jnp.asarray(weights.embedding).T
        if config.tied_head_dtype:  # rounded values, and the gradient as if they were not
            error = head.astype(config.tied_head_dtype).astype(head.dtype) - head
            head = head + jax.lax.stop_gradient(error)
    cap = config.logits_soft_cap
    x = x / config.logits_divisor
    return cap * jnp.tanh(x @ head / cap) if cap else x @ head


def loss(
    weights: Weights, batch: Any, config: Config, *, microbatches: int, key: Any = None
) -> tuple[jax.Array, tuple[jax.Array, Reported]]:
    """The loss of a batch, the cross-entropy per target in it, and what routers report."""
    count, length = batch.tokens.shape
    positions, segments = batch.positions, batch.segment_ids
    if positions is None:
        positions = np.broadcast_to(np.arange(length), (count, length))
    segments = np.ones((count, length), np.int32) if segments is None else segments
    keys = None
    if key is not None:
        each = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(count))
        keys = jax.random.key_data(each)

    def microbatch(part: tuple[Any, ...]) -> tuple[jax.Array, Reported]:
        tokens, targets, share, *side = part
        x, router = hidden(weights, tokens, Side(*side), config.model)
        log = jax.nn.log_softmax(of_hidden(weights, x, config.model), axis=-1)
        of_target = jnp.take_along_axis(log, targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(share * of_target), router

    whole = (batch.tokens, batch.targets, batch.weights, positions, segments, keys)
    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), whole)
    entropies, reported = jax.vmap(microbatch)(parts)
    entropy = jnp.sum(entropies) / np.sum(batch.weights)
    router = jax.tree.map(lambda each: jnp.mean(each, axis=0), reported)
    routers = config.train.load_balance_weight * router.load_balance
    routers += config.train.router_z_loss_weight * router.z_loss
    return entropy + routers, (entropy, router)
