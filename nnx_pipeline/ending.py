"""How a command ends when it is told to: at once, in one line, without half a file.

Left to Python, Ctrl-C raises KeyboardInterrupt in the main thread as soon as that is back from C++:
after a compile of minutes, or in a callback of JAX that swallows it; and the interpreter is then
taken down while threads of XLA run, which ends in a segmentation fault. Here a thread hears of the
signal at once, clears away what is unfinished, says so and ends the process. Nothing of this module
acts before a command calls `answer`.
"""

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
CLEARED = "no unfinished file is left"
_CODES: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}
_PATIENCE = 1.5  # seconds to clear away in; a second signal does not wait for them

_undo: dict[object, Callable[[], object]] = {}  # what clears away each thing that is unfinished
_notes: list[str] = []
_answering: list["_Answer"] = []


@contextlib.contextmanager
def cleared_away(undo: Callable[[], object]) -> Iterator[None]:
    """Has `undo` called if the command is told to end meanwhile; in another thread, at any point.

    undo: it imports nothing, takes no lock that the main thread may hold, and bears that what it
    clears away is not there.
    """
    entry = object()
    _undo[entry] = undo
    try:
        yield
    finally:
        _undo.pop(entry, None)


def note(text: str) -> None:
    """Adds to the line that says how the command ended, such as what it has kept."""
    _notes.append(text)


def line(name: str, code: int, cleared: str = CLEARED) -> str:
    """What a command says that was interrupted or terminated."""
    return f"{name}: {'; '.join([_WORDS[code], cleared, *_notes])}"


@contextlib.contextmanager
def answering(name: str) -> Iterator[None]:
    """`answer` for as long as the context lasts; nothing where that is in force already."""
    _notes.clear()
    begun = answer(name)
    try:
        yield
    finally:
        if begun:
            begun.stop()


def answer(name: str) -> "_Answer | None":
    """Ends this process in the way above on SIGINT (exit code 130) and SIGTERM (143) from now on.

    name: of the command, for the line that it says. None where it is in force already, and outside
    the main thread, which alone may set handlers. A signal that this process was started to ignore
    stays ignored.
    """
    if _answering or threading.current_thread() is not threading.main_thread():
        return None
    return _Answer(name)


class _Answer:
    """Handlers of the signals, and the thread that hears of them while the main one is in C++."""

    def __init__(self, name: str) -> None:
        self.name = name
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

    def stop(self) -> None:
        """Leaves the signals to what answered them before."""
        _answering.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._told)
        os.close(self._tell)

    def _listen(self, hear: int) -> None:
        """Every signal comes as a byte, which Python writes wherever the main thread is."""
        told = 0
        while byte := os.read(hear, 1):
            if byte[0] in self._before:
                told += 1
                self._end(_CODES[byte[0]], at_once=told > 1)
        os.close(hear)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Holds the main thread: what it would still write, say or raise is not wanted any more."""
        self._end(_CODES[number])  # if a library has taken the bytes for itself
        while True:
            time.sleep(60)

    def _end(self, code: int, at_once: bool = False) -> None:
        """Begins to end the process, and leaves that to other threads unless it is to be now."""
        if at_once:
            self._leave(code, "a second signal cut short the clearing away of unfinished files")
        elif self._begun.acquire(blocking=False):
            # Not threading.Thread: the main thread may be held while it starts one, with its lock.
            _thread.start_new_thread(self._clear, (code,))
            _thread.start_new_thread(self._give_up, (code,))

    def _clear(self, code: int) -> None:
        for undo in reversed(list(_undo.values())):
            with contextlib.suppress(Exception):
                undo()
        self._leave(code)

    def _give_up(self, code: int) -> None:
        time.sleep(_PATIENCE)
        self._leave(code, "clearing away unfinished files took too long")

    def _leave(self, code: int, cleared: str = CLEARED) -> None:
        if not self._said.acquire(blocking=False):
            return  # another thread is about to end the process
        # A progress bar may have hidden the cursor in the line that it draws.
        start = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{line(self.name, code, cleared)}\n".encode())
        os._exit(code)
