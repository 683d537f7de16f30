"""Steps and counts that cannot be right, and signs of damage in arrays that can be read.

Other programs write no checksums, so damage to their checkpoints shows in the values alone, if at
all. Each rule is far from anything that training produces. Flipped bits of exponents and blocks
of zeros break a rule; outliers, unused rows of a vocabulary, and moments without a gradient do not.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from linen_compat.formats._streams import COPIES, MOMENTS, PARAMETERS, SCALARS, Mismatch
from nnx_pipeline.train._saved import MOST_WEIGHT

TIMES_MIDDLE = 1e4  # the most that a weight may be, in medians of the array
LARGEST = {
    **{PARAMETERS: MOST_WEIGHT, COPIES[0]: MOST_WEIGHT},
    **{MOMENTS[0]: 1e6, COPIES[1]: 1e6, MOMENTS[1]: 1e12},  # the last are squares
}
LONGEST_RUN = 64  # this many consecutive exact zeros mean a lost block
_BLOCK = 2**20
_SAMPLE = 2**16
LARGEST_STEP = 2**31 - 1  # MaxText and this project count in int32
_TITLES = {
    "step": "the step",
    "count": "the count of Adam",
    "schedule_count": "the count of the learning rate",
    "skipped": "the number of skipped steps",
    "skipped_in_a_row": "the number of steps skipped in a row",
    "spike_seen": "the number of steps that spikes are compared with",
    "mini_step": "the number of accumulated steps",
    "gradient_step": "the number of accumulations",
}
_CURE = (
    "take another checkpoint, or its parameters alone (linen_compat.load, or linen-compat convert "
    "--parameters-only)"
)


def suspicion(
    array: np.ndarray, part: str, *, rows_may_be_zero: bool, all_may_be_zero: bool = False
) -> str | None:
    """What is implausible about the values of a stored array, or None when nothing is."""
    strange = _magnitude(array, part)
    # Moments may be zero: those of a parameter without a gradient are.
    if strange or part != PARAMETERS or all_may_be_zero:
        return strange
    return zeros_in_a_row([_used(array) if rows_may_be_zero else array])


def zeros_in_a_row(chunks: Iterable[np.ndarray]) -> str | None:
    """What is implausible about the zeros of an array, whose chunks are as it is stored."""
    longest = run = size = 0
    for block in itertools.chain.from_iterable(map(_blocks, chunks)):
        size += len(block)
        places = np.flatnonzero(block)
        if not len(places):  # all zeros: the run goes on into the next block
            run += len(block)
            continue
        # A run ends at the first value other than 0, or lies between two such values.
        inside = int(np.max(np.diff(places), initial=1)) - 1
        longest = max(longest, run + int(places[0]), inside)
        run = len(block) - 1 - int(places[-1])  # zeros at the end, which may go on
    longest = max(longest, run)
    if size and longest == size:
        return "holds nothing but zeros"
    if longest >= LONGEST_RUN:
        return f"holds {longest} zeros in a row, like a block that was lost"
    return None


def _magnitude(array: np.ndarray, part: str) -> str | None:
    """What is implausible about the largest magnitude of an array, or None when nothing is."""
    # For weights the median gives a narrower limit; moments may have any spread.
    limit, why = LARGEST[part], "training does not produce such values"
    if part == PARAMETERS and (middle := _middle(array)) > 0 and TIMES_MIDDLE * middle < limit:
        limit, why = TIMES_MIDDLE * middle, f"the median magnitude is {middle:.1e}"
    largest = max((float(np.max(block, initial=0.0)) for block in _magnitudes(array)), default=0.0)
    return f"holds a value of magnitude {largest:.1e}, and {why}" if largest > limit else None


def _used(array: np.ndarray) -> np.ndarray:
    """The array without those rows, along any of its axes, that are zero throughout."""
    for axis in range(array.ndim):
        others = tuple(other for other in range(array.ndim) if other != axis)
        used = np.any(array != 0, axis=others)
        if np.any(used) and not np.all(used):  # an array of zeros alone stays, to be reported
            array = np.compress(used, array, axis=axis)
    return array


def _middle(array: np.ndarray) -> float:
    """The median magnitude of the finite values, taken from a sample if the array is large."""
    sample = array.reshape(-1)[:: max(1, array.size // _SAMPLE)].astype(np.float64)
    sample = np.abs(sample[np.isfinite(sample)])
    return float(np.median(sample)) if sample.size else 0.0


def _magnitudes(array: np.ndarray) -> Iterator[np.ndarray]:
    """The magnitudes of the finite values in float64, block by block."""
    for block in _blocks(array):
        wide = np.abs(block.astype(np.float64))
        yield wide[np.isfinite(wide)]


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK]


def check_scalars(scalars: Mapping[str, np.ndarray]) -> None:
    """Raises Mismatch, with the cure, unless these can be the scalars of a training state."""
    if problem := problem_of(scalars):
        raise Mismatch(problem)


def problem_of(scalars: Mapping[str, np.ndarray]) -> str | None:
    """What is wrong with the scalars that are there, by the names of `streams.SCALARS`."""
    for name, title in _TITLES.items():
        value = scalars.get(name)
        if value is not None and not is_count(value):
            return (
                f"{title} is {np.asarray(value).tolist()!r}, and not a whole number from 0 "
                f"to {LARGEST_STEP}; {'take another checkpoint' if name == 'step' else _CURE}"
            )
    step, count, schedule = (
        None if scalars.get(name) is None else int(scalars[name]) for name in SCALARS
    )
    skipped = int(scalars.get("skipped", 0))
    if None not in (count, schedule) and count != schedule:
        return (
            f"the optimizer counts {count} steps of Adam and {schedule} of its learning rate, but "
            f"here both have the same count; {_CURE}"
        )
    if (several := scalars.get("gradient_step")) is not None and count != int(several):
        return (
            f"the optimizer counts {count} steps of Adam and {several} accumulations before them, "
            f"but they must be equal; {_CURE}"
        )
    done = None if step is None else step - skipped - int(scalars.get("mini_step", 0))
    if several is not None and done is not None and count is not None and done < count:
        return f"the step is {step} and Adam's count is {count}, which is more; {_CURE}"
    if several is None and None not in (step, count) and done != count:
        rule = f"must differ by the {skipped} skipped steps" if skipped else "must be equal"
        return f"the step is {step} and Adam's count is {count}, but they {rule}; {_CURE}"
    return None


def is_count(value: object) -> bool:
    """Whether a value without axes is a whole number that a step can be: 0 to `LARGEST_STEP`."""
    array = np.asarray(value)
    number = array.item() if array.shape == () else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    # NaN and infinity are out of range, so `int` never gets them.
    return 0 <= number <= LARGEST_STEP and number == int(number)
