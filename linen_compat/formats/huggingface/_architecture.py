"""What is known of a class of `transformers`: its keys, defaults and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nnx_pipeline.config.model import ModelConfig

CONFIG_FILE = "config.json"
# Without this key config.json means transformers' default, up to version 5 the longest sequence.
LONGEST = "max_position_embeddings"
LOCAL_THETA = "rope_local_base_freq"  # of layers with a window
WINDOW = "sliding_window"
# How many modules follow the layers that predict further tokens. They are read by no model here.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")

Keys = Mapping[str, Any]  # of config.json, with their values; or fields of `ModelConfig`


class Allowed(NamedTuple):
    """The values of a key that are computed here (none: any; the first is written), and why."""

    values: tuple[object, ...]
    reason: str


Only = Mapping[str, Allowed]
# What a model of any class is, but for the classes whose keys or fixed fields say otherwise.
PLAIN: Keys = {
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "router_bias_in_weights": False,
    "router_groups": 1,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "kv_lora_rank": None,
    "qk_norm": False,
    "norm_scale_offset": 0.0,
    "attention_bias": None,
    "attention_soft_cap": None,
    "logits_soft_cap": None,
    "sliding_window": None,
    "full_attention_every": None,
    "full_attention_first": 0,
    "norm_placement": "before",
    "qk_norm_over_heads": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logits_divisor": 1.0,
    "rope_head_dim": None,
    "rope_window_theta": None,
    "attention_sinks": False,
    "router_logits_bias": False,
    "expert_bias": False,
}
_OF_WINDOWS = ("sliding_window", "full_attention_every", "full_attention_first")


@dataclass(frozen=True)
class Architecture:
    """One class of `transformers`, with its `name` and `model_type` of `config.json`.

    - `absent`: the values that transformers assumes for absent keys.
    - `keys`: keys of this class with their fields of `ModelConfig`, such as those of experts.
    - `fixed`: fields that a model of this class must have; there is no key for another value.
    - `other_names`: keys by their names in other versions of transformers.
    - `only`: keys of this class alone, with their supported values. An absent key has the value of
      `absent`, or else the first supported one.
    - `biases`: what `attention_bias=true` means; None where it is not supported.
    - `windows`: which layers have the `sliding_window`, if the class has one: `all`, or `some`,
      those that `layer_types` names.
    - `scale`: the key of the factor on scores, which elsewhere is head_dim^-0.5.
    - `tensors`: names of a layer's tensors other than the usual ones, by NNX path; see `Tensors`.
    - `by_columns`: whether the experts of a layer are in tensors `[experts, in, out]`, of which
      those of gate and up take turns along the last axis.
    - `activation`: the key of the activation.
    - `partial_rotary`: the share of a head that is rotated where the class has a key for it.
    - `root_embedding`: whether embeddings are multiplied by the root of their width.
    - `other_types`: `model_type` of the same class under which models are published too.
    - `heads_divide`: whether transformers asks that the heads divide the residual stream's width.
    - `latent`: whether attention is over latent vectors.
    - `needs_rope`: whether transformers scales angles where no key says how.
    """

    name: str
    model_type: str
    absent: Keys
    keys: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    only: Only = field(default_factory=dict)
    fixed: Keys = field(default_factory=dict)
    biases: Literal["qkv", "all"] | None = None
    windows: Literal["all", "some"] | None = None
    scale: Literal["query_pre_attn_scalar", "attention_multiplier"] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    by_columns: bool = False
    activation: Literal["hidden_act", "hidden_activation"] = "hidden_act"
    partial_rotary: float | None = None
    root_embedding: bool = False
    other_types: tuple[str, ...] = ()
    heads_divide: bool = False
    latent: bool = False
    needs_rope: bool = False

    @property
    def is_routed(self) -> bool:
        return "num_experts" in self.keys.values()

    @property
    def features(self) -> tuple[str, ...]:
        """What models of this class have or may have beside a plain decoder, in a few words."""
        fields = {**self.fixed, **dict.fromkeys(self.keys.values())}
        biases = {"qkv": "biases of q, k, v", "all": "biases of attention"}
        of_class = {
            "experts": self.is_routed,
            "shared experts": "num_shared_experts" in fields,
            "dense first layers": "num_dense_layers" in fields,
            "groups of experts": "router_groups" in fields,
            "latent attention": self.latent,
            biases.get(self.biases or self.fixed.get("attention_bias", ""), ""): True,
            "norms of q, k": "qk_norm" in fields,
            "window of all layers": self.windows == "all",
            "window of some layers": self.windows == "some",
            "another base in them": "rope_window_theta" in fields,
            "partly rotated heads": self.partial_rotary is not None,
            "norms after blocks": self.fixed.get("norm_placement") == "after",
            "norms on both sides": self.fixed.get("norm_placement") == "both",
            "soft caps": "logits_soft_cap" in fields,
            "sinks": "attention_sinks" in fields,
            "biases of experts": "expert_bias" in fields,
            "multipliers": "residual_scale" in fields,
            "joint tensors": len({*self.tensors.values()}) < len(self.tensors),
        }
        return tuple(name for name, there in of_class.items() if name and there)

    def misfits(self, model: ModelConfig) -> Keys:
        """The fields of a model that have no place in this class, with their values there."""
        windows = {"all": _OF_WINDOWS[:1], "some": _OF_WINDOWS}
        free = {*self.keys.values(), *windows.get(self.windows or "", ())}
        free |= {"rope_head_dim"} if self.partial_rotary else set()
        free |= {"attention_bias"} if self.biases and "attention_bias" not in self.fixed else set()
        wanted = {name: value for name, value in PLAIN.items() if name not in free} | {**self.fixed}
        wanted |= {"embedding_scale": model.embed_dim**0.5} if self.root_embedding else {}
        wrong = {n: value for n, value in wanted.items() if getattr(model, n) != value}
        if (model.kv_lora_rank is not None) != self.latent:
            wrong["kv_lora_rank"] = "a rank" if self.latent else None
        if (model.num_experts > 1) != self.is_routed:
            wrong["num_experts"] = "several" if self.is_routed else 1
        if model.activation == "clamped_swish" and "activation" not in self.fixed:
            wrong["activation"] = "silu"
        if "attention_bias" in free and model.attention_bias not in (None, self.biases):
            wrong["attention_bias"] = self.biases
        return wrong
