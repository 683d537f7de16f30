"""MaxText's Mixtral, Qwen3 and Llama in plain numpy, as a reference to compare loaded models with.

It reads MaxText's own names and shares neither formulas nor the places of layers with the rest of
the project. One layer of weights is in memory at a time; everything is computed in float32.
"""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from linen_compat.formats.orbax.arrays import StoredArrays
from linen_compat.formats.orbax.chunks import Index
from linen_compat.formats.orbax.inspect import Inspection
from nnx_pipeline.config.model import ModelConfig

Weight = Callable[[str], np.ndarray]


def hidden_states(
    found: Inspection, config: ModelConfig, tokens: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the results of the embedding and of each layer, and at last the logits, with names.

    Each value is a float32 array `[batch, seq, …]`.

    - `found`: a checkpoint of MaxText, in any layout.
    - `config`: of the model that the checkpoint holds.
    - `tokens`: `[batch, seq]`, one document per row.
    """
    files = StoredArrays(found.items)

    def weight(name: str, index: Index = ()) -> np.ndarray:
        return files.read(found.parameters[name].stored, index).astype(np.float32)

    x = weight("token_embedder/embedding")[tokens]
    yield "token_embedder", x
    for layer in range(config.num_layers):
        prefix, index = place_of(found, layer)

        def of_layer(name: str, prefix: str = prefix, index: Index = index) -> np.ndarray:
            return weight(f"{prefix}/{name}", index)

        x = _layer(x, of_layer, config)
        yield f"layer {layer} ({prefix}{list(index) if index else ''})", x
    x = _norm(x, weight("decoder/decoder_norm/scale"), config)
    yield "logits", _capped(x @ _head(weight, config), config.logits_soft_cap)


def _head(weight: Weight, config: ModelConfig) -> np.ndarray:
    if not config.tied_embeddings:
        return weight("decoder/logits_dense/kernel")
    table = weight("token_embedder/embedding").T
    rounded = config.tied_head_dtype
    return table.astype(jnp.dtype(rounded)).astype(np.float32) if rounded else table


def place_of(found: Inspection, layer: int) -> tuple[str, Index]:
    """The path and the index of a layer, found by counting the layers in their order."""
    layout = found.layout
    if layout.format == "maxtext:unscanned":
        return f"decoder/layers_{layer}", ()
    if layout.format == "maxtext:scanned":
        return "decoder/layers", (slice(None), layer)
    number, base = 0, "decoder/pipeline_module/layers"
    for repeat in range(layout.repeats):
        for stage in range(layout.stages):
            for j in range(layout.layers_per_stage):
                if number == layer:
                    own = f"{base}/layers_{j}" if layout.layers_per_stage > 1 else base
                    return own, ((repeat, stage) if layout.repeats > 1 else (stage,))
                number += 1
    raise IndexError(f"layer {layer} of {number}")


def _layer(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    x = x + _attention(
        _norm(x, weight("pre_self_attention_layer_norm/scale"), config), weight, config
    )
    normed = _norm(x, weight("post_self_attention_layer_norm/scale"), config)
    if config.num_experts > 1:
        return x + _experts(normed, weight, config)
    names = ("mlp/wi_0/kernel", "mlp/wi_1/kernel", "mlp/wo/kernel")
    return x + _mlp(normed, *(weight(name) for name in names))


def _norm(x: np.ndarray, scale: np.ndarray, config: ModelConfig) -> np.ndarray:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean + np.float32(config.norm_epsilon)) * scale


def _attention(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    query, key, value = (
        np.einsum("bsd,dhk->bhsk", x, weight(f"self_attention/{name}/kernel"))
        for name in ("query", "key", "value")
    )
    if config.qk_norm:
        query = _norm(query, weight("self_attention/query_norm/scale"), config)
        query = query * np.float32(config.head_dim**-0.5)
        key = _norm(key, weight("self_attention/key_norm/scale"), config)
    query, key = _rotate(query, config), _rotate(key, config)
    group = config.num_heads // config.num_kv_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = np.einsum("bhsk,bhtk->bhst", query, key)
    scores = _capped(scores, config.attention_soft_cap)
    length = x.shape[1]
    seen = np.tri(length, dtype=bool)
    if config.sliding_window is not None:
        seen &= ~np.tri(length, k=-config.sliding_window, dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    mixed = np.einsum("bhst,bhtk->bshk", _softmax(scores), value)
    return np.einsum("bshk,hkd->bsd", mixed, weight("self_attention/out/kernel"))


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
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
    half = config.head_dim // 2
    rates = config.rope_theta ** (-np.arange(half) / half)
    if config.rope_scaling is None:
        return rates
    slow = rates / config.rope_slowing
    if config.rope_scaling == "linear":
        return slow
    length, low, high = config.rope_limits
    wavelength = 2 * np.pi / rates
    smooth = (length / wavelength - low) / (high - low)
    mixed = (1 - smooth) * slow + smooth * rates
    long, short = wavelength > length / low, wavelength < length / high
    return np.where(long, slow, np.where(short, rates, mixed))


def _experts(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    block = "moe_block" if config.qk_norm else "MoeBlock_0"
    scores = x @ weight(f"{block}/gate/kernel")
    # A stable sort gives ties to the lower index, as `jax.lax.top_k` does.
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., : config.num_experts_per_token]
    shares = _softmax(np.take_along_axis(scores, chosen, axis=-1))
    gate, up, down = (weight(f"{block}/{name}") for name in ("wi_0", "wi_1", "wo"))
    result = np.zeros_like(x)
    for expert in range(config.num_experts):
        share = np.sum(np.where(chosen == expert, shares, 0), axis=-1, keepdims=True)
        result += share * _mlp(x, gate[expert], up[expert], down[expert])
    return result


def _mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)
