"""Training in several processes; none waits for a process that has ended."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

import jax

from nnx_pipeline.lab._ending import INTERRUPTED
from nnx_pipeline.lab._files import say
from nnx_pipeline.lab.errors import described

SILENCE = 30  # seconds without a sign of life, after which JAX takes a process for lost
# With such a name JAX begins what it says of a computation that failed, which is a ValueError where
# that fails while it is started.
_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS"
    "|PERMISSION_DENIED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED"
    "|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED): "
)


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

    An exception within the context ends this process at once: with one line and exit code 1 where a
    computation failed, as when another process was killed, with the code of `sys.exit`, with 130
    for Ctrl-C, and with a traceback and 1 for others. Python alone would wait for minutes for the
    other processes. `atexit` functions are not called. A process that computes nothing across
    processes while another one is lost gets no exception: JAX ends it after 30 seconds, or at once
    where rank 0 is lost, by SIGABRT with its own messages.
    """
    jax.distributed.initialize(coordinator, processes, rank, heartbeat_timeout_seconds=SILENCE)
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


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        say(str(error.code))
        return 1
    failed = isinstance(error, ValueError) and _STATUS.match(str(error))
    if failed or isinstance(error, jax.errors.JaxRuntimeError):
        number, count = jax.process_index(), jax.process_count()
        say(
            f"process {number} of {count} cannot go on; if another one has ended, it says why: "
            f"{described(error)}"
        )
        return 1
    traceback.print_exception(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
