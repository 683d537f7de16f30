"""The architecture of a model: a frozen config that checks its values when it is made."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.config._fields import MOST_LAYERS, MOST_WIDTH, check_choices
from nnx_pipeline.config._model_rules import OF_ROUTER, check_together
from nnx_pipeline.lab import errors
from nnx_pipeline.lab.errors import InputError

Activation = Literal["silu", "gelu_tanh", "clamped_swish"]  # keys of `ops.mlp.ACTIVATIONS`
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder-only transformer of the Mixtral, Llama or DeepSeek kind.

    Raises InputError for values that are out of range or contradict each other.
    """

    vocab_size: int
    """Number of token ids: rows of the embedding table and columns of the head.

    Where it does not split over the mesh axes `stage` and `tensor`, the width of table and head
    splits over them instead: of 50,257 float32 rows of 4,096 numbers a device has 412 MB each on
    two stages. For logits and the loss the head then gets columns of zeros, which count in nothing
    and are never stored. Where `embed_dim` does not split either, a device holds all of both along
    such an axis (823 MB each).
    """

    embed_dim: int
    """Width of the residual stream."""
    mlp_dim: int
    """Hidden units of the MLP, or of each expert."""
    num_layers: int
    """Decoder layers of the whole model, over all stages and repeats."""
    num_dense_layers: int = 0
    """How many of the first layers have a dense MLP although the others have experts (DeepSeek).

    They run before the pipeline, on all devices at once, so that the layers of the stages are all
    alike; the other `num_layers - num_dense_layers` are divided over stages and repeats.
    """

    dense_mlp_dim: int | None = None
    """Hidden units of the MLP of the `num_dense_layers`; None if there are none."""
    num_heads: int
    """Query heads of a layer; a multiple of `num_kv_heads`."""
    num_kv_heads: int
    """Key-value heads of a layer, each read by `num_heads / num_kv_heads` query heads."""
    head_dim: int
    """Width of one head; even, because rotary embeddings rotate pairs of values.

    With `kv_lora_rank` it is the width of a query and of a key, whose last `rope_head_dim` numbers
    are rotated.
    """

    kv_lora_rank: int | None = None
    """Width of the latent vector from which all heads' keys and values are made; None for none.

    With it attention is multi-head latent attention (DeepSeek-V2, 2024, section 2.1), which needs
    `rope_head_dim`, `value_head_dim` and `num_kv_heads = num_heads`: each query head has a key and
    a value of its own.
    """

    q_lora_rank: int | None = None
    """Width of the latent vector from which queries are made; None makes them from the stream."""
    rope_head_dim: int | None = None
    """How many numbers of a head are rotated; None for all of them.

    With `kv_lora_rank` it is the last ones, whose key is the same in all heads; else the first.
    """

    value_head_dim: int | None = None
    """Width of a value head, with `kv_lora_rank`."""
    num_experts: int = 1
    """Experts of a layer; 1 means an ordinary dense MLP without a router."""
    num_experts_per_token: int = 1
    """Experts that the router chooses for each token; at most `num_experts`."""
    dtype: str = "bfloat16"
    """Dtype of activations and matrix products: `bfloat16`, `float16` or `float32`."""
    param_dtype: str = "float32"
    """Dtype in which parameters are stored: `bfloat16`, `float16` or `float32`."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    latent_norm_epsilon: float | None = None
    """The same in the norms of latent vectors (`kv_lora_rank`); None for `norm_epsilon`."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where a layer has norms: `before` attention and feed-forward, `after` them, or `both`.

    The second ones normalise what is added to the residual stream (OLMo 2; both in Gemma 2).
    """

    norm_scale_offset: float = 0.0
    """Added to the scale of every RMSNorm; 1.0 for models whose scale is stored around 0."""
    rope_theta: float = 1e6
    """Base of the rotary embedding: pair i turns by position / theta^(2i / head_dim) radians."""
    rope_interleaved: bool = False
    """Whether a pair is two neighbours, x[2i] and x[2i+1], rather than x[i] and x[i + head_dim/2].

    In MaxText the models with `rope_type: llama3.1` are of this kind. Of a Hugging Face model,
    whose pairs are never neighbours, query and key are reordered when it is read and written.
    """

    rope_window_theta: float | None = None
    """`rope_theta` of layers with a `sliding_window`, which have no `rope_scaling` (Gemma 3)."""
    rope_scaling: Literal["linear", "llama3", "yarn"] | None = None
    """How the rotary angles are slowed down for longer sequences; None leaves them as they are.

    `linear` divides all angles by `rope_factor`. `llama3` (Llama 3.1) and `yarn` (DeepSeek) count
    the turns of a pair in `rope_original_length` tokens. They divide the angle of a pair with
    `rope_low_frequency` turns or less, and leave a pair with `rope_high_frequency` turns or more.
    Between the two they take a mean, weighted by the number of turns or by the number of the pair,
    see `ops.self_attention.rotary.timescales`. The factor of `yarn` on the scores is part of
    `attention_scale` in DeepSeek's models, and in others `rope_amplitude` gives it.
    """

    rope_factor: float | None = None
    """By how much `rope_scaling` slows angles down, 1 or more; 8 in Llama 3.1."""
    rope_original_length: int | None = None
    """Tokens of the sequences that the model was first trained on; for `llama3` and `yarn`."""
    rope_low_frequency: float | None = None
    """Turns in the original length up to which `llama3` and `yarn` slow a pair down in full."""
    rope_high_frequency: float | None = None
    """Turns in the original length from which on `llama3` and `yarn` leave a pair as it is."""
    rope_truncate: bool = True
    """Whether `yarn` rounds the numbers of the pairs at its two limits outwards; not in GPT-OSS."""
    rope_amplitude: float = 1.0
    """Multiplies the rotated numbers of queries and keys, and so their part of a score twice.

    It is 0.1 · ln(factor) + 1 in models with `yarn` that are not DeepSeek's.
    """

    qk_norm: bool = False
    """Whether each query and each key is normalised by an RMSNorm before the rotary embedding."""
    qk_norm_over_heads: bool = False
    """Whether the mean in these norms is over all heads together, each with a scale of its own."""
    activation: Activation = "silu"
    """What is applied to the gate of the MLP and of experts; `gelu_tanh` in Gemma.

    `clamped_swish` is g · sigmoid(1.702 g) · (u + 1) with g at most 7 and u within 7 (GPT-OSS).
    """

    embedding_scale: float = 1.0
    """Multiplies the embedding of a token: embed_dim^0.5 in Gemma."""
    residual_scale: float = 1.0
    """Multiplies what attention and feed-forward add to the residual stream (Granite)."""
    logits_divisor: float = 1.0
    """Divides the logits, before their soft cap (Granite)."""
    attention_bias: Literal["qkv", "all"] | None = None
    """Which projections of attention have a bias; None for none of them.

    `qkv`: query, key and value have one (Qwen2). `all`: the output has one too (GPT-OSS). A bias is
    added right after the product, before the norm of `qk_norm`.
    """

    attention_sinks: bool = False
    """Whether each head has a score that every query reads beside those of keys, without a value.

    It takes a part of the softmax (GPT-OSS), and needs `attention="dot_product"`.
    """

    attention_soft_cap: float | None = None
    """The bound of the attention scores, cap · tanh(scores / cap); None for no bound.

    Gemma 2 has 50. It is applied after `attention_scale` and before the mask.
    """

    logits_soft_cap: float | None = None
    """Bound of the head's logits, cap · tanh(logits / cap): 30 in Gemma 2; None for no bound."""
    tied_embeddings: bool = False
    """Whether the embedding table is also the head: logits are hidden states · tableᵀ.

    A new table then has a standard deviation of embed_dim^-0.5; without it 1, as in MaxText.
    """

    tied_head_dtype: Literal["bfloat16"] | None = None
    """Dtype to which the table of `tied_embeddings` is rounded for the head; None for `dtype`.

    MaxText rounds it to bfloat16 whatever its `dtype` is. The product is in `dtype` in any case.
    """

    attention_scale: float = 1.0
    """Multiplies the attention scores.

    It is 1.0 where, as in MaxText, the factor 1/sqrt(head_dim) is part of the query kernel's
    initial values. With `qk_norm` no kernel can hold that factor, and MaxText's models have
    head_dim^-0.5 here.
    """

    dropout_rate: float = 0.0
    """Dropout rate, in training, of what attention and feed-forward add to the residual stream."""
    attention: Literal["dot_product", "chunked", "flash", "auto"] = "dot_product"
    """How attention is computed, a key of `ops.fast_attention.kernels.KERNELS`.

    `dot_product` holds the scores of one block of queries. `chunked` holds one tile of scores, on
    every platform; `flash` is the kernel of a TPU or NVIDIA GPU. `auto` takes what suits the
    platform and the sequence.
    """

    attention_block: int | None = None
    """How many queries of a sequence are attended at a time, and with `chunked` how many keys.

    `dot_product` holds the scores of one block of queries, and leaves later keys out. None takes
    512 of a sequence longer than 1024, and all queries of others, see `ops.attention.BLOCK`;
    `chunked` takes `ops.fast_attention.kernels.TILE`. `flash` has blocks of its own.
    """

    sliding_window: int | None = None
    """How many tokens a query reads: itself and tokens before it; None for all before it."""
    full_attention_every: int | None = None
    """Every how many layers one reads all tokens before it, without the `sliding_window`.

    With n it is the layers n - 1, 2n - 1, …, counted from 0 (2 as in GPT-OSS, 6 as in Gemma 3).
    Each stage then has a multiple of n layers, and in the model's `pipeline.layers`, which is a
    list, the j-th stack has the layers j, n + j, …. Where n does not divide the layers, the list
    has one stack for each layer, and the model one stage. None gives all layers the same window.
    Models with `num_dense_layers` do not have it.
    """

    full_attention_first: int = 0
    """How many of the first layers read all tokens before them, without the `sliding_window`.

    It is the `max_window_layers` of Qwen's models. The model then has one stage, and a stack for
    each layer.
    """

    quantization: Literal["int8", "fp8"] | None = None
    """In what precision activations are multiplied with kernels; None for `dtype`.

    It needs a dense model and the extra `quantization`, and holds for the projections of attention
    and for the MLP, forward and for the gradients of activations, see `ops.low_precision`. The
    gradients of kernels, attention itself, the embedding and the head keep `dtype`.
    """

    experts: Literal["dense", "grouped", "capacity"] = "dense"
    """How experts are computed, a key of `ops.moe.EXPERTS`.

    `dense` runs all experts on all tokens. `grouped` runs each expert on the tokens that are sent
    to it, and drops none. `capacity` runs each on as many of them as `capacity_factor` allows.
    """

    capacity_factor: float | None = None
    """How many choices of a sequence each of the `capacity` experts takes, over an even share.

    Of a sequence an expert takes ⌈tokens · num_experts_per_token · factor / num_experts⌉ choices;
    later ones are dropped, see `ops.capacity.experts`. None takes 1.25.
    """

    expert_group: int | None = None
    """How many experts of a device are computed at a time; a divisor of their number.

    The kernels of so many experts are gathered together. A small group saves memory, and a large
    one time. None takes, of `dense` experts, the smallest group whose products keep a device busy,
    see `ops.experts.group_size`: on a TPU or GPU one expert of Mixtral 8x7B at a time, and of
    `mixtral-small` eight for 1,024 tokens on a device and four for 2,048. None computes `grouped`
    experts all at once, and of 64 or more on a device gathers one of two kernels again for the
    backward pass, see `ops.grouped.experts.GroupedExperts`; `capacity` experts always are.
    """

    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router scores experts: a softmax over all experts, or a sigmoid of each.

    See `ops.router.route` for the weights that the chosen experts get.
    """

    router_normalize: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    router_scale: float = 1.0
    """Multiplies the weights of the chosen experts."""
    router_bias: bool = False
    """Whether a bias per expert is added to the scores by which experts are chosen.

    The weights of the chosen experts do not depend on it, it has no gradient, and the optimizer
    leaves it as it is (the correction bias of DeepSeek-V3).
    """

    router_bias_in_weights: bool = False
    """Whether the chosen experts' weights contain the bias too, which then has a gradient.

    MaxText computes so unless its `model_name` begins with `deepseek3`.
    """

    router_logits_bias: bool = False
    """Whether a bias per expert is added to the router's logits (GPT-OSS)."""
    expert_bias: bool = False
    """Whether the three products of each expert have biases (GPT-OSS); needs `dense` experts."""
    router_groups: int = 1
    """Groups of consecutive experts that the router chooses from first.

    The experts of a token are chosen from the `router_groups_per_token` best groups: with `sigmoid`
    scores those in which the two largest have the largest sum (DeepSeek-V3), with `softmax` those
    that have the largest score (DeepSeek-V2).
    """

    router_groups_per_token: int = 1
    """Groups that the experts of a token are chosen from; at most `router_groups`."""
    num_shared_experts: int = 0
    """Experts that every token goes through, beside the experts that the router chooses.

    Together they are a dense MLP with `num_shared_experts · mlp_dim` hidden units, whose output is
    added with weight 1.
    """

    embedding: Literal["auto", "gather", "one_hot"] = "gather"
    """How tokens are looked up: by a gather, or by a product with one-hot rows.

    `auto` takes the product, which costs as much as the head, unless its array is above 2 GiB.
    """

    max_position_embeddings: int | None = None
    """The longest sequence that the model was made for; None leaves any length.

    It is read from Hugging Face's `config.json` and written back to it.
    """

    @property
    def num_pipeline_layers(self) -> int:
        """All but the dense first ones: the layers that are divided over stages and repeats."""
        return self.num_layers - self.num_dense_layers

    @property
    def of_kinds(self) -> tuple["ModelConfig", ...]:
        """The configs of the layers of a stage, which take turns in this order."""
        every, first = self.full_attention_every, self.full_attention_first
        if every is None and not first:
            return (self,)
        windowed = dataclasses.replace(self, full_attention_every=None, full_attention_first=0)
        full = dataclasses.replace(windowed, sliding_window=None)
        cycle = every if every and self.num_layers % every == 0 else self.num_layers
        whole = (
            layer < first or bool(every and (layer + 1) % every == 0) for layer in range(cycle)
        )
        return tuple(full if each else windowed for each in whole)

    @property
    def of_latent_norms(self) -> "ModelConfig":
        """The config of the norms of latent vectors."""
        if self.latent_norm_epsilon is None:
            return self
        return dataclasses.replace(self, norm_epsilon=self.latent_norm_epsilon)

    @property
    def of_dense_layers(self) -> "ModelConfig":
        """The config of a model whose layers are all like the dense first layers of this one."""
        return dataclasses.replace(
            self,
            num_layers=self.num_dense_layers,
            num_dense_layers=0,
            mlp_dim=self.dense_mlp_dim or self.mlp_dim,
            dense_mlp_dim=None,
            num_experts=1,
            num_experts_per_token=1,
            experts="dense",
            capacity_factor=None,
            expert_group=None,
            router_groups_per_token=1,
            **OF_ROUTER,
        )

    @property
    def embedding_deviation(self) -> float:
        """The standard deviation with which a new embedding table begins: 1, as in MaxText.

        A table that is the head too gives new logits a variance of 1, and a loss near
        log(vocab_size).
        """
        return self.embed_dim**-0.5 if self.tied_embeddings else 1.0

    @property
    def rope_dim(self) -> int:
        """How many numbers of a query or key are rotated."""
        return self.head_dim if self.rope_head_dim is None else self.rope_head_dim

    def __post_init__(self) -> None:
        check_choices(self)
        errors.whole(self, "num_layers", most=MOST_LAYERS)
        errors.whole(self, "vocab_size", "embed_dim", "mlp_dim", "num_heads", most=MOST_WIDTH)
        errors.whole(self, "num_kv_heads", "head_dim", "num_experts", most=MOST_WIDTH)
        errors.whole(self, "num_experts_per_token")
        heads, groups, width = self.num_heads, self.num_kv_heads, self.head_dim
        rule = f"num_heads={heads} does not split over num_kv_heads={groups}"
        errors.divides(groups, heads, rule=rule)
        errors.divides(2, width, rule=f"head_dim={width} must be even for rotary embeddings")
        if self.num_experts_per_token > self.num_experts:
            raise InputError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds "
                f"num_experts={self.num_experts}; choose {self.num_experts} or fewer"
            )
        errors.one_of("dtype", self.dtype, DTYPES)
        errors.one_of("param_dtype", self.param_dtype, DTYPES)
        check_together(self)
        for name in ("attention_block", "sliding_window", "max_position_embeddings"):
            if getattr(self, name) is not None:
                errors.whole(self, name)
        if self.attention_block is not None and self.attention not in ("dot_product", "chunked"):
            raise InputError(
                f"attention_block={self.attention_block} is for attention='dot_product' and "
                f"'chunked', and attention={self.attention!r}; leave it at None"
            )
        errors.at_least(self, 0.0, "norm_epsilon")
        errors.number(self, "norm_scale_offset")
        errors.above_zero(self, "rope_theta", "rope_amplitude", "attention_scale")
        errors.above_zero(self, "embedding_scale", "residual_scale", "logits_divisor")
        for name in (
            "attention_soft_cap",
            "logits_soft_cap",
            "latent_norm_epsilon",
            "rope_window_theta",
        ):
            if getattr(self, name) is not None:
                errors.above_zero(self, name)
        if self.tied_head_dtype is not None and not self.tied_embeddings:
            raise InputError(
                f"tied_head_dtype={self.tied_head_dtype!r} has no effect with "
                "tied_embeddings=False; leave it out, or set tied_embeddings to True"
            )
        if not 0 <= errors.number(self, "dropout_rate") < 1:
            raise InputError(f"dropout_rate={self.dropout_rate} must be at least 0 and below 1")

    @property
    def rope_slowing(self) -> float:
        """By how much `rope_scaling` slows an angle down at most; 1 without one."""
        return 1.0 if self.rope_factor is None else self.rope_factor

    @property
    def rope_limits(self) -> tuple[int, float, float]:
        """The original length of `rope_scaling=llama3` or `yarn`, and the two limits in turns."""
        length = self.rope_original_length
        limits = (self.rope_low_frequency, self.rope_high_frequency)
        low, high = (limit for limit in limits if limit is not None)
        assert length is not None, "only rope_scaling=llama3 and yarn have them"
        return length, low, high
