"""Compiles a layout in a process of its own, and keeps what came of it."""

import contextlib
import json
import pickle
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.experiments.plan.layouts import Layout, Space
from nnx_pipeline.lab._baseline.execute import execute
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import described

_START = f"from {__name__} import child; child()"


class NotCompiled(Exception):
    """Why a layout has no program."""


@dataclass(frozen=True)
class Compiler:
    """Compiles layouts, several at a time, each in another process.

    - `space`: gives the config of a layout.
    - `platform`: what to compile for.
    - `cache`: where measurements are kept, by config and mesh: what is known is not traced again.
    - `patience`: seconds after which a compile is ended. The TPU compiler may look for long how a
      program that is nearly too large can be made to fit.
    """

    space: Space
    platform: Platform
    cache: Cache
    patience: int
    keys: dict[Layout, str | None] = field(default_factory=dict)

    def known(self, layout: Layout) -> Measurement | None:
        found = self.cache.get(self.key(layout))
        if found is None:
            return None
        with contextlib.suppress(KeyError, TypeError, ValueError):  # written by something else
            return Measurement.from_cache(*found)
        return None

    def __call__(self, layout: Layout) -> Measurement:
        """Raises NotCompiled with the reason."""
        with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as made:
            job, result = Path(made) / "job", Path(made) / "result.json"
            config = self.space.config_of(layout)
            job.write_bytes(pickle.dumps((config, layout.mesh, self.platform, self.patience)))
            code, said = execute([sys.executable, "-c", _START, str(job), str(result)])
            if code == -signal.SIGALRM:
                raise NotCompiled(f"took longer than {self.patience} s, and was ended")
            if code < 0:
                raise NotCompiled(f"the process was ended by a signal ({signal.strsignal(-code)})")
            if code or not result.is_file():
                raise NotCompiled((said.strip().splitlines() or [f"exit status {code}"])[-1])
            found = json.loads(result.read_text("utf-8"))
        if "error" in found:
            raise NotCompiled(found["error"])
        self.cache.put(self.key(layout), found["measured"])
        return Measurement.from_cache(found["measured"], None)

    def key(self, layout: Layout) -> str | None:
        # Made once: JAX's options, which are part of it, may differ from thread to thread.
        if layout not in self.keys:
            config = self.space.config_of(layout)
            self.keys[layout] = entry_key(self.platform, "plan", config, layout.mesh)
        return self.keys[layout]


def child() -> None:
    """What the other process does: measures the step of a job, and writes that or the error."""
    job, result = map(Path, sys.argv[1:3])
    config, mesh, platform, patience = pickle.loads(job.read_bytes())
    signal.alarm(patience)  # without a handler it ends the process, also while C++ runs
    found: dict[str, object]
    try:
        found = {"measured": measure_step(config, mesh, platform).to_cache()}
    except Exception as error:  # a program may break any compiler in any way
        found = {"error": described(error, most=300)}
    result.write_text(json.dumps(found), "utf-8")
