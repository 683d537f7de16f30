"""The other side of `helpers.run_fresh`: it has imported JAX, and forks for each script."""

import importlib
import json
import os
import sys
from types import CodeType
from typing import Any


def wait() -> CodeType:
    """Forks for each job on standard input; returns in the fork, with the code to run."""
    before = {*os.environ}
    for name in ("flax.linen", "flax.nnx", "optax", "orbax.checkpoint"):
        importlib.import_module(name)
    # Where there is no TPU, JAX tells libtpu so when it is imported.
    imported = {name: value for name, value in os.environ.items() if name not in before}
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return _begin(json.loads(line), imported)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _begin(job: dict[str, Any], imported: dict[str, str]) -> CodeType:
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(imported | job["environment"])
    for descriptor, path in enumerate([os.devnull, *job["written"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = [job["file"], *job["arguments"]]
    if job["file"] != "-c":
        sys.modules["__main__"].__file__ = job["file"]
    return compile(job["text"], job["file"].replace("-c", "<string>"), "exec")
