"""What no array of a trained model looks like, though every byte of it can be read.

Other formats carry no checksums, and then a damage shows by the values alone, if at all. Each rule
is far from what training makes: it is broken by bits of exponents that flipped and by blocks that
were overwritten with zeros, and not by outliers, by rows of a vocabulary that no token uses, or by
moments of what had no gradient.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from linen_compat.streams import MOMENTS, PARAMETERS

TIMES_MIDDLE = 1e4  # of the middle magnitude of an array of weights
LARGEST = {PARAMETERS: 1e6, MOMENTS[0]: 1e6, MOMENTS[1]: 1e12}  # a second moment is a square
LONGEST_RUN = 64  # of values that are exactly 0, one after the other
_BLOCK = 2**20
_SAMPLE = 2**16


def suspicion(
    array: np.ndarray, part: str, *, rows_may_be_zero: bool, all_may_be_zero: bool = False
) -> str | None:
    """What of an array cannot be right, None when nothing is.

    rows_may_be_zero: whether it belongs to tokens, along one axis, some of which nothing uses.
    all_may_be_zero: whether zero is what an untrained array holds, as a scale with an offset does.
    Values that are no finite numbers are another matter (`streams.check_finite`).
    """
    strange = _magnitude(array, part)
    if strange or part != PARAMETERS or all_may_be_zero:
        return strange
    return zeros_in_a_row([_used(array) if rows_may_be_zero else array])


def zeros_in_a_row(chunks: Iterable[np.ndarray]) -> str | None:
    """What of the zeros of an array cannot be right, given all of it in the order of its storage.

    A block that was lost lies in one piece there, and may be spread over layers.
    """
    longest = run = size = 0
    for block in itertools.chain.from_iterable(map(_blocks, chunks)):
        size += len(block)
        places = np.flatnonzero(block)
        if not len(places):
            run += len(block)
            continue
        inside = int(np.max(np.diff(places), initial=1)) - 1
        longest = max(longest, run + int(places[0]), inside)
        run = len(block) - 1 - int(places[-1])
    longest = max(longest, run)
    if size and longest == size:
        return "holds nothing but zeros"
    if longest >= LONGEST_RUN:
        return f"holds {longest} zeros in a row, like a block that was lost"
    return None


def _magnitude(array: np.ndarray, part: str) -> str | None:
    limit, why = LARGEST[part], "no such value comes of training"
    if part == PARAMETERS and (middle := _middle(array)) > 0 and TIMES_MIDDLE * middle < limit:
        limit, why = TIMES_MIDDLE * middle, f"the middle one of its magnitudes is {middle:.1e}"
    largest = max((float(np.max(block, initial=0.0)) for block in _magnitudes(array)), default=0.0)
    return f"holds a value of magnitude {largest:.1e}, and {why}" if largest > limit else None


def _used(array: np.ndarray) -> np.ndarray:
    """The array without the rows, along any of its axes, that are zero throughout."""
    for axis in range(array.ndim):
        others = tuple(other for other in range(array.ndim) if other != axis)
        used = np.any(array != 0, axis=others)
        if np.any(used) and not np.all(used):
            array = np.compress(used, array, axis=axis)
    return array


def _middle(array: np.ndarray) -> float:
    """The median of the magnitudes, of a sample of a large array."""
    sample = array.reshape(-1)[:: max(1, array.size // _SAMPLE)].astype(np.float64)
    sample = np.abs(sample[np.isfinite(sample)])
    return float(np.median(sample)) if sample.size else 0.0


def _magnitudes(array: np.ndarray) -> Iterator[np.ndarray]:
    for block in _blocks(array):
        wide = np.abs(block.astype(np.float64))
        yield wide[np.isfinite(wide)]


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK]
