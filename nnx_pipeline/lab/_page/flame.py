"""The bytes of the heap at its peak by call stack, callers above what they call, and for two
programs what differs. A script zooms; without it every call is drawn once, as it is here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nnx_pipeline.lab._files import ink_on
from nnx_pipeline.lab._page.charts import SMALLEST, DrawnArm
from nnx_pipeline.lab._page.markup import Markup, element
from nnx_pipeline.lab._report.view.buffers import short_source
from nnx_pipeline.lab._report.view.figures import ROLE_COLOURS, megabytes
from nnx_pipeline.lab.attribution._result import Attribution, Buffer, Call

_SMALLEST = 0.002  # of the whole width; smaller calls are not drawn


@dataclass(eq=False)
class _Node:
    """A call, or below the last one the buffers of one shape and role."""

    name: str
    place: str = ""
    role: str = ""  # of buffers
    bytes: list[int] = field(default_factory=lambda: [0, 0])  # of each program
    inside: dict[tuple[str, ...], "_Node"] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """What both programs hold: of buffers the larger of the two."""
        return sum(one.width for one in self.inside.values()) or max(self.bytes)

    @property
    def change(self) -> int:
        return self.bytes[1] - self.bytes[0]


def flame(arms: Sequence[DrawnArm]) -> Markup | None:
    """The graph of one program, or of what differs in two; None where no call stack is known.

    Of two programs, a call is a function, whatever its line, because lines move; and their first
    functions are one where each program has one.
    """
    heaps = [arm.attribution for arm in arms]
    if not all(heap.calls for heap in heaps):
        return None
    root = _Node("the heap at its peak")
    of_lines = len(heaps) == 1
    for which, heap in enumerate(heaps):
        for buffer in heap.buffers:
            _add(root, which, buffer, _path(heap, buffer, of_lines=of_lines))
    if not of_lines:
        _join_first(root)
    title = "Bytes at the peak by call stack, callers above what they call"
    if not of_lines:
        title = "What differs at the peak by call stack, b − a, MB"
    drawn = list(_drawn(root, 0.0, 1.0, 0, root.width or 1))
    depth = 1 + max(level for _, _, _, level in drawn)
    frames = [_frame(*one, total=root, is_difference=not of_lines) for one in drawn]
    return element(
        "figure",
        element("figcaption", title),
        element("p", _how_to_read(is_difference=not of_lines), class_="quiet"),
        element(
            "div", frames, class_="frames", role="tree", aria_label=title, style=f"--d:{depth}"
        ),
        element("p", class_="said", role="status"),
        class_="flame",
    )


def _how_to_read(*, is_difference: bool) -> str:
    words = "The width is bytes; calls of less than 0.2 % of it are left out. "
    if is_difference:
        words = (
            "The width is the larger of both programs. + and stripes: b holds more; −: b holds "
            "less. Calls of less than 0.2 % are left out. "
        )
    return (
        f"{words}Click, tap or press Enter to enlarge a call, Escape to go back; arrow keys move."
    )


def _add(root: _Node, which: int, buffer: Buffer, path: Sequence[tuple[str, str]]) -> None:
    node = root
    node.bytes[which] += buffer.bytes
    for name, place in path:
        node = node.inside.setdefault((name, place), _Node(name, place))
        node.bytes[which] += buffer.bytes
    name = buffer.shape or (buffer.role if buffer.source else buffer.name)
    leaf = node.inside.setdefault((name, buffer.role, ""), _Node(name, role=buffer.role))
    leaf.bytes[which] += buffer.bytes


def _path(heap: Attribution, buffer: Buffer, *, of_lines: bool) -> list[tuple[str, str]]:
    """The calls from the outermost one inwards, each by its function and its place."""
    return [_named(call, of_lines=of_lines) for call in reversed(heap.stack(buffer.call))]


def _named(call: Call, *, of_lines: bool) -> tuple[str, str]:
    place = short_source(f"{call.file}:{call.line}")
    if not of_lines:
        place = place.rpartition(":")[0].rpartition("/")[2]
    return call.function.replace(".<locals>", "") or "?", place


def _join_first(root: _Node) -> None:
    """Makes one call of the first functions of two programs, of which each has one."""
    first = [(key, node) for key, node in root.inside.items() if not node.role]
    if len(first) != 2 or any(all(node.bytes) for _, node in first):
        return
    a, b = sorted((node for _, node in first), key=lambda node: node.bytes[1])
    for key, _ in first:
        del root.inside[key]
    joined = _Node(f"{a.name} → {b.name}" if a.name != b.name else a.name, a.place)
    root.inside[joined.name, joined.place] = _merged(joined, a, b)


def _merged(into: _Node, *nodes: _Node) -> _Node:
    for node in nodes:
        into.bytes = [x + y for x, y in zip(into.bytes, node.bytes, strict=True)]
        for key, below in node.inside.items():
            there = into.inside.setdefault(key, _Node(below.name, below.place, below.role))
            _merged(there, below)
    return into


def _drawn(
    node: _Node, left: float, width: float, level: int, total: int
) -> Iterator[tuple[_Node, float, float, int]]:
    """A node and all below it, each with its left edge and width as shares, and its level."""
    yield node, left, width, level
    for below in sorted(node.inside.values(), key=lambda one: -one.width):
        share = below.width / total
        if share >= _SMALLEST:
            yield from _drawn(below, left, share, level + 1, total)
        left += share


def _frame(
    node: _Node, left: float, width: float, level: int, *, total: _Node, is_difference: bool
) -> Markup:
    at = f"--x:{100 * left:.3f};--w:{100 * width:.3f};--y:{level}"
    css = "buffer" if node.role else None
    if is_difference:
        said, sizes = _change_in_words(node), f"{_signed(node)} "
        if abs(node.change) >= SMALLEST:
            css = "grows" if node.change > 0 else "shrinks"
    else:
        share = node.bytes[0] / (total.bytes[0] or 1)
        said, sizes = f"{megabytes(node.bytes[0])} MB, {share:.1%}", ""
        if node.role:
            colour = ROLE_COLOURS[node.role]
            at += f";background:{colour};color:{ink_on(colour)}"
    words = " ".join(filter(None, (node.name, node.role, node.place)))
    return element(
        "div",
        sizes,
        node.name,
        element("small", f" {(node.place or node.role).rpartition('/')[2]}"),
        class_=css,
        style=at,
        title=f"{words}: {said}",
        role="treeitem",
        aria_level=level + 1,
        tabindex=-1 if level else 0,
    )


def _signed(node: _Node) -> str:
    words = f"{node.change / 1e6:+,.1f}".replace("-", "−")
    return "0.0" if abs(node.change) < SMALLEST else words


def _change_in_words(node: _Node) -> str:
    before, after = map(megabytes, node.bytes)
    if abs(node.change) < SMALLEST:
        return f"{before} → {after} MB, the same"
    more = "more" if node.change > 0 else "less"
    return f"{before} → {after} MB, {_signed(node)} MB, {more}"
