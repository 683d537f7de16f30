"""Shared by `nnx-pipeline` and `linen-compat`: one-line errors, progress and exit codes."""

import contextlib
import errno
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from nnx_pipeline import ending
from nnx_pipeline.errors import InputError, Note, described, printable
from nnx_pipeline.files import say, use_any_encoding
from nnx_pipeline.lab.report.output import Screen

FAILED, BAD_INPUT = 1, 2
LONGEST_LINE = 2_000  # characters of an error


class Failed(Exception):
    """What the command was asked for failed; the message says how, and the exit code is 1."""


def main_of(group: click.Group, name: str) -> Callable[[], None]:
    """An entry point that reports every expected error as one line on standard error.

    - `group`: the Click group that it runs.
    - `name`: of the program, as its messages give it.

    Exit codes: 0 for success, 1 where the command failed, 2 for bad input, and 130 or 143 for a run
    that was interrupted or terminated, after its unfinished files were removed.
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
        except Failed as error:
            _end(f"{name}: {error}", FAILED)
        except RecursionError:
            _end(f"{name}: what was given is nested too deeply; give something flatter", BAD_INPUT)
        except (click.Abort, KeyboardInterrupt):
            _end(ending.line(name, ending.INTERRUPTED), ending.INTERRUPTED)
        except OSError as error:
            rule = _NAMES.get(error.errno or 0)
            _end(f"{name}: {rule.format(error.filename) if rule else error}", _code(error))
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
}


def _code(error: OSError) -> int:
    """A file name that cannot be used is bad input; any other OSError is a failure."""
    return BAD_INPUT if error.errno in _NAMES else FAILED


def _end(message: str, code: int) -> None:
    """Prints the message as one line on standard error and exits with that code."""
    words = " ".join(message.split())
    if len(words) > LONGEST_LINE:  # the beginning has the rule, and the end has the cure
        words = f"{words[: LONGEST_LINE // 2]} … {words[-LONGEST_LINE // 2 :]}"
    say(words)
    sys.exit(code)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows on standard error what the command is doing.

    In a terminal each text replaces the one before it, elsewhere each is a line of its own. Before
    it stands the time since the beginning. What user functions print meanwhile goes to standard
    error too, since standard output may be JSON.
    """
    console = Screen(stderr=True)
    began = time.monotonic()

    def timed(text: str) -> str:
        return f"{_time(time.monotonic() - began)} {text}"

    with contextlib.redirect_stdout(sys.stderr):
        if console.is_terminal:
            columns = (
                SpinnerColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
            )
            with Progress(*columns, console=console, transient=True) as shown:
                task = shown.add_task("starting", total=None)
                yield lambda text: shown.update(task, description=printable(text))
        else:
            yield lambda text: say(timed(text))


LINE_EVERY = 10.0  # seconds between lines about the progress, where there is no terminal


class _Words(ProgressColumn):
    """Such as `2 of 5, 0:41, 1:02 left, loss 4.1`; the first time is that since the beginning."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        shown = _count(int(task.completed), int(task.total or 0), task.elapsed or 0.0)
        left = f", {_time(task.time_remaining)} left" if task.time_remaining else ""
        return Text(f"{shown}{left}, {task.fields['text']}")


def _count(done: int, total: int, seconds: float) -> str:
    return f"{done} of {total}, {_time(seconds)}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def bar(what: str, total: int, text: str, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function (text, by=1) that moves a progress bar on standard error.

    - `what`: is being done.
    - `total`: how many steps there are.
    - `text`: beside the bar until the first step; the function takes that for the next ones.
    - `done`: how many steps were done before.

    Where standard error is no terminal, there are lines in place of a bar: the first, the last, and
    one every ten seconds.
    """
    console = Screen(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, text, done)
        return
    columns = (TextColumn(what), BarColumn(bar_width=None), _Words())
    with Progress(*columns, console=console, expand=True) as shown:
        task = shown.add_task(what, total=total, text=text, completed=done)
        yield lambda text, by=1: shown.update(task, advance=by, text=text)


def _lines(what: str, total: int, text: str, done: int) -> Callable[..., None]:
    """What `bar` yields where there is no terminal."""
    began = said = time.monotonic()

    def tell(text: str) -> None:
        count = _count(done, total, time.monotonic() - began)
        say(f"{what}: {count}, {text}")

    def advance(text: str, by: int = 1) -> None:
        nonlocal done, said
        done += by
        if done == total or time.monotonic() - said >= LINE_EVERY:
            said = time.monotonic()
            tell(text)

    tell(text)
    return advance


@contextlib.contextmanager
def compiler_errors(kind: type[Exception] = Failed) -> Iterator[None]:
    """Turns an exception of tracing, compiling or running into `kind` with its first line.

    The message ends with the line of the user's source from which the exception came. InputError,
    Failed, the errors of Click, KeyboardInterrupt and OSError pass unchanged. A call of `sys.exit`
    in a user function counts as a failure.
    """
    try:
        yield
    except (InputError, Failed, click.ClickException, KeyboardInterrupt, OSError):
        raise
    except SystemExit as error:
        raise kind(f"the function exited: sys.exit({error.code!r})") from error
    except Exception as error:
        raise kind(f"the program did not compile or run: {described(error)}") from error
