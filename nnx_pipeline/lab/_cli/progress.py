"""What a command shows on standard error while it works."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import rich.progress
from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._files import Lasting, say, write_text
from nnx_pipeline.lab._report.output import Screen, as_text
from nnx_pipeline.lab.errors import printable


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows on standard error what the command is doing, and for how long.

    User functions print there meanwhile too: standard output may be JSON.
    """
    console = Screen(stderr=True)
    began = time.monotonic()

    with contextlib.redirect_stdout(sys.stderr):
        if console.is_terminal:
            columns = (
                rich.progress.SpinnerColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.description}", markup=False),
            )
            with rich.progress.Progress(*columns, console=console, transient=True) as shown:
                task = shown.add_task("starting", total=None)

                def tell(text: str) -> None:
                    if isinstance(text, Lasting):
                        console.show_line(text)
                    else:
                        shown.update(task, description=printable(text))

                yield tell
        else:
            yield lambda text: say(f"{_time(time.monotonic() - began)} {text}")


@contextlib.contextmanager
def shown_if_interrupted(
    view: Callable[[], RenderableType],
    json_path: str | None,
    files: Callable[[], Mapping[str, str]] = dict,
) -> Iterator[Callable[[], None]]:
    """A context whose table is printed if the command is interrupted, as it was drawn last; yields
    the function that draws it. It goes to standard error where JSON goes to standard output.

    - `files`: the text of each file that is written then too, by its path, such as `json_files`.
    """
    drawn, texts = "", dict[str, str]()
    descriptor = 2 if json_path == "-" else 1

    def draw() -> None:
        nonlocal drawn, texts  # another thread writes them, which may import nothing
        drawn, texts = f"{as_text(view())}\n", {**files()}

    def write() -> None:
        for path, text in texts.items():
            if path == "-":
                os.write(1, text.encode())
            else:
                write_text(path, text)

    with cleared_away(write), cleared_away(lambda: os.write(descriptor, drawn.encode())):
        yield draw


LINE_EVERY = 10.0  # seconds between lines about the progress, where there is no terminal


class _Words(rich.progress.ProgressColumn):
    """Such as `2 of 5, 0:41, 1:02 left, loss 4.1`; the first time is since the beginning."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: rich.progress.Task) -> Text:
        shown = _count(int(task.completed), int(task.total or 0), task.elapsed or 0.0)
        return Text(f"{shown}{_left(task.time_remaining or 0.0)}, {task.fields['text']}")


def _count(done: int, total: int, seconds: float) -> str:
    return f"{done} of {total}, {_time(seconds)}"


def _left(seconds: float) -> str:
    return f", {_time(seconds)} left" if seconds else ""


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def bar(what: str, total: int, text: str, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function (text, by=1) that moves a bar; without a terminal there are lines."""
    console = Screen(stderr=True)
    if not console.is_terminal:
        yield _lines(what, total, text, done)
        return
    text_and_bar = rich.progress.TextColumn(what), rich.progress.BarColumn(bar_width=None)
    with rich.progress.Progress(*text_and_bar, _Words(), console=console, expand=True) as shown:
        task = shown.add_task(what, total=total, text=text, completed=done)
        yield lambda text, by=1: shown.update(task, advance=by, text=text)


def _lines(what: str, total: int, text: str, done: int) -> Callable[..., None]:
    began, first = time.monotonic(), done
    said = began

    def tell(text: str) -> None:
        seconds = time.monotonic() - began
        left = seconds * (total - done) / (done - first) if done > first else 0.0
        say(f"{what}: {_count(done, total, seconds)}{_left(left)}, {text}")

    def advance(text: str, by: int = 1) -> None:
        nonlocal done, said
        done += by
        if done == total or time.monotonic() - said >= LINE_EVERY:
            said = time.monotonic()
            tell(text)

    tell(text)
    return advance
