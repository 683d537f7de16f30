"""Why what the best layout does not have is not in it."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from nnx_pipeline.experiments.plan.layouts import Layout, features_of, loop_of
from nnx_pipeline.experiments.plan.search import WORTH, Candidate, Compiled, Plan, account_of


def fallen(plan: Plan) -> dict[str, str]:
    """For each kind of choice that the best layout does not have, why not."""
    best, likely = plan.best, _likely(plan)
    has = {*features_of(best.candidate.layout).values()} if best else set()
    return {
        feature: _why(plan, feature, likely.get(feature), best)
        for feature in sorted(plan.best_of)
        if feature not in has
    }


class _Likely(NamedTuple):
    candidate: Candidate
    seconds: float


def _likely(plan: Plan) -> dict[str, _Likely]:
    """The layout with each kind of choice that was not compiled, fits and is the fastest, as
    predicted from those that were compiled."""
    taken = {one.candidate.layout for one in plan.compiled}
    # With those that are no candidates because others of their mesh are predicted to be faster.
    rest = [one for one in plan.best_of.values() if one.layout not in taken]
    left = [*plan.left(), *(one for one in rest if one.predicted.least_bytes <= plan.limit)]
    if not left:
        return {}
    seconds, account = plan.refitted(left, "step").mean, plan.refitted(left, "account").mean
    found = dict[str, _Likely]()
    for at in np.argsort(seconds)[::-1]:
        if account[at] <= math.log(plan.limit):
            one = _Likely(left[at], math.exp(seconds[at]))
            found |= dict.fromkeys(features_of(one.candidate.layout).values(), one)
    return found


def _why(plan: Plan, feature: str, likely: _Likely | None, best: Compiled | None) -> str:
    mine = [one for one in plan.compiled if feature in features_of(one.candidate.layout).values()]
    if mine and not any(one.result for one in mine):
        return f"does not compile: {mine[0].error}"
    fitting = [(one.step, one) for one in mine if one.step and one.fits(plan.limit)]
    step, fastest = min(fitting, key=lambda pair: pair[0], default=(math.inf, None))
    if likely is not None and likely.seconds < (1 - WORTH) * step:
        where = shown(likely.candidate.layout, best)
        if best is None or best.step is None:
            return f"about {likely.seconds:.3g} s, predicted: {where}"
        return f"{likely.seconds / best.step - 1:+.1%}, predicted, not compiled: {where}"
    if fastest is not None and best and best.step:
        where = shown(fastest.candidate.layout, best)
        return f"{step / best.step - 1:+.1%} at best, compiled: {where}"
    limit = f"{plan.limit / 1e9:,.1f} GB"
    if large := [one for one in mine if one.result]:
        one = min(large, key=account_of)
        where = shown(one.candidate.layout, best)
        return f"needs {account_of(one) / 1e9:,.1f} of {limit}, compiled: {where}"
    predicted, layout = plan.best_of[feature].predicted, plan.best_of[feature].layout
    if predicted.least_bytes > plan.limit:
        least = f"holds at least {predicted.least_bytes / 1e9:,.1f} of {limit}"
        return f"{least}: {shown(layout, best)}"
    return f"about {predicted.bytes / 1e9:,.1f} of {limit}, predicted: {shown(layout, best)}"


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
