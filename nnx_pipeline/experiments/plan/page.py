"""A plan as a page: memory against time, with the frontier."""

from collections.abc import Sequence

from nnx_pipeline.experiments.plan.asked import Asked
from nnx_pipeline.experiments.plan.search import Compiled, Plan
from nnx_pipeline.lab._page.document import frontier_page
from nnx_pipeline.lab._page.frontier import Spot, frontier_sections
from nnx_pipeline.lab._report.view.figures import estimated


def plan_page(all_asked: Sequence[Asked], plans: Sequence[Plan]) -> str:
    pairs = list(zip(all_asked, plans, strict=True))
    sections = [frontier_sections(asked.title(), _spots(plan), plan.limit) for asked, plan in pairs]
    measured = [plan.best.result for plan in plans if plan.best and plan.best.result]
    commands = [
        " ".join(asked.words(plan.best.candidate.layout)) for asked, plan in pairs if plan.best
    ]
    return frontier_page(pairs[0][0].title(), sections, measured, command="\n".join(commands))


def _spots(plan: Plan) -> list[Spot]:
    fitting, frontier = plan.fitting(), plan.frontier()
    others = [one for one in plan.compiled if one.step and one not in fitting]
    return [_spot(one, one in frontier, fits=one in fitting) for one in (*fitting, *others)]


def _spot(one: Compiled, on_frontier: bool, *, fits: bool) -> Spot:
    assert one.result is not None, "of those with a time"
    assert one.step is not None, "of those with a time"
    account = one.result.needed_bytes
    shown = f"{account / 1e9:,.2f}", estimated(one.result.time, "step_seconds")
    return Spot(str(one.candidate.layout), account, one.step, shown, fits, on_frontier)
