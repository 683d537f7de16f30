"""Why what the best layout does not have is not in it."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from nnx_pipeline.experiments.plan.layouts import Layout, features_of, loop_of
from nnx_pipeline.experiments.plan.search import WORTH, Compiled, Plan, account_of, of_limit


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
    """Of the layouts with a kind of choice that were not compiled, as predicted from the others.

    - `fastest`, `seconds`: of those that fit; None where none is predicted to fit.
    - `smallest`, `bytes`: of all.
    """

    fastest: Layout | None
    seconds: float
    smallest: Layout
    bytes: float


def _likely(plan: Plan) -> dict[str, _Likely]:
    taken = {one.candidate.layout for one in plan.compiled}
    # With those that are no candidates because others of their mesh are predicted to be faster.
    rest = [one for one in plan.best_of.values() if one.layout not in taken]
    left = [*plan.left(), *rest]
    if not left:
        return {}
    seconds = np.exp(plan.refitted(left, "step").mean)
    least = np.array([one.predicted.least_bytes for one in left])
    account = np.maximum(np.exp(plan.refitted(left, "account").mean), least)
    found = dict[str, _Likely]()
    for at, one in enumerate(left):
        step = float(seconds[at]) if account[at] <= plan.limit else math.inf
        new = _Likely(one.layout if step < math.inf else None, step, one.layout, float(account[at]))
        for feature in features_of(one.layout).values():
            old = found.get(feature, new)
            fastest = min(old, new, key=lambda it: it.seconds)
            smallest = min(old, new, key=lambda it: it.bytes)
            found[feature] = _Likely(*fastest[:2], *smallest[2:])
    return found


def _why(plan: Plan, feature: str, likely: _Likely | None, best: Compiled | None) -> str:
    mine = [one for one in plan.compiled if feature in features_of(one.candidate.layout).values()]
    if mine and not any(one.result for one in mine):
        return f"does not compile: {mine[0].error}"
    fitting = [(one.step, one) for one in mine if one.step and one.fits(plan.limit)]
    step, fastest = min(fitting, key=lambda pair: pair[0], default=(math.inf, None))
    if likely and likely.fastest and likely.seconds < (1 - WORTH) * step:
        where = shown(likely.fastest, best)
        if best is None or best.step is None:
            return f"about {likely.seconds:.3g} s, predicted: {where}"
        return f"{likely.seconds / best.step - 1:+.1%}, predicted, not compiled: {where}"
    if fastest is not None and best and best.step:
        where = shown(fastest.candidate.layout, best)
        return f"{step / best.step - 1:+.1%} at best, compiled: {where}"
    made = [(account_of(one), one.candidate.layout) for one in mine if one.result]
    size, layout = min(made, key=lambda pair: pair[0], default=(0, None))
    if layout is not None:
        return f"needs {of_limit(size, plan.limit)}, compiled: {shown(layout, best)}"
    assert likely is not None, "what was not compiled is predicted"
    needs = of_limit(likely.bytes, plan.limit)
    return f"about {needs}, predicted: {shown(likely.smallest, best)}"


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
