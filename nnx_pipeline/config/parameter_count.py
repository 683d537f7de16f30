"""How many parameters a model has, from its config alone."""

from dataclasses import dataclass

from nnx_pipeline.config.model import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    total: int
    active: int
    """What one token passes through: all but the experts that it is not sent to."""


def count_parameters(model: ModelConfig) -> ParameterCount:
    """The number of parameters of a model, computed from its config alone."""
    expert = 3 * model.embed_dim * model.mlp_dim
    expert += 2 * model.mlp_dim + model.embed_dim if model.expert_bias else 0
    router = model.embed_dim * model.num_experts if model.num_experts > 1 else 0
    router += model.num_experts * (model.router_bias + model.router_logits_bias)
    attention = _attention(model)
    shared = attention + router + model.num_shared_experts * expert
    dense = model.num_dense_layers * (attention + 3 * model.embed_dim * (model.dense_mlp_dim or 0))
    tables = 1 if model.tied_embeddings else 2
    outside = tables * model.vocab_size * model.embed_dim + model.embed_dim

    def with_experts(experts: int) -> int:
        return outside + dense + model.num_pipeline_layers * (shared + experts * expert)

    return ParameterCount(
        with_experts(model.num_experts), with_experts(model.num_experts_per_token)
    )


def _attention(model: ModelConfig) -> int:
    """With the norms of the layer."""
    norms = (4 if model.norm_placement == "both" else 2) * model.embed_dim
    heads = model.num_heads + model.num_kv_heads if model.qk_norm_over_heads else 2
    norms += heads * model.head_dim if model.qk_norm else 0
    if model.kv_lora_rank is None:
        heads = 2 * (model.num_heads + model.num_kv_heads)
        biases = model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
        biases += model.embed_dim if model.attention_bias == "all" else 0
        biases = biases if model.attention_bias else 0
        biases += model.num_heads if model.attention_sinks else 0
        return heads * model.embed_dim * model.head_dim + biases + norms
    rank, value_dim = model.kv_lora_rank, model.value_head_dim or 0
    source, query = model.embed_dim, 0
    if model.q_lora_rank is not None:
        source, query = model.q_lora_rank, model.embed_dim * model.q_lora_rank + model.q_lora_rank
    query += source * model.num_heads * model.head_dim
    plain = model.head_dim - model.rope_dim
    keys = model.embed_dim * (rank + model.rope_dim) + rank
    keys += rank * model.num_heads * (plain + value_dim)
    return query + keys + model.num_heads * value_dim * model.embed_dim + norms
