"""The entry point of `linen-compat`, which handles Ctrl-C before it imports anything large."""

import os
import sys

from nnx_pipeline.lab import _ending as ending

_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def main() -> None:
    if sys.argv[1:2] in (["check"], ["convert"]):
        _begin_with_large_pages()
    ending.answer("linen-compat")
    from linen_compat._cli import main as cli

    cli.main()


def _begin_with_large_pages() -> None:
    """Begins this process anew where glibc is to ask for pages of 2 MB, if nobody has told it.

    TensorStore takes and gives back memory for each chunk. With pages of 4 KB half of the seconds
    of the processors were spent in page faults.
    """
    if sys.platform == "linux" and sys.executable and _TUNABLES not in os.environ:
        environment = {**os.environ, _TUNABLES: _LARGE_PAGES}
        os.execve(sys.executable, sys.orig_argv, environment)
