"""Training in several processes, of which none waits for one that has ended."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax

from nnx_pipeline.errors import described
from nnx_pipeline.files import say

SILENCE = 30  # seconds without a sign of life, after which JAX takes a process for lost


@contextlib.contextmanager
def several_processes(
    coordinator: str | None = None, processes: int | None = None, rank: int | None = None
) -> Iterator[None]:
    """Joins the processes of a training, and ends this one where it cannot go on.

    - `coordinator`: address and port of the process of rank 0, such as `10.0.0.1:1234`.
    - `processes`: how many there are.
    - `rank`: the number of this one, from 0.

    All three are found by `jax.distributed.initialize` itself where the cluster says them. It is
    called before any other function of JAX that needs devices.

    An exception within the context ends this process at once with exit code 1: with one line where
    a computation failed, as it does when another process was killed, and else with its traceback.
    Without that Python would wait for minutes for the others at its end, and they for this one.
    """
    jax.distributed.initialize(coordinator, processes, rank, heartbeat_timeout_seconds=SILENCE)
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        number, count = jax.process_index(), jax.process_count()
        say(
            f"process {number} of {count} cannot go on; if another one has ended, it says why: "
            f"{described(error)}"
        )
    except Exception:
        traceback.print_exc()
    else:
        jax.distributed.shutdown()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
