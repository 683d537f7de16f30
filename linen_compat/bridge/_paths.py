"""Paths and axes of parameters on the other side of a wrapper, and checks of given trees."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jaxtyping import PyTree

from linen_compat import modules
from linen_compat.formats import _names as names
from linen_compat.formats._names import Names
from linen_compat.modules.parameters import AXES, unboxed
from nnx_pipeline import (
    MLP,
    Attention,
    DecoderLayer,
    Embed,
    InputError,
    LatentAttention,
    ModelConfig,
    RMSNorm,
    RoutedMoE,
)

Path = tuple[str, ...]
Tree = Mapping[str, PyTree]
Flat = Mapping[Path, PyTree]  # the leaves of a tree by their paths
Variable = nnx.Variable[PyTree]
Axes = tuple[str | None, ...]

_ATTENTION = (*names.ATTENTION, *names.BIASES, names.SINKS, *names.QK_NORMS)
_ROUTED = (*names.EXPERTS, *names.EXPERT_BIASES)
_LAYER = (*names.NORMS, *_ATTENTION)
_DEEPSEEK = "DeepSeekMoeBlock_0/"
# MaxText's names of axes by the end of the Linen path. The first match is taken.
_MAXTEXT_AXES: dict[str, Axes] = {
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
    "query/bias": ("q_heads", "kv"),
    "key/bias": ("kv_heads", "kv_head_dim"),
    "value/bias": ("kv_heads", "kv_head_dim"),
    "out/bias": ("norm",),
    "sinks": ("q_heads",),
    "wi_0_bias": ("exp", "mlp_moe"),
    "wi_1_bias": ("exp", "mlp_moe"),
    "wo_bias": ("exp", "norm"),
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


def _below(table: Iterable[Names], nnx_prefix: str, linen_prefix: str) -> tuple[Names, ...]:
    return tuple(
        dataclasses.replace(
            entry,
            nnx=entry.nnx.removeprefix(nnx_prefix),
            linen=entry.linen.removeprefix(linen_prefix),
        )
        for entry in table
    )


# The parameters of each class of this project, NNX or Linen, with paths that start at the class.
_OF_CLASSES: tuple[tuple[tuple[type, ...], tuple[Names, ...]], ...] = (
    ((RMSNorm, modules.RMSNorm), (Names("scale", "scale", ""),)),
    ((Embed, modules.Embed), (Names("embedding", "embedding", ""),)),
    (
        (Attention, modules.Attention),
        _below(_ATTENTION, "attention.", "self_attention/"),
    ),
    ((RoutedMoE, modules.MoeBlock), _below(_ROUTED, "feed_forward.", "MoeBlock_0/")),
    ((MLP, modules.MlpBlock), _below(names.MLP, "feed_forward.", "mlp/")),
    (
        (modules.DeepSeekMoeBlock,),
        _below(names.EXPERTS_OF_DEEPSEEK, "feed_forward.", _DEEPSEEK),
    ),
    ((modules.MixtralDecoderLayer,), (*_LAYER, *names.EXPERTS)),
    ((modules.Qwen3MoeDecoderLayer,), (*_LAYER, *names.EXPERTS_OF_QWEN3)),
    ((modules.LlamaDecoderLayer,), (*_LAYER, *names.MLP)),
)


def table_of(module: nnx.Module | nn.Module) -> tuple[Names, ...]:
    """The names of the parameters in a module of this project; none for any other module."""
    if isinstance(module, DecoderLayer):
        routed, config = "router" in vars(module.feed_forward), module.attention.config
        if config.kv_lora_rank is None:
            layer = names.of_layer(2 if routed else 1, qk_norm=config.qk_norm)
            return (*layer, *names.OPTIONAL, *names.EXPERT_BIASES)
        return _of_latent_layer(config, routed)
    if isinstance(module, modules.DeepSeekDenseLayer | modules.DeepSeekMoELayer):
        return _of_latent_layer(module.config, isinstance(module, modules.DeepSeekMoELayer))
    if isinstance(module, LatentAttention | modules.LatentAttention):
        return _below(_latent(module.config), "attention.", "self_attention/")
    if isinstance(module, RoutedMoE | modules.MoeBlock) and module.config.kv_lora_rank is not None:
        prefix = _DEEPSEEK if isinstance(module, RoutedMoE) else f"{_DEEPSEEK}MoeBlock_0/"
        return _below(names.EXPERTS_OF_DEEPSEEK, "feed_forward.", prefix)
    return next((table for kinds, table in _OF_CLASSES if isinstance(module, kinds)), ())


def _of_latent_layer(config: ModelConfig, routed: bool) -> tuple[Names, ...]:
    experts = names.EXPERTS_OF_DEEPSEEK if routed else names.MLP
    return (*names.NORMS, *_latent(config), *experts)


def _latent(config: ModelConfig) -> tuple[Names, ...]:
    return names.PLAIN_QUERY if config.q_lora_rank is None else names.LATENT_ATTENTION


def linen_paths(module: nnx.Module) -> dict[Path, Path]:
    """The Linen path of every parameter of a class of this project, by NNX path.

    The outermost such class decides the names below it.
    """
    paths: dict[Path, Path] = {}
    # Outer modules come first, and `setdefault` keeps the names that they give.
    for at, inner in sorted(nnx.iter_modules(module), key=lambda pair: len(pair[0])):
        prefix = tuple(map(str, at))
        for entry in table_of(inner):
            paths.setdefault((*prefix, *entry.nnx.split(".")), (*prefix, *entry.linen.split("/")))
    return paths


def flatten(tree: Tree) -> dict[Path, PyTree]:
    """One mapping from path to leaf; metadata boxes are leaves."""
    flat: dict[Path, PyTree] = {}
    stack: list[tuple[Path, PyTree]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Mapping):
            stack.extend(((*path, str(key)), child) for key, child in node.items())
        else:
            flat[path] = node
    return flat


def unboxed_shape(leaf: PyTree) -> PyTree:
    """The shape of an array, in a metadata box or not; of a pytree, that of each array in it."""
    return jax.tree.map(np.shape, unboxed(leaf))


def check_leaves(leaves: Flat, wanted: Flat, *, of: str, at: Path = ()) -> None:
    """Raises InputError for a leaf that is unknown, missing, or of another shape than wanted.

    Paths begin with the collection; `at` is the path of the module within the outer one.
    """
    unknown = [path for path in leaves if path not in wanted]
    missing = [path for path in wanted if path not in leaves]
    if unknown:
        name = _name(unknown[0], at)
        cure = _nearest(name, [_name(path, at) for path in missing or wanted])
        raise InputError(f"{name} is not a variable of {of}{_more(unknown)}; {cure}")
    if missing:
        raise InputError(
            f"{_name(missing[0], at)}, a variable of {of}, is not in the tree{_more(missing)}; "
            f"{_nearest(_name(missing[0], at), [_name(path, at) for path in leaves])}"
        )
    for path, shape in wanted.items():
        actual = unboxed_shape(leaves[path])
        if actual != shape:
            raise InputError(
                f"{_name(path, at)} has shape {actual} and {of} needs {shape}; "
                "give arrays that were made for a model of the same sizes"
            )


def _name(path: Path, at: Path) -> str:
    return "/".join((path[0], *at, *path[1:]))


def _more(paths: list[Path]) -> str:
    return f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""


def _nearest(name: str, known: list[str]) -> str:
    if not known:
        return "the tree is empty; initialise it, or load one"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"the nearest known one is {close[0]}"


def nnx_path(module: nn.Module, path: Path) -> Path:
    """The NNX path of a parameter of a Linen module, whose `path` is below the collection."""
    name = {entry.linen: entry.nnx for entry in table_of(module)}.get("/".join(path))
    return path if name is None else tuple(name.split("."))


def linen_axes(path: Path) -> Axes:
    """MaxText's names for the axes of one of its parameters, by the parameter's Linen path."""
    name = f"/{'/'.join(path)}"
    return next(axes for end, axes in _MAXTEXT_AXES.items() if name.endswith(f"/{end}"))


def layout_axes(axes: Axes) -> Axes:
    """The names in `Layout` of axes with MaxText's names; other names stay as they are."""
    return tuple(AXES.get(name, name) if name else name for name in axes)
