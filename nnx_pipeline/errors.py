"""The one exception that bad input ends in, how a near miss is named, and checks of values."""

import difflib
import math
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used; the message holds the rule, the value and the cure.

    The command line prints it as one line and exits with 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Names the cure for an unknown name: the nearest known one, or all of them.

    >>> nearest("mixtral-smal", ["tiny", "mixtral-small"])
    "did you mean 'mixtral-small'?"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(known)}"


def one_of(field: str, value: object, choices: Iterable[object]) -> None:
    """Raises InputError unless `value` is among `choices`."""
    choices = tuple(choices)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise InputError(
            f"{field}={value!r} is not known; {nearest(str(value), map(str, choices))}"
        )


def divides(divisor: int, value: int, *, rule: str) -> None:
    """Raises InputError with `rule` and the nearest fitting values unless it divides."""
    if value % divisor:
        below, above = value // divisor * divisor, -(-value // divisor) * divisor
        fitting = f"{below} or {above}" if below else f"{above}"
        raise InputError(f"{rule}; choose a multiple of {divisor}, such as {fitting}")


def number(config: object, name: str) -> float:
    """The value of a field; raises InputError unless it is a finite number."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name}={value!r} is not a finite number")
    return value


def at_least(config: object, minimum: float, *names: str) -> None:
    """Raises InputError unless all of these fields are numbers of `minimum` or more."""
    for name in names:
        if number(config, name) < minimum:
            value = getattr(config, name)
            raise InputError(f"{name}={value!r} is out of range; choose {minimum} or more")


def above_zero(config: object, *names: str) -> None:
    """Raises InputError unless all of these fields are numbers above 0."""
    for name in names:
        if number(config, name) <= 0:
            raise InputError(f"{name}={getattr(config, name)!r} must be above 0")


def whole(config: object, *names: str) -> None:
    """Raises InputError unless all of these fields are whole numbers of 1 or more."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} is not a whole number of 1 or more")
