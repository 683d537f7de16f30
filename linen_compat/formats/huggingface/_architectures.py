"""The classes of `transformers` that this project computes: their keys, defaults and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import InputError

CONFIG_FILE = "config.json"
# Without this key config.json means transformers' default, up to version 5 the longest sequence.
LONGEST = "max_position_embeddings"
WINDOW = "sliding_window"

Keys = Mapping[str, Any]  # of config.json, with their values; or fields of `ModelConfig`


class Allowed(NamedTuple):
    """The values of a key that are computed here (none: any; the first is written), and why."""

    values: tuple[object, ...]
    reason: str


Only = Mapping[str, Allowed]
PLAIN_ROUTER: Keys = {
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "router_groups": 1,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
}


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`, with its `name` and `model_type` of `config.json`.

    - `absent`: the values that transformers assumes for absent keys.
    - `experts`: the keys of experts and of latent attention, with their fields of `ModelConfig`;
      none for a dense model.
    - `fixed`: fields that a model of this class must have; there is no key for another value.
    - `other_names`: keys by their names in other versions of transformers.
    - `only`: keys of this class alone, with their supported values. An absent key has the value of
      `absent`, or else the first supported one.
    - `is_written`: whether models without a window are written as this class, not as an equal one.
    - `heads_divide`: whether transformers asks that the heads divide the residual stream's width.
    """

    name: str
    model_type: str
    absent: Keys
    experts: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    only: Only = field(default_factory=dict)
    qk_norm: bool = False
    is_written: bool = True
    reads_window: bool = False
    heads_divide: bool = False
    latent: bool = False
    fixed: Keys = field(default_factory=lambda: PLAIN_ROUTER)

    @property
    def is_routed(self) -> bool:
        return bool(self.experts)


_ONE_KIND = "layers of one kind are computed here, with attention to the whole sequence"
_OF_QWEN3: Only = {
    "use_sliding_window": Allowed((False, None), _ONE_KIND),
    "max_window_layers": Allowed((), "it has no effect without use_sliding_window"),
}
_ROUTED_EVERYWHERE = "every layer is routed here"
_ABSENT: Keys = {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    absent={
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, LONGEST: 131_072},
    },
    experts={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"},
    reads_window=True,
)
LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    absent={**_ABSENT, "num_key_value_heads": None, LONGEST: 2048},
    heads_divide=True,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    absent={**_ABSENT, "num_key_value_heads": 8, WINDOW: 4096, LONGEST: 131_072},
    is_written=False,  # as a Llama, which computes the same
    reads_window=True,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    absent={**_ABSENT, "num_key_value_heads": 32, "head_dim": 128, LONGEST: 32_768},
    only=_OF_QWEN3,
    qk_norm=True,
)
QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    absent={
        **{**_ABSENT, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768, "norm_topk_prob": False, LONGEST: 32_768},
    },
    experts={
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "moe_intermediate_size": "mlp_dim",
    },
    other_names={"num_local_experts": "num_experts"},  # of transformers 5
    only={
        **_OF_QWEN3,
        "norm_topk_prob": Allowed((True,), "the weights of a token's experts add up to 1 here"),
        "decoder_sparse_step": Allowed((1, None), _ROUTED_EVERYWHERE),
        "mlp_only_layers": Allowed(([], None), _ROUTED_EVERYWHERE),
    },
    qk_norm=True,
)
_LATENT_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "mlp_dim",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scale",
    "first_k_dense_replace": "num_dense_layers",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "value_head_dim",
}
_ABSENT_IN_LATENT: Keys = {
    **{**_ABSENT, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
_OF_LATENT: Only = {
    # transformers normalises latent vectors with this one whatever the key says.
    "rms_norm_eps": Allowed((1e-6,), "transformers has this value in the norms of latent vectors"),
    "moe_layer_freq": Allowed((1, None), "all layers after the dense ones are routed here"),
    "aux_loss_alpha": Allowed((), "the load-balance loss is chosen in TrainConfig"),
    "seq_aux": Allowed((), "the load-balance loss is chosen in TrainConfig"),
    "ep_size": Allowed((), "it only places experts on devices"),
    "auto_map": Allowed((), "it names code that transformers does not need"),
    # Modules for multi-token prediction are read by no model here; their tensors are refused.
    "num_nextn_predict_layers": Allowed((), "it has no effect on the other layers"),
    "num_mtp_layers": Allowed((), "it has no effect on the other layers"),
}
DEEPSEEK_V2 = Architecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    absent={
        **_ABSENT_IN_LATENT,
        **{"num_key_value_heads": None, "n_routed_experts": 64, "num_experts_per_tok": None},
        **{"moe_intermediate_size": 1407, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
        **{"first_k_dense_replace": 0, "topk_method": "greedy", LONGEST: 2048},
    },
    experts=_LATENT_KEYS,
    other_names={"num_experts": "n_routed_experts"},
    only={
        **_OF_LATENT,
        "topk_method": Allowed(("greedy",), "experts are chosen from all groups here"),
        "scoring_func": Allowed(("softmax", None), "transformers takes a softmax of the logits"),
        "norm_topk_prob": Allowed((False, None), "transformers divides no weights by their sum"),
        "n_group": Allowed((), "it has no effect with topk_method='greedy'"),
        "topk_group": Allowed((), "it has no effect with topk_method='greedy'"),
    },
    heads_divide=True,
    latent=True,
    fixed={
        "router_score": "softmax",
        "router_normalize": False,
        "router_bias": False,
        "router_groups": 1,
        "rope_interleaved": True,
    },
)
DEEPSEEK_V3 = Architecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    absent={
        **_ABSENT_IN_LATENT,
        **{"num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        **{"first_k_dense_replace": 3, "norm_topk_prob": True, "n_group": 8, "topk_group": 4},
        **{"rope_interleave": True, LONGEST: 4096},
    },
    experts={
        **_LATENT_KEYS,
        "norm_topk_prob": "router_normalize",
        "n_group": "router_groups",
        "topk_group": "router_groups_per_token",
        "rope_interleave": "rope_interleaved",
    },
    other_names={"num_local_experts": "n_routed_experts"},
    only={
        **_OF_LATENT,
        "topk_method": Allowed(("noaux_tc", None), "a bias corrects which experts are chosen"),
        "scoring_func": Allowed(("sigmoid", None), "transformers takes a sigmoid of the logits"),
    },
    latent=True,
    fixed={"router_score": "sigmoid", "router_bias": True, "router_bias_in_weights": False},
)
ARCHITECTURES = {
    one.name: one for one in (MIXTRAL, LLAMA, MISTRAL, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3)
}


def written_as(model: ModelConfig) -> Architecture:
    """The class that a model is written as."""
    windowed = model.sliding_window is not None
    if model.kv_lora_rank is not None and not windowed:
        return DEEPSEEK_V2 if model.router_score == "softmax" else DEEPSEEK_V3
    for one in ARCHITECTURES.values():
        same = (one.is_routed, one.qk_norm) == (model.num_experts > 1, model.qk_norm)
        same = same and not one.latent and model.kv_lora_rank is None
        if same and (one.reads_window if windowed else one.is_written):
            return one
    raise InputError(
        f"model.sliding_window={model.sliding_window} has no place in a Hugging Face model with "
        f"{'qk_norm' if model.qk_norm else 'kv_lora_rank'}; only one without a window can be saved "
        "in this format"
    )
