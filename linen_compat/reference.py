"""MaxText's Mixtral and Llama in plain numpy, as a reference to compare loaded models with.

It reads MaxText's own names and shares neither formulas nor the places of layers with the rest of
the project. One layer of weights is in memory at a time; everything is computed in float32.
"""

from collections.abc import Callable, Iterator

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
    yield "logits", x @ weight("decoder/logits_dense/kernel")


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
    query, key = _rotate(query, config), _rotate(key, config)
    group = config.num_heads // config.num_kv_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = np.einsum("bhsk,bhtk->bhst", query, key)
    length = x.shape[1]
    seen = np.tri(length, dtype=bool)
    if config.sliding_window is not None:
        seen &= ~np.tri(length, k=-config.sliding_window, dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    mixed = np.einsum("bhst,bhtk->bshk", _softmax(scores), value)
    return np.einsum("bshk,hkd->bsd", mixed, weight("self_attention/out/kernel"))


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    half = config.head_dim // 2
    rates = config.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(x.shape[2])[:, None] * rates
    sine, cosine = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _experts(x: np.ndarray, weight: Weight, config: ModelConfig) -> np.ndarray:
    scores = x @ weight("MoeBlock_0/gate/kernel")
    # A stable sort gives ties to the lower index, as `jax.lax.top_k` does.
    chosen = np.argsort(-scores, axis=-1, kind="stable")[..., : config.num_experts_per_token]
    shares = _softmax(np.take_along_axis(scores, chosen, axis=-1))
    gate, up, down = (weight(f"MoeBlock_0/{name}") for name in ("wi_0", "wi_1", "wo"))
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
