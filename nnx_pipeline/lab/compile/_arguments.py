"""The arguments of a user's function: written as texts, or returned by a function."""

import ast
import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab._tracing.calls import Keywords
from nnx_pipeline.lab.compile._functions import LARGEST, check_sizes, check_width, find_function
from nnx_pipeline.lab.compile._places import check_splits
from nnx_pipeline.lab.errors import InputError, nearest, shown

MOST_AXES = 64  # more than any program has; JAX takes minutes over thousands
_NAMED = re.compile(r"\s*(?P<name>[^\W\d]\w*)\s*=(?P<value>.*)", re.DOTALL)
_ARGUMENT = re.compile(r"(?P<dtype>[\w<>]+)\[(?P<axes>[^\]]*)\]")
_AXIS = re.compile(r"(?P<size>\d{1,16})(@(?P<names>\w+(\+\w+)*))?")
# How JAX and HLO write dtypes, whose numbers are bits: f32, s32, i32, f8_e4m3fn, f8e4m3fn.
_SHORT = re.compile(r"(?P<kind>bf|f|s|i|u|c)(?P<bits>\d{1,3})_?(?P<rest>(e\d\w*)?)")
_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "i": "int", "u": "uint", "c": "complex"}
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
# What an unknown dtype is compared with.
_DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64"),
    *("f32", "bf16", "f16", "f64", "f8_e4m3fn", "f8_e5m2", "pred", "s8", "s16", "s32", "s64"),
    *("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "c64", *_KEYS),
)
_WORDS = {"true": True, "false": False, "none": None}


def arguments_of(
    inputs: str | None,
    arguments: Sequence[str],
    mesh: Mesh | None,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> tuple[object, ...]:
    """The arguments of a call, `Keywords` last: each written as a text, or returned by `inputs`
    (`module:function`), called with `numbers` under the mesh: a tuple of pytrees, a dict of keyword
    arguments, or a tuple and a dict. Raises InputError if both are given."""
    if inputs is None:
        given = _written(arguments, mesh)
    elif arguments:
        raise InputError("--inputs and --arg both give the arguments; keep one of them")
    else:
        make = find_function(inputs)
        _check_given(inputs, make, numbers)
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            given = _returned(inputs, make(**numbers))
    check_sizes(given)
    return given


def _check_given(inputs: str, make: Callable[..., object], numbers: Mapping[str, int]) -> None:
    """Raises InputError where the function of `--inputs` needs what it is not called with."""
    try:
        known = inspect.signature(make, follow_wrapped=False).parameters.values()
    except ValueError:
        return  # it has no signature that Python knows
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in known if one.default is one.empty and one.kind not in many]
    if missing := [name for name in needed if name not in numbers]:
        given = f"with {', '.join(numbers)} alone" if numbers else "without an argument"
        raise InputError(
            f"{inputs} needs {', '.join(missing)}, and is called {given}; give a default, such as "
            f"{missing[0]}=8 in its def"
        )


def _returned(inputs: str, made: object) -> tuple[object, ...]:
    if made is None:
        raise InputError(
            f"{inputs!r} returned None; return the tuple of the arguments, () where there are none"
        )
    given = made if isinstance(made, tuple) else (made,)
    # A state and a batch may be a tuple and a dict too, so that the function decides.
    is_pair = type(made) is tuple and [type(one) for one in made] == [tuple, dict]
    others, named = given if is_pair else ((), made)
    if type(named) is dict and all(isinstance(name, str) for name in named):
        return *others, Keywords(named, instead=given)
    return given


def _written(texts: Sequence[str], mesh: Mesh | None) -> tuple[object, ...]:
    others: list[object] = []
    named: dict[str, object] = {}
    for text in texts:
        match = _NAMED.fullmatch(text)
        if not match:
            others.append(_value(text, text, mesh))
            continue
        if match["name"] in named:
            raise InputError(f"--arg {text} names {match['name']} again; give it once")
        named[match["name"]] = _value(text, match["value"], mesh)
    return (*others, *([Keywords(named)] if named else []))


def _value(argument: str, text: str, mesh: Mesh | None) -> object:
    """The array or the value of Python that the text of an argument, without its name, is."""
    if _ARGUMENT.fullmatch(text.replace(" ", "")):
        return parse_argument(text, mesh)
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes, which Python keeps as they are
            return ast.literal_eval(word)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(
            f"argument {shown(argument)} is not an array; write for example bfloat16[8@data,128], "
            f"or a value of Python, such as 4, true or '\"{word if word.isalnum() else 'text'}\"'"
        ) from error


def parse_argument(text: str, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """The abstract array that a text such as `bfloat16[8@data,128]` describes: `@` names the mesh
    axis that an axis is sharded over, or several of them joined by `+`. Raises InputError for an
    unknown dtype or mesh axis, or a size that does not split evenly."""
    what = f"argument {text!r}"
    match = _ARGUMENT.fullmatch(text.replace(" ", ""))
    if not match:
        raise InputError(f"{what} is not an array; write for example bfloat16[8@data,128]")
    dtype = _dtype(what, match["dtype"])
    shape, entries = [], []
    parts = match["axes"].split(",") if match["axes"] else []
    if len(parts) > MOST_AXES:
        raise InputError(
            f"argument {shown(text)} has {len(parts):,} axes, more than {MOST_AXES}; give fewer"
        )
    for part in parts:
        axis = _AXIS.fullmatch(part)
        if not axis:
            raise InputError(f"{what}: {part!r} is not an axis; write 8 or 8@data")
        shape.append(int(axis["size"]))
        entries.append(tuple(axis["names"].split("+")) if axis["names"] else None)
    if math.prod(shape) * dtype.itemsize > LARGEST:
        raise InputError(f"{what} is larger than {LARGEST:,} bytes; give smaller axes")
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=_sharding(what, shape, entries, mesh))


def _dtype(what: str, name: str) -> Any:
    if name in _KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=_KEYS[name])).dtype
    found = "bool" if name == "pred" else name
    if short := _SHORT.fullmatch(name):
        found = "_".join(filter(None, (f"{_KINDS[short['kind']]}{short['bits']}", short["rest"])))
    try:
        dtype = jnp.dtype(found)
    except TypeError as error:
        raise InputError(f"{what}: there is no dtype {name!r}; {nearest(name, _DTYPES)}") from error
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool)):
        raise InputError(f"{what}: JAX has no arrays of {dtype}; write a numeric dtype")
    check_width(what, dtype)
    return dtype


def _sharding(
    what: str, shape: list[int], entries: list[tuple[str, ...] | None], mesh: Mesh | None
) -> NamedSharding | None:
    names = [name for entry in entries for name in entry or ()]
    known = dict(mesh.shape) if mesh is not None else {}
    for name in names:
        if name not in known:
            raise InputError(f"{what}: the mesh has no axis {name!r}; {nearest(name, known)}")
    if len(set(names)) < len(names):
        raise InputError(f"{what} names a mesh axis twice; name each mesh axis once")
    if mesh is None:
        return None
    check_splits(what, shape, entries, known)
    return NamedSharding(mesh, P(*entries))
