"""The architecture of a model: a frozen config that checks its values when it is made."""

from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.errors import (
    InputError,
    above_zero,
    at_least,
    divides,
    is_divisor,
    number,
    one_of,
    whole,
)

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder-only transformer of the Mixtral or Llama kind.

    Raises InputError for values that are out of range or contradict each other.
    """

    vocab_size: int
    """Number of token ids: rows of the embedding table and columns of the head."""

    embed_dim: int
    """Width of the residual stream."""

    mlp_dim: int
    """Hidden units of the MLP, or of each expert."""

    num_layers: int
    """Decoder layers of the whole model, over all stages and repeats."""

    num_heads: int
    """Query heads of a layer; a multiple of `num_kv_heads`."""

    num_kv_heads: int
    """Key-value heads of a layer, each read by `num_heads / num_kv_heads` query heads."""

    head_dim: int
    """Width of one head; even, because rotary embeddings rotate pairs of values."""

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

    norm_scale_offset: float = 0.0
    """Added to the scale of every RMSNorm; 1.0 for models whose scale is stored around 0."""

    rope_theta: float = 1e6
    """Base of the rotary embedding: pair i turns by position / theta^(2i / head_dim) radians."""

    attention_scale: float = 1.0
    """Multiplies the attention scores.

    The default is 1.0 because, as in MaxText, the factor 1/sqrt(head_dim) is part of the query
    kernel's initial values.
    """

    dropout_rate: float = 0.0
    """Dropout rate of what attention and feed-forward add to the residual stream.

    Dropout acts in training only.
    """

    attention: Literal["dot_product", "chunked", "flash", "auto"] = "dot_product"
    """How attention is computed, a key of `ops.fast_attention.kernels.KERNELS`.

    `dot_product` holds the scores of one block of queries. `chunked` holds one tile of scores, on
    every platform; `flash` is the kernel of a TPU or NVIDIA GPU. `auto` takes what suits the
    platform and the sequence, see `ops.fast_attention.kernels.chosen`.
    """

    attention_block: int | None = None
    """How many queries of a sequence are attended at a time, and with `chunked` how many keys.

    `dot_product` holds the scores of one block of queries, and leaves later keys out. None takes
    512 of a sequence longer than 1024, and all queries of others, see `ops.attention.BLOCK`;
    `chunked` takes `ops.fast_attention.kernels.TILE`. `flash` has blocks of its own.
    """

    sliding_window: int | None = None
    """How many tokens a query reads: itself and those before it; None for all before it."""

    experts: Literal["dense", "grouped"] = "dense"
    """How experts are computed, a key of `ops.moe.EXPERTS`.

    `dense` runs all experts on all tokens, `grouped` each on the tokens that are sent to it, of
    which none is dropped.
    """

    expert_group: int | None = None
    """How many experts of a device one product of `dense` experts computes; a divisor of them all.

    A small group saves memory, and a large one time. None takes the smallest group whose products
    keep a device busy, see `ops.experts.group_size`: on a TPU or GPU one expert of Mixtral 8x7B at
    a time, and all eight of `mixtral-small`.
    """

    embedding: Literal["auto", "gather", "one_hot"] = "gather"
    """How tokens are looked up: by a gather, or by a product with one-hot rows.

    `auto` takes the product unless its one-hot array would be above 2 GiB. The product costs as
    much as the head.
    """

    max_position_embeddings: int | None = None
    """The longest sequence that the model was made for; None leaves any length.

    It is read from Hugging Face's `config.json` and written back to it.
    """

    def __post_init__(self) -> None:
        whole(self, "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads")
        whole(self, "num_kv_heads", "head_dim", "num_experts", "num_experts_per_token")
        divides(
            self.num_kv_heads,
            self.num_heads,
            rule=f"num_heads={self.num_heads} does not split over num_kv_heads={self.num_kv_heads}",
        )
        divides(
            2, self.head_dim, rule=f"head_dim={self.head_dim} must be even for rotary embeddings"
        )
        if self.num_experts_per_token > self.num_experts:
            raise InputError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds "
                f"num_experts={self.num_experts}; choose {self.num_experts} or fewer"
            )
        one_of("dtype", self.dtype, DTYPES)
        one_of("param_dtype", self.param_dtype, DTYPES)
        one_of("attention", self.attention, ("dot_product", "chunked", "flash", "auto"))
        one_of("experts", self.experts, ("dense", "grouped"))
        if self.attention_block is not None:
            whole(self, "attention_block")
            if self.attention not in ("dot_product", "chunked"):
                raise InputError(
                    f"attention_block={self.attention_block} is for attention='dot_product' and "
                    f"'chunked', and attention={self.attention!r}; leave it at None"
                )
        if self.sliding_window is not None:
            whole(self, "sliding_window")
        if self.expert_group is not None:
            whole(self, "expert_group")
            rule = f"expert_group={self.expert_group} does not divide num_experts="
            is_divisor(self.expert_group, self.num_experts, rule=f"{rule}{self.num_experts}")
            if self.experts != "dense":
                raise InputError(
                    f"expert_group={self.expert_group} is how many experts one product of "
                    f"experts='dense' computes, and experts={self.experts!r}; leave it at None"
                )
        if self.num_experts == 1 and self.experts != "dense":
            raise InputError(
                f"experts={self.experts!r} needs routed experts, and num_experts=1; leave it at "
                "'dense', or set num_experts to 2 or more"
            )
        one_of("embedding", self.embedding, ("auto", "gather", "one_hot"))
        if self.max_position_embeddings is not None:
            whole(self, "max_position_embeddings")
        at_least(self, 0.0, "norm_epsilon")
        number(self, "norm_scale_offset")
        above_zero(self, "rope_theta", "attention_scale")
        if not 0 <= number(self, "dropout_rate") < 1:
            raise InputError(f"dropout_rate={self.dropout_rate} must be at least 0 and below 1")
