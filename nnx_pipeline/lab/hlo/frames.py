"""Where in the source an instruction of HLO text comes from: metadata, and the tables it refers to.

The tables stand at the head of the text, one row per number: names of files and functions, places
in them, and frames, each with the number of the frame that called it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Frame = tuple[str, int, str]

_FIELD = re.compile(r'(\w+)=\s*("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)', re.DOTALL)


class Frames:
    """The stacks of Python frames of one program.

    tables: rows by number, as text, by the title of the table.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, str]]) -> None:
        self._tables = tables
        self._found: dict[str, tuple[Frame, ...]] = {"0": (), "-1": ()}

    def describe(
        self, metadata: str
    ) -> tuple[str | None, str | None, int | None, tuple[Frame, ...]]:
        """op_name, source file, line and all frames of `{op_name="..." stack_frame_id=6}`."""
        fields = dict(_FIELD.findall(metadata))
        file, line = _unquoted(fields.get("source_file")), fields.get("source_line")
        frames: tuple[Frame, ...] = ((file, int(line), ""),) if file and line else ()
        if "stack_frame_id" in fields:
            frames = self._frames(fields["stack_frame_id"]) or frames
        if frames:
            file, line = frames[0][0], str(frames[0][1])
        return _unquoted(fields.get("op_name")), file, int(line) if line else None, frames

    def _frames(self, number: str) -> tuple[Frame, ...]:
        """A frame and those that called it."""
        if number not in self._found:
            frame = dict(_FIELD.findall(self._row("StackFrames", number)))
            place = dict(_FIELD.findall(self._row("FileLocations", frame.get("file_location_id"))))
            file = _unquoted(self._row("FileNames", place.get("file_name_id")))
            name = _unquoted(self._row("FunctionNames", place.get("function_name_id"))) or ""
            here = ((file, int(place["line"]), name),) if file and "line" in place else ()
            # Printed is the caller's number plus one, and 1 where there is none: a frame is never
            # its own caller, yet the first one says so.
            caller = str(int(frame.get("parent_frame_id", 1)) - 1)
            self._found[number] = here + (self._frames(caller) if caller != number else ())
        return self._found[number]

    def _row(self, table: str, number: str | None) -> str:
        return self._tables.get(table, {}).get(number or "", "")


def _unquoted(text: str | None) -> str | None:
    """The string between double quotes, escapes resolved; None for no text."""
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text else None
