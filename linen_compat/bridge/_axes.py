"""Logical axis names of MaxText, as in Linen's metadata boxes, and their names in `Layout`.

`Layout` is `nnx_pipeline.sharding.layout.Layout`.
"""

from linen_compat.bridge._paths import Path
from linen_compat.modules.parameters import AXES

Axes = tuple[str | None, ...]

# By the end of the Linen path. The first match is taken, so more specific ends come first.
_MAXTEXT: dict[str, Axes] = {
    "query/kernel": ("embed", "q_heads", "kv"),
    "wq_a/kernel": ("embed", "q_lora_up_proj"),
    "wq_b/kernel": ("q_lora", "q_heads", "kv"),
    "wkv_a/kernel": ("embed", "kv_lora_up_proj"),
    "wkv_b/kernel": ("kv_lora", "kv_heads", "kv_head_dim"),
    "key/kernel": ("embed", "kv_heads", "kv_head_dim"),
    "value/kernel": ("embed", "kv_heads", "kv_head_dim"),
    "out/kernel": ("heads", "kv", "embed"),
    "DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel": ("embed_moe", None),
    "gate/kernel": ("embed", None),
    "gate/bias": (None,),
    "wi_0/kernel": ("embed", "mlp"),
    "wi_1/kernel": ("embed", "mlp"),
    "wo/kernel": ("mlp", "embed"),
    "wi_0": ("exp", "embed_moe", "mlp_moe"),
    "wi_1": ("exp", "embed_moe", "mlp_moe"),
    "wo": ("exp", "mlp_moe", "embed_moe"),
    "scale": ("norm",),
    "embedding": ("vocab", "embed_vocab"),
    "logits_dense/kernel": ("embed_vocab", "vocab"),
}


def linen_axes(path: Path) -> Axes:
    """MaxText's names for the axes of one of its parameters, by the parameter's Linen path."""
    name = f"/{'/'.join(path)}"
    return next(axes for end, axes in _MAXTEXT.items() if name.endswith(f"/{end}"))


def layout_axes(axes: Axes) -> Axes:
    """The names in `Layout` of axes with MaxText's names; other names stay as they are."""
    return tuple(AXES.get(name, name) if name else name for name in axes)
