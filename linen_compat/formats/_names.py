"""The name of each parameter here, in MaxText's Linen tree and in Hugging Face's files.

A model may have layers of two kinds, dense ones before those of the pipeline (DeepSeek). Each
kind has names of its own, and layers are numbered from 0 within their kind.
"""

import dataclasses
from collections.abc import Container, Iterable
from dataclasses import dataclass

from nnx_pipeline import InputError, ModelConfig


@dataclass(frozen=True)
class Names:
    """The three names of one parameter; those of a layer's start below the layer.

    In Hugging Face's, `<expert>` stands for one tensor for each expert. `group` is what MaxText
    calls the layers of this kind, where they are not in a pipeline.
    """

    nnx: str
    linen: str
    huggingface: str
    group: str = "layers"

    @property
    def is_early(self) -> bool:
        """Whether the parameter belongs to a layer before the pipeline."""
        return self.nnx.startswith(EARLY)


ORBAX = "an Orbax checkpoint"
EARLY = "dense_layers."  # the beginning of the NNX paths of layers before the pipeline
_ROUTED, _SHARED = "DeepSeekMoeBlock_0/MoeBlock_0", "DeepSeekMoeBlock_0/shared_experts"
_HF_SHARED = "mlp.shared_experts"
_HF_QUERY_NORM, _HF_KV_NORM = "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"
OUTSIDE = (
    Names("embedding.embedding", "token_embedder/embedding", "model.embed_tokens.weight"),
    Names("norm.scale", "decoder/decoder_norm/scale", "model.norm.weight"),
    Names("head", "decoder/logits_dense/kernel", "lm_head.weight"),
)
PATHS_OUTSIDE = frozenset(names.nnx for names in OUTSIDE)
TOKENS = (OUTSIDE[0], OUTSIDE[2])  # those with a vocabulary axis
ATTENTION = (
    Names("attention.query", "self_attention/query/kernel", "self_attn.q_proj.weight"),
    Names("attention.key", "self_attention/key/kernel", "self_attn.k_proj.weight"),
    Names("attention.value", "self_attention/value/kernel", "self_attn.v_proj.weight"),
    Names("attention.out", "self_attention/out/kernel", "self_attn.o_proj.weight"),
)
BIASES = (
    Names("attention.query_bias", "self_attention/query/bias", "self_attn.q_proj.bias"),
    Names("attention.key_bias", "self_attention/key/bias", "self_attn.k_proj.bias"),
    Names("attention.value_bias", "self_attention/value/bias", "self_attn.v_proj.bias"),
    Names("attention.out_bias", "self_attention/out/bias", "self_attn.o_proj.bias"),
)
SINKS = Names("attention.sinks", "self_attention/sinks", "self_attn.sinks")
QK_NORMS = (
    Names(
        "attention.query_norm.scale", "self_attention/query_norm/scale", "self_attn.q_norm.weight"
    ),
    Names("attention.key_norm.scale", "self_attention/key_norm/scale", "self_attn.k_norm.weight"),
)
NORMS = (
    Names("attention_norm.scale", "pre_self_attention_layer_norm/scale", "input_layernorm.weight"),
    Names(
        "feed_forward_norm.scale",
        "post_self_attention_layer_norm/scale",
        "post_attention_layernorm.weight",
    ),
)
POST_NORMS = (
    Names(
        "attention_post_norm.scale",
        "post_self_attention_norm/scale",
        "post_attention_layernorm.weight",
    ),
    Names(
        "feed_forward_post_norm.scale", "post_ffw_norm/scale", "post_feedforward_layernorm.weight"
    ),
)
EXPERTS = (
    Names("feed_forward.router", "MoeBlock_0/gate/kernel", "block_sparse_moe.gate.weight"),
    Names("feed_forward.gate", "MoeBlock_0/wi_0", "block_sparse_moe.experts.<expert>.w1.weight"),
    Names("feed_forward.up", "MoeBlock_0/wi_1", "block_sparse_moe.experts.<expert>.w3.weight"),
    Names("feed_forward.down", "MoeBlock_0/wo", "block_sparse_moe.experts.<expert>.w2.weight"),
)
EXPERTS_OF_QWEN3 = (
    Names("feed_forward.router", "moe_block/gate/kernel", "mlp.gate.weight"),
    Names("feed_forward.gate", "moe_block/wi_0", "mlp.experts.<expert>.gate_proj.weight"),
    Names("feed_forward.up", "moe_block/wi_1", "mlp.experts.<expert>.up_proj.weight"),
    Names("feed_forward.down", "moe_block/wo", "mlp.experts.<expert>.down_proj.weight"),
)
# Biases of routers and experts, of layers that have them.
EXPERT_BIASES = (
    Names("feed_forward.router_logits_bias", "MoeBlock_0/gate/bias", "mlp.router.bias"),
    Names("feed_forward.gate_bias", "MoeBlock_0/wi_0_bias", "mlp.experts.gate_up_proj_bias"),
    Names("feed_forward.up_bias", "MoeBlock_0/wi_1_bias", "mlp.experts.gate_up_proj_bias"),
    Names("feed_forward.down_bias", "MoeBlock_0/wo_bias", "mlp.experts.down_proj_bias"),
)
MLP = (
    Names("feed_forward.gate", "mlp/wi_0/kernel", "mlp.gate_proj.weight"),
    Names("feed_forward.up", "mlp/wi_1/kernel", "mlp.up_proj.weight"),
    Names("feed_forward.down", "mlp/wo/kernel", "mlp.down_proj.weight"),
)
LATENT_ATTENTION = (
    Names("attention.query_down", "self_attention/wq_a/kernel", "self_attn.q_a_proj.weight"),
    Names("attention.query_norm.scale", "self_attention/q_norm/scale", _HF_QUERY_NORM),
    Names("attention.query", "self_attention/wq_b/kernel", "self_attn.q_b_proj.weight"),
    Names(
        "attention.kv_down", "self_attention/wkv_a/kernel", "self_attn.kv_a_proj_with_mqa.weight"
    ),
    Names("attention.kv_norm.scale", "self_attention/kv_norm/scale", _HF_KV_NORM),
    Names("attention.kv_up", "self_attention/wkv_b/kernel", "self_attn.kv_b_proj.weight"),
    Names("attention.out", "self_attention/out/kernel", "self_attn.o_proj.weight"),
)
# Without a latent vector of queries, which some models have not.
PLAIN_QUERY = (
    Names("attention.query", "self_attention/query/kernel", "self_attn.q_proj.weight"),
    *LATENT_ATTENTION[3:],
)
EXPERTS_OF_DEEPSEEK = (
    Names("feed_forward.router", f"{_ROUTED}/gate/kernel", "mlp.gate.weight"),
    Names("feed_forward.router_bias", f"{_ROUTED}/gate/bias", "mlp.gate.e_score_correction_bias"),
    Names("feed_forward.gate", f"{_ROUTED}/wi_0", "mlp.experts.<expert>.gate_proj.weight"),
    Names("feed_forward.up", f"{_ROUTED}/wi_1", "mlp.experts.<expert>.up_proj.weight"),
    Names("feed_forward.down", f"{_ROUTED}/wo", "mlp.experts.<expert>.down_proj.weight"),
    Names("feed_forward.shared.gate", f"{_SHARED}/wi_0/kernel", f"{_HF_SHARED}.gate_proj.weight"),
    Names("feed_forward.shared.up", f"{_SHARED}/wi_1/kernel", f"{_HF_SHARED}.up_proj.weight"),
    Names("feed_forward.shared.down", f"{_SHARED}/wo/kernel", f"{_HF_SHARED}.down_proj.weight"),
)
OPTIONAL = (*BIASES, SINKS, *POST_NORMS)  # what layers of any kind may have besides
ROUTER_BIAS = EXPERTS_OF_DEEPSEEK[1]
_ROUTED_ALWAYS = (EXPERTS_OF_DEEPSEEK[0], *EXPERTS_OF_DEEPSEEK[2:5])
KV_DOWN = LATENT_ATTENTION[3]


