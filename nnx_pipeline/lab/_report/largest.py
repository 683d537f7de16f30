"""The largest number with which a program fits: each value that was compiled, and the proof."""

import itertools
from collections.abc import Iterator

from rich.console import Group, RenderableType

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view.buffers import buffer_rows
from nnx_pipeline.lab._report.view.figures import (
    DASH,
    bounded,
    decimals_apart,
    estimated,
    megabytes,
    sign,
)
from nnx_pipeline.lab._report.view.remarks import NAMED, Remark, closing_remarks
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.search.largest import Largest, Tried

_FITS = {True: "yes", False: "no", None: "failed"}


def largest_view(title: str, found: Largest) -> RenderableType:
    has_tokens = any(one.result and one.result.tokens for one in found.rows)
    heads = [
        Column(found.over.unit, is_number=True),
        Column("fits"),
        Column("account", is_number=True),
        Column("arguments", 3, is_number=True),
        Column("heap", 3, is_number=True),
        Column("of limit", 1, is_number=True),
        Column("step ms", is_number=True),
        Column(f"ms/{found.over.unit}", 2 if has_tokens else 0, is_number=True),
        *([Column("ns/token", is_number=True)] if has_tokens else []),
    ]
    table = Columns(heads, title=title, is_bare=True)
    for one in found.rows:
        table.add_row(*_cells(one, found.limit.bytes))
    best = found.tried[found.value].result if found.value is not None else None
    closing = closing_remarks([best], hint=False) if best else []
    return Group(table, *texts([*_remarks(found), *closing]))


def _cells(one: Tried, limit: int) -> list[str]:
    memory = one.result.memory if one.result else None
    needed = one.needed_bytes
    time = one.result.time if one.result else None
    step, tokens = time.step_seconds if time else None, one.result.tokens if one.result else None
    each = None if step is None or not one.value else step / one.value
    per_token = None if step is None or not tokens else step / tokens
    before = sign(time)
    return [
        f"{one.value:,}",
        _FITS[one.fits],
        megabytes(needed),
        megabytes(memory.argument_bytes if memory else None),
        megabytes(memory.heap_bytes if memory else None),
        DASH if needed is None else f"{needed / limit:.1%}",
        estimated(time, "step_seconds"),
        bounded(time, each) if time else DASH,
        DASH if per_token is None else f"{before}{per_token * 1e9:,.1f}",
    ]


def verdict(found: Largest) -> str:
    """The answer, and what proves it."""
    value, above, lowest = found.value, found.too_large, found.over.values[0]
    ends = [found.tried[at] for at in (lowest if value is None else value, above) if at is not None]
    decimals = decimals_apart(found.limit.bytes, *(one.needed_bytes for one in ends))
    limit = megabytes(found.limit.bytes, decimals)
    if value is None:
        at, need = found.over.at(lowest), _needs(found.tried[lowest], decimals)
        if found.tried[lowest].fits is None:
            return f"{at} did not compile"
        return f"{at} does not fit: {need}, and the limit is {limit} MB"
    fits = f"{found.over.at(value)} fits with {megabytes(ends[0].needed_bytes, decimals)}"
    if found.bracket is None:
        refused = [one.value for one in found.rows if one.fits is False]
        more = f", and {found.over.at(min(refused))} does not" if refused else ""
        return f"so far {fits} of {limit} MB{more}: the search is not finished"
    if above is None:
        return f"the highest value fits: {fits} of {limit} MB"
    need = _needs(found.tried[above], decimals)
    return f"{fits} of {limit} MB; {found.over.at(above)} does not: {need}"


def _needs(one: Tried, decimals: int) -> str:
    if one.needed_bytes is None:
        return "the compiler refuses it"
    return f"it needs {megabytes(one.needed_bytes, decimals)} MB"


def _remarks(found: Largest) -> Iterator[Remark]:
    if not found.tried:
        return
    yield Remark(verdict(found), "strong" if found.value is not None else "alarm")
    limit = found.limit
    text = f"the limit: {megabytes(limit.bytes)} MB"
    if limit.device_bytes is not None and limit.kept_back is not None:
        percent = 100 * limit.bytes / limit.device_bytes
        share = f"{percent:.1f}".removesuffix(".0") if percent >= 0.1 else f"{percent:.1g}"
        text += f" is {share}% of the {megabytes(limit.device_bytes)} that a program may use of a "
        text += f"device; {megabytes(limit.kept_back)} are kept back"
    yield Remark(text)
    if found.value is not None and (best := found.tried[found.value].result):
        yield from _parts(found.over.at(found.value), best)
    sizes = [one.needed_bytes for one in found.rows if one.result]
    if len(sizes) > 1 and len({*sizes}) == 1:
        yield Remark(
            f"all {len(sizes)} programs need the same memory: it may not depend on "
            f"{found.over.name}, or not within this range",
            "warning",
        )
    for one in found.passed_over:
        yield Remark(f"passed over: {found.over.at(one.value)}: {one.error}", "warning")
    below = [
        one.value for one in found.rows if one.fits is False and one.value < (found.value or 0)
    ]
    if below:
        yield Remark(
            f"{found.over.at(below[-1])} does not fit, although {found.value} above it does: a "
            "larger value may fit too",
            "warning",
        )
    elif len(found.tried) < len(found.over.values) and (fall := _fall(found)):
        lower, higher = fall
        yield Remark(
            f"memory does not grow everywhere: {found.over.at(lower.value)} needs more than "
            f"{found.over.at(higher.value)}; of values that were not compiled one above may fit, "
            "and one below may not",
            "warning",
        )
    kept = sum(bool(one.result and one.result.measured) for one in found.rows)
    made = counted(len(found.rows) - kept, "compile")
    values = counted(len(found.over.values), "value")
    yield Remark(f"{made}, {kept} taken from earlier runs; {values}")


def _parts(at: str, best: Measurement) -> Iterator[Remark]:
    rows = [(words, size) for words, size in best.account.rows().items() if size]
    parts = " + ".join(f"{words} {megabytes(size)}" for words, size in rows)
    yield Remark(f"{at} holds: {parts}; largest in the heap:")
    for row in buffer_rows(best.attribution.buffers)[:NAMED] if best.attribution else []:
        yield Remark(
            f"  {megabytes(row.bytes)}: {row.role}, {row.shape or 'no array'}, {row.source}"
        )


def _fall(found: Largest) -> tuple[Tried, Tried] | None:
    """Two values of which the lower needs more memory."""
    known = [one for one in found.rows if one.needed_bytes is not None]
    for lower, higher in itertools.pairwise(known):
        if (lower.needed_bytes or 0) > (higher.needed_bytes or 0):
            return lower, higher
    return None
