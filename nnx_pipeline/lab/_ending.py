"""Ends a command on SIGINT or SIGTERM: at once, with a one-line message and no unfinished file.

By default Python raises KeyboardInterrupt only when the main thread returns from C++, after minutes
of compiling, and shuts down while threads of XLA still run, which ends in a segmentation fault.
Here a thread of its own hears the signal, removes unfinished files, prints a line and ends the
process.
"""

import _thread
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
CLEARED = "no unfinished file is left"
GOES_ON = "finished measurements are kept; run the same command again to continue"
_CODES: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}
_PATIENCE = 1.5  # seconds for removing unfinished files; a second signal ends the process at once

_polls: list["_Poll"] = []  # who asks whether to stop, one at most
_undo: dict[object, Callable[[], object]] = {}  # removes each unfinished file or folder
_notes: list[str] = []
_answering: list["_Answer"] = []


@contextlib.contextmanager
def cleared_away(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the command is interrupted or terminated within the context.

    It runs in another thread, at any point of the context. So it must import nothing, take no lock
    that the main thread may hold, and accept that what it removes does not exist.
    """
    entry = object()
    _undo[entry] = undo
    try:
        yield
    finally:
        _undo.pop(entry, None)


@dataclass
class _Poll:
    """What a first SIGTERM is to the thread that hears it, and to the main thread."""

    heard: bool = False
    asked: bool = False


@contextlib.contextmanager
def stopping_at_sigterm() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGTERM has come, which ends nothing in this context.

    Who asks should come to an end in good order; a second signal ends the command as ever.
    """
    poll = _Poll()
    _polls.append(poll)
    try:
        yield lambda: poll.asked
    finally:
        _polls.remove(poll)


def add_note(text: str) -> None:
    """Adds a text, once, to the line printed when the command is ended: such as what it saved."""
    if text not in _notes:
        _notes.append(text)


def line(name: str, code: int, cleared: str = CLEARED) -> str:
    return f"{name}: {'; '.join([_WORDS[code], cleared, *_notes])}"


@contextlib.contextmanager
def answering(name: str) -> Iterator[None]:
    _notes.clear()
    begun = answer(name)
    try:
        yield
    finally:
        if begun:
            begun.stop()


def answer(name: str) -> "_Answer | None":
    """Ends this process from now on at SIGINT (exit code 130) and SIGTERM (143).

    Does nothing if it does so already, and outside the main thread, which alone may set handlers. A
    signal that this process was started to ignore stays ignored.
    """
    if _answering or threading.current_thread() is not threading.main_thread():
        return None
    # Python tries out the folder for temporary files when it is first asked for: it writes a file
    # there and removes it. Only before the handlers are set is that removed whatever happens.
    with contextlib.suppress(FileNotFoundError):  # no folder can be used; who needs one says so
        tempfile.gettempdir()
    return _Answer(name)


def stay_if_ending() -> None:
    """Stops a thread for good once the process is about to end, so that it writes nothing more."""
    while any(one.has_begun for one in _answering):
        time.sleep(60)


class _Answer:
    def __init__(self, name: str) -> None:
        self.name = name
        # Each lock is taken once and never released: clearing begins once, the line is said once.
        self._begun, self._said = threading.Lock(), threading.Lock()
        hear, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._told = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, self._hold)
            for number in _CODES
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        threading.Thread(target=self._listen, args=(hear,), daemon=True).start()
        _answering.append(self)

    @property
    def has_begun(self) -> bool:
        return self._begun.locked()

    def stop(self) -> None:
        _answering.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._told)
        os.close(self._tell)

    def _listen(self, hear: int) -> None:
        """Waits for signals: Python writes each as a byte to the pipe, even while C++ runs."""
        signals = 0
        while byte := os.read(hear, 1):
            if byte[0] == signal.SIGTERM and _polls and not _polls[-1].heard:
                _polls[-1].heard = True
            elif byte[0] in self._before:
                signals += 1
                self._end(_CODES[byte[0]], at_once=signals > 1)
        os.close(hear)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Stops the main thread, so that it writes, prints and raises nothing more."""
        if number == signal.SIGTERM and _polls and not _polls[-1].asked:
            _polls[-1].asked = True
            return
        # The thread has usually begun the end. It has not if a library replaced the wakeup pipe.
        self._end(_CODES[number])
        while True:
            time.sleep(60)

    def _end(self, code: int, at_once: bool = False) -> None:
        if at_once:
            self._leave(code, "a second signal cut short the removal of unfinished files")
        elif self._begun.acquire(blocking=False):
            # Not threading.Thread, which takes a lock: the main thread may hold it, if it was
            # stopped by `_hold` while it started a thread itself.
            _thread.start_new_thread(self._clear, (code,))
            _thread.start_new_thread(self._give_up, (code,))

    def _clear(self, code: int) -> None:
        for undo in reversed(list(_undo.values())):
            with contextlib.suppress(Exception):
                undo()
        self._leave(code)

    def _give_up(self, code: int) -> None:
        time.sleep(_PATIENCE)
        self._leave(code, "the removal of unfinished files took too long")

    def _leave(self, code: int, cleared: str = CLEARED) -> None:
        """Prints the line and ends the process, without Python's own shutdown."""
        if not self._said.acquire(blocking=False):
            return  # another thread is about to end the process
        # A progress bar may have hidden the cursor and drawn a line: both are undone.
        start = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{line(self.name, code, cleared)}\n".encode())
        os._exit(code)
