"""The entry point of `linen-compat`, which handles Ctrl-C before it imports anything large."""

import contextlib
import os
import signal
import sys

from nnx_pipeline.lab import _ending as ending

_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def main() -> None:
    if sys.argv[1:2] in (["check"], ["convert"]):
        _begin_with_large_pages()
    ending.answer("linen-compat")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from linen_compat._cli import main as cli

    cli.main()


def _begin_with_large_pages() -> None:
    """Begins the installed command anew where glibc is to ask for pages of 2 MB, unless somebody
    has told glibc something.

    TensorStore takes and gives back memory for each chunk. With pages of 4 KB half of the seconds
    of the processors were spent in page faults.
    """
    # A program that calls `main` is not begun anew, nor one that is read from standard input.
    is_installed = os.path.basename(sys.argv[0]) == "linen-compat" and sys.argv[0] in sys.orig_argv
    if sys.platform != "linux" or not is_installed or _TUNABLES in os.environ:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it is handled again
    with contextlib.suppress(OSError):  # then it goes on as it is
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _TUNABLES: _LARGE_PAGES})
