"""Finds the Python frames that an HLO instruction comes from, by its metadata and the tables at the
head of the text: file names, function names, places in them, and frames with their callers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nnx_pipeline.lab._tracing.installed import Frame, home_of, in_program, package_of

_FIELD = re.compile(r'(\w+)=\s*("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)', re.DOTALL)


class Frames:
    """The stacks of Python frames of one program.

    - `tables`: the rows of each table by its title, as text by row number.
    - `program`: the name of the module: `jit_` and the name of the function.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, str]], program: str) -> None:
        self._tables = tables
        self._found: dict[str, tuple[Frame, ...]] = {"0": (), "-1": ()}
        self._own: dict[str, tuple[Frame, ...]] = {}
        numbers = tables.get("StackFrames", {})
        callers = {self._caller(number) for number in numbers}
        whole = (self._frames(number) for number in numbers if number not in callers)
        self._home = home_of(map(in_program, whole), program.removeprefix("jit_"))

    def describe(
        self, metadata: str
    ) -> tuple[str | None, str | None, int | None, tuple[Frame, ...]]:
        """The op_name, file, line and frames of metadata as in `{op_name="..." stack_frame_id=6}`.
        Only frames of the program's own code count (`_tracing.installed`), the innermost one
        first."""
        fields = dict(_FIELD.findall(metadata))
        file, line = _unquoted(fields.get("source_file")), fields.get("source_line")
        stack: tuple[Frame, ...] = ((file, int(line), ""),) if file and line else ()
        number = fields.get("stack_frame_id", "0")
        if number not in self._own:
            self._own[number] = self._of_program(self._frames(number))
        own = self._own[number] or self._of_program(stack)
        file_and_line = own[0][:2] if own else (None, None)
        return _unquoted(fields.get("op_name")), *file_and_line, own

    def _of_program(self, stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
        return tuple(one for one in in_program(stack) if package_of(one[0]) == self._home)

    def _frames(self, number: str) -> tuple[Frame, ...]:
        if number not in self._found:
            frame = dict(_FIELD.findall(self._row("StackFrames", number)))
            place = dict(_FIELD.findall(self._row("FileLocations", frame.get("file_location_id"))))
            file = _unquoted(self._row("FileNames", place.get("file_name_id")))
            name = _unquoted(self._row("FunctionNames", place.get("function_name_id"))) or ""
            here = ((file, int(place["line"]), name),) if file and "line" in place else ()
            caller = self._caller(number)
            self._found[number] = here + (self._frames(caller) if caller != number else ())
        return self._found[number]

    def _caller(self, number: str) -> str:
        frame = dict(_FIELD.findall(self._row("StackFrames", number)))
        # The text prints the caller's number plus one, and so 1 where there is no caller. Frame 1
        # shows it: it prints 1, and no frame is its own caller.
        return str(int(frame.get("parent_frame_id", 1)) - 1)

    def _row(self, table: str, number: str | None) -> str:
        return self._tables.get(table, {}).get(number or "", "")


def _unquoted(text: str | None) -> str | None:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text else None
