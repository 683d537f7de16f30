"""The trace of some steps that `--profile` asks for."""

import contextlib
import re
from collections.abc import Callable, Iterator

from jaxtyping import PyTree

from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.train._cli.board import check_folder, make_folder

_FORM = re.compile(r"(\d{1,18})\.\.(\d{1,18}):(.+)", re.ASCII | re.DOTALL)


def check_profile(asked: str | None, steps: int) -> None:
    """Raises InputError, before any work is done, for what is no trace of some steps."""
    if asked is not None:
        _, _, folder = _parsed(asked, 0, steps)
        check_folder(f"--profile {asked}", folder)


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

    first, last, folder = _parsed(asked, done, steps)
    make_folder(f"--profile {asked}", folder)
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


def _parsed(asked: str, done: int, steps: int) -> tuple[int, int, str]:
    match = _FORM.fullmatch(asked)
    if match is None:
        raise InputError(
            f"--profile {asked!r} is not of the form FIRST..LAST:DIR; write such as 10..12:trace"
        )
    first, last = int(match[1]), int(match[2])
    if not done < first <= last <= steps:
        trained = f"steps {done + 1} to {steps}" if done < steps else counted(0, "step")
        raise InputError(
            f"--profile {asked}: {trained} are trained now; give FIRST..LAST:DIR with some of them"
        )
    return first, last, match[3]
