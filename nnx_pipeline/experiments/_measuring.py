"""Measures many programs: from the cache where they are known, and else several at a time."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from nnx_pipeline.experiments._arms import Program
from nnx_pipeline.experiments._numerics import VIRTUAL_CPUS
from nnx_pipeline.experiments._programs import prepare
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile._cache_key import entry_key
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig

NO_CACHE = Cache(None)
# One compile of a large model takes some gigabytes of host memory.
MOST_AT_ONCE = 4

Job = tuple[Program, MeshConfig]
Result = Measurement | str
_Made = TypeVar("_Made")


def measure_programs(
    jobs: Mapping[Job, str],
    platform: Platform,
    *,
    cache: Cache = NO_CACHE,
    progress: Progress = lambda text: None,
) -> dict[Job, Result]:
    """The measurement of each program, or the first line of the error that stopped it.

    - `jobs`: programs and their meshes, each with the name that `progress` gives it.
    - `platform`: what to compile for.
    - `cache`: looked up first, and given each new measurement as soon as it is made.
    - `progress`: called with a text when a phase of a program begins, from several threads at once.

    A compiler uses one core for most of its time. So one program after the other is traced, in the
    thread that calls this, and meanwhile those before it are compiled in other threads: as many at
    once as this process may use cores, and four at most. Each then takes somewhat longer.

    Raises InputError when a program, its mesh and the platform do not fit together.
    """
    keys = {job: entry_key(platform, "measurement", job[1], job[0]) for job in jobs}
    results: dict[Job, Result] = {
        job: known for job, key in keys.items() if (known := _known(cache, key)) is not None
    }
    missing = [job for job in jobs if job not in results]

    def ready(job: Job) -> Callable[[], Result]:
        """Traces a program, and returns what compiles it or returns why it has no trace."""

        def say(text: str) -> None:
            count = f"{len(results)} of {len(jobs)} programs, " if len(jobs) > 1 else ""
            progress(f"{count}{jobs[job]}: {text}")

        traced = _or_error(lambda: prepare(*job, platform, virtual_cpus=VIRTUAL_CPUS, progress=say))
        return (lambda: traced) if isinstance(traced, str) else traced

    def keep(job: Job, result: Result) -> None:
        if not isinstance(result, str):
            cache.put(keys[job], result.to_cache())
        results[job] = result

    # While memory on the host is measured, nothing else may run.
    for job in [job for job in missing if job[0].kind == "trace"]:
        keep(job, _or_error(ready(job)))
    together = [job for job in missing if job not in results]
    with ThreadPoolExecutor(max_workers=_at_once(len(together))) as pool:
        started = {pool.submit(_or_error, ready(job)): job for job in together}
        for future in as_completed(started):
            keep(started[future], future.result())
    return {job: results[job] for job in jobs}


def _at_once(programs: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(programs, cores or 1, MOST_AT_ONCE))


def _known(cache: Cache, key: str | None) -> Measurement | None:
    """The measurement that the cache holds, None if it holds none or something else wrote it."""
    known = cache.get(key)
    try:
        return None if known is None else Measurement.from_cache(*known)
    except (KeyError, TypeError, ValueError):
        return None


def _or_error(make: Callable[[], _Made]) -> _Made | str:
    """What a function returns, or the first line of its error, other than an InputError.

    An arm may break any compiler in any way: the report says how.
    """
    try:
        return make()
    except InputError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0][:200]
