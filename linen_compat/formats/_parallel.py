"""Tasks in several threads, in a given amount of memory, whose results come in order."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Task = Callable[[], Result]
_MOST_THREADS = 32


def threads() -> int:
    """How many threads keep all processors busy, while some wait for a file or for TensorStore."""
    known = hasattr(os, "sched_getaffinity")  # on Linux
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return min(2 * cores, _MOST_THREADS)


class Memory:
    """Bytes that tasks may take at once. Who is alone may take more, as nobody else can give any.

    Without tasks that run in other threads nothing waits.
    """

    def __init__(self, most: int) -> None:
        self._most, self._taken, self._tasks = most, 0, 0
        self._change = threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._change:
            self._change.wait_for(lambda: not self._tasks or self._taken + nbytes <= self._most)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        with self._change:
            self._taken -= nbytes
            self._change.notify_all()

    def begin(self) -> None:
        """Counts a task that runs in another thread, until `end`."""
        with self._change:
            self._tasks += 1

    def end(self) -> None:
        with self._change:
            self._tasks -= 1
            self._change.notify_all()


def in_order(tasks: Iterable[Task[Result]], memory: Memory, workers: int) -> Iterator[Result]:
    """The results of tasks. With one worker each runs in this thread, when it is its turn.

    The next task is asked for while others run, so that whoever gives it can wait for memory. After
    an error no other task begins, and the error of the first task that has one is raised.
    """
    if workers == 1:
        for task in tasks:
            yield task()
        return
    stopped = threading.Event()

    def run(task: Task[Result]) -> Result:
        try:
            if stopped.is_set():
                raise _NotBegun
            return task()
        except BaseException:
            stopped.set()
            raise
        finally:
            memory.end()

    running = deque[Future[Result]]()

    def results(most: int) -> Iterator[Result]:
        while running and (len(running) > most or running[0].done()):
            with contextlib.suppress(_NotBegun):  # the error is that of another task
                yield running.popleft().result()

    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in tasks:
                memory.begin()
                running.append(pool.submit(run, task))
                yield from results(most=2 * workers)
            yield from results(most=0)
        finally:
            stopped.set()


class _NotBegun(Exception):
    """Stands for the result of a task that did not begin, because another one had an error."""
