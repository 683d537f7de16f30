"""Names what JAX does not lower: what needs the device, with its line, and shardings of its own."""

import contextlib
import os
import re
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from nnx_pipeline.lab._tracing.jaxpr import calls_pmap, equations_of, inner_jaxprs, location_of
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

_CALLBACKS = {
    "debug_print": "jax.debug.print",
    "debug_callback": "jax.debug.callback",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}
_NO_RULE = re.compile(r"translation rule for primitive '(\w+)' not found")  # the words of JAX
_CURE = "leave the call out of what is measured, with jnp.zeros in the place of what it returns"
_HERMITIAN = ", or take jnp.linalg.eigh where the matrix is Hermitian"
# What JAX says when it lowers a function with shardings of its own, and what these are.
_ARGUMENTS = (
    "in_shardings that its arguments do not have here; leave these out and give the arguments "
    "theirs, by sharding= of a jax.ShapeDtypeStruct or by @axis of --arg. out_shardings may stay"
)
_DEVICES = "devices of its own; write it with axes alone, or over a jax.sharding.AbstractMesh"
_INSIDE = (
    "a jit, or a device_put, inside with devices of its own; leave its shardings out, or use "
    "jax.lax.with_sharding_constraint with axes alone"
)
_OWN_SHARDINGS = {
    r"incompatible devices .*sharding_constraint": f"a sharding constraint with {_DEVICES}",
    r"incompatible devices .*output sharding": f"an out_sharding with {_DEVICES}",
    r"incompatible devices .*ARG_SHARDING": _ARGUMENTS,
    r"incompatible devices .* inside jit": _INSIDE,
    r"Memory kinds passed to jax\.jit does not match": _ARGUMENTS,
    r"Sharding passed to jit does not match": _ARGUMENTS,
}
PMAP = (
    "jax.pmap, which takes devices of this process and cannot be compiled for others; write it as "
    "a jax.jit of arguments with shardings, or as a jax.shard_map without mesh=, which takes the "
    "mesh that mesh= of the measurement, or --mesh, gives"
)
CAPTURED = (
    "computes with a jax.ShapeDtypeStruct that is none of its arguments, such as one of a module "
    "around it; pass it as an argument"
)


@contextlib.contextmanager
def lowered_without_devices(program: ClosedJaxpr, platform: Platform) -> Iterator[None]:
    """A context to lower a program in, which raises InputError for what JAX cannot lower there: a
    callback to Python in a program for NVIDIA, `eig` there, for which it asks cuSOLVER on such a
    GPU, and a primitive that it does not lower for the platform at all."""
    if platform.is_gpu:
        for equation in equations_of(program):
            if name := _CALLBACKS.get(equation.primitive.name):
                raise InputError(
                    f"{name}{_line(program, equation.primitive.name)} calls Python, which JAX "
                    f"compiles for a GPU only on a machine with such a GPU; {_CURE}"
                )
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        named = _NO_RULE.search(str(error))
        if named is None and "cusolverGetVersion" not in str(error):
            raise
        name = named[1] if named else "eig"
        why = f"JAX does not lower it for {platform.kind}"
        if named is None:
            why = "JAX asks cuSOLVER how to compute it, on a machine with such a GPU"
        cure = f"{_CURE}{_HERMITIAN if name == 'eig' else ''}"
        raise InputError(f"{name}{_line(program, name)}: {why}; {cure}") from error


def _line(program: ClosedJaxpr, primitive: str) -> str:
    at = location_of(_path(program.jaxpr, primitive))
    return f" at {os.path.relpath(at.file)}:{at.line} (in {at.function})" if at.file else ""


def _path(program: Jaxpr, primitive: str) -> list[JaxprEqn]:
    """The first equation of a primitive and those around it, innermost first; [] for none."""
    for equation in program.eqns:
        if equation.primitive.name == primitive:
            return [equation]
        for inner in inner_jaxprs(equation):
            if found := _path(inner, primitive):
                return [*found, equation]
    return []


@contextlib.contextmanager
def lowered_for_other_devices(name: str, program: ClosedJaxpr) -> Iterator[None]:
    """A context to lower in; raises InputError for own shardings and for constants without a
    value."""
    try:
        yield
    except TypeError as error:
        if "ShapeDtypeStruct" not in str(error):
            raise
        raise InputError(f"{name} {CAPTURED}") from error
    except ValueError as error:
        if calls_pmap(program):
            raise InputError(f"{name} uses {PMAP}") from error
        for words, what in _OWN_SHARDINGS.items():
            if re.search(words, str(error), re.DOTALL):
                raise InputError(f"{name} has {what}") from error
        raise
