"""People's own functions: found by name, with abstract arguments, on a mesh of any devices."""

import contextlib
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.nnx_state import holds_itself, name_of, without_repeats
from nnx_pipeline.sharding import is_trivial, spec_axes

AnyMesh = Mesh | AbstractMesh | MeshConfig | str | None

LARGEST = 2**50  # bytes of an argument: more than any pod has, less than compilers count up to
_ARGUMENT = re.compile(r"(?P<dtype>\w+)\[(?P<axes>[^\]]*)\]")
_AXIS = re.compile(r"(?P<size>\d+)(@(?P<names>\w+(\+\w+)*))?")


def find_function(text: str) -> Callable[..., Any]:
    """The function of a text such as `package.module:function`.

    Modules are looked for in the current directory, too, as `python -m` does. Raises InputError
    when there is no such module or function.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{text!r} names no function; write module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # what a module raises is its own affair
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise InputError(f"{text!r}: the module cannot be imported ({reason})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = [known for known in vars(found) if not known.startswith("_")]
            raise InputError(f"{text!r}: there is no {part!r}; {nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{text!r} is a {type(found).__name__} and cannot be called")
    return found


def parse_argument(text: str, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """An abstract array of a text such as `bfloat16[8@data,128]`: axis sizes, spread over the mesh.

    Several mesh axes are joined by `+`. Raises InputError for an unknown dtype or mesh axis, or a
    size that does not split.
    """
    match = _ARGUMENT.fullmatch(text.replace(" ", ""))
    if not match:
        raise InputError(f"argument {text!r} is no array; write for example bfloat16[8@data,128]")
    try:
        dtype = jnp.dtype(match["dtype"])
    except TypeError as error:
        raise InputError(f"argument {text!r}: there is no dtype {match['dtype']!r}") from error
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool)):
        raise InputError(f"argument {text!r}: JAX has no arrays of {dtype}; write a number's dtype")
    _check_width(f"argument {text!r}", dtype)
    shape, entries = [], []
    for part in match["axes"].split(",") if match["axes"] else ():
        axis = _AXIS.fullmatch(part)
        if not axis:
            raise InputError(f"argument {text!r}: {part!r} is no axis; write 8 or 8@data")
        shape.append(int(axis["size"]))
        entries.append(tuple(axis["names"].split("+")) if axis["names"] else None)
    if math.prod(shape) * dtype.itemsize > LARGEST:
        raise InputError(f"argument {text!r} is larger than {LARGEST:,} bytes; give smaller axes")
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=_sharding(text, shape, entries, mesh))


def _check_width(what: str, dtype: Any) -> None:
    """Raises InputError for a dtype in whose place JAX takes half of it."""
    if jnp.issubdtype(dtype, jnp.number) and (
        (used := jax.dtypes.canonicalize_dtype(dtype)) != dtype
    ):
        raise InputError(
            f"{what}: JAX makes {used} of {dtype}; write that, or set JAX_ENABLE_X64=1"
        )


def _sharding(
    text: str, shape: list[int], entries: list[tuple[str, ...] | None], mesh: Mesh | None
) -> NamedSharding | None:
    names = [name for entry in entries for name in entry or ()]
    known = dict(mesh.shape) if mesh is not None else {}
    for name in names:
        if name not in known:
            raise InputError(
                f"argument {text!r}: the mesh has no axis {name!r}; {nearest(name, known)}"
            )
    if len(set(names)) < len(names):
        raise InputError(f"argument {text!r} names a mesh axis twice; spread one axis over it")
    if mesh is None:
        return None
    sharding = NamedSharding(mesh, P(*entries))
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError as error:
        raise InputError(
            f"argument {text!r} does not split evenly over the mesh {known}"
        ) from error
    return sharding


def arguments_of(
    inputs: str | None, arguments: Sequence[str], mesh: Mesh | None
) -> tuple[Any, ...]:
    """The abstract arguments: from a function that gives them, or written down one by one.

    inputs: `module:function` of a function without arguments that gives a tuple of pytrees of
    arrays or `jax.ShapeDtypeStruct`; it is called under the mesh.
    """
    if inputs is None:
        written = tuple(parse_argument(text, mesh) for text in arguments)
        check_arrays(written)
        return written
    if arguments:
        raise InputError("--inputs and --arg both give the arguments; keep one of them")
    make = find_function(inputs)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        made = make()
    given = made if isinstance(made, tuple) else (made,)
    check_arrays(given)
    return given


@contextlib.contextmanager
def called_with(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[None]:
    """Raises InputError unless the function takes as many arguments; the function is called inside.

    A wrapper may bind some of what it wraps, as that of `nnx.cached_partial` does, so that what is
    wrapped is asked only where the call has failed.
    """
    _bind(function, arguments, follow_wrapped=not isinstance(function, FunctionType))
    try:
        yield
    except TypeError:
        _bind(function, arguments)
        raise


def _bind(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, follow_wrapped: bool = True
) -> None:
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except ValueError:
        return  # it has no signature that Python knows
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{name_of(function)} cannot be called with {len(arguments)} arguments: {error}; give "
            "its arrays in order and bind the rest with functools.partial"
        ) from error


def mesh_on(mesh: AnyMesh, devices: Sequence[Any]) -> Mesh | None:
    """The mesh, or one of the same axes over other devices.

    A text or a `MeshConfig` has the axes of this project, in auto mode. Raises InputError when
    there are not enough devices.
    """
    if isinstance(mesh, str):
        mesh = MeshConfig.parse(mesh)
    if isinstance(mesh, MeshConfig):
        return make_mesh(mesh, devices[:1] if mesh.num_devices == 1 else devices, sharding="auto")
    if mesh is None:
        return None
    sizes, needed = tuple(mesh.shape.values()), mesh.size
    if len(devices) < needed:
        raise InputError(f"the mesh needs {needed} devices and there are {len(devices)}")
    grid = np.asarray(list(devices[:needed])).reshape(sizes)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def check_arrays(arguments: Any) -> None:
    """Raises InputError where an argument, or all of them, are more than compilers count up to,
    and for shapes said to be of 64 bits in whose place JAX takes 32."""
    if holds_itself(arguments):
        raise InputError(
            "an argument is a module that holds itself, which JAX cannot take apart; leave out "
            "the attribute that leads back to it"
        )
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue
        size = math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 0)
        total += size
        place = f"argument {jax.tree_util.keystr(path)}"
        # Of an array with values JAX takes half of the bits when the program runs, too.
        if isinstance(leaf, jax.ShapeDtypeStruct):
            _check_width(place, leaf.dtype)
        for what, held in ((place, size), ("all arguments together", total)):
            if held > LARGEST:
                raise InputError(
                    f"{what}: {held:,} bytes are more than {LARGEST:,}; give smaller axes"
                )


def abstract(arguments: Any, mesh: Mesh | None, device: Any, *, static: Container[int] = ()) -> Any:
    """The arguments without their values, on this mesh, or without one on this device.

    Variables that NNX modules share stay shared. static: identities of leaves that need not be
    arrays and stay as they are.

    Raises InputError for another leaf that is no array, for a sharding over axes that the mesh
    lacks, and for a kind of memory that the devices lack.
    """

    def changed(leaf: Any) -> Any:
        return leaf if id(leaf) in static else _abstract_leaf(leaf, mesh, device)

    once, restored = without_repeats(arguments)
    return restored(jax.tree.map(changed, once))


def memory_kind(leaf: Any) -> str | None:
    """The kind of memory that the sharding of an array names, None for that of devices."""
    sharding: Any = getattr(leaf, "sharding", None)
    kind: str | None = getattr(sharding, "memory_kind", None)
    if kind in (None, "device"):
        return None
    if isinstance(leaf, jax.Array):  # what an array without a kind has, on a CPU of old
        (device, *_) = sharding.device_set
        kind = None if kind == device.default_memory().kind else kind
    return kind


def _abstract_leaf(leaf: Any, mesh: Mesh | None, device: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or isinstance(leaf, jax.Ref):
        raise InputError(
            f"an argument holds a {type(leaf).__name__}; give arrays or jax.ShapeDtypeStruct, and "
            "bind the rest with functools.partial"
        )
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=_placed(leaf, mesh, device),
        weak_type=getattr(leaf, "weak_type", False),
    )


def _placed(leaf: Any, mesh: Mesh | None, device: Any) -> jax.sharding.Sharding:
    sharding = getattr(leaf, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    kind = _known_kind(memory_kind(leaf), device)
    if mesh is None:
        if not is_trivial(spec):
            raise InputError("an argument is spread over a mesh and there is none; give mesh=")
        if kind is None:
            return jax.sharding.SingleDeviceSharding(device)
        mesh = Mesh(np.asarray([device]), ("device",))
    missing = sorted(spec_axes(spec) - set(mesh.axis_names))
    if missing:
        raise InputError(f"an argument is spread over {missing}, which mesh= does not have")
    placed = NamedSharding(mesh, spec, memory_kind=kind)
    if placed.memory_kind == kind or kind is None:
        return placed
    # The NVIDIA topology names no memories, and JAX drops the kind; without devices it keeps it.
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=kind)


def _known_kind(kind: str | None, device: Any) -> str | None:
    """Raises InputError where the device has no memory of this kind."""
    if kind is None:
        return None
    kinds = [memory.kind for memory in device.addressable_memories()] or ["device", "pinned_host"]
    if kind not in kinds:
        raise InputError(
            f"an argument is in memory of the kind {kind!r}, which {device.device_kind} lacks; "
            f"{nearest(kind, kinds)}"
        )
    return kind
