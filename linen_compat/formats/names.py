"""The name of each parameter in this project, in MaxText's Linen tree and in Hugging Face's files.

There is one table, read in both directions. The path of a parameter of a layer starts below the
layer; `orbax.layouts` knows where each layout puts its layers.
"""

from collections.abc import Container
from dataclasses import dataclass

from nnx_pipeline import InputError, ModelConfig


@dataclass(frozen=True)
class Names:
    """The three names of one parameter.

    - `nnx`: the path in `nnx_pipeline.Mixtral`, or below `pipeline.layers`.
    - `linen`: the path below `params/params`, or below a layer.
    - `huggingface`: the name of the tensor, or what follows `model.layers.<number>`. A name with
      `<expert>` stands for one tensor for each expert.
    """

    nnx: str
    linen: str
    huggingface: str


OUTSIDE = (
    Names("embedding.embedding", "token_embedder/embedding", "model.embed_tokens.weight"),
    Names("norm.scale", "decoder/decoder_norm/scale", "model.norm.weight"),
    Names("head", "decoder/logits_dense/kernel", "lm_head.weight"),
)
TOKENS = (OUTSIDE[0], OUTSIDE[2])  # those with a vocabulary axis
ATTENTION = (
    Names("attention.query", "self_attention/query/kernel", "self_attn.q_proj.weight"),
    Names("attention.key", "self_attention/key/kernel", "self_attn.k_proj.weight"),
    Names("attention.value", "self_attention/value/kernel", "self_attn.v_proj.weight"),
    Names("attention.out", "self_attention/out/kernel", "self_attn.o_proj.weight"),
)
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
MLP = (
    Names("feed_forward.gate", "mlp/wi_0/kernel", "mlp.gate_proj.weight"),
    Names("feed_forward.up", "mlp/wi_1/kernel", "mlp.up_proj.weight"),
    Names("feed_forward.down", "mlp/wo/kernel", "mlp.down_proj.weight"),
)


def check_names(model: ModelConfig) -> None:
    """Raises InputError for a model with parameters that have no name in the tables above."""
    nothing = {"router_bias": False, "num_shared_experts": 0, "attention_bias": None}
    for name, none in nothing.items():
        if getattr(model, name) != none:
            raise InputError(
                f"model.{name}={getattr(model, name)!r} gives layers parameters that have no name "
                f"in Linen or in a checkpoint yet; only a model with {none!r} can be converted"
            )


def of_layer(num_experts: int, *, qk_norm: bool = False) -> tuple[Names, ...]:
    """The parameters of one layer.

    - `num_experts`: with two or more the layer is routed.
    - `qk_norm`: whether queries and keys are normalised. Routed layers have Qwen3's names with it,
      and Mixtral's without.
    """
    experts = EXPERTS_OF_QWEN3 if qk_norm else EXPERTS
    attention = (*ATTENTION, *QK_NORMS) if qk_norm else ATTENTION
    return (*NORMS, *attention, *(experts if num_experts > 1 else MLP))


def of_model(paths: Container[str]) -> tuple[tuple[Names, ...], tuple[Names, ...]]:
    """The parameters outside the layers, and those of a layer, of a model that has these paths.

    - `paths`: the NNX paths of the model's parameters.

    A model without a head has tied embeddings.
    """
    outside = tuple(names for names in OUTSIDE if names.nnx in paths)
    experts = 2 if EXPERTS[0].nnx in paths else 1
    return outside, of_layer(experts, qk_norm=QK_NORMS[0].nnx in paths)


ALL_OF_LAYERS = (*NORMS, *ATTENTION, *QK_NORMS, *EXPERTS, *EXPERTS_OF_QWEN3, *MLP)
