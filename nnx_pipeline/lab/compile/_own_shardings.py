"""Names shardings that a function has of its own, which JAX refuses when it lowers the function."""

import contextlib
import re
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr

from nnx_pipeline.lab._tracing.jaxpr import calls_pmap
from nnx_pipeline.lab.errors import InputError

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
def lowered_for_other_devices(name: str, program: ClosedJaxpr) -> Iterator[None]:
    """A context to lower a program in, which raises InputError for shardings of its own, and for a
    constant without a value."""
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
