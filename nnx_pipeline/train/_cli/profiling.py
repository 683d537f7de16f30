"""The trace of some steps that `--profile` asks for."""

import contextlib
import re
from collections.abc import Callable, Iterator

from jaxtyping import PyTree

from nnx_pipeline.lab.errors import InputError, counted

_FORM = re.compile(r"(\d{1,18})\.\.(\d{1,18}):(.+)", re.ASCII | re.DOTALL)


@contextlib.contextmanager
def profiled(asked: str | None, done: int, steps: int) -> Iterator[Callable[[int, PyTree], None]]:
    """A function to call with the number of each step and what it computes, before the next one
    begins; it begins and ends the trace.

    `asked` is `FIRST..LAST:DIR` or None, `done` the step after which training goes on, `steps` its
    last one. Raises InputError unless all steps to be traced are trained now.
    """
    if asked is None:
        yield lambda number, computed: None
        return
    import jax

    first, last, folder = _parsed(asked)
    if not done < first <= last <= steps:
        trained = f"steps {done + 1} to {steps}" if done < steps else counted(0, "step")
        raise InputError(
            f"--profile {asked}: {trained} are trained now; give FIRST..LAST:DIR with some of them"
        )
    running = False

    def begun(number: int, computed: PyTree) -> None:
        nonlocal running
        if running and number == last:
            jax.block_until_ready(computed)
            running = False
            jax.profiler.stop_trace()
        elif not running and number + 1 == first:
            jax.block_until_ready(computed)
            jax.profiler.start_trace(folder)
            running = True

    begun(done, None)
    try:
        yield begun
    finally:
        if running:  # training has ended before
            jax.profiler.stop_trace()


def _parsed(asked: str) -> tuple[int, int, str]:
    match = _FORM.fullmatch(asked)
    if match is None:
        raise InputError(
            f"--profile {asked!r} is not of the form FIRST..LAST:DIR; write such as 10..12:trace"
        )
    return int(match[1]), int(match[2]), match[3]
