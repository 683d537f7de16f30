"""Errors of JAX in the call of a pipeline, with the line of the user's own and the cure."""

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from nnx_pipeline.lab.errors import InputError


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """Explains what JAX cannot type in explicit mode, and forward mode through a custom rule."""
    # Within a `jax.jit` JAX differentiates the program when this library has returned, and gives
    # its own error; to its public rules forward mode looks like the first half of reverse mode.
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "custom_vjp" in str(error):
            raise InputError(_FORWARD_MODE) from error
        # JAX does not export the class; other errors name the type of an array that is sharded.
        sharding = isinstance(error, (TypeError, ValueError)) and _SHARDED.search(str(error))
        if type(error).__name__ != "ShardingTypeError" and not sharding:
            raise
        said = " ".join(str(error).partition("\n---")[0].split())  # without JAX's note on frames
        raise InputError(
            f"{_line_of(error)} does what JAX cannot type on a mesh with explicit axes: {said}; "
            "make the mesh with sharding='auto' (on the command line set pipeline.sharding=auto)"
            f"{next((cure for word, cure in _CURES.items() if word in said), '')}"
        ) from error


def _line_of(error: Exception) -> str:
    """The innermost line of the user's own that was running; `the model` where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    return f"{user[-1].filename}:{user[-1].lineno} ({user[-1].name})" if user else "the model"


_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
)
_FORWARD_MODE = (
    "a pipeline was differentiated in forward mode (jax.jvp or jax.jacfwd), in which derivatives "
    "that are written by hand have no rule; use jax.grad, and for a Hessian-vector product jax.jvp "
    "of jax.grad, or for own layers set pipeline.schedule=circular, pipeline.backward=autodiff, "
    "pipeline.fsdp_gather=use and pipeline.unrolled_layers to the layers of a stage"
)
# By a word of what JAX says.
_CURES = {
    "gather": (
        ", or look rows up by table.at[tokens].get(out_sharding=rows) with "
        "rows = jax.P(*jax.typeof(tokens).sharding.spec, None)"
    ),
    "reshape": ", as for a convolution, which is a reshape where it is mapped over stages",
    "contracting_spec": (
        ", or give the product in the layer an out_sharding, such as jax.typeof(x).sharding"
    ),
}
_SHARDED = re.compile(r"\w+\[[\d,]*\d@\w")  # such as float32[2@fsdp,4]
