"""User functions: found by name, and given abstract arguments."""

import contextlib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab._files import local
from nnx_pipeline.lab._tracing.calls import Call, calls_pmap_inside
from nnx_pipeline.lab._tracing.jaxpr import is_pmap
from nnx_pipeline.lab._tracing.nnx_state import Tree, holds_itself, name_of, without_repeats
from nnx_pipeline.lab.compile._lowering import CAPTURED, PMAP
from nnx_pipeline.lab.compile._places import check_splits, placed_on
from nnx_pipeline.lab.errors import InputError, counted, described, nearest, shown

# Bytes of an argument: more than any pod has, and less than the largest number compilers count to.
LARGEST = 2**50
# What an unknown dtype is compared with.
_DTYPES = (
    *(jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.bool_),
    *(jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64),
)
MOST_AXES = 64  # more than any program has; JAX takes minutes over thousands
_ARGUMENT = re.compile(r"(?P<dtype>\w+)\[(?P<axes>[^\]]*)\]")
_AXIS = re.compile(r"(?P<size>\d{1,16})(@(?P<names>\w+(\+\w+)*))?")


def find_function(text: str) -> Callable[..., object]:
    """Imports the function that `package.module:function` or `folder/file.py:function` names;
    raises InputError where there is none. Modules are also looked for in the current directory, as
    `python -m` does, and those that a file imports beside it, as `python file.py` does."""
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{text!r} names no function; write module:function")
    is_file = module_name.endswith(".py")
    if "/" in module_name and not is_file:
        raise InputError(f"{text!r} names no module; write {module_name}.py:{name} for a file")
    if is_file and not local(module_name).is_file():
        raise InputError(f"{text!r}: there is no file {module_name}; name one, or a module")
    here = str(local(module_name).resolve().parent if is_file else Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any
    try:
        found = _of_file(local(module_name)) if is_file else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise InputError(
            f"{text!r}: the module cannot be imported ({described(error)}); modules are looked for "
            "in the current folder and where Python finds them"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = [known for known in vars(found) if not known.startswith("_")]
            raise InputError(f"{text!r}: there is no {part!r}; {nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(
            f"{text!r} has the type {type(found).__name__}, which cannot be called; name a function"
        )
    function: Callable[..., object] = found
    return function


def _of_file(path: Path) -> ModuleType:
    """The module of a file, which is run once, whatever a module of that name may be elsewhere."""
    file = str(path.resolve())
    for known in [*sys.modules.values()]:
        if getattr(known, "__file__", None) == file:
            return known
    name = path.stem if path.stem not in sys.modules else file.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot import {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def parse_argument(text: str, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """The abstract array that a text such as `bfloat16[8@data,128]` describes: `@` names the mesh
    axis that an axis is sharded over, or several of them joined by `+`. Raises InputError for an
    unknown dtype or mesh axis, or a size that does not split evenly."""
    what = f"argument {text!r}"
    match = _ARGUMENT.fullmatch(text.replace(" ", ""))
    if not match:
        raise InputError(f"{what} is not an array; write for example bfloat16[8@data,128]")
    name = match["dtype"]
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        known = [kind.__name__ for kind in _DTYPES]
        raise InputError(f"{what}: there is no dtype {name!r}; {nearest(name, known)}") from error
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool)):
        raise InputError(f"{what}: JAX has no arrays of {dtype}; write a numeric dtype")
    _check_width(what, dtype)
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


def _check_width(what: str, dtype: Any) -> None:
    used = jax.dtypes.canonicalize_dtype(dtype) if jnp.issubdtype(dtype, jnp.number) else dtype
    if used != dtype:
        raise InputError(
            f"{what}: JAX turns {dtype} into {used}; write {used}, or set JAX_ENABLE_X64=1"
        )


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


def arguments_of(
    inputs: str | None, arguments: Sequence[str], mesh: Mesh | None
) -> tuple[object, ...]:
    """The abstract arguments of a call, each written as a text, or returned as a tuple of pytrees
    by `inputs` (`module:function`), called under the mesh. Raises InputError if both are given."""
    if inputs is None:
        made: object = tuple(parse_argument(text, mesh) for text in arguments)
    elif arguments:
        raise InputError("--inputs and --arg both give the arguments; keep one of them")
    else:
        make = find_function(inputs)
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            made = make()
    if made is None:
        raise InputError(
            f"{inputs!r} returned None; return the tuple of the arguments, () where there are none"
        )
    given = made if isinstance(made, tuple) else (made,)
    check_sizes(given)
    return given


@contextlib.contextmanager
def called_with(call: Call) -> Iterator[None]:
    """A context to trace a call in, which raises InputError if the arguments do not fit it, for a
    `jax.pmap`, and for a `jax.shard_map` with a mesh of its own, which JAX refuses."""
    _bind(call, follow_wrapped=not isinstance(call.function, FunctionType))
    name = name_of(call.function)
    try:
        yield
    except TypeError as error:
        _bind(call)
        if "ShapeDtypeStruct" in str(error):  # of Python or JAX, where an array is needed
            raise InputError(f"{name} {CAPTURED} ({described(error)})") from error
        leaves = jax.tree.leaves(call.given)
        others = [x for x in leaves if id(x) in call.static and not isinstance(x, int | float)]
        if "as an abstract array" not in str(error) or not others:  # the words of JAX
            raise
        raise InputError(
            f"{name} is given a {type(others[0]).__name__}, which its jit does not take as static; "
            "name that argument in static_argnames, or give an array"
        ) from error
    except ValueError as error:
        inside = "axis to squeeze out" in str(error)  # the words of JAX, there and elsewhere
        if is_pmap(call.function) or (inside and calls_pmap_inside(call)):
            raise InputError(f"{name} uses {PMAP}") from error
        if "Non-hashable static arguments" in str(error):  # the words of JAX
            raise InputError(
                f"{name} is given a static argument without a hash, such as a list; give a tuple "
                "or another value that never changes"
            ) from error
        if "mesh passed to shard_map" not in str(error):  # the words of JAX
            raise
        raise InputError(
            f"{name} calls jax.shard_map with a mesh of its own, and is compiled for the devices "
            "of another one; leave mesh= out of the shard_map (write a jax.pmap as one), which "
            "then takes the mesh that mesh= of the measurement, or --mesh, gives"
        ) from error


def _bind(call: Call, *, follow_wrapped: bool = True) -> None:
    try:
        signature = inspect.signature(call.function, follow_wrapped=follow_wrapped)
    except ValueError:
        return  # it has no signature that Python knows
    try:
        signature.bind(*call.arguments, **call.keywords)
    except TypeError as error:
        lists = any(isinstance(argument, list) for argument in call.arguments)
        given = counted(len(call.arguments) + len(call.keywords) - call.bound, "argument")
        raise InputError(
            f"{name_of(call.function)} cannot be called with {given}: {error}; give its arrays in "
            "order, keyword-only ones without a default last (a command takes them from --arg or "
            "--inputs), and bind the rest with functools.partial"
            + ("; a list is one argument, the arguments themselves are in a tuple" if lists else "")
        ) from error


def check_sizes(arguments: object) -> None:
    """Raises InputError for more than `LARGEST` bytes, for a `jax.ShapeDtypeStruct` of a dtype that
    JAX would narrow, and for a module that contains itself."""
    if holds_itself(arguments):
        raise InputError(
            "an argument is a module that contains itself, which JAX cannot flatten; leave out "
            "the attribute that leads back to it"
        )
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue
        size = math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 0)
        total += size
        place = f"argument {jax.tree_util.keystr(path)}"
        # JAX narrows an array with values in the same way when the program runs, so it is let pass.
        if isinstance(leaf, jax.ShapeDtypeStruct):
            _check_width(place, leaf.dtype)
        for what, held in ((place, size), ("all arguments together", total)):
            if held > LARGEST:
                raise InputError(
                    f"{what}: {held:,} bytes are more than {LARGEST:,}; give smaller axes"
                )


def abstract_arguments(
    arguments: Tree, mesh: Mesh | None, device: jax.Device, *, static: Container[int] = ()
) -> Tree:
    """Pytrees of arrays as shapes on `mesh` in the place of their own, or on one device. Numbers
    and `static` leaves (by `id`) stay as they are, shared variables shared. Raises InputError for
    other leaves, for axes that the mesh lacks and for memory that the device lacks."""

    def changed(leaf: Any) -> Any:
        if id(leaf) in static or isinstance(leaf, bool | int | float | complex):
            return leaf
        check_array(leaf)
        place, weak = placed_on(leaf, mesh, device), getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)

    # A shared variable is made abstract once, or it would come out as several variables.
    once, restored = without_repeats(arguments)
    return restored(jax.tree.map(changed, once))


def check_array(leaf: object) -> None:
    """Raises InputError for a leaf of the arguments that is no array, or one that can change."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or isinstance(leaf, jax.Ref):
        raise InputError(
            f"an argument holds a {type(leaf).__name__}; give arrays or jax.ShapeDtypeStruct, and "
            "bind the rest with functools.partial"
        )
