"""What would make a program smaller: the shapes of waste that its largest buffers show.

Each rule looks at the rows of the peak. Where the places of all values are known, a cure has a gain
(`_gains`), with what must take the place of the buffers taken off:

- logits: in PARTS parts, each of which stays; the gradient of the matrix that makes them is added.
- scores: in PARTS parts of the queries, one of which is there once more, in float32.
- residuals stacked by a scan: the carry of each step stays, and the residuals of two steps.
- donation: the results, less what temporaries use their memory for first.
- padding: the padding of arrays whose elements fill whole tiles in another shape.
- casts: half of the bytes.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from nnx_pipeline.lab._hlo.buffers import BufferValue
from nnx_pipeline.lab._hlo.loops import loop_trips
from nnx_pipeline.lab._hlo.module import Shape, shapes_of
from nnx_pipeline.lab.attribution._result import ADVICE, Buffer
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.explain._gains import Kept, Placed

PARTS = 8  # into which a loss or the queries are cut
SMALLEST_SQUARE = 256  # of scores, in queries and keys
TILE = 1024  # elements of a tile of 32 bits on a TPU; twice as many of 16 bits
_LEAST = 0.01  # of all rows: smaller buffers get no cure
_ADVISED = 3  # roles that get general advice, where nothing better is known
_FLOATS = ("f32", "f64")
_NO_VALUE = ("padding", "fragmentation", "kept argument", "other memory space")


@dataclass(frozen=True, kw_only=True)
class Cure:
    """One thing to change.

    - `what`: what to change, in words.
    - `why`: what was seen.
    - `bytes`: what the buffers hold that it is about, per device.
    - `gain_bytes`: by how much the program gets smaller at least; None where that is not known.
    - `source`: the line of the largest of the buffers; None where that is not known.
    """

    what: str
    why: str
    bytes: int
    gain_bytes: int | None
    source: str | None = None


def cures_of(
    rows: Sequence[Buffer], placed: Placed | None, *, arguments: int = 0, is_tpu: bool = False
) -> tuple[Cure, ...]:
    """The cures for these buffers, those with the largest gain first and those without one last.

    - `rows`: what is held at the peak, or what a text lists.
    - `placed`: the places of all values; None where they are not known, and no gain is.
    - `arguments`: bytes of the arguments that stand outside of these rows.
    - `is_tpu`: whether layouts have the tiles of a TPU.
    """
    whole = sum(row.bytes for row in rows)
    seen: set[str] = set()
    found: list[Cure] = []
    for rule in (_logits, _scores, _residuals, _casts):
        for cure, used in rule(rows, placed):
            if cure.bytes >= _LEAST * whole:
                found.append(cure)
                seen.update(row.name for row in used)
    found += _donation(placed)
    found += [one for one in _padding(rows, placed, is_tpu) if one.bytes >= _LEAST * whole]
    found += _replicated(placed)
    if arguments > whole:
        why = "arguments, which take more than all buffers above"
        found.append(Cure(what=ADVICE["arguments"], why=why, bytes=arguments, gain_bytes=None))
    found += _advice([row for row in rows if row.name not in seen], whole)
    return tuple(sorted(found, key=lambda cure: (-(cure.gain_bytes or 0), -cure.bytes)))


def promises_of(rows: Sequence[Buffer], placed: Placed) -> dict[str, int]:
    """What a donation, and a checkpoint in the loops, gain at least; without what gains nothing."""
    loops = [cure.gain_bytes or 0 for cure, _ in _residuals(rows, placed)]
    found = {"donation": placed.donations()[1], "loop": max(loops, default=0)}
    return {kind: gain for kind, gain in found.items() if gain}


_Found = Iterator[tuple[Cure, list[Buffer]]]


def _shape(row: Buffer) -> Shape | None:
    return next(iter(shapes_of(row.shape)), None) if "[" in row.shape else None


def _shaped(rows: Iterable[Buffer]) -> Iterator[tuple[Buffer, Shape]]:
    for row in rows:
        if row.role not in _NO_VALUE and (shape := _shape(row)) is not None:
            yield row, shape


def _cure(what: str, why: str, rows: Sequence[Buffer], gain: int | None) -> Cure:
    largest = max(rows, key=lambda row: row.bytes)
    size = sum(row.bytes for row in rows)
    # A part of the gain may be of buffers that are no rows of the peak; the promise is about these.
    return Cure(
        what=what,
        why=why,
        bytes=size,
        gain_bytes=None if gain is None else min(gain, size),
        source=largest.source,
    )


def _logits(rows: Sequence[Buffer], placed: Placed | None) -> _Found:
    logits = [(row, shape) for row, shape in _shaped(rows) if row.role == "logits"]
    if not logits:
        return
    _, largest = max(logits, key=lambda pair: pair[0].bytes)
    used = [row for row, shape in logits if shape.elements == largest.elements]
    gain = _gain_of_logits(largest, placed) if placed else None
    what = (
        f"the loss for a part of the tokens at a time, here {PARTS} parts: a jax.lax.scan over "
        "them with jax.checkpoint around its body"
    )
    why = f"logits of all tokens at once, {used[0].shape}"
    yield _cure(what, why, used, gain), used


def _gain_of_logits(logits: Shape, placed: Placed) -> int | None:
    """None where no argument is the matrix that makes them."""
    vocabulary = max(logits.dims)
    shapes = [shape for item in placed.arguments for shape in item.shapes]
    tables = [one.elements for one in shapes if vocabulary in one.dims and len(one.dims) > 1]
    weights = {_sizes(shape) for shape in shapes}

    def are_logits(shape: Shape) -> bool:
        whole = shape.elements == logits.elements and vocabulary in shape.dims
        return whole and _sizes(shape) not in weights

    return placed.gain(_part_of(are_logits), 4 * max(tables)) if tables else None


def _part_of(chosen: Callable[[Shape], bool]) -> Kept:
    def kept(value: BufferValue, shape: Shape) -> int | None:
        return -(-value.bytes // PARTS) if chosen(shape) else None

    return kept


def _scores(rows: Sequence[Buffer], placed: Placed | None) -> _Found:
    squares = _weights(placed)
    sides: dict[int, list[Buffer]] = defaultdict(list)
    for row, shape in _shaped(rows):
        side = _side(shape)
        computed = row.role in ("activation", "saved residual", "scan carry", "other")
        if side and computed and (side, side) not in squares:
            sides[side].append(row)
    for side, used in sides.items():
        gain = None
        if placed:
            part = max(shape.elements for _, shape in _shaped(used)) * 4 // PARTS
            gain = placed.gain(_part_of(functools.partial(_has_side, side)), part)
        what = (
            f"attention that never holds all scores: a flash attention kernel, or {PARTS} parts of "
            "the queries one after the other, each with jax.checkpoint"
        )
        why = f"scores of {side:,} by {side:,}, {max(used, key=lambda row: row.bytes).shape}"
        yield _cure(what, why, used, gain), used


def _sizes(shape: Shape) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape.dims if size > 1))


def _weights(placed: Placed | None) -> set[tuple[int, ...]]:
    """The last two dimensions of every argument: a square weight is no scores."""
    if placed is None:
        return set()
    return {tuple(s.dims[-2:]) for item in placed.arguments for s in item.shapes}


def _side(shape: Shape) -> int | None:
    """The number of queries and keys of an array that may be scores, else None."""
    if len(shape.dims) < 2 or not shape.dtype.startswith(("f", "bf", "pred")):
        return None
    size, times = Counter(shape.dims).most_common(1)[0]
    return size if times >= 2 and size >= SMALLEST_SQUARE else None


def _has_side(side: int, shape: Shape) -> bool:
    return _side(shape) == side


def _residuals(rows: Sequence[Buffer], placed: Placed | None) -> _Found:
    stacks: dict[int, list[tuple[Buffer, Shape]]] = defaultdict(list)
    for row, shape in _shaped(rows):
        in_loop = "while/body" in row.operation or "/scan" in row.operation
        if row.role == "saved residual" and in_loop and len(shape.dims) > 1 and shape.dims[0] > 1:
            stacks[shape.dims[0]].append((row, shape))
    for steps, pairs in stacks.items():
        used = [row for row, _ in pairs]
        shapes = {shape for _, shape in pairs}
        gain, carry = None, _carry_bytes(placed, steps, shapes) if placed else None
        if placed and carry is None:
            continue  # an array of so many rows, which no loop stacks
        if placed and carry:
            total = sum(row.bytes for row in used)
            instead = steps * carry + 2 * total // steps
            gain = placed.gain(functools.partial(_without, shapes), instead)
        what = (
            "jax.checkpoint around the body of the scan over layers: it saves the input of each "
            "step and computes the rest again"
        )
        number = counted(len(used), "residual")
        why = f"{number} stacked by a scan of {steps} steps, the largest {used[0].shape}"
        yield _cure(what, why, used, gain), used


def _without(shapes: set[Shape], value: BufferValue, shape: Shape) -> int | None:
    return 0 if shape in shapes else None


def _carry_bytes(placed: Placed, steps: int, stacks: set[Shape]) -> int | None:
    """The bytes that each step of the loop that stacks these hands to the next one, None where no
    such loop is found. Counters and what the loop only reads are left out."""
    flow, trips = placed.flow, loop_trips(placed.module)
    for item in flow.instructions.values():
        is_other = trips.get((flow.home[item.name], item.name)) not in (steps, None)
        if item.opcode != "while" or is_other or not stacks & set(item.shapes):
            continue
        carried = [
            shape.bytes
            for at, shape in enumerate(item.shapes)
            if shape not in stacks
            and shape.dims
            and shape.dims[0] != steps
            and len(flow.sources((item.name, (at,)))) > 1
        ]
        return sum(carried)
    return None


def _casts(rows: Sequence[Buffer], placed: Placed | None) -> _Found:
    casts = [(row, shape) for row, shape in _shaped(rows) if row.role == "parameter cast"]
    wide = [row for row, shape in casts if shape.dtype in _FLOATS]
    if wide:
        names = {row.name for row in wide}

        def half(value: BufferValue, shape: Shape) -> int | None:
            return value.bytes // 2 if value.name in names else None

        what = (
            "parameters kept in the narrower dtype: cast inside the layer that needs float32, or "
            "give preferred_element_type to the product"
        )
        why = f"float32 copies of parameters, the largest {wide[0].shape}"
        yield _cure(what, why, wide, placed.gain(half) if placed else None), wide
    if narrow := [row for row, shape in casts if shape.dtype not in _FLOATS]:
        what = (
            "parameters stored in this dtype, or cast one layer at a time, inside the scan over "
            "layers"
        )
        why = f"copies of parameters in another dtype, the largest {narrow[0].shape}"
        yield _cure(what, why, narrow, None), narrow


def _donation(placed: Placed | None) -> list[Cure]:
    if placed is None:
        return []
    found, gain = placed.donations()
    if not found or not gain:
        return []
    largest = sorted(found, key=lambda one: -one.bytes)
    names = ", ".join(
        f"{one.name} (number {one.number})" if one.name else f"number {one.number}"
        for one in largest[:3]
    )
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return [
        Cure(
            what=f"donate_argnums of jax.jit for {names}{more}; then the caller must not read them",
            why="arguments of the shape and dtype of a result, not donated",
            bytes=sum(one.bytes for one in found),
            gain_bytes=gain,
        )
    ]


def _padding(rows: Sequence[Buffer], placed: Placed | None, is_tpu: bool) -> list[Cure]:
    padded = [row for row in rows if row.role == "padding"]
    if not padded:
        return []

    def unpadded(value: BufferValue, shape: Shape) -> int | None:
        whole = shape.elements % (TILE * 32 // max(shape.bits, 8)) == 0
        return value.array_bytes if whole else None

    gain = placed.gain(unpadded) if placed and is_tpu else None
    what = (
        "another shape or order of axes: a TPU pads the last axis to a multiple of 128 and the one "
        "before it to 8; put the large axes last"
    )
    largest = max(padded, key=lambda row: row.bytes)
    why = f"padding, most of it of {largest.name.removeprefix('padding of ')}"
    return [_cure(what, why, padded, gain)]


def _replicated(placed: Placed | None) -> list[Cure]:
    devices = re.search(r"num_partitions=(\d+)", placed.hlo.partition("\n")[0]) if placed else None
    if placed is None or devices is None or int(devices[1]) < 2:
        return []
    whole = [
        item
        for item in placed.arguments
        if item.attributes.get("sharding", "").startswith("{replicated")
        and any(len(shape.dims) > 1 for shape in item.shapes)
    ]
    size = sum(item.result_bytes for item in whole)
    total = sum(item.result_bytes for item in placed.arguments)
    if not whole or size < 0.1 * total:
        return []
    largest = max(whole, key=lambda item: item.result_bytes)
    named = largest.op_name or f"argument {largest.literal}"
    return [
        Cure(
            what="a sharding that splits them over a mesh axis, gathered one layer at a time",
            why=f"{len(whole)} arguments whole on each of {devices[1]} devices, such as {named}",
            bytes=size,
            gain_bytes=None,
        )
    ]


def _advice(rows: Sequence[Buffer], whole: int) -> list[Cure]:
    """General advice for the largest roles that no rule is about."""
    by_role: dict[str, list[Buffer]] = defaultdict(list)
    for row in rows:
        if row.role in ADVICE:
            by_role[row.role].append(row)
    sized = sorted(by_role.items(), key=lambda pair: -sum(row.bytes for row in pair[1]))
    cures = [
        _cure(ADVICE[role], f"{role}, the largest {max(some, key=_bytes).shape}", some, None)
        for role, some in sized[:_ADVISED]
    ]
    return [cure for cure in cures if cure.bytes >= 5 * _LEAST * whole]


def _bytes(row: Buffer) -> int:
    return row.bytes
