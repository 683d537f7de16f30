"""Paths of parameters: their names on the other side of a wrapper, and checks of given trees."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from jaxtyping import PyTree

from linen_compat import modules
from linen_compat.formats import _names as names
from linen_compat.formats._names import Names
from linen_compat.modules.parameters import unboxed
from nnx_pipeline import MLP, Attention, DecoderLayer, Embed, InputError, RMSNorm, RoutedMoE
from nnx_pipeline.modules import LatentAttention

Path = tuple[str, ...]
Tree = Mapping[str, PyTree]
Flat = Mapping[Path, PyTree]  # the leaves of a tree by their paths
Variable = nnx.Variable[Any]

_LAYER = (*names.NORMS, *names.ATTENTION, *names.QK_NORMS)
# With a latent vector of queries or without: no module has both.
_LATENT = {True: names.LATENT_ATTENTION, False: names.PLAIN_QUERY}
_DEEPSEEK = "DeepSeekMoeBlock_0/"


def _below(table: Iterable[Names], nnx_prefix: str, linen_prefix: str) -> tuple[Names, ...]:
    return tuple(
        Names(
            entry.nnx.removeprefix(nnx_prefix),
            entry.linen.removeprefix(linen_prefix),
            entry.huggingface,
        )
        for entry in table
    )


# The parameters of each class of this project, with paths in NNX and in Linen that start at the
# class.
_OF_CLASS: dict[type, tuple[Names, ...]] = {
    RMSNorm: (Names("scale", "scale", ""),),
    Embed: (Names("embedding", "embedding", ""),),
    Attention: _below((*names.ATTENTION, *names.QK_NORMS), "attention.", "self_attention/"),
    RoutedMoE: _below(names.EXPERTS, "feed_forward.", "MoeBlock_0/"),
    MLP: _below(names.MLP, "feed_forward.", "mlp/"),
}
_OF_LINEN_CLASS: dict[type, tuple[Names, ...]] = {
    modules.RMSNorm: _OF_CLASS[RMSNorm],
    modules.Embed: _OF_CLASS[Embed],
    modules.Attention: _OF_CLASS[Attention],
    modules.MoeBlock: _OF_CLASS[RoutedMoE],
    modules.MlpBlock: _OF_CLASS[MLP],
    modules.DeepSeekMoeBlock: _below(names.EXPERTS_OF_DEEPSEEK, "feed_forward.", _DEEPSEEK),
    modules.MixtralDecoderLayer: (*_LAYER, *names.EXPERTS),
    modules.Qwen3MoeDecoderLayer: (*_LAYER, *names.EXPERTS_OF_QWEN3),
    modules.LlamaDecoderLayer: (*_LAYER, *names.MLP),
}


def table_of(module: nnx.Module) -> tuple[Names, ...] | None:
    """The names of the parameters in a module of this project; None for any other module."""
    if isinstance(module, DecoderLayer):
        routed, config = "router" in vars(module.feed_forward), module.attention.config
        if config.kv_lora_rank is not None:
            experts = names.EXPERTS_OF_DEEPSEEK if routed else names.MLP
            return (*names.NORMS, *_LATENT[config.q_lora_rank is not None], *experts)
        return names.of_layer(2 if routed else 1, qk_norm=config.qk_norm)
    if isinstance(module, LatentAttention):
        table = _LATENT[module.config.q_lora_rank is not None]
        return _below(table, "attention.", "self_attention/")
    if isinstance(module, RoutedMoE) and module.config.kv_lora_rank is not None:
        return _below(names.EXPERTS_OF_DEEPSEEK, "feed_forward.", _DEEPSEEK)
    return next((table for kind, table in _OF_CLASS.items() if isinstance(module, kind)), None)


def linen_paths(module: nnx.Module) -> dict[Path, Path]:
    """The Linen path of every parameter of a class of this project, by NNX path.

    The outermost such class decides the names below it. All other paths are the same in NNX and in
    Linen.
    """
    found: dict[Path, Path] = {}
    # Outer modules come first, and `setdefault` keeps the names that they give.
    for at, inner in sorted(nnx.iter_modules(module), key=lambda pair: len(pair[0])):
        prefix = tuple(map(str, at))
        for entry in table_of(inner) or ():
            found.setdefault((*prefix, *entry.nnx.split(".")), (*prefix, *entry.linen.split("/")))
    return found


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


def nest(flat: Flat) -> dict[str, PyTree]:
    """The inverse of `flatten`."""
    tree: dict[str, PyTree] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def unboxed_shape(leaf: PyTree) -> PyTree:
    """The shape of an array, in a metadata box or not; of a pytree, that of each array in it."""
    return jax.tree.map(np.shape, unboxed(leaf))


def check_leaves(given: Flat, wanted: Flat, *, of: str, at: Path = ()) -> None:
    """Raises InputError for a leaf that is unknown, missing, or of another shape than needed.

    Paths begin with the collection. `wanted` has shapes, and `at` is the path of the module within
    the outer one, for the message.
    """
    unknown = [path for path in given if path not in wanted]
    missing = [path for path in wanted if path not in given]
    if unknown:
        name = _name(unknown[0], at)
        cure = _nearest(name, [_name(path, at) for path in missing or wanted])
        raise InputError(f"{name} is not a variable of {of}{_more(unknown)}; {cure}")
    if missing:
        raise InputError(
            f"{_name(missing[0], at)}, a variable of {of}, is not in the tree{_more(missing)}; "
            f"{_nearest(_name(missing[0], at), [_name(path, at) for path in given])}"
        )
    for path, shape in wanted.items():
        found = unboxed_shape(given[path])
        if found != shape:
            raise InputError(
                f"{_name(path, at)} has shape {found} and {of} needs {shape}; "
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


def _table_of_linen(module: nn.Module) -> tuple[Names, ...]:
    """The names of the parameters in a Linen module of this project; none for any other module."""
    if isinstance(module, modules.DeepSeekDenseLayer | modules.DeepSeekMoELayer):
        routed = isinstance(module, modules.DeepSeekMoELayer)
        latent = _LATENT[module.config.q_lora_rank is not None]
        return (*names.NORMS, *latent, *(names.EXPERTS_OF_DEEPSEEK if routed else names.MLP))
    if isinstance(module, modules.LatentAttention):
        table = _LATENT[module.config.q_lora_rank is not None]
        return _below(table, "attention.", "self_attention/")
    if isinstance(module, modules.MoeBlock) and module.config.kv_lora_rank is not None:
        return _below(names.EXPERTS_OF_DEEPSEEK, "feed_forward.", f"{_DEEPSEEK}MoeBlock_0/")
    tables = (table for kind, table in _OF_LINEN_CLASS.items() if isinstance(module, kind))
    return next(tables, ())


def nnx_path(module: nn.Module, path: Path) -> Path:
    """The NNX path of a parameter of a Linen module, whose `path` is below the collection."""
    return next(
        (
            tuple(entry.nnx.split("."))
            for entry in _table_of_linen(module)
            if tuple(entry.linen.split("/")) == path
        ),
        path,
    )
