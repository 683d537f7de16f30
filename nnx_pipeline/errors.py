"""The one exception that bad input ends in, and how a near miss is named."""

import difflib
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
