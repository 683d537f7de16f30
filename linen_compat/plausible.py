"""What no array of a trained model looks like, though every byte of it can be read.

Other formats carry no checksums, and then a damage shows by the values alone, if at all. Each rule
is far from what training makes: it is broken by bits of exponents that flipped and by blocks that
were overwritten with zeros, and not by outliers, by rows of a vocabulary that no token uses, or by
moments of what had no gradient.
"""

from collections.abc import Iterator

import numpy as np

from linen_compat.streams import MOMENTS, PARAMETERS

TIMES_MIDDLE = 1e4  # of the middle magnitude of an array of weights
LARGEST = {PARAMETERS: 1e6, MOMENTS[0]: 1e6, MOMENTS[1]: 1e12}  # a second moment is a square
LONGEST_RUN = 64  # of values that are exactly 0, one after the other
_BLOCK = 2**20
_SAMPLE = 2**16


def suspicion(array: np.ndarray, part: str, *, rows_may_be_zero: bool) -> str | None:
    """What of an array cannot be right, None when nothing is.

    rows_may_be_zero: whether it belongs to tokens, along one axis, some of which nothing uses.
    Values that are no finite numbers are another matter (`streams.check_finite`).
    """
    return _magnitude(array, part) or (
        _zeros(array, rows_may_be_zero) if part == PARAMETERS else None
    )


def _magnitude(array: np.ndarray, part: str) -> str | None:
    limit, why = LARGEST[part], "no such value comes of training"
    if part == PARAMETERS and (middle := _middle(array)) > 0 and TIMES_MIDDLE * middle < limit:
        limit, why = TIMES_MIDDLE * middle, f"the middle one of its magnitudes is {middle:.1e}"
    largest = max((float(np.max(block, initial=0.0)) for block in _magnitudes(array)), default=0.0)
    return f"holds a value of magnitude {largest:.1e}, and {why}" if largest > limit else None


def _zeros(array: np.ndarray, rows_may_be_zero: bool) -> str | None:
    if rows_may_be_zero:
        for axis in range(array.ndim):
            others = tuple(other for other in range(array.ndim) if other != axis)
            used = np.any(array != 0, axis=others)
            if np.any(used) and not np.all(used):
                array = np.compress(used, array, axis=axis)
    run = _longest_run(array)
    if run == array.size:  # a scale of nothing but zeros is one with an offset of 1
        return "holds nothing but zeros" if array.ndim > 1 else None
    return f"holds {run} zeros in a row, like a block that was lost" if run >= LONGEST_RUN else None


def _longest_run(array: np.ndarray) -> int:
    """The largest number of zeros that follow each other, the last axis fastest."""
    longest = run = 0
    for block in _blocks(array):
        places = np.flatnonzero(block)
        if not len(places):
            run += len(block)
            continue
        inside = int(np.max(np.diff(places), initial=1)) - 1
        longest = max(longest, run + int(places[0]), inside)
        run = len(block) - 1 - int(places[-1])
    return max(longest, run)


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
