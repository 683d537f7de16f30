"""Weights of 8 or 4 bits with one scale for each block, which are dequantized as they are read.

fp8 is the form in which DeepSeek-V3 and Kimi K2 are published, MXFP4 that of GPT-OSS.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from linen_compat.formats._streams import ArraySpec, Mismatch
from linen_compat.formats.huggingface._architecture import CONFIG_FILE, Keys
from nnx_pipeline import InputError

CODE, STORED = "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)
CODES = {CODE: STORED, "U8": np.dtype(np.uint8)}
READ = np.dtype(ml_dtypes.bfloat16)  # in which such weights are read
SCALES = "_scale_inv"  # the end of the name of the scales
KEY, BLOCK = "quantization_config", "weight_block_size"
# Of MXFP4: the ends of the names of two tensors of bytes, the numbers that 4 bits stand for, and
# how many numbers share a scale, which is a power of 2.
MX_BLOCKS, MX_SCALES = "_blocks", "_scales"
_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_HALVES, -_HALVES])
_SHARED, _EXPONENT_OF_ONE = 32, 127
_METHOD = {"quant_method": "fp8", "fmt": "e4m3"}


def check_quantization(values: Keys) -> None:
    """Raises InputError for weights that are stored in another form than these."""
    found = values.get(KEY)
    if found is None:
        return
    if isinstance(found, dict) and found.get("quant_method") == "mxfp4":
        return
    same = isinstance(found, dict) and {**_METHOD, **found} == {**found, **_METHOD}
    if not same or not _is_block(found.get(BLOCK)):
        raise InputError(
            f"{CONFIG_FILE}: {KEY}={found!r} is not supported, only mxfp4, and fp8 with "
            f"{BLOCK}: save the model with plain float weights"
        )


def _is_block(block: object) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )


def block_of(values: Keys) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    check_quantization(values)
    if values.get(KEY) is None:
        raise Mismatch(
            f"the folder has tensors of dtype {CODE}, and its {CONFIG_FILE} has no {KEY}"
        )
    rows, columns = values[KEY][BLOCK]
    return rows, columns


def scales_of(name: str, specs: dict[str, ArraySpec], block: tuple[int, int]) -> str:
    """The name of the scales of a tensor; raises Mismatch unless they are there and fit."""
    scales, shape = name + SCALES, specs[name].shape
    if len(shape) != 2 or scales not in specs:
        raise Mismatch(f"{name} has dtype {CODE} and no {scales} for its blocks")
    fits = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if specs[scales].shape != fits:
        raise Mismatch(
            f"{scales} has shape {[*specs[scales].shape]}, and blocks of {[*block]} of {name} "
            f"{[*shape]} need {[*fits]}"
        )
    return scales


def dequantized(
    stored: np.ndarray, scales: np.ndarray, block: tuple[int, int], index: Sequence[slice]
) -> np.ndarray:
    """The part `index` of a tensor: its stored numbers times the scales of their blocks."""
    shape = [rows * part for rows, part in zip(scales.shape, block, strict=True)]
    cuts = index or (slice(None), slice(None))
    rows, columns = (
        np.arange(size)[cut] // part for size, cut, part in zip(shape, cuts, block, strict=True)
    )
    wide = stored[tuple(cuts)].astype(np.float32)
    whole: np.ndarray = wide * scales[np.ix_(rows[: len(wide)], columns[: wide.shape[1]])]
    return whole.astype(READ)


def of_mxfp4(specs: dict[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The tensors `[experts, in, out]` of which there are blocks and scales, by their names."""
    found = {}
    for name, spec in specs.items():
        plain = name.removesuffix(MX_BLOCKS)
        if plain == name or plain + MX_SCALES not in specs:
            continue
        *rows, groups, half = spec.shape
        if specs[plain + MX_SCALES].shape != (*rows, groups) or 2 * half != _SHARED:
            raise Mismatch(
                f"{name} has shape {[*spec.shape]} and {plain}{MX_SCALES} "
                f"{[*specs[plain + MX_SCALES].shape]}, and there is one scale for each "
                f"{_SHARED // 2} bytes"
            )
        experts, outputs = rows
        found[plain] = ArraySpec((experts, groups * _SHARED, outputs), READ)
    return found


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[experts, out, groups, 16]` bytes and their scales to numbers `[experts, in, out]`."""
    # The lower half of a byte is the first number.
    both = np.stack([_NUMBERS[blocks & 15], _NUMBERS[blocks >> 4]], axis=-1)
    wide = both.reshape(*blocks.shape[:-1], _SHARED)
    exponents = scales.astype(np.int32)[..., None] - _EXPONENT_OF_ONE
    numbers = np.ldexp(wide, exponents).reshape(*blocks.shape[:2], -1)
    turned: np.ndarray = np.swapaxes(numbers, 1, 2)
    return turned.astype(READ)
