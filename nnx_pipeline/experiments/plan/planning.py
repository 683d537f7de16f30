"""What the command `plan` does."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType

from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments.plan.asked import Asked
from nnx_pipeline.experiments.plan.compiling import Compiler
from nnx_pipeline.experiments.plan.fallen import fallen, refusals
from nnx_pipeline.experiments.plan.layouts import Layout, row_of
from nnx_pipeline.experiments.plan.page import plan_page
from nnx_pipeline.experiments.plan.search import Budget, Compiled, Plan, search
from nnx_pipeline.experiments.plan.view import nothing_fits, plan_view, several_view
from nnx_pipeline.experiments.plan.wanted import Chips, Spending, Written
from nnx_pipeline.lab import _ending as ending
from nnx_pipeline.lab._cli.progress import progress, shown_if_interrupted
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import Chosen, Costing
from nnx_pipeline.lab._files import Lasting
from nnx_pipeline.lab._report.output import json_files, show, write_files
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.effort import Effort

PATIENCE = 0.5  # of the time of a plan, after which a compile is ended


def run_plan(
    config: Config, chosen: Chosen, chips: Chips, spending: Spending, written: Written
) -> None:
    """Plans for each platform, shows what came of it, and raises Failed where nothing fits."""
    named = chips.platforms
    if twice := [name for at, name in enumerate(named) if name in named[:at]]:
        raise InputError(f"--what-if {twice[0]} is named twice; name each platform once")
    costing = Costing(chips.prices, None)
    all_asked = [Asked.of(config, chosen, name, costing, chips.limit) for name in named]
    costing.check([one.platform for one in all_asked], of_function=False)
    for asked in all_asked:
        asked.platform.devices(0)  # a compiler that is missing is said before anything is listed
    plans = list[Plan]()

    def files() -> dict[str, str]:
        here = all_asked[: len(plans)]
        page = {} if written.html_path is None else {written.html_path: plan_page(here, plans)}
        return json_files(written.json_path, lambda: to_json(here, plans)) | page

    def view() -> RenderableType:
        return plan_view(all_asked[len(plans) - 1], plans[-1])

    with shown_if_interrupted(view, written.json_path, files) as draw:
        for asked in all_asked:
            with progress() as say, compiler_errors():
                _add_plan(plans, asked, spending, say, draw)
            if len(all_asked) == 1 or plans[-1].best:
                show(view(), json_path=written.json_path)
    if len(plans) > 1:
        show(several_view(all_asked, plans), json_path=written.json_path)
    write_files(files())
    if failed := [one for one in plans if one.best is None]:
        raise Failed(nothing_fits(failed[0]))


def _add_plan(
    plans: list[Plan], asked: Asked, spending: Spending, say: Progress, draw: Callable[[], None]
) -> None:
    """Makes the plan of one platform."""
    say(f"listing layouts for {asked.platform}")
    plan, cache = asked.plan(), Cache.of_user()
    plans.append(plan)
    what = " ".join(["plan", asked.name, *asked.assignments, str(asked.platform)])
    effort = Effort(what=what, most=spending.most, cache=cache, say=say)
    effort.begin()
    layouts = f"{len(plan.candidates):,} layouts to choose from"
    say(Lasting(f"{spending.minutes:g} minutes at most; {layouts}"))
    if cache.folder is not None:
        ending.add_note(ending.GOES_ON)
    seconds = 60 * spending.minutes
    compiler = Compiler(plan.space, asked.platform, cache, patience=math.ceil(seconds * PATIENCE))

    def known(layout: Layout) -> Measurement | None:
        found = compiler.known(layout)
        return found and asked.costing.of(found)

    def compile(layout: Layout) -> Measurement:
        return asked.costing.of(compiler(layout))

    plan.recall(compiler.tried(), known)
    budget = Budget(time.monotonic() + seconds)
    draw()
    search(plan, compile, known, effort, budget, seen=draw)


def to_json(all_asked: Sequence[Asked], plans: Sequence[Plan]) -> dict[str, Any]:
    """What `plan --json` writes."""
    rows = [_of_platform(asked, plan) for asked, plan in zip(all_asked, plans, strict=True)]
    return {"schema": 1, "plans": rows}


def _of_platform(asked: Asked, plan: Plan) -> dict[str, Any]:
    best = plan.best
    return {
        "platform": str(asked.platform),
        "model": asked.name,
        "limit_bytes": plan.limit,
        "layouts": plan.layouts,
        "cannot_fit": plan.too_large,
        "predicted_too_slow": plan.too_slow,
        "candidates": len(plan.candidates),
        "refused": dict(refusals(plan)),
        "fell_out": fallen(plan),
        "best": best and _row(plan, best),
        "ended": plan.ended or None,
        "compiled": [_row(plan, one) for one in plan.compiled],
        "paste": best and " ".join(asked.words(best.candidate.layout)),
    }


def _row(plan: Plan, one: Compiled) -> dict[str, Any]:
    result = one.result
    return {
        "layout": row_of(one.candidate.layout),
        "predicted_step_seconds": one.candidate.predicted.seconds,
        "predicted_bytes": one.candidate.predicted.bytes,
        "account_bytes": result and result.needed_bytes,
        "fits": one.fits(plan.limit),
        "error": one.error or None,
        "time": result and result.time and result.time.to_json(),
        "collectives": result and result.collectives,
        "rate": result and result.rate and result.rate.to_json(),
        "earlier": result and result.measured,
    }
