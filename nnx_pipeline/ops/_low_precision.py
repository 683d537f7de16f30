"""Matrix products of activations with a kernel, in the dtype of the model or in 8 bits (Qwix)."""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import InputError, install
from nnx_pipeline.sharding.layout import P, is_explicit, out_sharding


class Precision(NamedTuple):
    """The dtypes of activations and kernels, and of cotangents of the results."""

    values: str
    cotangents: str


# What `model.quantization` may be. The two formats of 8 bits are those of Micikevicius et al. 2022,
# "FP8 formats for deep learning": cotangents get the one with the wider range.
PRECISIONS = {"int8": Precision("int8", "int8"), "fp8": Precision("float8_e4m3fn", "float8_e5m2")}
# (equation, activations, kernel, sharding of the result) to the result
Product = Callable[[str, Array, Array, P], Array]


def full_product(equation: str, x: Array, kernel: Array, out: P) -> Array:
    """The einsum of two arrays in their own dtype, sharded as `out`."""
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding(out))


def product_of(config: ModelConfig) -> Product:
    """The product that `quantization` of a config says; raises InputError without Qwix."""
    check_package(config)
    if config.quantization is None:
        return full_product
    return functools.partial(quantized_product, PRECISIONS[config.quantization])


def check_package(config: ModelConfig) -> None:
    if config.quantization is not None and importlib.util.find_spec("qwix") is None:
        raise InputError(
            f"model.quantization={config.quantization!r} needs Qwix, which is not installed; "
            f"{install('quantization')}, or set it to None"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def quantized_product(
    kind: Precision, equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."], out: P
) -> Float[Array, "..."]:
    """`full_product` of operands that are rounded to 8 bits."""
    # Each operand is divided by its largest absolute values along the axes that are summed over.
    # The cotangent of `x` is such a product too; that of the kernel is computed in the dtype of
    # `x`, because its sum over tokens would need one scale for all of them (SwitchBack, Wortsman et
    # al. 2023, section 2.2). Rounding itself has the derivative 1.
    return _product_forward(kind, equation, x, kernel, out)[0]


def _product_forward(
    kind: Precision, equation: str, x: Array, kernel: Array, out: P
) -> tuple[Array, tuple[Array, Array]]:
    dtypes = (kind.values, kind.values)
    return _rounded_product(equation, (x, kernel), dtypes, out_sharding(out)), (x, kernel)


def _product_backward(
    kind: Precision, equation: str, out: P, residuals: tuple[Array, Array], d_result: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    operands, result = equation.split("->")
    of_x, of_kernel = operands.split(",")
    back, dtypes = f"{result},{of_kernel}->{of_x}", (kind.cotangents, kind.values)
    d_x = _rounded_product(back, (d_result, kernel), dtypes, _sharding_of(x))
    back, to = f"{of_x},{result}->{of_kernel}", _sharding_of(kernel)
    return d_x, jnp.einsum(back, x, d_result, out_sharding=to)


quantized_product.defvjp(_product_forward, _product_backward)


def _rounded_product(
    equation: str, operands: tuple[Array, Array], dtypes: tuple[str, str], to: P | None
) -> Array:
    """The einsum of two operands, each rounded to 8 bits, in the dtype of the first."""
    # Its result has the axes of the first that are not summed over, then those of the second.
    import qwix  # it takes seconds, and not every model needs it

    inputs, result = equation.split("->")
    names, rounded = inputs.split(","), list[object]()
    summed = [axis for axis in names[0] if axis not in result]
    with jax.numpy_dtype_promotion("standard"):  # Qwix multiplies sums of integers by scales
        for x, dtype, axes in zip(operands, dtypes, names, strict=True):
            channels = [number for number, axis in enumerate(axes) if axis in result]
            # The scales multiply sums, which have more digits than the operands.
            scales = {"channelwise_axes": channels, "scale_dtype": jnp.float32}
            rounded.append(qwix.quantize(x, dtype, **scales))
        # Not `qwix.einsum`, which exchanges the operands and gives `out_sharding` to that product.
        over = tuple(tuple(map(axes.index, summed)) for axes in names)
        product: Array = qwix.dot_general(*rounded, (over, ((), ())), out_sharding=to)
        return product.astype(operands[0].dtype)


def _sharding_of(x: Array) -> P | None:
    """The sharding of an array's type, for an argument `out_sharding=`; None in auto mode."""
    return jax.typeof(x).sharding.spec if is_explicit() else None
