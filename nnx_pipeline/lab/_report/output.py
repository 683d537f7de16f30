"""Writes results: tables to standard output, and JSON to a file or there."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from nnx_pipeline.lab._files import hold_pipe, local, write_output, write_text
from nnx_pipeline.lab.errors import InputError, printable

WIDTH_OF_FILES = 140  # columns, where the output is no terminal


def check_outputs(**paths: str | None) -> None:
    """Raises InputError, before any work is done, unless each output can be written.

    `-` is for `json` and `markdown`, and no two options may name the same file.
    """
    files = {f"--{name}": path for name, path in paths.items() if path is not None}
    for option, path in files.items():
        if path == "-" and option not in ("--json", "--markdown"):
            texts = "JSON and Markdown go" if "markdown" in paths else "JSON goes"
            raise InputError(f"{option} -: only {texts} to standard output; name a file")
        check_writable(path, option)
        same = [o for o, p in files.items() if Path(p).resolve() == Path(path).resolve()]
        is_device = Path(path).exists() and not Path(path).is_file()
        if len(same) > 1 and not is_device:
            raise InputError(f"{' and '.join(same)} both write {path}; name two files")


def check_writable(path: str | None, option: str) -> None:
    """Raises InputError, before any work is done, if `path` cannot be written; None and `-` can.

    The errors of `_NAMES` in `support` are raised as they are.
    """
    if path is None or path == "-":
        return
    local(path)
    # Called only for the OSError of a name that is too long or of links in a circle.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        os.stat(path)
    hold_pipe(path)
    folder, shown = Path(path).absolute().parent, path or repr(path)
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option} {shown} cannot be written; choose a file in a writable folder")


def emit_json(path: str | None, value: object) -> None:
    """Writes a value as JSON to a file, or to standard output for `-`; None writes nothing."""
    write_files(json_files(path, lambda: value))


def write_files(texts: Mapping[str, str]) -> None:
    """Writes each text to the file of its path, or to standard output for `-`."""
    for path, text in texts.items():
        if path == "-":
            write_output(text.rstrip("\n"))
        else:
            write_text(path, text)


def json_files(path: str | None, make: Callable[[], object]) -> dict[str, str]:
    """The text that `emit_json` writes of the value that is made, by its path; nothing for None."""
    if path is None:
        return {}
    # In ASCII, so that names keep every character, and no terminal and no encoding has a say.
    return {path: f"{json.dumps(finite(make()), indent=2, allow_nan=False)}\n"}


def finite(value: object) -> object:
    """The value with None for each NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Screen(Console):
    """A console of Rich on which texts stand as they are.

    Rich takes words in square brackets for markup, and shapes and messages contain them.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # Rich moves the cursor itself
                yield segment
            else:
                yield segment._replace(text=printable(segment.text, keep="\n"))

    def show_line(self, text: str) -> None:
        self.print(text, highlight=False)


def as_text(view: RenderableType) -> str:
    """What `show` prints, without colours."""
    screen = Screen(width=_width())
    return "".join(segment.text for segment in screen.render(view)).rstrip("\n")


def show(view: RenderableType, *, json_path: str | None) -> None:
    if json_path != "-":
        Screen(width=_width()).print(printable(view) if isinstance(view, str) else view)


def _width() -> int | None:
    # A terminal has its own width, and COLUMNS sets that of a file or a pipe.
    return None if Screen().is_terminal or os.environ.get("COLUMNS") else WIDTH_OF_FILES
