"""A plan on the terminal: the best layouts, why others are none, and the command to paste."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from nnx_pipeline.experiments.plan.asked import Asked
from nnx_pipeline.experiments.plan.fallen import fallen, refusals
from nnx_pipeline.experiments.plan.layouts import Layout, loop_of
from nnx_pipeline.experiments.plan.search import WORTH, Compiled, Plan, of_limit
from nnx_pipeline.lab._report.columns import Column, Columns, texts
from nnx_pipeline.lab._report.view.figures import DASH, estimated, most, sign
from nnx_pipeline.lab._report.view.remarks import Remark, closing_remarks
from nnx_pipeline.lab._timing.rate import TRILLION
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import counted

SHOWN = 8  # layouts of the table
THE_BEST = "the best of each, bytes in the units above"
WIDTH = 76  # columns of the command
_HEADS = (
    Column(""),
    Column("mesh", is_prose=True),
    Column("loop", 1),
    Column("remat", 2),
    Column("account", is_number=True),
    Column("step ms", is_number=True),
    Column("bubble", 5, is_number=True),
    Column("sent", 6, is_number=True),
    Column("tokens/s", 4, is_number=True),
)
_COST = Column("10¹² tokens", 3, is_number=True)


def plan_view(asked: Asked, plan: Plan) -> RenderableType:
    shown = plan.fitting()[:SHOWN]
    has_price = any(one.result and one.result.price for one in shown)
    heads = [*_HEADS, _COST] if has_price else _HEADS
    unit = "GB" if plan.best is None or _needed(plan.best) >= 1e9 else "MB"
    title = f"{asked.title()}: {unit} per device, tokens/s per chip"
    table = Columns(heads, title=title, is_bare=True)
    frontier = plan.frontier()
    for one in shown:
        table.add_row(*_cells(one, plan, one in frontier), *([_cost(one)] if has_price else []))
    best = [plan.best.result] if plan.best and plan.best.result else []
    remarks = [*_counts(plan), *_reasons(plan), *closing_remarks(best, hint=False)]
    return Group(*([table] if shown else []), *texts(remarks), *_command(asked, plan))


def several_view(all_asked: Sequence[Asked], plans: Sequence[Plan]) -> RenderableType:
    """The best layout of each platform."""
    has_price = any(asked.costing.prices for asked in all_asked)
    heads = [Column("platform"), *_HEADS[1:]]
    table = Columns([*heads, _COST] if has_price else heads, title=THE_BEST, is_bare=True)
    for asked, plan in zip(all_asked, plans, strict=True):
        if (best := plan.best) is None:
            table.add_row(str(asked.platform), "none fits")
            continue
        cells = _cells(best, plan, True)[1:]
        table.add_row(str(asked.platform), *cells, *([_cost(best)] if has_price else []))
    return table


def nothing_fits(plan: Plan) -> str:
    """Why there is no answer."""
    made = [one for one in plan.compiled if one.result]
    if not made:
        why = next((one.error for one in plan.compiled), "no compile was finished in the time")
        return f"no layout was compiled: {why}; give more --minutes or --most"
    needed = min(one.result.needed_bytes for one in made if one.result)
    return (
        f"none of {counted(len(made), 'compiled layout')} fits: the smallest needs "
        f"{of_limit(needed, plan.limit)}; take more devices, a smaller batch, "
        "or more --minutes"
    )


def _cells(one: Compiled, plan: Plan, on_frontier: bool) -> list[str]:
    layout, result = one.candidate.layout, one.result
    assert result is not None, "of what was compiled"
    bubble = result.time and result.time.bubble_share
    return [
        "→" if one is plan.best else "*" if on_frontier else "",
        str(layout.mesh) + (" zero1" if layout.zero1 else ""),
        loop_of(layout) or DASH,
        _remat(layout, plan),
        _bytes(result.needed_bytes, plan),
        estimated(result.time, "step_seconds"),
        f"{bubble:.0%}" if bubble else DASH,
        _bytes(_sent(result), plan),
        f"{most(result.time)}{result.rate.per_chip_second:,.0f}" if result.rate else DASH,
    ]


def _remat(layout: Layout, plan: Plan) -> str:
    """What is recomputed, and what else differs from the best."""
    best = plan.best.candidate.layout if plan.best else layout
    more = [mine for mine, other in zip(layout[-2:], best[-2:], strict=True) if mine != other]
    return ", ".join([layout.remat, *more])


def _sent(result: Measurement) -> int:
    return sum(kind["bytes"] or 0 for kind in result.collectives.values())


def _bytes(size: int, plan: Plan) -> str:
    """In GB, or in MB where the best layout needs less than one GB."""
    is_large = plan.best is None or _needed(plan.best) >= 1e9
    return f"{size / 1e9:,.1f}" if is_large else f"{size / 1e6:,.1f}"


def _needed(one: Compiled) -> int:
    return one.result.needed_bytes if one.result else 0


def _cost(one: Compiled) -> str:
    rate = one.result.rate if one.result else None
    cost = rate.cost_of(TRILLION) if rate else None
    return DASH if cost is None or one.result is None else f"{sign(one.result.time)}{cost:,.0f}"


def _counts(plan: Plan) -> Iterator[Remark]:
    best = plan.best
    if best:
        layout = best.candidate.layout
        kinds = [f"{layout.experts} experts"] if plan.space.config.model.num_experts > 1 else []
        what = ", ".join([*kinds, f"{layout.attention} attention"])
        yield Remark(f"→ with {what}; * on the frontier: none that fits is smaller and faster")
        if best.result and best.result.price:
            yield Remark(f"→ 10¹² tokens cost {_cost(best)}")
        if unlike := _whole_estimate(plan):
            yield Remark(unlike)
    refused, made = sum(plan.listed.refused.values()), len(plan.compiled)
    earlier = sum(one.is_earlier for one in plan.compiled)
    yield Remark(
        f"{plan.layouts:,} layouts on {plan.listed.meshes} meshes: {plan.too_large:,} "
        f"cannot fit, {plan.too_slow:,} are predicted too slow, {len(plan.candidates):,} are left; "
        f"{made} compiled, {earlier} of them earlier"
    )
    yield Remark(_end(plan))
    if refused:
        yield Remark(f"{refused:,} meshes with a schedule that the config refuses, such as:")
    for reason, number in refusals(plan).most_common():
        yield Remark(f"  {number:,}: {reason.partition(';')[0]}")


def _whole_estimate(plan: Plan) -> str:
    """What to know where the best is a lower bound, and others are not."""
    whole = next((one for one in plan.fitting() if not sign(_time(one))), None)
    if plan.best is None or not sign(_time(plan.best)) or whole is None:
        return ""
    step = estimated(_time(whole), "step_seconds")
    whole_of = f"{step} ms, {whole.candidate.layout}"
    return f"→ is a lower bound; the fastest with a whole estimate takes {whole_of}"


def _time(one: Compiled) -> Time | None:
    return one.result.time if one.result else None


def _end(plan: Plan) -> str:
    if plan.ended == "time":
        return "the time is over: with more --minutes a faster one may be found"
    if plan.ended == "compiles":
        return "all compiles are used up: with a larger --most a faster one may be found"
    if not plan.ended:
        return "not finished"
    return f"no other layout is expected to save {WORTH:.1%} of the step"


def _reasons(plan: Plan) -> Iterator[Remark]:
    if plan.best is None:
        return
    yield Remark("what the best layout does not have, and the best layout that has it:")
    for feature, why in fallen(plan).items():
        yield Remark(f"  {feature}: {why}")
    failed = [one for one in plan.compiled if one.error]
    for one in failed:
        if not one.is_earlier:
            yield Remark(f"{one.candidate.layout} failed: {one.error}", "warning")
    if earlier := [one for one in failed if one.is_earlier]:
        one = earlier[-1]
        yield Remark(
            f"{counted(len(earlier), 'layout')} failed in earlier plans, such as "
            f"{one.candidate.layout}: {one.error}"
        )


def _command(asked: Asked, plan: Plan) -> list[Text]:
    """The command to paste, over several lines where one is too long."""
    if plan.best is None:
        return []
    lines = [""]
    for words in asked.words(plan.best.candidate.layout):
        if lines[-1] and len(lines[-1]) + len(words) > WIDTH:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {words}" if lines[-1] else words
    return [Text("\n".join(lines), style="bold")]
