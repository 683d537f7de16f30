"""Checks that a training step and the optimizer's counts are valid and agree with each other."""

from collections.abc import Mapping

import numpy as np

from linen_compat.formats._streams import Mismatch

LARGEST = 2**31 - 1  # MaxText and this project count in int32
_TITLES = {
    "step": "the step",
    "count": "the count of Adam",
    "schedule_count": "the count of the learning rate",
}
_CURE = (
    "take another checkpoint, or its parameters alone (linen_compat.load, or linen-compat convert "
    "--parameters-only)"
)


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
                f"to {LARGEST}; {'take another checkpoint' if name == 'step' else _CURE}"
            )
    step, count, schedule = (
        None if scalars.get(name) is None else int(scalars[name]) for name in _TITLES
    )
    if None not in (count, schedule) and count != schedule:
        return (
            f"the optimizer counts {count} steps of Adam and {schedule} of its learning rate, but "
            f"here both have the same count; {_CURE}"
        )
    if None not in (step, count) and step != count:
        return f"the step is {step} and Adam's count is {count}, but they must be equal; {_CURE}"
    return None


def is_count(value: object) -> bool:
    """Whether a value without axes is a whole number that a step can be: 0 to `LARGEST`."""
    array = np.asarray(value)
    number = array.item() if array.shape == () else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    # NaN and infinity are out of range, so `int` never gets them.
    return 0 <= number <= LARGEST and number == int(number)
