"""The frontier of what can be kept: memory against time, and what to write."""

from collections.abc import Iterator

from rich.console import Group, RenderableType

from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view.figures import decimals_apart, estimated, megabytes
from nnx_pipeline.lab._report.view.remarks import Remark, closing_remarks
from nnx_pipeline.lab.errors import counted
from nnx_pipeline.lab.search.cheapest import Point
from nnx_pipeline.lab.search.kept import Kept

_CHOSEN = "→"


def kept_view(title: str, kept: Kept) -> RenderableType:
    heads = [
        Column(""),
        Column("kept and offloaded", is_prose=True),
        Column("account", is_number=True),
        Column("fits"),
        Column("step ms", is_number=True),
    ]
    table = Columns(heads, title=title, is_bare=True)
    chosen = kept.fastest
    for point in kept.search.frontier():
        time = kept.results[point.choice].time
        table.add_row(
            _CHOSEN if point == chosen else "",
            kept.said(point.choice),
            megabytes(point.account),
            "yes" if point.fits(kept.limit.bytes) else "no",
            estimated(time, "step_seconds"),
        )
    closing = closing_remarks([kept.results[chosen.choice]], hint=False) if chosen else []
    return Group(table, *texts([*_remarks(kept, chosen), *closing]))


def nothing_fits(kept: Kept) -> str:
    """Why there is no answer."""
    limit, least = kept.limit.bytes, kept.search.smallest()
    if least is None or least.account is None:
        why = next(
            (point.error for point in kept.search.points if point.error), "none was compiled"
        )
        return f"no choice compiles: {why}"
    if least.account <= limit:
        return f"nothing is known of the time of {kept.said(least.choice)}, which fits"
    sizes = limit, least.account, least.account - limit
    decimals = decimals_apart(*sizes)
    most, needed, above = (megabytes(size, decimals) for size in sizes)
    return (
        f"the limit of {most} MB is below all {len(kept.search.points)} choices that "
        f"were compiled: {kept.said(least.choice)} needs {needed}, {above} MB "
        "more; give a higher --limit"
    )


def _remarks(kept: Kept, chosen: Point | None) -> Iterator[Remark]:
    yield Remark("what is not named is computed again; no other choice is smaller and faster")
    made, size = counted(len(kept.search.points), "compile"), kept.space.size()
    earlier = sum(bool(one.measured) for one in kept.results.values())
    yield Remark(f"{made} of {size:,} choices, {earlier} of them taken from earlier runs")
    if kept.search.ended == "spent":
        yield Remark(
            f"all {made} that it announced are used up: a choice that was not compiled may be "
            "faster",
            "warning",
        )
    elif kept.search.ended is None:
        yield Remark("the search is not finished", "warning")
    for point in kept.search.points:
        if point.error:
            yield Remark(f"{kept.said(point.choice)} failed: {point.error}", "warning")
    if chosen is not None:
        yield Remark(f"the fastest within {megabytes(kept.limit.bytes)} MB:", "strong")
        yield Remark(kept.paste(chosen.choice), "strong")
