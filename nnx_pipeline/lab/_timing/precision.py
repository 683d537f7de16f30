"""How fast a device multiplies, by what a program asks of a product."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import NamedTuple

from nnx_pipeline.lab._hlo.module import Computation, Instruction, Shape
from nnx_pipeline.lab._timing.devices import Device

PRECISIONS = ("default", "high", "highest")
# An algorithm that fixes the dtype, and in how many passes: `dot_bf16_bf16_f32_x3`. Those of 8 bits
# (`dot_any_f8_any_f8_f32`) leave it to the operands.
_ALGORITHM = re.compile(r"dot_(bf16|f16|tf32|f32|f64)_\w+?(?:_x(\d))?")
_ASKED = re.compile(r'"(operand_precision|algorithm)"\s*:\s*(\[[^\]]*\]|"\w*")')
# The pieces that a TPU makes of an operand, each multiplied as `bf16`.
_PIECES = {"s16": 2, "u16": 2, "s32": 4, "u32": 4}
_NARROW = {"s4", "u4", "s8", "u8", "f8e5m2"}
_PARTS = {"c64": "f32", "c128": "f64"}  # the numbers of which a complex one is made
# The program of a kernel of a TPU, and in it, where it is text, each product with its operands.
_BODY = re.compile(r'"body"\s*:\s*"([^"]*)"')
_IN_BODY = re.compile(r"contract_precision<(\w+)>")
_PRODUCT = re.compile(r"tpu\.matmul ([^\n]*) : vector<[\dx]*x(\w+)>, vector<[\dx]*x(\w+)>")
_LEVELS = {"bf16": "default", "fp32": "highest"}


class ProductPrecision(NamedTuple):
    dtypes: tuple[str, str]  # of both operands, as HLO spells them
    precisions: tuple[str, str] = ("default", "default")  # of both, of `PRECISIONS`
    algorithm: str = ""  # such as `dot_bf16_bf16_f32_x3`
    in_library: bool = False  # cuBLAS or cuDNN


def precision_of(computation: Computation, product: Instruction) -> ProductPrecision:
    lhs, rhs, *_ = (shapes[0].dtype for shapes in computation.operand_shapes(product))
    said = dict(_ASKED.findall(product.config))
    attributes = {**said, **product.attributes}
    levels = re.findall(r"\w+", attributes.get("operand_precision", "").lower()) or ["default"]
    algorithm = attributes.get("algorithm", "").strip('"').lower().removeprefix("alg_")
    in_library = product.opcode.startswith("custom-call")
    return ProductPrecision((lhs, rhs), (levels[0], levels[-1]), algorithm, in_library)


def product_rate(device: Device, wanted: ProductPrecision) -> float | None:
    """Operations per second of a product, passes counted; None if its rate is not known."""
    if fixed := _ALGORITHM.fullmatch(wanted.algorithm):
        return _rate(device, fixed[1], int(fixed[2] or 1))
    if device.dimensions:
        is_small = {*wanted.dtypes} <= {*device.halved} and "s8" in device.flops
        return _rate(device, "s8", 1) if is_small else _rate(device, "bf16", _passes(wanted))
    # XLA's own kernels take TF32 at the default alone, its libraries at `high` too.
    exact = PRECISIONS[2:] if wanted.in_library else PRECISIONS[1:]
    in_tf32 = not set(exact) & set(wanted.precisions)
    dtypes = {_PARTS.get(dtype, dtype) for dtype in wanted.dtypes}
    found = [_rate(device, "tf32" if it == "f32" and in_tf32 else it, 1) for it in dtypes]
    known = [rate for rate in found if rate is not None]
    return min(known) if len(known) == len(found) else None


def precisions_of_kernel(
    kernel: Instruction, read: Sequence[Shape]
) -> tuple[ProductPrecision, ...]:
    """What the products of a kernel written by hand for a TPU may ask; one where that is known.
    MLIR in binary form tells the precisions; the dtypes are those of the arrays that it reads."""
    found = _BODY.search(kernel.config)
    try:
        body = base64.b64decode(found[1] if found else "").decode("utf-8", "replace")
    except binascii.Error:
        body = ""
    if products := _PRODUCT.findall(body):
        return tuple(
            ProductPrecision((_of_mlir(one), _of_mlir(other)), (level, level))
            for said, one, other in products
            for level in _levels(said)
        )
    return _of_operands(read, _levels(body) if body else PRECISIONS)


def _of_operands(read: Sequence[Shape], levels: Sequence[str]) -> tuple[ProductPrecision, ...]:
    """What products of these arrays may ask, with one of these precisions."""
    largest = sorted(read, key=lambda shape: -shape.elements)[:2]
    if largest and {shape.dtype for shape in largest} <= _NARROW:  # the others may be scales
        return (ProductPrecision((largest[0].dtype, largest[-1].dtype)),)
    wide = {shape.dtype for shape in read} & {"f32", "bf16", "f16"} or {"bf16"}
    return tuple(ProductPrecision((one, one), (level, level)) for one in wide for level in levels)


def _levels(body: str) -> Sequence[str]:
    """The precisions that a text of MLIR names; `default` where it names none."""
    named = set(_IN_BODY.findall(body))
    if not named <= {*_LEVELS}:
        return PRECISIONS
    return tuple(sorted(_LEVELS[one] for one in named)) or PRECISIONS[:1]


def _of_mlir(dtype: str) -> str:
    """The name that HLO has for a dtype of MLIR: `s8` for `i8`, the others in small letters."""
    return re.sub(r"^s?i(?=\d)", "s", dtype.lower().replace("ui", "u", 1))


def _rate(device: Device, dtype: str, passes: int) -> float | None:
    rate = device.flops.get(dtype)
    return None if rate is None else rate / passes


def _passes(wanted: ProductPrecision) -> int:
    """How many products in `bf16` a TPU makes of one: of the pieces whose product is not lost."""
    one, other = (
        PRECISIONS.index(level) + 1 if dtype == "f32" else _PIECES.get(dtype, 1)
        for dtype, level in zip(wanted.dtypes, wanted.precisions, strict=True)
    )
    # Floats keep what is as large as the last piece, integers their lowest 32 bits.
    pieces = max(one, other) if "f32" in wanted.dtypes else 4
    return sum(i + j < pieces for i in range(one) for j in range(other))
