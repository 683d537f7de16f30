"""The classes of `transformers` that this project computes: their keys, defaults and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.errors import InputError

# Without this key config.json means transformers' default, up to version 5 the longest sequence.
LONGEST = "max_position_embeddings"
WINDOW = "sliding_window"

Only = Mapping[str, tuple[tuple[Any, ...], str]]


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`.

    - `name`, `model_type`: as in `config.json`.
    - `absent`: the values that transformers assumes for absent keys.
    - `experts`: the keys of experts, and the fields of `ModelConfig` that they become; none for a
      dense model.
    - `other_names`: keys by the names that other versions of transformers give them.
    - `only`: keys of this class alone that have supported values only, and the reason. The first
      value is the one that is written. An absent key counts as the value of `absent`, or as null.
    - `qk_norm`: whether queries and keys are normalised.
    - `is_written`: whether models without a window are written as this class; else they are written
      as an equal one.
    - `reads_window`: whether it has a sliding window.
    - `heads_divide`: whether transformers asks that the heads divide the residual stream's width.
    """

    name: str
    model_type: str
    absent: Mapping[str, Any]
    experts: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    only: Only = field(default_factory=dict)
    qk_norm: bool = False
    is_written: bool = True
    reads_window: bool = False
    heads_divide: bool = False

    @property
    def is_routed(self) -> bool:
        """Whether the layers have experts."""
        return bool(self.experts)


_ONE_KIND = "layers of one kind are computed here, with attention to the whole sequence"
_OF_QWEN3: Only = {
    "use_sliding_window": ((False, None), _ONE_KIND),
    "max_window_layers": ((), "it has no effect without use_sliding_window"),
}
_ROUTED_EVERYWHERE = "every layer is routed here"
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    absent={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        LONGEST: 131_072,
    },
    experts={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    reads_window=True,
)
LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    absent={"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": None, LONGEST: 2048},
    heads_divide=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    absent={
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_key_value_heads": 8,
        WINDOW: 4096,
        LONGEST: 131_072,
    },
    is_written=False,  # as a Llama, which computes the same
    reads_window=True,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    absent={
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_key_value_heads": 32,
        "head_dim": 128,
        LONGEST: 32_768,
    },
    only=_OF_QWEN3,
    qk_norm=True,
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    absent={
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        LONGEST: 32_768,
    },
    experts={
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "moe_intermediate_size": "mlp_dim",
    },
    other_names={"num_local_experts": "num_experts"},  # of transformers 5
    only={
        **_OF_QWEN3,
        "norm_topk_prob": ((True,), "the weights of a token's experts add up to 1 here"),
        "decoder_sparse_step": ((1, None), _ROUTED_EVERYWHERE),
        "mlp_only_layers": (([], None), _ROUTED_EVERYWHERE),
    },
    qk_norm=True,
)
ARCHITECTURES = {one.name: one for one in (MIXTRAL, LLAMA, MISTRAL, QWEN3, QWEN3_MOE)}


def written_as(model: ModelConfig) -> Architecture:
    """The class that a model is written as.

    Raises InputError for a sliding window that no class has beside what else the model has.
    """
    windowed = model.sliding_window is not None
    for one in ARCHITECTURES.values():
        same = (one.is_routed, one.qk_norm) == (model.num_experts > 1, model.qk_norm)
        if same and (one.reads_window if windowed else one.is_written):
            return one
    raise InputError(
        f"model.sliding_window={model.sliding_window} has no place in a Hugging Face model with "
        "qk_norm; only one without a window can be saved in this format"
    )
