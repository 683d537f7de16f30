"""How fast a device multiplies, by what a program asks of a product."""

from __future__ import annotations

import re
from typing import NamedTuple

from nnx_pipeline.lab.hlo.module import Computation, Instruction
from nnx_pipeline.lab.timing.devices import Device

PRECISIONS = ("default", "high", "highest")
# An algorithm that fixes the dtype, and in how many passes: `dot_bf16_bf16_f32_x3`. Those of 8 bits
# (`dot_any_f8_any_f8_f32`) leave it to the operands.
_ALGORITHM = re.compile(r"dot_(bf16|f16|tf32|f32|f64)_\w+?(?:_x(\d))?")
_ASKED = re.compile(r'"(operand_precision|algorithm)"\s*:\s*(\[[^\]]*\]|"\w*")')
# The pieces of which a TPU makes an operand, each multiplied as `bf16`.
_PIECES = {"s16": 2, "u16": 2, "s32": 4, "u32": 4}
_AS_S8 = {"s4", "u4", "s8", "u8", "f8e5m2"}  # what a TPU multiplies at the rate of `s8`
_PARTS = {"c64": "f32", "c128": "f64"}  # the numbers of which a complex one is made


class Asked(NamedTuple):
    """What a program asks of a product.

    - `dtypes`: of both operands, as HLO spells them.
    - `precisions`: of both operands, each one of `PRECISIONS`.
    - `algorithm`: such as `dot_bf16_bf16_f32_x3`; "" for none.
    - `in_library`: whether cuBLAS or cuDNN computes it.
    """

    dtypes: tuple[str, str]
    precisions: tuple[str, str] = ("default", "default")
    algorithm: str = ""
    in_library: bool = False


def asked_of(computation: Computation, product: Instruction) -> Asked:
    """What the text of a product says.

    - `computation`: the one that holds the product.
    """
    lhs, rhs, *_ = (shapes[0].dtype for shapes in computation.operand_shapes(product))
    said = dict(_ASKED.findall(product.attributes.get("backend_config", "")))
    told = {**said, **product.attributes}
    levels = re.findall(r"\w+", told.get("operand_precision", "").lower()) or ["default"]
    algorithm = told.get("algorithm", "").strip('"').lower().removeprefix("alg_")
    in_library = product.opcode.startswith("custom-call")
    return Asked((lhs, rhs), (levels[0], levels[-1]), algorithm, in_library)


def product_rate(device: Device, asked: Asked) -> float | None:
    """Operations per second of a product, passes counted; None if its rate is not known.

    - `asked`: what the program asks of it.
    """
    if fixed := _ALGORITHM.fullmatch(asked.algorithm):
        return _rate(device, fixed[1], int(fixed[2] or 1))
    if device.dimensions:
        is_small = set(asked.dtypes) <= _AS_S8 and "s8" in device.flops
        return _rate(device, "s8", 1) if is_small else _rate(device, "bf16", _passes(asked))
    # XLA's own kernels take TF32 at the default alone, its libraries at `high` too.
    exact = PRECISIONS[2:] if asked.in_library else PRECISIONS[1:]
    in_tf32 = not set(exact) & set(asked.precisions)
    dtypes = {_PARTS.get(dtype, dtype) for dtype in asked.dtypes}
    found = [_rate(device, "tf32" if it == "f32" and in_tf32 else it, 1) for it in dtypes]
    known = [rate for rate in found if rate is not None]
    return min(known) if len(known) == len(found) else None


def _rate(device: Device, dtype: str, passes: int) -> float | None:
    rate = device.flops.get(dtype)
    return None if rate is None else rate / passes


def _passes(asked: Asked) -> int:
    """How many products in `bf16` a TPU makes of one: of the pieces whose product is not lost."""
    one, other = (
        PRECISIONS.index(level) + 1 if dtype == "f32" else _PIECES.get(dtype, 1)
        for dtype, level in zip(asked.dtypes, asked.precisions, strict=True)
    )
    # Floats keep what is as large as the last piece, integers their lowest 32 bits.
    kept = max(one, other) if "f32" in asked.dtypes else 4
    return sum(i + j < kept for i in range(one) for j in range(other))
