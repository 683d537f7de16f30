"""Shape and dtype of every parameter of a model, from its config alone: nothing is traced."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

import ml_dtypes  # noqa: F401  # makes bfloat16 known to numpy
import numpy as np

from linen_compat.formats._names import EARLY, PATHS_OUTSIDE, check_names
from linen_compat.formats._streams import ArraySpec
from nnx_pipeline.config.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@functools.lru_cache(maxsize=16)
def model_arrays(config: ModelConfig) -> Mapping[str, ArraySpec]:
    """Shape and dtype of each parameter by NNX path, those of the layers as in one layer."""
    check_names(config)
    embed, vocabulary = config.embed_dim, config.vocab_size
    shapes: Shapes = {"embedding.embedding": (vocabulary, embed), "norm.scale": (embed,)}
    if not config.tied_embeddings:
        shapes["head"] = (embed, vocabulary)
    if config.num_dense_layers:
        dense = _of_layer(config.of_dense_layers)
        shapes |= {EARLY + path: shape for path, shape in dense.items()}
    shapes |= _of_layer(config)
    arrays = {
        path: ArraySpec(shapes[path], _dtype(path, config)) for path in sorted(shapes, key=_place)
    }
    return MappingProxyType(arrays)


def _place(path: str) -> tuple[bool, list[str]]:
    """What sorts paths as the tree of a model does, in which the layers are below `pipeline`."""
    return path not in PATHS_OUTSIDE and not path.startswith(EARLY), path.split(".")


def _dtype(path: str, config: ModelConfig) -> np.dtype:
    chooses = path.endswith(".router_bias")  # an expert, which rounding would change
    return np.dtype("float32" if chooses else config.param_dtype)


def _of_layer(config: ModelConfig) -> Shapes:
    attention = _of_attention if config.kv_lora_rank is None else _of_latent_attention
    shapes = {f"attention.{name}": shape for name, shape in attention(config).items()}
    blocks = _of_experts if config.num_experts > 1 else _of_mlp
    shapes |= {f"feed_forward.{name}": shape for name, shape in blocks(config).items()}
    norms = {"before": ("norm",), "after": ("post_norm",), "both": ("norm", "post_norm")}
    for norm in norms[config.norm_placement]:
        shapes |= {f"{block}_{norm}.scale": (config.embed_dim,) for block in _BLOCKS}
    return shapes


_BLOCKS = ("attention", "feed_forward")


def _of_attention(config: ModelConfig) -> Shapes:
    embed, head = config.embed_dim, config.head_dim
    heads, groups = (config.num_heads, head), (config.num_kv_heads, head)
    shapes: Shapes = {"query": (embed, *heads), "key": (embed, *groups), "value": (embed, *groups)}
    shapes["out"] = (*heads, embed)
    if config.attention_bias is not None:
        shapes |= {"query_bias": heads, "key_bias": groups, "value_bias": groups}
    if config.attention_bias == "all":
        shapes["out_bias"] = (embed,)
    if config.attention_sinks:
        shapes["sinks"] = heads[:1]
    if config.qk_norm:
        whole = config.qk_norm_over_heads
        shapes["query_norm.scale"] = heads if whole else (head,)
        shapes["key_norm.scale"] = groups if whole else (head,)
    return shapes


def _of_latent_attention(config: ModelConfig) -> Shapes:
    assert config.kv_lora_rank is not None, "the config has checked it"
    assert config.value_head_dim is not None, "the config has checked it"
    embed, heads, head = config.embed_dim, config.num_heads, config.head_dim
    rank, value = config.kv_lora_rank, config.value_head_dim
    shapes: Shapes = {
        "kv_down": (embed, rank + config.rope_dim),
        "kv_norm.scale": (rank,),
        "kv_up": (rank, heads, head - config.rope_dim + value),
        "out": (heads, value, embed),
        "query": (config.q_lora_rank or embed, heads, head),
    }
    if config.q_lora_rank is not None:
        shapes["query_down"] = (embed, config.q_lora_rank)
        shapes["query_norm.scale"] = (config.q_lora_rank,)
    return shapes


def _of_mlp(config: ModelConfig, width: int | None = None) -> Shapes:
    embed, width = config.embed_dim, width or config.mlp_dim
    return {"gate": (embed, width), "up": (embed, width), "down": (width, embed)}


def _of_experts(config: ModelConfig) -> Shapes:
    experts, embed, width = config.num_experts, config.embed_dim, config.mlp_dim
    shapes: Shapes = {name: (experts, *shape) for name, shape in _of_mlp(config).items()}
    shapes["router"] = (embed, experts)
    if config.router_bias:
        shapes["router_bias"] = (experts,)
    if config.router_logits_bias:
        shapes["router_logits_bias"] = (experts,)
    if config.expert_bias:
        wide = (experts, width)
        shapes |= {"gate_bias": wide, "up_bias": wide, "down_bias": (experts, embed)}
    if config.num_shared_experts:
        shared = _of_mlp(config, config.num_shared_experts * width)
        shapes |= {f"shared.{name}": shape for name, shape in shared.items()}
    return shapes
