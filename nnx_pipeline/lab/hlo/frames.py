"""Finds the Python frames that an HLO instruction comes from, by its metadata and frame tables.

The tables stand at the head of the text and have numbered rows: names of files, names of functions,
places in them, and frames, each with the number of the frame that called it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Frame = tuple[str, int, str]  # file, line and function

_FIELD = re.compile(r'(\w+)=\s*("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)', re.DOTALL)


class Frames:
    """The stacks of Python frames of one program.

    - `tables`: the rows of each table by the title of the table, as text by row number.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, str]]) -> None:
        self._tables = tables
        self._found: dict[str, tuple[Frame, ...]] = {"0": (), "-1": ()}

    def describe(
        self, metadata: str
    ) -> tuple[str | None, str | None, int | None, tuple[Frame, ...]]:
        """The op_name, file, line and frames of metadata as in `{op_name="..." stack_frame_id=6}`.

        File and line are those of the innermost frame, which comes first.
        """
        fields = dict(_FIELD.findall(metadata))
        file, line = _unquoted(fields.get("source_file")), fields.get("source_line")
        frames: tuple[Frame, ...] = ((file, int(line), ""),) if file and line else ()
        if "stack_frame_id" in fields:
            frames = self._frames(fields["stack_frame_id"]) or frames
        if frames:
            file, line = frames[0][0], str(frames[0][1])
        return _unquoted(fields.get("op_name")), file, int(line) if line else None, frames

    def _frames(self, number: str) -> tuple[Frame, ...]:
        """The frame of a number, and after it the frames that called it."""
        if number not in self._found:
            frame = dict(_FIELD.findall(self._row("StackFrames", number)))
            place = dict(_FIELD.findall(self._row("FileLocations", frame.get("file_location_id"))))
            file = _unquoted(self._row("FileNames", place.get("file_name_id")))
            name = _unquoted(self._row("FunctionNames", place.get("function_name_id"))) or ""
            here = ((file, int(place["line"]), name),) if file and "line" in place else ()
            # The text prints the caller's number plus one, and so 1 where there is no caller. Frame
            # 1 shows it: it prints 1, and no frame is its own caller.
            caller = str(int(frame.get("parent_frame_id", 1)) - 1)
            self._found[number] = here + (self._frames(caller) if caller != number else ())
        return self._found[number]

    def _row(self, table: str, number: str | None) -> str:
        return self._tables.get(table, {}).get(number or "", "")


def _unquoted(text: str | None) -> str | None:
    """The string between double quotes with its escapes resolved; None for no text."""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text else None
