"""Finds the parts of HLO text, and the Python frames of an instruction. Lines do not decide where a
part ends: an attribute may hold the JSON of a kernel, a quotation may hold brackets."""

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from nnx_pipeline.lab._tracing.installed import Frame, home_of, in_program, package_of

_CLOSES = {"(": ")", "[": "]", "{": "}"}
# Written so that no text matches in two ways: an unclosed quotation fails at once, where it stands.
_QUOTED = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_COMMENTED = r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/"
_OPAQUE = rf"(?:{_QUOTED}|{_COMMENTED}|/(?!\*))"
_PLAIN, _PLAIN_IN_BRACKETS = r'[^()\[\]{}"/,\n]*', r'[^()\[\]{}"/]*'

COMMENT = re.compile(_COMMENTED, re.DOTALL)
_SPACE = re.compile(rf"(?:\s+|{_COMMENTED})*", re.DOTALL)
_STRING = re.compile(_QUOTED, re.DOTALL)
_ARRAY = re.compile(r"[a-z]\w*\[[^\[\]]*\]")
_BRACKET = re.compile(
    rf"{_PLAIN_IN_BRACKETS}(?:{_OPAQUE}{_PLAIN_IN_BRACKETS})*[()\[\]{{}}]", re.DOTALL
)
# A bracket, a comma, or the end of a line or of the text.
_BOUNDARY = re.compile(rf"{_PLAIN}(?:{_OPAQUE}{_PLAIN})*([()\[\]{{}},\n]|\Z)", re.DOTALL)


class Scanner:
    """Steps through a text; positions are offsets into it, results the positions behind what is
    found."""

    def __init__(self, text: str) -> None:
        self.text = text

    def fail(self, at: int, what: str) -> NoReturn:
        line = self.text.count("\n", 0, at) + 1
        start = self.text.rfind("\n", 0, at) + 1
        excerpt = self.text[max(start, at - 60) : at + 60].partition("\n\n")[0].strip()
        raise ValueError(f"line {line} of the HLO text: {what}: {excerpt!r}")

    def space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        return found.end() if found else at

    def closing(self, at: int) -> int:
        """From the position of a bracket."""
        awaited: list[str] = []
        position = at
        while True:
            found = _BRACKET.match(self.text, position)
            if found is None:
                self.fail(at, "a bracket, or a quotation or comment behind it, is never closed")
            position = found.end()
            mark = self.text[position - 1]
            if mark in _CLOSES:
                awaited.append(_CLOSES[mark])
            elif awaited.pop() != mark:
                line = self.text.count("\n", 0, position) + 1
                self.fail(at, f"a bracket that a {mark!r} of another kind closes in line {line}")
            if not awaited:
                return position

    def type(self, at: int) -> int:
        """An array with its layout, a tuple or a buffer."""
        if self.text.startswith(("(", "b("), at):
            return self.closing(at + (self.text[at] == "b"))
        found = _ARRAY.match(self.text, at)
        if found is None:
            self.fail(at, "not a type of arrays")
        end = found.end()
        return self.closing(end) if self.text.startswith("{", end) else end

    def quotation_or_group(self, at: int) -> int:
        if self.text.startswith("{", at):
            return self.closing(at)
        found = _STRING.match(self.text, at)
        if found is None:
            self.fail(at, "neither a quotation nor a group in braces")
        return found.end()

    def attributes(self, at: int) -> tuple[dict[str, str], int]:
        """The `key=value` pairs from a position on, each after a comma, up to the closing brace
        around them, or to the end of a line that is not in brackets or after a comma or an equals
        sign."""
        pieces, end = self._pieces(at)
        (behind, first), *rest = pieces
        if COMMENT.sub("", first).strip():
            self.fail(behind, "something other than a comma or the end of the line")
        found: dict[str, str] = {}
        for start, piece in rest:
            key, equals, value = piece.partition("=")
            key = COMMENT.sub("", key).strip()
            if not key.replace("-", "_").isidentifier():
                self.fail(start, f"{key[:40]!r} names no attribute")
            if not equals or key in found:
                self.fail(start, f"attribute {key!r} has no value, or a second one")
            found[key] = value.strip()
        return found, end

    def _pieces(self, at: int) -> tuple[list[tuple[int, str]], int]:
        """The texts between commas up to the end of the attributes, each with its position."""
        text, position, start = self.text, at, at
        pieces: list[tuple[int, str]] = []
        while True:
            found = _BOUNDARY.match(text, position)
            if found is None:
                self.fail(position, "a quotation or comment is never closed")
            mark, position = found[1], found.end()
            if mark in _CLOSES:
                position = self.closing(position - 1)
            elif mark == ",":
                pieces.append((start, text[start : position - 1]))
                start = position
            elif mark in ("\n", "}", ""):
                piece = text[start : position - len(mark)]
                goes_on = mark == "\n" and (
                    piece.rstrip().endswith("=") or (pieces and not piece.strip())
                )
                if not goes_on:
                    return [*pieces, (start, piece)], position - len(mark)
            else:
                self.fail(position - 1, f"a {mark!r} that closes nothing")


def split_at_commas(text: str) -> list[str]:
    """Splits at the commas outside brackets, quotations and comments, and removes the comments."""
    # Most lists of operands are plain names, which need no scanner.
    if "(" not in text and "{" not in text and "[" not in text and '"' not in text:
        bare = COMMENT.sub("", text) if "/*" in text else text
        return [part for part in map(str.strip, bare.split(",")) if part]
    return [part for part in map(str.strip, _split(text)) if part]


def _split(text: str) -> Iterator[str]:
    scanner, start, position = Scanner(text), 0, 0
    while found := _BOUNDARY.match(text, position):
        mark, position = found[1], found.end()
        if mark in _CLOSES:
            position = scanner.closing(position - 1)
        elif mark in (",", ""):
            yield COMMENT.sub("", text[start : position - len(mark)])
            start = position
            if not mark:
                return


_FIELD = re.compile(r'(\w+)=\s*("[^"\\]*(?:\\.[^"\\]*)*"|[^\s}]+)', re.DOTALL)


class Frames:
    """The stacks of Python frames of a program, from the tables at the head of its text: rows by
    their numbers, by titles. `program` is the name of the module: `jit_` and the name of the
    function."""

    def __init__(self, tables: Mapping[str, Mapping[str, str]], program: str) -> None:
        self._tables = tables
        self._found: dict[str, tuple[Frame, ...]] = {"0": (), "-1": ()}
        self._own: dict[str, tuple[Frame, ...]] = {}
        numbers = tables.get("StackFrames", {})
        callers = {self._caller(number) for number in numbers}
        whole = (self._frames(number) for number in numbers if number not in callers)
        self._home = home_of(map(in_program, whole), program.removeprefix("jit_"))

    def describe(self, metadata: str) -> tuple[str, tuple[Frame, ...]]:
        """The op_name and frames of metadata as in `{op_name="..." stack_frame_id=6}`. Only frames
        of the program's own code count (`_tracing.installed`), the innermost one first."""
        fields = dict(_FIELD.findall(metadata))
        file, line = _unquoted(fields.get("source_file")), fields.get("source_line")
        stack: tuple[Frame, ...] = ((file, int(line), ""),) if file and line else ()
        number = fields.get("stack_frame_id", "0")
        if number not in self._own:
            self._own[number] = self._of_program(self._frames(number))
        name = _unquoted(fields.get("op_name")) or ""
        return name, self._own[number] or self._of_program(stack)

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
