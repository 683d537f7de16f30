"""Checks the arguments of `to_linen`, `to_nnx` and their wrappers before they are used."""

import inspect
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from nnx_pipeline import InputError
from nnx_pipeline.lab.errors import nearest


def check_class(kind: object) -> None:
    if isinstance(kind, type) and issubclass(kind, nnx.Module):
        return
    name = _type(kind).__name__
    if isinstance(kind, nnx.Module):
        cure = f"give the class and its arguments, to_linen({name}, …)"
    elif issubclass(_type(kind), nn.Module):
        cure = f"{name} is already a Linen module; use it as it is"
    else:
        cure = "give a class and its arguments, such as to_linen(RMSNorm, config)"
    raise InputError(f"to_linen takes a class of nnx.Module and got {_short(kind)}; {cure}")


def check_module(module: object) -> None:
    if isinstance(module, nn.Module):
        return
    name = _type(module).__name__
    if isinstance(module, type) and issubclass(module, nn.Module):
        cure = f"make one first, to_nnx({name}(…), …)"
    elif issubclass(_type(module), nnx.Module):
        cure = f"{name} is already an NNX module; use it as it is"
    else:
        cure = "give a Linen module and an example of its inputs, such as to_nnx(Dense(4), x)"
    raise InputError(f"to_nnx takes a Linen module and got {_short(module)}; {cure}")


def check_arguments(
    function: Callable[..., object],
    args: tuple[object, ...],
    options: Mapping[str, object],
    *,
    of: str,
) -> None:
    """Raises InputError unless a method takes these arguments; `of` is its name."""
    try:
        inspect.signature(function).bind(None, *args, **options)
    except TypeError as error:
        message = f"{of} does not take these arguments: {error}; give those that it takes"
        raise InputError(message) from error


def check_method(module: object, name: object, *, of: str) -> None:
    if not isinstance(name, str) or not callable(getattr(module, name, None)):
        methods = [each for each in dir(type(module)) if not each.startswith("_")]
        raise InputError(f"{of} has no method {name!r}; {nearest(str(name), methods)}")


def check_rngs(rngs: object) -> None:
    is_seed = isinstance(rngs, int | np.integer) and not isinstance(rngs, bool)
    if rngs is None or is_seed or isinstance(rngs, nnx.Rngs | jax.Array | np.ndarray):
        return
    named = ", ".join(f"{name}=…" for name in rngs) if isinstance(rngs, Mapping) else "params=0"
    raise InputError(
        f"rngs={_short(rngs)} is not a key, a seed or an nnx.Rngs; give rngs=nnx.Rngs({named})"
    )


def check_collections(variables: object, *, of: str) -> None:
    """Raises InputError for anything but None and a tree of variables, as `init` returns it."""
    if variables is not None and not isinstance(variables, Mapping):
        raise InputError(
            f"variables={_short(variables)} is not a tree of collections; give what "
            f"{of}(…).init(key, …) returns"
        )


def check_collect(collect: Iterable[str]) -> tuple[str, ...]:
    """The names of collections as a tuple; one string, whose letters would be names, is refused."""
    if isinstance(collect, str):
        raise InputError(
            f"collect={collect!r} is a single string; give a tuple, collect=({collect!r},)"
        )
    return tuple(collect)


def _type(thing: object) -> type:
    return thing if isinstance(thing, type) else type(thing)


def _short(thing: object) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if isinstance(thing, int | float | str | Mapping):
        return repr(thing)[:60]
    return f"an object of {type(thing).__name__}"
