"""Reads the buffers that an out-of-memory text lists, of the TPU's and the GPU's form."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nnx_pipeline.lab._hlo.module import Shape, shapes_of
from nnx_pipeline.lab.attribution._result import Buffer

# The first line of an entry: `1. Size: 2.00G` on a TPU, `Buffer 1:` and then `Size: 2.00GiB` on a
# GPU. `Unpadded size:` is another one.
_ENTRY = re.compile(r"(?:\d+\.\s+Size:|Buffer \d+:)")
_FIELDS = {
    "size": re.compile(r"(?<![Uu]npadded )\bSize:\s*([\d.]+ ?[KMGTP]?i?B?)"),
    "unpadded": re.compile(r"Unpadded size:\s*([\d.]+ ?[KMGTP]?i?B?)"),
    "padding": re.compile(r"Extra memory due to padding:\s*([\d.]+ ?[KMGTP]?i?B?)"),
    "operation": re.compile(r'op_name="([^"]*)'),
    "file": re.compile(r'source_file="([^"]*)"'),
    "line": re.compile(r"source_line=(\d+)"),
    "shape": re.compile(r"(?:Shape|Subshape):\s*(\(?[a-z]\w*\[.*)"),
    "label": re.compile(r"XLA [Ll]abel:\s*(.*)"),
    "kind": re.compile(r"Allocation type:\s*(.*)"),
}
_PARAMETER = re.compile(r"Entry Parameter Subshape:")
_END = re.compile(r"\s*={8,}\s*$")
_MOST_LINES = 12  # of one entry
_VOCABULARY = re.compile(
    r"logits|lm_?head|cross_?entropy|log_?softmax|vocab|softmax_xent", re.IGNORECASE
)
_WEIGHT = re.compile(r"embed|kernel|proj|dense|lm_?head|weight|mlp", re.IGNORECASE)
LEAST_VOCABULARY = 8192  # of the last dimension, where nothing but the words tells logits


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One entry of the table."""

    bytes: int
    padding: int
    type: str  # with its layout; "" where the text is cut
    operation: str
    source: str | None
    label: str
    is_argument: bool

    @property
    def shape(self) -> Shape | None:
        return next(iter(shapes_of(self.type)), None) if self.type else None

    def rows(self) -> list[Buffer]:
        """A row for the array, and one for the padding of its layout."""
        array = max(0, self.bytes - self.padding)
        row = Buffer(
            name=self.label.partition(" ")[0].lstrip("%") or "an entry of the text",
            bytes=array,
            shape=self.type.partition("{")[0],
            operation=self.operation.partition("[")[0],  # older versions print parameters
            source=self.source,
            role=self._role(),
            first=0,
            last=0,
        )
        if not self.padding:
            return [row]
        padded = {**vars(row), "name": f"padding of {row.name}", "bytes": self.padding}
        return [row, Buffer(**{**padded, "shape": "", "role": "padding"})]

    def _role(self) -> str:
        """A role as far as words and shape tell it; the rest is `other`."""
        shape, path = self.shape, self.operation
        if self.is_argument:
            return "kept argument"
        if shape is None:
            return "other"
        last = re.sub(r"\[.*", "", path).rpartition("/")[2]
        if last == "convert_element_type" and len(shape.dims) == 2 and _WEIGHT.search(path):
            return "parameter cast"
        if max(shape.dims, default=0) >= LEAST_VOCABULARY and _VOCABULARY.search(path):
            return "logits"
        stacked = last == "dynamic_update_slice" or "dynamic-update-slice" in self.label
        if stacked and "while/body" in path and "transpose(" not in path:
            return "saved residual"
        if last == "all_gather" or "all-gather" in self.label:
            return "collective buffer"
        return "activation" if path else "other"


def listed_in(lines: Sequence[str], bytes_of: Callable[[str], int]) -> list[Listed]:
    """The entries of the tables in these lines; an entry that stands there twice counts once."""
    found = [_listed(fields, bytes_of) for fields in _entries(lines) if "size" in fields]
    return list(dict.fromkeys(found))


def _entries(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    fields: dict[str, str] | None = None
    age = 0
    for line in lines:
        if _ENTRY.search(line):
            if fields is not None:
                yield fields
            fields, age = {"number": line.strip()}, 0
        if fields is None:
            continue
        age += 1
        if _END.search(line) or age > _MOST_LINES:
            yield fields
            fields = None
            continue
        for name, pattern in _FIELDS.items():
            if name not in fields and (hit := pattern.search(line)):
                fields[name] = hit[1].strip()
        if _PARAMETER.search(line):
            fields["argument"] = "yes"
    if fields is not None:
        yield fields


def _listed(fields: dict[str, str], bytes_of: Callable[[str], int]) -> Listed:
    size = bytes_of(fields["size"])
    printed = fields.get("shape", "")
    try:
        exact = sum(shape.bytes for shape in shapes_of(printed))
    except ValueError:  # cut in the middle
        printed, exact = "", 0
    padding = bytes_of(fields["padding"]) if "padding" in fields else 0
    # The text has two decimals: the shape says the bytes exactly, where they agree.
    if exact and abs(exact + padding - size) <= 0.01 * size + 2**20:
        size = exact + padding
    place = fields.get("file"), fields.get("line")
    kind = fields.get("kind", "").lower()
    return Listed(
        bytes=size,
        padding=padding,
        type=printed,
        operation=fields.get("operation", ""),
        source=f"{place[0]}:{place[1]}" if all(place) else None,
        label=fields.get("label", ""),
        is_argument="argument" in fields or "parameter" in kind or "argument" in kind,
    )
