"""What the fields of a `ModelConfig` must satisfy together, as checks that raise InputError."""

from typing import Any

from nnx_pipeline.config._fields import MOST_WIDTH
from nnx_pipeline.lab import errors
from nnx_pipeline.lab.errors import InputError, counted

# The fields that each `rope_scaling` reads, with their values in a model that has it: Llama 3.1
# (which scales by parts), and DeepSeek-V3.
_BY_PARTS = ("rope_factor", "rope_original_length", "rope_low_frequency", "rope_high_frequency")
ROPE_SCALINGS: dict[str, dict[str, float]] = {
    "linear": {"rope_factor": 8.0},
    "llama3": dict(zip(_BY_PARTS, (8.0, 8192, 1.0, 4.0), strict=True)),
    "yarn": dict(zip(_BY_PARTS, (40.0, 4096, 1.0, 32.0), strict=True)),
}
Model = Any  # a `ModelConfig`, which imports this module
# The fields that are about a router, with their defaults.
OF_ROUTER: dict[str, Any] = {
    "router_score": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "router_bias": False,
    "router_bias_in_weights": False,
    "router_logits_bias": False,
    "expert_bias": False,
    "router_groups": 1,
    "num_shared_experts": 0,
}


def check_together(model: Model) -> None:
    """Raises InputError for fields that contradict each other."""
    if model.attention_sinks and (model.attention != "dot_product" or model.kv_lora_rank):
        raise InputError(
            f"attention_sinks=True needs attention='dot_product' without latent vectors, and "
            f"attention={model.attention!r}, kv_lora_rank={model.kv_lora_rank}; leave one out"
        )
    if model.expert_bias and (model.experts != "dense" or model.num_shared_experts):
        raise InputError(
            f"expert_bias=True needs experts='dense' and no shared experts, and experts="
            f"{model.experts!r}, num_shared_experts={model.num_shared_experts}; leave one out"
        )
    if model.qk_norm_over_heads and not model.qk_norm:
        raise InputError(
            "qk_norm_over_heads=True is about a norm that qk_norm=False leaves out; set both or "
            "none"
        )
    _check_latent(model)
    _check_dense_layers(model)
    _check_kinds(model)
    _check_experts(model)
    _check_quantization(model)
    _check_rope(model)


def _check_latent(model: Model) -> None:
    sizes = {"rope_head_dim": 64, "value_head_dim": 128}
    if model.rope_head_dim is not None:
        errors.whole(model, "rope_head_dim", most=MOST_WIDTH)
        errors.divides(2, model.rope_dim, rule=f"rope_head_dim={model.rope_dim} must be even")
        if model.rope_dim >= model.head_dim:
            raise InputError(
                f"rope_head_dim={model.rope_dim} is a part of head_dim={model.head_dim}, which is "
                "the width of a whole query; make head_dim larger"
            )
    if model.kv_lora_rank is None:
        if model.rope_head_dim is not None and model.rope_interleaved:
            raise InputError(
                f"rope_head_dim={model.rope_head_dim} and rope_interleaved=True need kv_lora_rank, "
                "which is None; leave one of them out"
            )
        for name in ("q_lora_rank", "latent_norm_epsilon", "value_head_dim"):
            if getattr(model, name) is not None:
                raise InputError(
                    f"{name}={getattr(model, name)!r} is for multi-head latent attention, and "
                    "kv_lora_rank=None; leave it out, or set kv_lora_rank"
                )
        return
    for name, example in sizes.items():
        if getattr(model, name) is None:
            raise InputError(
                f"kv_lora_rank={model.kv_lora_rank} needs {name}, which is not given; "
                f"DeepSeek-V3 has {example}"
            )
    ranks = ("kv_lora_rank",) if model.q_lora_rank is None else ("kv_lora_rank", "q_lora_rank")
    errors.whole(model, *ranks, *sizes, most=MOST_WIDTH)
    if model.num_kv_heads != model.num_heads:
        raise InputError(
            f"with kv_lora_rank each query head has its own key, and num_kv_heads="
            f"{model.num_kv_heads} differs from num_heads={model.num_heads}; make them equal"
        )
    if model.attention_bias is not None:
        raise InputError(
            f"attention_bias={model.attention_bias!r} is not for multi-head latent attention, "
            "whose projections have none; set it to None"
        )
    if model.qk_norm:
        raise InputError(
            "qk_norm=True normalises query and key heads, and with kv_lora_rank the latent "
            "vectors are normalised instead; set it to False"
        )


def _check_dense_layers(model: Model) -> None:
    errors.whole(model, "num_dense_layers", least=0)
    number = model.num_dense_layers
    if (number > 0) != (model.dense_mlp_dim is not None):
        raise InputError(
            f"num_dense_layers={number} and dense_mlp_dim={model.dense_mlp_dim} go together; "
            "give both, or neither"
        )
    if number == 0:
        return
    errors.whole(model, "dense_mlp_dim", most=MOST_WIDTH)
    if model.num_experts == 1:
        raise InputError(
            f"num_dense_layers={number} are dense although other layers have experts, and "
            "num_experts=1; leave it at 0, or set num_experts to 2 or more"
        )
    if number >= model.num_layers:
        raise InputError(
            f"num_dense_layers={number} leaves no layer with experts of num_layers="
            f"{model.num_layers}; choose {model.num_layers - 1} or fewer"
        )


