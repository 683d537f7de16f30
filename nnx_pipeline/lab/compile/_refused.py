"""Names what a function calls that JAX does not lower without the device, and the line of it."""

import contextlib
import os
import re
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from nnx_pipeline.lab._tracing.jaxpr import equations_of, inner_jaxprs, location_of
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


@contextlib.contextmanager
def lowered_without_devices(program: ClosedJaxpr, platform: Platform) -> Iterator[None]:
    """A context to lower a program in, which raises InputError for what JAX cannot lower there: a
    callback to Python in a program for NVIDIA, `eig` there, for which it asks cuSOLVER on such a
    GPU, and a primitive that it does not lower for the platform at all."""
    if platform.kind == "cuda":
        for equation in equations_of(program):
            if name := _CALLBACKS.get(equation.primitive.name):
                raise InputError(
                    f"{name}{_line(program, equation.primitive.name)} calls Python, which JAX "
                    f"compiles for NVIDIA only on a machine with such a GPU; {_CURE}"
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
