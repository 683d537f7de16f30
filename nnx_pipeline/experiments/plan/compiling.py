"""Compiles a layout in a process of its own, and keeps what came of it."""

import contextlib
import json
import pickle
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Why a layout has no program.

    - `seconds`: after which a compile was ended; 0 where the layout itself has none.
    - `is_chance`: whether another try may end otherwise, as where memory ran out.
    """

    def __init__(self, why: str, seconds: int = 0, *, is_chance: bool = False) -> None:
        super().__init__(why)
        self.seconds, self.is_chance = seconds, is_chance


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
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tried(self) -> dict[str, str]:
        """The layouts that earlier plans of this space compiled, as text, and why one has no
        program; "" for the others. One that took too long counts if it may not take longer now."""
        return {
            layout: why
            for layout, (why, seconds) in self._tried().items()
            if not seconds or seconds >= self.patience
        }

    def _tried(self) -> dict[str, tuple[str, int]]:
        found = self.cache.get(self._list_key())
        return found[0] if found is not None and isinstance(found[0], dict) else {}

    def _list_key(self) -> str | None:
        return entry_key(self.platform, "layouts of a plan", self.space.config)

    def _note(self, layout: Layout, why: str = "", seconds: int = 0) -> None:
        with self.lock:
            self.cache.put(self._list_key(), {**self._tried(), str(layout): (why, seconds)})

    def known(self, layout: Layout) -> Measurement | None:
        found = self.cache.get(self.key(layout))
        if found is None:
            return None
        with contextlib.suppress(KeyError, TypeError, ValueError):  # written by something else
            return Measurement.from_cache(*found)
        return None

    def __call__(self, layout: Layout) -> Measurement:
        """Raises NotCompiled with the reason."""
        try:
            measured = self._compile(layout)
        except NotCompiled as error:
            if not error.is_chance:
                self._note(layout, str(error), error.seconds)
            raise
        self.cache.put(self.key(layout), measured)
        self._note(layout)
        return Measurement.from_cache(measured, None)

    def _compile(self, layout: Layout) -> Any:
        with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as made:
            job, result = Path(made) / "job", Path(made) / "result.json"
            config = self.space.config_of(layout)
            job.write_bytes(pickle.dumps((config, layout.mesh, self.platform, self.patience)))
            code, said = execute([sys.executable, "-c", _START, str(job), str(result)])
            if code == -signal.SIGALRM:
                why = f"took longer than {self.patience} s, and was ended"
                raise NotCompiled(why, seconds=self.patience)
            if code < 0:
                why = f"the process was ended by a signal ({signal.strsignal(-code)})"
                raise NotCompiled(why, is_chance=True)
            if code or not result.is_file():
                why = (said.strip().splitlines() or [f"exit status {code}"])[-1]
                raise NotCompiled(why, is_chance=True)
            found = json.loads(result.read_text("utf-8"))
        if "error" in found:
            raise NotCompiled(found["error"], is_chance=found["is_chance"])
        return found["measured"]

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
        # The machine may have more memory, files or threads another time.
        is_chance = isinstance(error, MemoryError | OSError) or "new thread" in str(error)
        found = {"error": described(error, most=300), "is_chance": is_chance}
    result.write_text(json.dumps(found), "utf-8")
