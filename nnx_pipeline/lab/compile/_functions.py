"""User functions: found by name, and given abstract arguments."""

import contextlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nnx_pipeline.lab._files import local
from nnx_pipeline.lab._tracing.calls import Call, calls_pmap_inside
from nnx_pipeline.lab._tracing.jaxpr import is_pmap
from nnx_pipeline.lab._tracing.nnx_state import (
    Tree,
    holds_itself,
    is_array,
    is_traced,
    name_of,
    without_repeats,
)
from nnx_pipeline.lab.compile._lowering import CAPTURED, PMAP
from nnx_pipeline.lab.compile._places import placed_on
from nnx_pipeline.lab.errors import InputError, counted, described, nearest

# Bytes of an argument: more than any pod has, and less than the largest number compilers count to.
LARGEST = 2**50


# What JAX says of an axis that a mesh lacks: in a constraint, a shard_map and a collective.
_NO_AXIS = ("is not found in mesh", "must refer to an axis marked as manual", "unbound axis name")


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


def check_width(what: str, dtype: Any) -> None:
    used = jax.dtypes.canonicalize_dtype(dtype) if jnp.issubdtype(dtype, jnp.number) else dtype
    if used != dtype:
        raise InputError(
            f"{what}: JAX turns {dtype} into {used}; write {used}, or set JAX_ENABLE_X64=1"
        )


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
        _check_numbers(call, error)
        if "ShapeDtypeStruct" in str(error):  # of Python or JAX, where an array is needed
            raise InputError(f"{name} {CAPTURED} ({described(error)})") from error
        leaves = jax.tree.leaves(call.given)
        others = [leaf for leaf in leaves if not is_traced(leaf)]
        if "as an abstract array" not in str(error) or not others:  # the words of JAX
            raise
        raise InputError(
            f"{name} is given a {type(others[0]).__name__}, which its jit does not take as static; "
            "name that argument in static_argnames, or give an array"
        ) from error
    except NameError as error:
        _check_axes(name, error)
        raise
    except ValueError as error:
        inside = "axis to squeeze out" in str(error)  # the words of JAX, there and elsewhere
        if is_pmap(call.function) or (inside and calls_pmap_inside(call)):
            raise InputError(f"{name} uses {PMAP}") from error
        if "Non-hashable static arguments" in str(error):  # the words of JAX
            raise InputError(
                f"{name} is given a static argument without a hash, such as a list; give a tuple "
                "or another value that never changes"
            ) from error
        _check_axes(name, error)
        if "mesh passed to shard_map" not in str(error):  # the words of JAX
            raise
        raise InputError(
            f"{name} calls jax.shard_map with a mesh of its own, and is compiled for the devices "
            "of another one; leave mesh= out of the shard_map (write a jax.pmap as one), which "
            "then takes the mesh that mesh= of the measurement, or --mesh, gives"
        ) from error


def _check_numbers(call: Call, error: TypeError) -> None:
    """Raises InputError where a function without jit needs the value of a number that it is given
    in order, which is traced."""
    numbers = [one for one in jax.tree.leaves(call.given) if isinstance(one, int | float)]
    is_jitted = callable(getattr(call.function, "lower", None))
    if isinstance(error, jax.errors.JAXTypeError) and numbers and not is_jitted:
        raise InputError(
            f"{name_of(call.function)} needs a value while it is traced, and numbers in order are "
            f"traced ({described(error)}); give it by name (--arg n=4, or functools.partial), or "
            "jit the function with static_argnames"
        ) from error


def _check_axes(name: str, error: Exception) -> None:
    """Raises InputError where JAX says that a mesh lacks an axis."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    if any(words in str(error) for words in _NO_AXIS):
        has = f"has {', '.join(axes)}" if axes else "is missing"
        raise InputError(
            f"{name} names an axis that the mesh lacks ({described(error)}); the mesh {has}: give "
            "one with the axes of the function, such as --mesh dp=4,tp=2"
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
            "order, keyword-only ones without a default last, and bind the rest with "
            "functools.partial (a command takes them from --arg, also by name, or from --inputs)"
            + ("; a list is one argument, the arguments themselves are in a tuple" if lists else "")
        ) from error


def check_sizes(arguments: object) -> None:
    """Raises InputError for more than `LARGEST` bytes, for a `jax.ShapeDtypeStruct` of a dtype that
    JAX would narrow, for a reference, and for a module that contains itself."""
    if holds_itself(arguments):
        raise InputError(
            "an argument is a module that contains itself, which JAX cannot flatten; leave out "
            "the attribute that leads back to it"
        )
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if isinstance(leaf, jax.Ref):
            raise InputError(
                f"an argument holds a {type(leaf).__name__}, which can change; give an array, or "
                "make the reference in the function"
            )
        if not is_array(leaf):
            continue
        size = math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 0)
        total += size
        place = f"argument {jax.tree_util.keystr(path)}"
        # JAX narrows an array with values in the same way when the program runs, so it is let pass.
        if isinstance(leaf, jax.ShapeDtypeStruct):
            check_width(place, leaf.dtype)
        for what, held in ((place, size), ("all arguments together", total)):
            if held > LARGEST:
                raise InputError(
                    f"{what}: {held:,} bytes are more than {LARGEST:,}; give smaller axes"
                )


def abstract_arguments(arguments: Tree, mesh: Mesh | None, device: jax.Device) -> Tree:
    """Pytrees of arrays as shapes on `mesh` in the place of their own, or on one device. What is no
    array stays as it is, shared variables shared. Raises InputError for axes that the mesh lacks
    and for memory that the device lacks."""

    def changed(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        place, weak = placed_on(leaf, mesh, device), getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak)

    # A shared variable is made abstract once, or it would come out as several variables.
    once, restored = without_repeats(arguments)
    return restored(jax.tree.map(changed, once))
