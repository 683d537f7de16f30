"""The other side of `helpers.run_fresh`: it has imported JAX, and forks for each script."""

import json
import os
import sys
from types import CodeType
from typing import Any


def wait() -> CodeType:
    """Forks for each job on standard input; returns in the fork, with the code to run."""
    import flax.linen
    import flax.nnx  # noqa: F401
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            return _begin(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _begin(job: dict[str, Any]) -> CodeType:
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for descriptor, path in enumerate([os.devnull, *job["written"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = [job["file"], *job["arguments"]]
    return compile(job["text"], job["file"].replace("-c", "<string>"), "exec")
