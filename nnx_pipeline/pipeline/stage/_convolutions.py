"""Refuses convolutions on the meshes on which XLA gets the gradients of their kernels wrong.

A convolution that is mapped over stages becomes one with groups. Where the batch is sharded as well
and a further mesh axis holds copies, XLA adds the gradient of the kernel up over these copies too,
so that it is as many times too large as there are copies. That was seen with jaxlib 0.10.2 and
0.12.0.1 on the CPU; `tests/pipeline/test_convolutions.py` shows it without this package.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nnx_pipeline.lab._tracing.jaxpr import inner_jaxprs, with_bodies
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.sharding.layout import is_explicit, mesh_sizes

SHARED, COPIES = ("data", "fsdp", "expert"), ("tensor", "context")


def without_convolutions(apply_stage: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a stage, with an InputError where it has a convolution that goes wrong.

    A convolution that is mapped over stages becomes one with groups. Where the batch is sharded too
    and a further mesh axis holds copies, XLA adds the gradient of the kernel up over these copies
    as well (jaxlib 0.10.2 and 0.12.0.1 on the CPU; `tests/pipeline/test_convolutions.py` shows it
    without this package). On meshes with explicit axes JAX itself refuses such a convolution.
    """
    sizes = mesh_sizes()
    shared, copies = (_wide(axes, sizes) for axes in (SHARED, COPIES))
    if sizes.get("stage", 1) == 1 or not shared or not copies or is_explicit():
        return apply_stage

    @functools.wraps(apply_stage)
    def checked(*args: Any) -> Any:
        if _has_convolution(jax.make_jaxpr(apply_stage)(*args)):
            raise InputError(
                "a layer has a convolution, and XLA gets the gradient of its kernel wrong on a "
                f"mesh with stages, a batch that is sharded over {shared}, and copies along "
                f"{copies}; take a mesh in which {copies} is 1, or write the convolution as a sum "
                "of shifted products"
            )
        return apply_stage(*args)

    return checked


def _wide(axes: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    return " and ".join(axis for axis in axes if sizes.get(axis, 1) > 1)


def _has_convolution(program: Any) -> bool:
    inside = (body for equation in with_bodies(program) for body in inner_jaxprs(equation))
    equations = (equation for body in (program.jaxpr, *inside) for equation in body.eqns)
    return any(equation.primitive.name == "conv_general_dilated" for equation in equations)
