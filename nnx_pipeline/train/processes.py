"""Training in several processes; none waits for a process that has ended."""

import contextlib
import hashlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._files import say
from nnx_pipeline.lab.errors import InputError, described

ARRIVAL = 300  # seconds until all processes must have come
SILENCE = 25  # seconds without a sign of life, after which JAX takes a process for lost
_PATIENCE = 5  # seconds more, in which JAX says which one that is
# With such a name JAX begins what it says of a computation that failed, which is a ValueError where
# that fails while it is started. With one of `_OWN` the fault is not another process's.
_OWN = "INVALID_ARGUMENT|RESOURCE_EXHAUSTED|OUT_OF_RANGE|UNIMPLEMENTED"
_OTHERS = (
    "CANCELLED|UNKNOWN|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED"
    "|FAILED_PRECONDITION|ABORTED|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED"
)
_STATUS = re.compile(f"(?:(?P<own>{_OWN})|{_OTHERS}): ")


@contextlib.contextmanager
def several_processes(
    coordinator: str | None = None, processes: int | None = None, rank: int | None = None
) -> Iterator[None]:
    """Joins the processes of a training, and ends this one where it cannot go on.

    - `coordinator`: address and port of the process of rank 0, such as `10.0.0.1:1234`.
    - `processes`: how many there are.
    - `rank`: the number of this one, from 0.

    `jax.distributed.initialize` finds all three itself where the cluster says them. Call it before
    any other function of JAX that needs devices.

    An exception within the context ends this process: with one line and exit code 1 where a
    computation failed, with the code of `sys.exit`, with 130 for Ctrl-C, and with a traceback and 1
    for others. Python alone would wait for minutes for the other processes. `atexit` functions are
    not called.

    Where another process is lost, JAX ends this one after 25 seconds of silence, or at once where
    rank 0 is lost, by SIGABRT. Its messages name the rank. A computation that failed waits for
    them, unless memory was short.
    """
    jax.distributed.initialize(
        *(coordinator, processes, rank),
        initialization_timeout=ARRIVAL,
        heartbeat_timeout_seconds=SILENCE,
    )
    try:
        yield
        jax.distributed.shutdown()
    except GeneratorExit:  # a generator that holds the context was closed, which is no error
        raise
    except BaseException as error:
        code = 1
        try:
            code = _exit_code(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where nobody reads what was written any more
            os._exit(code)


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[int], bool]]:
    """Yields a function that says after each step, by its number, whether SIGTERM has come.

    Of several processes all stop after the same step, whichever of them it came to. Each of them
    must ask after each step. While they are joined SIGTERM ends none by itself.
    """
    if jax.distributed.is_initialized():  # JAX has taken the signal, of a single process too
        yield multihost_utils.reached_preemption_sync_point
        return
    with ending.stopping_at_sigterm() as stops:
        yield lambda number: stops()


def check_same(values: Mapping[str, object]) -> None:
    """Raises InputError in all processes unless each of them has the same values.

    - `values`: by the names that a user knows, in the same order everywhere.
    """
    digests = [hashlib.sha256(repr(value).encode()).digest() for value in values.values()]
    own = np.array([[*digest] for digest in digests], np.uint8)
    of_each = np.reshape(multihost_utils.process_allgather(own), (-1, *own.shape))
    for number, found in enumerate(of_each):
        differ = (found != of_each[0]).any(axis=1)
        if differ.any():
            names = ", ".join(name for name, other in zip(values, differ, strict=True) if other)
            raise InputError(
                f"process {number} has another value than process 0 of {names}; give all processes "
                "the same command, and the same files"
            )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        say(str(error.code))
        return 1
    if has_failed(error):
        number, count = jax.process_index(), jax.process_count()
        say(
            f"process {number} of {count} cannot go on; if another one has ended, it says why: "
            f"{described(error)}"
        )
        status = _STATUS.match(str(error))
        if not (status and status["own"]):
            time.sleep(SILENCE + _PATIENCE)  # until JAX ends this process, and says who is lost
        return 1
    traceback.print_exception(error)
    return ending.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def has_failed(error: BaseException | None) -> bool:
    """Whether an exception is JAX's, of a computation."""
    failed = isinstance(error, ValueError) and _STATUS.match(str(error))
    return bool(failed) or isinstance(error, jax.errors.JaxRuntimeError)
