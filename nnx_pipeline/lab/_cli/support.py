"""Shared by `nnx-pipeline` and `linen-compat`: one-line errors and exit codes."""

import contextlib
import errno
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click

from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._files import say, use_any_encoding
from nnx_pipeline.lab.errors import InputError, Note, Unavailable, described

FAILED, BAD_INPUT = 1, 2
LONGEST_LINE = 2_000  # characters of an error


class Failed(Exception):
    """What the command was asked for failed; the message says how, and the exit code is 1."""


def main_of(group: click.Group, name: str) -> Callable[[], None]:
    """An entry point that runs a group and reports every expected error as one line.

    Exit codes: 0 for success, 1 for a failure, 2 for bad input, and 130 or 143 for a run that was
    interrupted or terminated, after its unfinished files were removed.
    """

    def main() -> None:
        use_any_encoding()
        try:
            with ending.answering(name), _notes(name):
                code = group.main(prog_name=name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            say(error.format_message(), keep="\n")
            sys.exit(BAD_INPUT)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else name
            _end(f"{command}: {error.format_message()} See {command} --help.", BAD_INPUT)
        except InputError as error:
            _end(f"{name}: {error}", BAD_INPUT)
        except (Failed, Unavailable) as error:
            _end(f"{name}: {error}", FAILED)
        except RecursionError:
            _end(f"{name}: what was given is nested too deeply; give something flatter", BAD_INPUT)
        except (click.Abort, KeyboardInterrupt):
            _end(ending.line(name, ending.INTERRUPTED), ending.INTERRUPTED)
        except OSError as error:
            rule = _NAMES.get(error.errno or 0)
            code = BAD_INPUT if rule else FAILED
            _end(f"{name}: {rule.format(error.filename) if rule else error}", code)
        sys.exit(code if isinstance(code, int) else 0)

    return main


@contextlib.contextmanager
def _notes(name: str) -> Iterator[None]:
    """Prints each note as one line on standard error; other warnings stay as they are."""
    with warnings.catch_warnings():
        other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, Note):
                say(" ".join(f"{name}: note: {message}".split()))
            else:
                other(message, category, *where)

        warnings.showwarning = show  # type: ignore[assignment]  # `where` is four arguments
        yield


# Errors of a file name that the file system refuses, whatever the command wanted to do with it.
_NAMES = {
    errno.ENAMETOOLONG: "{} is a longer name than the file system allows; give a shorter one",
    errno.ELOOP: "{} is a link that leads back to itself; give another name",
    errno.ENXIO: "{} is a pipe that nobody reads; start its reader first, or name a file",
}


def _end(message: str, code: int) -> None:
    words = " ".join(message.split())
    if len(words) > LONGEST_LINE:  # the beginning has the rule, and the end has the cure
        words = f"{words[: LONGEST_LINE // 2]} … {words[-LONGEST_LINE // 2 :]}"
    say(words)
    sys.exit(code)


@contextlib.contextmanager
def compiler_errors(kind: type[Exception] = Failed) -> Iterator[None]:
    """Turns an exception of tracing, compiling or running into `kind`, with its line in user code.

    Errors of the commands, of Click and of files pass unchanged.
    """
    try:
        yield
    except (InputError, Failed, Unavailable, click.ClickException, KeyboardInterrupt, OSError):
        raise
    except SystemExit as error:
        raise kind(f"the function exited: sys.exit({error.code!r})") from error
    except Exception as error:
        raise kind(f"the program did not compile or run: {described(error)}") from error
