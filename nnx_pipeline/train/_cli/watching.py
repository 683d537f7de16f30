"""Watches a process of a training: JAX ends one that has lost another, before it can say so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.support import FAILED
from nnx_pipeline.lab._files import say
from nnx_pipeline.train._cli.checkpoints import checkpoints

if TYPE_CHECKING:
    from nnx_pipeline.train._cli.hosts import Hosts

_WATCHED = "NNX_PIPELINE_WATCHED"  # in the environment of a process that another one watches
_MAIN = "from nnx_pipeline.lab._cli.main import main; main()"
# Seconds before a process begins again: until the others know that it was killed, and have ended;
# or until all that have lost it have ended.
_UNTIL_KNOWN, _BREAK = 35, 5
_OF_JAX = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ (coordination_|preemption_|client\.h)")
_SILENT = re.compile(r"stopped sending heartbeats\):\s*(?:\S*task:)?(\d+)")
_NO_COORDINATOR = "Failed to send RPC to coordination service"
_NOT_ALL = re.compile(r"RPC: /\S*CoordinationService/RegisterTask")
_NO_ANSWER = re.compile(r"RPC: /\S*CoordinationService")


def is_watched() -> bool:
    """Whether another process watches this one, which then ends when that one does."""
    if _WATCHED not in os.environ:
        return False
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    return True


def _end_with_standard_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # so that no unfinished file is left
    time.sleep(3)
    os._exit(ending.INTERRUPTED)


def watch(hosts: Hosts, run: str | None) -> int:
    """Runs this command in another process, and again as often as `--restart` says, with which it
    goes on after what is saved. Returns its exit code.

    Says in one line which process was lost and from which step to go on.

    - `run`: the folder of `--checkpoint-dir`, if any.
    """
    for left in range(hosts.restart, -1, -1):
        words = sys.argv[1:]
        if hosts.restart and "--resume" not in words and _newest(run) is not None:
            words = [*words, "--resume"]
        child = _Child(words)
        code = child.wait()
        fault = child.why(hosts)
        if fault is None:
            return code
        if left:
            times = f"and may {left - 1} times more" if left > 1 else "for the last time"
            say(f"nnx-pipeline: {fault}; it begins again, {times}")
            time.sleep(_BREAK if code == -signal.SIGABRT else _UNTIL_KNOWN)
    newest = _newest(run)
    way = "nothing is saved to go on with"
    if newest is not None:
        way = f"the same command with --resume goes on after step {newest}"
    say(f"nnx-pipeline: {fault}; {way}")
    return FAILED


def _newest(run: str | None) -> int | None:
    """The newest step of a run that is saved, if any."""
    saved = checkpoints().saved_run(run) if run else None
    return None if saved is None else saved.step


class _Child:
    """A process that trains; its standard error passes through, but for what JAX says at its
    end."""

    def __init__(self, words: list[str]) -> None:
        self._messages = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *words],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, _WATCHED: "1"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            if self._messages or _OF_JAX.match(line):
                self._messages += line
            elif b" peer ranks. Expected number" not in line:  # of Gloo, on CPUs
                say(line.decode(errors="replace").removesuffix("\n"))

    def wait(self) -> int:
        """Waits for the end, and passes SIGTERM on; SIGINT ends both. Returns the exit code."""

        def interrupt() -> None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(1)

        with ending.stopping_at_sigterm() as stops, ending.cleared_away(interrupt):
            told = False
            while self._process.poll() is None:
                if stops() and not told:
                    self._process.terminate()
                    told = True
                time.sleep(0.1)
        self._reader.join()
        return self._process.returncode

    def why(self, hosts: Hosts) -> str | None:
        return why(self._process.returncode, self._messages.decode(errors="replace"), hosts)


def why(code: int, messages: str, hosts: Hosts) -> str | None:
    """Which process was lost and how, in words; None where the watched one has said all itself.

    What is not understood of JAX's messages is written as it is.
    """
    of = f" of {hosts.num_processes}" if hosts.num_processes else ""
    this = "a process" if hosts.process_id is None else f"process {hosts.process_id}"
    if code < 0 and code != -signal.SIGABRT:
        return f"{this}{of} was ended by signal {-code}"
    if silent := _SILENT.search(messages):
        return f"process {silent[1]}{of} was lost, which sent no sign of life any more"
    if _NO_COORDINATOR in messages:
        return f"process 0{of} was lost, which coordinates the others"
    if _NOT_ALL.search(messages):
        return (
            f"{this}{of} waited for minutes at {hosts.coordinator or 'the coordinator'}, which did "
            "not answer, or to which not all processes came"
        )
    if _NO_ANSWER.search(messages):
        return f"process 0{of}, which coordinates the others, could not be reached any more"
    if messages:
        say(messages, keep="\n")
    return None if code >= 0 else f"JAX has ended {this}{of}, and says above why"
