"""Compares the numbers that two programs compute, array by array."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Values = Mapping[str, np.ndarray]  # the loss and every gradient, or every parameter, by name


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How far apart the numbers are that the two arms of an experiment compute.

    These are the loss and gradients, or the created parameters, in the size `tiny` on CPU devices,
    whose `mesh` and `pipeline` may differ from the config's. `measured` is the date of a cached
    result.

    - `within_tolerance`: whether in each array by itself the largest difference is at most the
      experiment's tolerance times the largest absolute value of that array in either arm. A
      difference that is NaN is not within tolerance.
    - `worst`, `worst_relative`: the array in which the arms are farthest apart relative to its
      largest absolute value, and how far apart relative to that value.
    - `all_zero`: arrays that are zero throughout in both arms, whose equality shows nothing.
    """

    max_abs_diff: float
    bitwise_equal: bool
    within_tolerance: bool
    mesh: str
    pipeline: str = ""
    worst: str = ""
    worst_relative: float = 0.0
    all_zero: tuple[str, ...] = ()
    measured: str | None = None


def compare_values(a: Values, b: Values, tolerance: float) -> Numerics:
    """Compares the arrays of two arms; leaves `mesh` and `pipeline` of the result empty.

    Raises ValueError for an array that only one arm has or whose shapes differ.
    """
    if a.keys() != b.keys():
        raise ValueError(f"one arm computes {sorted(a.keys() ^ b.keys())} and the other does not")
    differences, relative = {}, {}
    for name, one in a.items():
        if one.shape != b[name].shape:
            raise ValueError(
                f"{name} has shape {one.shape} in one arm and {b[name].shape} in the other"
            )
        pair = [np.asarray(array, np.float64) for array in (one, b[name])]
        # numpy's maximum keeps a NaN, and a NaN is within no tolerance.
        with np.errstate(invalid="ignore"):  # of infinities, whose difference is a NaN
            differences[name] = float(np.max(np.abs(pair[0] - pair[1]), initial=0.0))
            largest = float(np.max(np.abs(pair), initial=0.0))
            # 0 where both arrays are zero, and 1 where one is.
            relative[name] = differences[name] / largest if largest else 0.0
    worst = max(relative, key=lambda name: (np.isnan(relative[name]), relative[name]))
    return Numerics(
        max_abs_diff=float(np.max(list(differences.values()))),
        bitwise_equal=all(
            one.dtype == b[name].dtype and one.tobytes() == b[name].tobytes()
            for name, one in a.items()
        ),
        within_tolerance=all(each <= tolerance for each in relative.values()),
        mesh="",
        worst=worst,
        worst_relative=relative[worst],
        all_zero=tuple(name for name in a if not (np.any(a[name]) or np.any(b[name]))),
    )
