"""What a search says of its compiles before it starts, how it counts them, and where they stay."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nnx_pipeline.lab._files import Lasting
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement, Progress, kept_in
from nnx_pipeline.lab.errors import counted


class Spent(Exception):
    """A search asks for more compiles than it said that it would make."""


@dataclass
class Effort:
    """The compiles of one search.

    - `what`: what is compiled and for which platform, such as `my_step:step, cuda:h100:1`. The
      seconds that a compile takes are kept by this text, whatever changes in the source.
    - `most`: how many compiles the search makes at most; a search may lower it as it goes on.
    - `cache`: keeps the programs and these seconds, so that a search that is interrupted goes on
      where it was; `Cache(None)` keeps nothing.
    - `say`: called with a line about the progress.
    - `tried`: how many programs were asked for.
    """

    what: str
    most: int
    cache: Cache = field(default_factory=lambda: Cache(None))
    say: Progress = lambda text: None
    tried: int = 0

    def begin(self) -> None:
        """Says how many compiles may come, and how long the last one of this kind took."""
        known = self.cache.get(self._key)
        took = "how long one takes is not known yet"
        if known is not None and isinstance(known[0], int | float):
            seconds, when = known
            took = f"the last such took {seconds:,.1f} s, on {when[:10]}"
        self.say(Lasting(f"{counted(self.most, 'compile')} at most; {took}"))

    @property
    def left(self) -> int:
        return self.most - self.tried

    def measure(self, name: str, make: Callable[[], Measurement]) -> Measurement:
        """Makes one measurement of the search, or takes it from an earlier run.

        - `name`: what is compiled, such as `batch=64`.
        - `make`: traces, lowers and compiles it in this thread.

        Raises Spent where no compile is left, and what `make` raises, which counts too.
        """
        if self.left < 1:
            raise Spent(f"{name} would be more than {counted(self.most, 'compile')}")
        self.tried += 1
        self.say(f"{self.tried} of at most {self.most}: {name}")
        began = time.monotonic()
        with kept_in(self.cache):
            result = make()
        if result.measured is None:
            self.cache.put(self._key, round(time.monotonic() - began, 3))
        return result

    @property
    def _key(self) -> str:
        return hashlib.sha256(f"seconds of a compile: {self.what}".encode()).hexdigest()
