"""Reads what XLA, JAX and the operating system say when memory runs out, inside any log.

Sizes such as `19.32G` are in units of 1024; they have two decimals, so that sums differ by as much.
A table of buffers belongs to the message above it:

    RESOURCE_EXHAUSTED: … Ran out of memory in memory space hbm. Used 19.32G of 15.48G hbm. …
    Total hbm usage >= 19.84G:
        program          19.32G
      1. Size: 2.00G
         Operator: op_name="jit(step)/…/dot_general" source_file="model.py" source_line=12
         Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.explain._listed import Listed, listed_in

_SIZE = r"(\d+(?:\.\d+)? ?(?:[KMGTP]i?)?B?(?: bytes)?)(?!\w)"
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

When = Literal["compile", "run", "host"]

# What log writers put before each line: colours, the process, the time, the place in a source.
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(
    r"^\s*(?:"
    r"\([\w.<>-]+ pid=\d+(?:, ip=[\d.]+)?\)"
    r"|\[(?:rank|default|host|worker|node)?[-_ \d]+\]:?"
    r"|\[\d+,\d+\]<std\w+>:"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?:?(?= |$)"
    r"|[IWEF](?:\d{4} [\d:]+\.\d+)? +(?:\d+ +)?[\w./-]+\.(?:cc|py):\d+\]"
    r"|(?:std(?:out|err) [FP]|>)(?= )"
    r") ?"
)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message that memory has run out.

    - `line`: where it begins in the text.
    - `what`: what it means, in a sentence.
    - `when`: while compiling, while running, or on the host.
    - `sizes`: the figures that the text names, in bytes, by what they are.
    - `buffers`: the rows of its table of buffers, largest first; () where it has none.
    - `times`: how often it stands in the text, as where several processes write it.
    """

    line: int
    what: str
    when: When
    sizes: dict[str, int] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    times: int = 1

    def size(self, *names: str) -> int | None:
        """The first of these figures that the text has."""
        return next((self.sizes[name] for name in names if name in self.sizes), None)


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    when: When
    what: str
    names: tuple[str, ...] = ()  # of the sizes that the groups of the pattern hold


def _rule(pattern: str, when: When, what: str, *names: str) -> _Rule:
    return _Rule(re.compile(pattern.replace("SIZE", _SIZE), re.IGNORECASE), when, what, names)


_TOO_LARGE = "The TPU compiler refused the program: it needs more than a device has (XLA's E1000)."
_NEEDED, _CAPACITY, _FREE, _ASKED = "needed", "device has", "free", "asked for"
_RULES = (
    _rule(
        r"ran out of memory in memory space hbm\.?\s+used SIZE of SIZE hbm\.?"
        r"(?:\s+exceeded hbm capacity by SIZE)?",
        *("compile", _TOO_LARGE),
        *(_NEEDED, _CAPACITY, "too much"),
    ),
    _rule(
        r"ran out of memory on hbm, [^()]{0,200}\(SIZE\) exceeds available hbm \(SIZE\)",
        *("compile", _TOO_LARGE),
        *(_NEEDED, _CAPACITY),
    ),
    _rule(
        r"tensorcore hbm usage: SIZE, sparsecore hbm usage:? SIZE, exceeding available bytes: SIZE",
        *(
            "compile",
            "The TPU compiler refused the program: both kinds of cores need too much (E1000).",
        ),
        *("TensorCore", "SparseCore", _CAPACITY),
    ),
    _rule(
        r"ran out of memory in memory space (?!hbm)\w+(?:[^\n]{0,200}?used SIZE of SIZE)?",
        "compile",
        "A kernel needs more on-chip memory than there is (XLA's E1001): smaller blocks of the "
        "kernel, not a smaller model.",
        *("on-chip memory needed", "on-chip memory there is"),
    ),
    _rule(
        r"attempting to (?:allocate|reserve) SIZE(?: at the bottom of memory)?\. that was not "
        r"possible\. there are SIZE free",
        *("run", "An array or a program did not fit beside what the device already held."),
        *(_ASKED, _FREE),
    ),
    _rule(
        r"(?:(?<!ran )out of memory (?:while )?trying to allocate|failed to allocate request for)"
        r" SIZE",
        *("run", "The device had no room for a block beside what it already held."),
        _ASKED,
    ),
    _rule(
        r"allocator \(\w+\) ran out of memory trying to allocate SIZE",
        *("run", "The allocator of the GPU had no room for a block."),
        _ASKED,
    ),
    _rule(
        r"can't reduce memory use below SIZE \([^)]*\) by rematerialization; only reduced to SIZE",
        "compile",
        "The compiler tried to compute values again to save memory, and it was not enough.",
        *("aimed at", "reached"),
    ),
    _rule(
        r"out of memory allocating SIZE",
        *("host", "The memory of the host had no room for a block."),
        _ASKED,
    ),
    _rule(
        r"unable to allocate SIZE for an array",
        *("host", "NumPy had no room for an array in the memory of the host."),
        _ASKED,
    ),
    _rule(
        r"std::bad_alloc|\bMemoryError\b|cannot allocate memory|oom-?kill|out of memory: killed"
        r"|\bkilled process \d+|exit code:? (?:137|-9)\b",
        "host",
        "The host ran out of memory, and the process ended; no device is at fault.",
    ),
)
# Lines of the text below a message, each with what its figure is.
_LINES = tuple(
    (re.compile(rf"^\s*{pattern.replace('SIZE', _SIZE)}", re.IGNORECASE), names)
    for pattern, *names in (
        (r"total hbm usage >= SIZE", "in all"),
        (r"HBM capacity SIZE", "device has"),
        (r"currently allocated: +SIZE", "in use"),
        (r"reserved\S* +SIZE", "reserved"),
        (r"program +SIZE", "program"),
        (r"arguments +SIZE", "arguments"),
        (r"global +SIZE", "global"),
        (r"scoped +SIZE", "scoped"),
        (r"overlays +SIZE", "overlays"),
        (r"HLO temp +SIZE", "heap"),
        (r"output size SIZE; shares SIZE with arguments", "outputs", "outputs in arguments"),
        (r"parameter allocation: +SIZE", "arguments"),
        (r"constant allocation: +SIZE", "constants"),
        (r"maybe_live_out allocation: +SIZE", "outputs"),
        (r"preallocated temp allocation: +SIZE", "heap"),
        (r"total allocation: +SIZE", "in all"),
        (r"total fragmentation: +SIZE", "fragmentation"),
        (r"limit: +SIZE", "of the allocator"),
        (r"inuse: +SIZE", "in use"),
        (r"maxinuse: +SIZE", "most in use"),
        (r".*largest contiguous region of free memory is SIZE", "largest free block"),
    )
)
# A line with one of these words is about memory, and is named where nothing else reads it.
_ABOUT_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|\bOOM\b|ran out of memory|hbm usage", re.IGNORECASE
)