def input_axes(path: str) -> int:
    """How many of the axes of a kernel, which are the first ones, are those of its input."""
    return 2 if path.removeprefix(EARLY) == "attention.out" else 1


def _grouped(names: Iterable[Names], group: str, start: str = "") -> tuple[Names, ...]:
    return tuple(dataclasses.replace(entry, nnx=start + entry.nnx, group=group) for entry in names)


def check_names(model: ModelConfig) -> None:
    """Raises InputError for a model with parameters that have no name in the tables above."""
    if model.kv_lora_rank is not None and model.num_experts == 1:
        raise InputError(
            f"model.kv_lora_rank={model.kv_lora_rank} with num_experts=1 has no names in Linen "
            "or in a checkpoint, where layers with latent attention have experts; set "
            "num_experts to 2 or more"
        )


def is_apart(model: ModelConfig) -> bool:
    """Whether layers have what MaxText's DeepSeek alone has, and so the names of its groups."""
    more = model.router_bias or model.num_shared_experts or model.num_dense_layers
    return model.kv_lora_rank is not None or bool(more)


def check_one_kind(model: ModelConfig, where: str) -> None:
    """Raises InputError for a model whose layers are of several kinds that take turns."""
    if len(model.of_kinds) > 1:
        name = "every" if model.full_attention_every is not None else "first"
        raise InputError(
            f"model.full_attention_{name}={getattr(model, f'full_attention_{name}')} makes layers "
            f"of several kinds that take turns, which have no names in {where}; they have in a "
            "Hugging Face folder"
        )


