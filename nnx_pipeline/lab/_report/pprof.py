"""The heap at its peak as a profile that `go tool pprof` reads: bytes by call stack."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nnx_pipeline.lab.attribution._result import Attribution, Buffer, Call


def pprof_profile(attribution: Attribution, comment: str) -> bytes:
    """The buffers of the heap, each with its call stack, and its role and shape as labels: the
    gzipped message `Profile` of pprof's `profile.proto`, whose field numbers are those below.

    - `comment`: what the program is; `go tool pprof -comments` shows it.
    """
    texts, lines, functions = _Numbers(first=0), _Numbers(), _Numbers()
    texts.of("")  # the format wants this one first

    def sample(buffer: Buffer) -> bytes:
        stack = [lines.of(place) for place in _stack(attribution, buffer)]
        labels = {"role": buffer.role, "shape": buffer.shape, "operation": buffer.operation}
        return (
            _packed(1, stack)
            + _packed(2, [buffer.bytes])
            + b"".join(
                _message(3, _number(1, texts.of(key)) + _number(2, texts.of(text)))
                for key, text in labels.items()
                if text
            )
        )

    def location(number: int, place: Call) -> bytes:
        function = functions.of((place.function or place.file, place.file))
        return _number(1, number) + _message(4, _number(1, function) + _number(2, place.line))

    def function(number: int, name: str, file: str) -> bytes:
        names = _number(2, texts.of(name)) + _number(3, texts.of(name))
        return _number(1, number) + names + _number(4, texts.of(file))

    kind = _message(1, _number(1, texts.of("heap")) + _number(2, texts.of("bytes")))
    samples = [_message(2, sample(one)) for one in attribution.buffers]
    locations = [_message(4, location(number, place)) for place, number in lines.items()]
    named = [_message(5, function(number, *names)) for names, number in functions.items()]
    said = _packed(13, [texts.of(comment)])
    strings = [_message(6, text.encode()) for text, _ in texts.items()]
    return gzip.compress(b"".join([kind, *samples, *locations, *named, *strings, said]), mtime=0)


def _stack(attribution: Attribution, buffer: Buffer) -> list[Call]:
    """The lines of a buffer's call stack, innermost first; its role for a row without a line."""
    calls = [replace(call, caller=None) for call in attribution.stack(buffer.call)]
    return calls or [Call(file="", line=0, function=f"({buffer.role})", caller=None)]


class _Numbers(dict[Any, int]):
    """Gives each thing a number, in the order in which they first come."""

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def of(self, thing: Any) -> int:
        return self.setdefault(thing, len(self) + self.first)


def _varint(value: int) -> bytes:
    """Seven bits to a byte, the lowest first; negative numbers as 64 bits in two's complement."""
    value %= 1 << 64
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _packed(field: int, values: Sequence[int]) -> bytes:
    return _message(field, b"".join(map(_varint, values)))
