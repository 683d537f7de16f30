"""What the loss is multiplied by in a loop, so that small gradients in float16 are not lost."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array, PyTree

from nnx_pipeline.lab._tracing.jaxpr import equations_of
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline.metrics import counts

# the loss, and its two parts: the loss of `leave`, and the metrics
Total = tuple[Array, tuple[Array, PyTree]]
Lift = float | Array | None


def checked_lift(lift: Any) -> Lift:
    """The lift, of which there is no derivative; raises InputError unless it is above 0."""
    is_number = isinstance(lift, int | float | np.number | np.ndarray | jax.Array)
    if lift is not None and (not is_number or isinstance(lift, bool) or jnp.shape(lift)):
        raise InputError(f"lift={lift!r} is not a number; give a power of two, such as 2.0**12")
    if isinstance(lift, jax.core.Tracer):
        return jax.lax.stop_gradient(lift)
    if lift is not None and not 0 < float(np.asarray(lift)) < math.inf:
        raise InputError(f"lift={lift} is not above 0 and finite; give one such as 2.0**12")
    return lift


def lifted(leave: Callable[..., Array], lift: Lift) -> Callable[..., Array]:
    if lift is None:
        return leave
    return functools.wraps(leave)(lambda *given: leave(*given) * lift)


def lifted_weights(metric_weights: PyTree, lift: Lift) -> PyTree:
    if lift is None:
        return metric_weights
    return jax.tree.map(lambda weight: weight * lift if counts(weight) else weight, metric_weights)


def without_lift(total: Total, lift: Lift) -> Total:
    if lift is None:
        return total
    loss, (own, metrics) = total
    return loss / lift, (own / lift, metrics)


def computes_in_float16(program: ClosedJaxpr) -> bool:
    """Whether a program reads arrays in float16, or makes them of others, at any depth."""
    read = [*program.jaxpr.invars, *program.jaxpr.constvars]
    made = [
        variable
        for equation in equations_of(program)
        if not all(isinstance(given, Literal) for given in equation.invars)  # else a constant
        for variable in equation.outvars
    ]
    return any(getattr(each.aval, "dtype", None) == jnp.float16 for each in (*read, *made))


def refuse_unlifted() -> None:
    raise InputError(
        "a gradient was asked for of functions that compute in float16; the loop computes it "
        "before it is known by what the loss is multiplied, so that small gradients vanish and a "
        "loss scale comes too late; set `lift` of ModelEnds or ModelFunctions, such as 2.0**12 "
        "(1.0 where `leave` scales its loss), or compute in bfloat16 or float32"
    )