def of_layer(num_experts: int, *, qk_norm: bool = False) -> tuple[Names, ...]:
    """The parameters of a layer without latent attention: of Qwen3 with QK norm, or Mixtral."""
    experts = EXPERTS_OF_QWEN3 if qk_norm else EXPERTS
    attention = (*ATTENTION, *QK_NORMS) if qk_norm else ATTENTION
    return (*NORMS, *attention, *(experts if num_experts > 1 else MLP))


def of_deepseek(paths: Container[str]) -> tuple[Names, ...]:
    """The parameters of layers with latent attention: of those with experts, then dense ones."""
    attention = LATENT_ATTENTION if LATENT_ATTENTION[0].nnx in paths else PLAIN_QUERY
    return _in_groups((*NORMS, *attention), paths)


def _in_groups(shared: tuple[Names, ...], paths: Container[str]) -> tuple[Names, ...]:
    """The parameters of layers with experts, then dense ones; `shared` are those that both have."""
    named = (n for n in EXPERTS_OF_DEEPSEEK if n in _ROUTED_ALWAYS or n.nnx in paths)
    routed = _grouped((*shared, *named), "moe_layers")
    dense = _grouped((*shared, *MLP), "dense_layers", EARLY)
    return (*routed, *(dense if any(entry.nnx in paths for entry in dense) else ()))


def of_model(paths: Container[str]) -> tuple[tuple[Names, ...], tuple[Names, ...]]:
    """The parameters outside the layers, and in a layer of each kind, by all NNX paths."""
    outside = tuple(names for names in OUTSIDE if names.nnx in paths)  # no head: it is tied
    if KV_DOWN.nnx in paths:
        return outside, of_deepseek(paths)
    shared = (*NORMS, *ATTENTION, *OPTIONAL, *QK_NORMS)
    attention = tuple(names for names in shared if names.nnx in paths)
    if any(names.nnx in paths for names in _APART):
        return outside, _in_groups(attention, paths)
    experts: tuple[Names, ...] = MLP
    if EXPERTS[0].nnx in paths:
        experts = EXPERTS_OF_QWEN3 if QK_NORMS[0].nnx in paths else EXPERTS
    biases = tuple(names for names in EXPERT_BIASES if names.nnx in paths)
    return outside, (*attention, *experts, *biases)


# What layers have that MaxText calls `moe_layers`, as DeepSeek's, rather than `layers`.
_APART = (
    ROUTER_BIAS,
    EXPERTS_OF_DEEPSEEK[5],
    dataclasses.replace(NORMS[0], nnx=EARLY + NORMS[0].nnx),
)
# Each parameter of a layer of any model, with the group of layers that it can be in.
_ATTENTION = (*NORMS, *LATENT_ATTENTION, PLAIN_QUERY[0], *ATTENTION[1:3], *OPTIONAL, *QK_NORMS)
OF_DEEPSEEK = (
    *_grouped((*NORMS, *LATENT_ATTENTION, PLAIN_QUERY[0], *EXPERTS_OF_DEEPSEEK), "moe_layers"),
    *_grouped((*NORMS, *LATENT_ATTENTION, PLAIN_QUERY[0], *MLP), "dense_layers", EARLY),
)
ALL_OF_LAYERS = (*_ATTENTION, *EXPERTS, *EXPERT_BIASES, *EXPERTS_OF_QWEN3, *MLP, *OF_DEEPSEEK)
