"""Why what the best layout does not have is not in it."""

import math
from collections import Counter

from nnx_pipeline.experiments.plan.layouts import Layout, features_of, loop_of
from nnx_pipeline.experiments.plan.search import Candidate, Compiled, Plan, account_of


def fallen(plan: Plan) -> dict[str, str]:
    """For each kind of choice that the best layout does not have, why not."""
    best = plan.best
    has = {*features_of(best.candidate.layout).values()} if best else set()
    return {
        feature: _why(plan, feature, candidate, best)
        for feature, candidate in sorted(plan.best_of.items())
        if feature not in has
    }


def _why(plan: Plan, feature: str, candidate: Candidate, best: Compiled | None) -> str:
    limit = plan.limit
    mine = [one for one in plan.compiled if feature in features_of(one.candidate.layout).values()]
    fitting = sorted((one for one in mine if one.fits(limit)), key=lambda one: one.step or 0.0)
    if fitting and best and best.step and fitting[0].step:
        more = fitting[0].step / best.step - 1
        return f"{more:+.1%} at best, compiled: {shown(fitting[0].candidate.layout, best)}"
    if large := [one for one in mine if one.result]:
        one = min(large, key=account_of)
        needs = f"needs {account_of(one) / 1e9:,.1f} of {limit / 1e9:,.1f} GB"
        return f"{needs}, compiled: {shown(one.candidate.layout, best)}"
    if mine:
        return f"does not compile: {mine[0].error}"
    predicted, where = candidate.predicted, f": {shown(candidate.layout, best)}"
    if predicted.least_bytes > limit:
        return f"holds at least {predicted.least_bytes / 1e9:,.1f} of {limit / 1e9:,.1f} GB{where}"
    if predicted.bytes > limit:
        return f"about {predicted.bytes / 1e9:,.1f} of {limit / 1e9:,.1f} GB, predicted{where}"
    if best is None:
        return f"about {predicted.seconds:.3g} s, predicted{where}"
    assert best.step is not None, "of one that fits"
    seconds = math.exp(plan.refitted([candidate], "step").mean[0])
    return f"{seconds / best.step - 1:+.1%}, predicted, not compiled{where}"


def shown(layout: Layout, best: Compiled | None) -> str:
    """A layout by its mesh, its loop, and what the best one does not have."""
    if best is None:
        return str(layout)
    beside = best.candidate.layout
    parts = [str(layout.mesh), loop_of(layout), "zero1" if layout.zero1 else ""]
    parts += [f"remat={layout.remat}"] if layout.remat != beside.remat else []
    parts += [layout.experts] if layout.experts != beside.experts else []
    parts += [layout.attention] if layout.attention != beside.attention else []
    return ", ".join(filter(None, parts))


def refusals(plan: Plan) -> Counter[str]:
    """How many meshes and schedules the config refuses, by one reason of each rule."""
    examples = plan.listed.examples
    return Counter({examples[rule]: number for rule, number in plan.listed.refused.items()})