def _check_kinds(model: Model) -> None:
    """Full attention of some layers, and a window of the others."""
    errors.whole(model, "full_attention_first", least=0)
    first, every = model.full_attention_first, model.full_attention_every
    if every is None and first == 0:
        return
    name = "full_attention_first" if every is None else "full_attention_every"
    if every is not None:
        errors.whole(model, name)
    if every == 1 or model.sliding_window is None:
        raise InputError(
            f"{name}={getattr(model, name)} lets layers with a window take turns with one without, "
            f"and sliding_window={model.sliding_window}; give a window and 2 or more, or leave it "
            "out"
        )
    if every is not None and first:
        raise InputError(
            f"full_attention_every={every} and full_attention_first={first} each say which layers "
            "have no window; leave one of them out"
        )
    if first >= model.num_layers:
        raise InputError(
            f"full_attention_first={first} leaves none of num_layers={model.num_layers} the "
            "sliding_window; choose fewer, or leave the window out"
        )
    if model.num_dense_layers > 0:
        raise InputError(
            f"{name}={getattr(model, name)} counts the layers of the pipeline alone, and "
            f"num_dense_layers={model.num_dense_layers} come before these; leave one of them out"
        )


def _check_quantization(model: Model) -> None:
    if model.quantization is None:
        return
    if model.num_experts > 1:
        raise InputError(
            f"quantization={model.quantization!r} needs a dense model, and "
            f"num_experts={model.num_experts}: the products of experts, which have derivatives "
            "or kernels of their own, have no low precision; leave it at None, or set "
            "num_experts to 1"
        )
    if model.kv_lora_rank is not None:
        raise InputError(
            f"quantization={model.quantization!r} is not for multi-head latent attention, whose "
            "projections have no low precision; leave it at None, or kv_lora_rank"
        )
    if model.dtype == "float16":
        raise InputError(
            f"quantization={model.quantization!r} is not for dtype='float16', of which small "
            "scales are rounded to 0; set dtype to 'bfloat16' or 'float32'"
        )


def _check_experts(model: Model) -> None:
    if model.expert_group is not None:
        errors.whole(model, "expert_group")
        rule = f"expert_group={model.expert_group} does not divide num_experts="
        errors.is_divisor(model.expert_group, model.num_experts, rule=f"{rule}{model.num_experts}")
        if model.num_experts == 1:
            raise InputError(
                f"expert_group={model.expert_group} is how many of several experts are computed at "
                "a time, and num_experts=1; leave it at None, or set num_experts to 2 or more"
            )
        if model.experts == "capacity":
            raise InputError(
                f"expert_group={model.expert_group} is how many experts are computed at a time, "
                "and experts='capacity' computes all of a device at once; leave it at None"
            )
    if model.capacity_factor is not None:
        errors.above_zero(model, "capacity_factor")
        if model.experts != "capacity":
            raise InputError(
                f"capacity_factor={model.capacity_factor} is how much each of "
                f"experts='capacity' takes, and experts={model.experts!r}; leave it at None"
            )
    errors.above_zero(model, "router_scale")
    if model.router_bias_in_weights and not model.router_bias:
        raise InputError(
            "router_bias_in_weights=True needs a bias, and router_bias=False; set both or none"
        )
    errors.whole(model, "num_shared_experts", least=0)
    for name, default in OF_ROUTER.items():
        if model.num_experts == 1 and getattr(model, name) != default:
            raise InputError(
                f"{name}={getattr(model, name)!r} is about a router, which num_experts=1 does "
                f"not have; leave it at {default!r}, or set num_experts to 2 or more"
            )
    _check_groups(model)
    if model.num_experts == 1 and model.experts != "dense":
        raise InputError(
            f"experts={model.experts!r} needs routed experts, and num_experts=1; leave it at "
            "'dense', or set num_experts to 2 or more"
        )


def _check_groups(model: Model) -> None:
    errors.whole(model, "router_groups", "router_groups_per_token")
    groups, some = model.router_groups, model.router_groups_per_token
    if some > groups:
        raise InputError(
            f"router_groups_per_token={some} exceeds router_groups={groups}; choose {groups} "
            "or fewer"
        )
    if groups == 1:
        return
    rule = f"num_experts={model.num_experts} does not split into router_groups={groups}"
    errors.divides(groups, model.num_experts, rule=rule)
    size, chosen = model.num_experts // groups, model.num_experts_per_token
    least = 2 if model.router_score == "sigmoid" else 1
    if size < least or chosen > some * size:
        raise InputError(
            f"router_groups={groups} leaves {counted(size, 'expert')} in each group, and a token "
            f"chooses from {counted(some, 'group')}; a group needs {counted(least, 'expert')}, and "
            f"all groups of a token num_experts_per_token={chosen}; choose fewer groups, or more "
            "per token"
        )


def _check_rope(model: Model) -> None:
    read = ROPE_SCALINGS.get(model.rope_scaling or "", {})
    known = "DeepSeek-V3" if model.rope_scaling == "yarn" else "Llama 3.1"
    for name in _BY_PARTS:
        value = getattr(model, name)
        if name in read and value is None:
            raise InputError(
                f"rope_scaling={model.rope_scaling!r} needs {name}, which is not given; "
                f"{known} has {read[name]}"
            )
        if name not in read and value is not None:
            raise InputError(
                f"{name}={value!r} has no effect with rope_scaling={model.rope_scaling!r}; "
                "leave it out, or choose a rope_scaling that reads it"
            )
    if "rope_factor" in read:
        errors.at_least(model, 1.0, "rope_factor")
    if "rope_original_length" in read:
        errors.whole(model, "rope_original_length")
        errors.above_zero(model, "rope_low_frequency", "rope_high_frequency")
        low, high = model.rope_low_frequency, model.rope_high_frequency
        if low > high or (low == high and model.rope_scaling != "yarn"):
            raise InputError(
                f"rope_low_frequency={low} must be below rope_high_frequency={high}, as pairs "
                f"between them are slowed down in part; {known} has "
                f"{read['rope_low_frequency']} and {read['rope_high_frequency']}"
            )