def bytes_of(text: str) -> int:
    """The bytes of a printed size such as `19.32G`, `6.00MiB`, `0B` or `2147483648 bytes`."""
    found = re.match(r"(\d*\.?\d*) ?([KMGTP]?)", text.strip(), re.IGNORECASE)
    number, unit = (found[1], found[2].upper()) if found else ("0", "")
    return round(float(number if number.strip(".") else 0) * 1024.0 ** _UNITS[unit])


def cleaned(text: str) -> list[str]:
    """The lines without what log writers put before them; a message that Python printed in
    quotation marks is cut at its `\\n`."""
    lines = []
    for line in _COLOUR.sub("", text).split("\n"):
        shorter = line.rstrip("\r")
        while (found := _PREFIX.match(shorter)) and found.end():
            shorter = shorter[found.end() :]
        lines.append(shorter)
    if sum("\\n" in line and "hbm" in line.lower() for line in lines) == 0:
        return lines
    return [
        part
        for line in lines
        for part in (line.split("\\n") if _ABOUT_MEMORY.search(line) else [line])
    ]


def read_messages(text: str) -> tuple[list[Message], list[str]]:
    """The messages of a text in their order, alike ones once, and the lines that are about memory
    and not understood."""
    lines = cleaned(text)
    found = list(_headlines(lines))
    if not found and (rows := listed_in(lines, bytes_of)):
        what = "A table of buffers, without the message above it."
        found = [(0, 0, Message(line=1, what=what, when="compile"))]
    ends = [*(start for start, _, _ in found[1:]), *([len(lines)] if found else [])]
    messages, read = [], set[int]()
    for (start, last, message), end in zip(found, ends, strict=True):
        read.update(range(start, last + 1))
        sizes, used = _figures(lines[start:end])
        read.update(start + at for at in used)
        rows = listed_in(lines[start:end], bytes_of)
        whole = replace(message, sizes={**message.sizes, **sizes}, buffers=_rows(rows))
        messages.append(whole)
    unread = [
        f"line {at + 1} is not understood: {line.strip()[:100]}"
        for at, line in enumerate(lines)
        if at not in read and _ABOUT_MEMORY.search(line) and not _is_repeated(line)
    ]
    return _once(messages), list(dict.fromkeys(unread))


def _is_repeated(line: str) -> bool:
    return "BufferAssignment OOM Debugging" in line or line.strip().endswith("RESOURCE_EXHAUSTED:")


def _headlines(lines: list[str]) -> Iterator[tuple[int, int, Message]]:
    """The first and the last line of each message, numbered from 0."""
    text = "\n".join(lines)
    hits = [
        (found.start(), found.end(), rule, found)
        for rule in _RULES
        for found in rule.pattern.finditer(text)
    ]
    for start, end, rule, found in sorted(hits, key=lambda hit: hit[0]):
        sizes = {
            name: bytes_of(size)
            for name, size in zip(rule.names, found.groups(), strict=False)
            if size
        }
        first = text.count("\n", 0, start)
        last = first + text.count("\n", start, end)
        yield first, last, Message(line=first + 1, what=rule.what, when=rule.when, sizes=sizes)


def _figures(lines: list[str]) -> tuple[dict[str, int], list[int]]:
    sizes: dict[str, int] = {}
    used = []
    for at, line in enumerate(lines):
        for pattern, names in _LINES:
            if found := pattern.match(line):
                used.append(at)
                for name, size in zip(names, found.groups(), strict=False):
                    sizes.setdefault(name, bytes_of(size))  # `reserved` stands there twice
    return sizes, used


def _rows(listed: Iterable[Listed]) -> tuple[Buffer, ...]:
    rows = [row for one in listed for row in one.rows()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _once(messages: list[Message]) -> list[Message]:
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Message]] = {}
    for message in messages:
        named = tuple(sorted((k, v) for k, v in message.sizes.items() if k in (_ASKED, _NEEDED)))
        groups.setdefault((message.what, named), []).append(message)
    return [
        replace(
            max(group, key=lambda one: (len(one.buffers), len(one.sizes))),
            line=group[0].line,
            times=len(group),
        )
        for group in groups.values()
    ]
