"""MaxText's models in plain numpy, as a reference to compare loaded models with.

It reads MaxText's own names and shares neither formulas nor the places of layers with the rest.
"""

import itertools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from linen_compat.formats._orbax.arrays import StoredArrays
from linen_compat.formats._orbax.chunks import Index
from linen_compat.formats._orbax.inspect import Inspection
from nnx_pipeline.config.model import ModelConfig

Weight = Callable[[str], np.ndarray]
_KERNELS = ("wi_0", "wi_1", "wo")


def hidden_states(
    contents: Inspection, config: ModelConfig, tokens: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the embedding `[batch, seq, …]`, each layer's and the logits, with names."""
    files = StoredArrays(contents.items)

    def weight(name: str, index: Index = ()) -> np.ndarray:
        return files.read(contents.parameters[name].stored, index).astype(np.float32)

    x = weight("token_embedder/embedding")[tokens]
    yield "token_embedder", x
    for layer in range(config.num_layers):
        prefix, index = slot_of(contents, layer)

        def of_layer(name: str, prefix: str = prefix, index: Index = index) -> np.ndarray:
            return weight(f"{prefix}/{name}", index)

        early = layer < config.num_dense_layers
        x = _layer(x, of_layer, config.of_dense_layers if early else config)
        yield f"layer {layer} ({prefix}{list(index) if index else ''})", x
    x = _norm(x, weight("decoder/decoder_norm/scale"), config)
    yield "logits", _capped(x @ _head(weight, config), config.logits_soft_cap)


def _head(weight: Weight, config: ModelConfig) -> np.ndarray:
    if not config.tied_embeddings:
        return weight("decoder/logits_dense/kernel")
    table = weight("token_embedder/embedding").T
    rounded = config.tied_head_dtype
    return table.astype(jnp.dtype(rounded)).astype(np.float32) if rounded else table


def slot_of(contents: Inspection, layer: int) -> tuple[str, Index]:
    """The path and the index of a layer, found by counting the layers in their order."""
    layout = contents.layout
    dense, group = layout.num_dense_layers, "moe_layers" if contents.is_latent else "layers"
    if layer < dense and layout.format == "maxtext:pipelined":
        return "decoder/dense_layers", (slice(None), layer)
    if layer < dense:
        group = "dense_layers"
    else:
        layer -= dense
    if layout.format == "maxtext:unscanned":
        return f"decoder/{group}_{layer}", ()
    if layout.format == "maxtext:scanned":
        return f"decoder/{group}", (slice(None), layer)
    sizes = (layout.repeats, layout.stages, layout.layers_per_stage)
    repeat, stage, j = [*itertools.product(*map(range, sizes))][layer]
    inner = f"/layers_{j}" if layout.layers_per_stage > 1 else ""
    index = (repeat, stage) if layout.repeats > 1 else (stage,)
    return f"decoder/pipeline_module/layers{inner}", index


def _layer(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    attention = _attention if config.kv_lora_rank is None else _latent_attention
    x = x + attention(
        _norm(x, weight("pre_self_attention_layer_norm/scale"), config), weight, config
    )
    normed = _norm(x, weight("post_self_attention_layer_norm/scale"), config)
    if config.num_experts > 1:
        experts = _experts if config.kv_lora_rank is None else _experts_of_deepseek
        x += experts(normed, weight, config)
    else:
        x += _mlp(normed, *(weight(f"mlp/{name}/kernel") for name in _KERNELS))
    return x


def _norm(x: np.ndarray, scale: np.ndarray, config: ModelConfig) -> np.ndarray:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: np.ndarray = x / np.sqrt(mean + np.float32(config.norm_epsilon)) * scale
    return normed


def _attention(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    query, key, value = (
        _einsum("bsd,dhk->bhsk", x, weight(f"self_attention/{name}/kernel"))
        for name in ("query", "key", "value")
    )
    if config.attention_bias:
        query, key, value = (
            one + weight(f"self_attention/{name}/bias")[:, None]
            for one, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        query = query * np.float32(config.head_dim**-0.5)
    if config.qk_norm:
        query = _norm(query, weight("self_attention/query_norm/scale"), config)
        query = query * np.float32(config.head_dim**-0.5)
        key = _norm(key, weight("self_attention/key_norm/scale"), config)
    query, key = _rotate(query, config), _rotate(key, config)
    group = config.num_heads // config.num_kv_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    mixed = _mixed(query, key, value, config)
    return _einsum("bshk,hkd->bsd", mixed, weight("self_attention/out/kernel"))


def _mixed(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, config: ModelConfig
) -> np.ndarray:
    """Values mixed by the scores of queries and keys, `[batch, heads, seq, …]` each."""
    scores = _einsum("bhsk,bhtk->bhst", query, key)
    scores = _capped(scores, config.attention_soft_cap)
    length = query.shape[2]
    seen = np.tri(length, dtype=bool)
    if config.sliding_window is not None:
        seen &= ~np.tri(length, k=-config.sliding_window, dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    return _einsum("bhst,bhtk->bshk", _softmax(scores), value)


def _latent_attention(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    """Attention through latent vectors; all heads share the rotated part of a key."""

    def of(name: str) -> np.ndarray:
        return weight(f"self_attention/{name}")

    rank, plain = config.kv_lora_rank, config.head_dim - config.rope_dim
    if config.q_lora_rank is None:
        query = _einsum("bsd,dhk->bhsk", x, of("query/kernel"))
    else:
        latent = _norm(x @ of("wq_a/kernel"), of("q_norm/scale"), config)
        query = _einsum("bsr,rhk->bhsk", latent, of("wq_b/kernel"))
    low = x @ of("wkv_a/kernel")
    latent = _norm(low[..., :rank], of("kv_norm/scale"), config)
    both = _einsum("bsr,rhk->bhsk", latent, of("wkv_b/kernel"))
    turned = _rotate(low[:, None, :, rank:], config)
    turned = np.broadcast_to(turned, (*both.shape[:-1], config.rope_dim))
    key = np.concatenate([both[..., :plain], turned], axis=-1)
    query = np.concatenate([query[..., :plain], _rotate(query[..., plain:], config)], axis=-1)
    query = query * np.float32(config.attention_scale)
    mixed = _mixed(query, key, both[..., plain:], config)
    return _einsum("bshk,hkd->bsd", mixed, of("out/kernel"))


def _einsum(formula: str, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.einsum(formula, first, second)
    return result


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else np.multiply(np.float32(cap), np.tanh(x / np.float32(cap)))


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.rope_dim // 2
    angles = np.arange(x.shape[2])[:, None] * _rates(config)
    sine, cosine = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    if config.rope_interleaved:
        turned = np.empty_like(x)
        first, second = x[..., 0::2], x[..., 1::2]
        turned[..., 0::2] = first * cosine - second * sine
        turned[..., 1::2] = second * cosine + first * sine
        return turned
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _rates(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, in float64."""
    half = config.rope_dim // 2
    rates = config.rope_theta ** (-np.arange(half) / half)
    if config.rope_scaling is None:
        return rates
    slow = rates / config.rope_slowing
    if config.rope_scaling == "linear":
        return slow
    length, low, high = config.rope_limits
    if config.rope_scaling == "yarn":
        # The places at which a pair would turn so often, counted in numbers, not in pairs.
        base = 2 * np.log(config.rope_theta)
        start, end = (
            config.rope_dim * np.log(length / (turns * 2 * np.pi)) / base for turns in (high, low)
        )
        start, end = max(np.floor(start), 0), min(np.ceil(end), config.rope_dim - 1)
        ramp = np.clip((np.arange(half) - start) / max(end - start, 1e-3), 0, 1)
        mixed: np.ndarray = slow * ramp + rates * (1 - ramp)
        return mixed
    wavelength = 2 * np.pi / rates
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * slow + smooth * rates
    long, short = wavelength > length / low, wavelength < length / high
    return np.where(long, slow, np.where(short, rates, between))


def _experts(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    block = "moe_block" if config.qk_norm else "MoeBlock_0"
    scores = x @ weight(f"{block}/gate/kernel")
    # A stable sort gives ties to the lower index, as `jax.lax.top_k` does.
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., : config.num_experts_per_token]
    shares = _softmax(np.take_along_axis(scores, chosen, axis=-1))
    return _mix_of_experts(x, chosen, shares, [weight(f"{block}/{name}") for name in _KERNELS])


def _experts_of_deepseek(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    """Routed experts, whose choice a bias may correct, and shared experts."""
    block = "DeepSeekMoeBlock_0"
    logits = x @ weight(f"{block}/MoeBlock_0/gate/kernel")
    scores = 1 / (1 + np.exp(-logits)) if config.router_score == "sigmoid" else _softmax(logits)
    bias = weight(f"{block}/MoeBlock_0/gate/bias") if config.router_bias else np.float32(0)
    ranked = scores + bias
    if config.router_groups > 1:
        grouped = ranked.reshape(*ranked.shape[:-1], config.router_groups, -1)
        best = np.sum(np.sort(grouped, axis=-1)[..., -2:], axis=-1)
        top = np.argsort(-best, axis=-1, kind="stable")[..., : config.router_groups_per_token]
        open_ = np.zeros(best.shape, dtype=bool)
        np.put_along_axis(open_, top, values=True, axis=-1)
        grouped = np.where(open_[..., None], grouped, -np.inf)
        ranked = grouped.reshape(ranked.shape)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[..., : config.num_experts_per_token]
    weighed = scores + bias if config.router_bias_in_weights else scores
    shares = np.take_along_axis(weighed, chosen, axis=-1)
    if config.router_score == "sigmoid":
        shares = shares / (np.sum(shares, axis=-1, keepdims=True) + 1e-20)
    shares = shares * np.float32(config.router_scale)
    kernels = [weight(f"{block}/MoeBlock_0/{name}") for name in _KERNELS]
    shared = (weight(f"{block}/shared_experts/{name}/kernel") for name in _KERNELS)
    result = _mix_of_experts(x, chosen, shares, kernels)
    result += _mlp(x, *shared)
    return result


def _mix_of_experts(
    x: np.ndarray, chosen: np.ndarray, shares: np.ndarray, kernels: list[np.ndarray]
) -> np.ndarray:
    """The sum of the chosen experts' results, each times its share."""
    gate, up, down = kernels
    result = np.zeros_like(x)
    for expert in range(len(gate)):
        share = np.sum(np.where(chosen == expert, shares, 0), axis=-1, keepdims=True)
        result += share * _mlp(x, gate[expert], up[expert], down[expert])
    return result


def _mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = x @ gate
    result: np.ndarray = (gated / (1 + np.exp(-gated)) * (x @ up)) @ down
    return result


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    shares: np.ndarray = powers / np.sum(powers, axis=-1, keepdims=True)
    return shares
