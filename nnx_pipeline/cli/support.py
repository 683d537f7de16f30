"""What both command lines share: errors as one line, progress, exit codes."""

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator

import click
from rich.console import Console

from nnx_pipeline import ending
from nnx_pipeline.errors import InputError

FAILED, BAD_INPUT = 1, 2


class Failed(Exception):
    """The thing asked for did not work out; the message says what, the exit code is 1."""


def main_of(group: click.Group, name: str) -> Callable[[], None]:
    """An entry point that ends every error in one clear line on standard error.

    Exit codes: 0 success, 1 the thing asked for failed, 2 bad input, 130 and 143 for a run that was
    interrupted or terminated, and has cleared away what it began.
    """

    def main() -> None:
        try:
            with ending.answering(name):
                code = group.main(prog_name=name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            print(error.format_message(), file=sys.stderr)
            sys.exit(BAD_INPUT)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else name
            _end(f"{command}: {error.format_message()} See {command} --help.", BAD_INPUT)
        except InputError as error:
            _end(f"{name}: {error}", BAD_INPUT)
        except Failed as error:
            _end(f"{name}: {error}", FAILED)
        except (click.Abort, KeyboardInterrupt):
            _end(ending.line(name, ending.INTERRUPTED), ending.INTERRUPTED)
        except OSError as error:
            rule = _NAMES.get(error.errno or 0)
            _end(f"{name}: {rule.format(error.filename) if rule else error}", _code(error))
        sys.exit(code if isinstance(code, int) else 0)

    return main


# What a file system says of a name that it does not take, whatever the command wanted of it.
_NAMES = {
    errno.ENAMETOOLONG: "{} is a longer name than the file system takes; give a shorter one",
    errno.ELOOP: "{} is a link that leads back to itself; give another name",
}


def _code(error: OSError) -> int:
    return BAD_INPUT if error.errno in _NAMES else FAILED


def _end(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that says on standard error what is going on: live, or line by line.

    What people's own functions print meanwhile goes there too: standard output may be JSON.
    """
    console = Console(stderr=True, markup=False, emoji=False)
    with contextlib.redirect_stdout(sys.stderr):
        if console.is_terminal:
            with console.status("starting") as status:
                yield lambda text: status.update(text)
        else:
            yield lambda text: print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def compiler_errors() -> Iterator[None]:
    """Turns what a compiler raises into a failure with its first line."""
    try:
        yield
    except (InputError, Failed, click.ClickException, KeyboardInterrupt, OSError):
        raise
    except SystemExit as error:
        raise Failed(f"it did not run: it called sys.exit({error.code!r})") from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise Failed(
            f"it did not compile or run: {type(error).__name__}: {lines[0][:300]}"
        ) from error
