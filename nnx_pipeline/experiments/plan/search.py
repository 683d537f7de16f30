"""Chooses which layouts are compiled: the best predicted first, and refits the prediction.

How far compiled figures lie from predicted ones is itself predicted from the layouts compiled so
far (a Gaussian process over what they have in common). The next compile is of the layout that is
expected to save the most time, counted by how likely it fits.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from nnx_pipeline.experiments.plan.layouts import (
    Layout,
    Listed,
    Space,
    features_of,
    list_shapes,
    loop_of,
    options_of,
)
from nnx_pipeline.experiments.plan.predict import Predicted, Predictor
from nnx_pipeline.lab._baseline.execute import end_all
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.errors import InputError, described
from nnx_pipeline.lab.search._surrogate import Surrogate
from nnx_pipeline.lab.search.effort import Effort, Spent

FEW = 4_000  # layouts that are all looked at, whatever is predicted
SLOWER = 1.5  # times the best prediction, beyond which none of more is looked at
MOST = 20_000
ROOM = 0.6  # of the memory, which the first layouts are predicted to need at most
KINDS_FIRST = 3  # kinds of layouts of which the best predicted are compiled first
WITHIN = 1.3  # times the best prediction, for those
UNSURE = 0.2  # deviation of the logarithm of a prediction, before anything is compiled
WORTH = 1e-3  # expected saving, as a share of the step, below which nothing more is compiled
LINE_EVERY = 30.0  # seconds between lines about running compiles
RECALLED = 60  # the fastest of earlier compiles: with many more each prediction takes seconds
# `done`: nothing that was not compiled is worth it.
Ended = Literal["", "done", "time", "compiles"]


class Candidate(NamedTuple):
    layout: Layout
    predicted: Predicted


@dataclass(frozen=True)
class Compiled:
    """What came of a candidate: a measurement, or why there is none.

    - `is_earlier`: whether an earlier plan compiled it.
    """

    candidate: Candidate
    result: Measurement | None = None
    error: str = ""
    is_earlier: bool = False

    @property
    def step(self) -> float | None:
        time = self.result.time if self.result and not self.result.is_refused else None
        return time.step_seconds if time else None

    def fits(self, limit: int) -> bool:
        return self.result is not None and bool(self.step) and self.result.needed_bytes <= limit


@dataclass
class Plan:
    """The layouts of a model on some devices, and what is known of them.

    - `space`, `predictor`: what there is to choose, and how it is predicted.
    - `limit`: bytes of a device.
    - `listed`: what the config takes and refuses; `layouts`: how many layouts that are with all
      options.
    - `too_large`, `too_slow`: how many cannot fit, and how many are predicted too slow.
    - `candidates`: the others, best predicted first.
    - `best_of`: the best predicted layout with each feature, whether it is a candidate or not.
    - `compiled`: in the order in which they were compiled.
    - `ended`: what ended the search; "" as long as it goes on.
    """

    space: Space
    predictor: Predictor
    limit: int
    listed: Listed = field(default_factory=Listed)
    layouts: int = 0
    too_large: int = 0
    too_slow: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    best_of: dict[str, Candidate] = field(default_factory=dict)
    compiled: list[Compiled] = field(default_factory=list)
    running: list[Candidate] = field(default_factory=list)
    ended: Ended = ""

    def fill(self) -> None:
        """Lists the candidates. Raises InputError where there is no layout, or none can fit."""
        self.listed = list_shapes(self.space)
        shapes = sorted(map(self._fastest, self.listed.shapes), key=lambda one: one[0])
        bound = math.inf
        for fastest, shape in shapes:
            options = [*options_of(self.space, shape)]
            self.layouts += len(options)
            slow = fastest > SLOWER * bound and len(self.candidates) >= FEW
            if slow or len(self.candidates) >= MOST:
                self.too_slow += len(options)
                self._see(Candidate(options[0], self.predictor.predict(options[0])))
                continue
            for option in options:
                one = Candidate(option, self.predictor.predict(option))
                self._see(one)
                if one.predicted.least_bytes > self.limit:
                    self.too_large += 1
                    continue
                self.candidates.append(one)
                if one.predicted.bytes <= self.limit:
                    bound = min(bound, one.predicted.seconds)
        self.candidates.sort(key=lambda one: one.predicted.seconds)
        self._check()

    def _fastest(self, shape: Layout) -> tuple[float, Layout]:
        return self.predictor.predict(next(options_of(self.space, shape))).seconds, shape

    def _see(self, one: Candidate) -> None:
        for feature in features_of(one.layout).values():
            known = self.best_of.get(feature)
            if known is None or self._order(one) < self._order(known):
                self.best_of[feature] = one

    def _order(self, one: Candidate) -> tuple[bool, bool, float]:
        predicted = one.predicted
        too_large = predicted.bytes > self.limit
        return predicted.least_bytes > self.limit, too_large, predicted.seconds

    def _check(self) -> None:
        if not self.layouts:
            reasons = self.listed.examples
            (rule, _), *_ = self.listed.refused.most_common() or [("", 0)]
            raise InputError(f"no mesh of {self.space.devices} devices: {reasons.get(rule, '')}")
        if not self.candidates:
            least = min(one.predicted.least_bytes for one in self.best_of.values())
            is_half = self.space.config.model.param_dtype != "float32"
            raise InputError(
                f"no layout fits: the state alone needs {of_limit(least, self.limit)} that a "
                "device may hold; take more devices, or a higher --limit where one is given"
                + ("" if is_half else ", or --set model.param_dtype=bfloat16")
            )

    @property
    def best(self) -> Compiled | None:
        return min(self.fitting(), key=lambda one: one.step or math.inf, default=None)

    def fitting(self) -> list[Compiled]:
        """Those that were compiled and fit, the fastest first."""
        found = [one for one in self.compiled if one.fits(self.limit)]
        return sorted(found, key=lambda one: (one.step or math.inf, account_of(one)))

    def frontier(self) -> list[Compiled]:
        """Those that fit than which none is both smaller and faster, the fastest first."""
        least, found = math.inf, list[Compiled]()
        for one in self.fitting():
            if account_of(one) < least:
                least = account_of(one)
                found.append(one)
        return found

    def next(self) -> Candidate | None:
        """What is worth the next compile; None where nothing is."""
        left = self.left()
        if not left:
            return None
        seconds, account = self.refitted(left, "step"), self.refitted(left, "account")
        chance = _normal((math.log(self.limit) - account.mean) / account.deviation)
        chance *= self._likely_to_compile(left)
        if (new := self._first_of_kind(left, seconds.mean, chance)) is not None:
            return new
        best = self.best
        if best is None or best.step is None:
            gain = chance * np.exp(np.min(seconds.mean) - seconds.mean)
            return left[int(np.argmax(gain))]
        distance = (math.log(best.step) - seconds.mean) / seconds.deviation
        density = np.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
        gain = chance * seconds.deviation * (distance * _normal(distance) + density)
        at = int(np.argmax(gain))
        return left[at] if float(gain[at]) > WORTH else None

    def left(self) -> list[Candidate]:
        """The candidates that were not compiled and are not running."""
        taken = {one.candidate.layout for one in self.compiled}
        taken |= {one.layout for one in self.running}
        return [one for one in self.candidates if one.layout not in taken]

    def recall(
        self, tried: Mapping[str, str], known: Callable[[Layout], Measurement | None]
    ) -> None:
        """Takes up what earlier plans compiled: the fastest, and what has no program.

        - `tried`: layouts as text, and why one has no program.
        - `known`: gives the measurement of a layout that has one.
        """
        failed, made = list[Compiled](), list[Compiled]()
        for one in self.candidates:
            if (why := tried.get(str(one.layout))) is None:
                continue
            if why:
                failed.append(Compiled(one, error=why, is_earlier=True))
            elif (result := known(one.layout)) is not None:
                made.append(Compiled(one, result, is_earlier=True))
        made.sort(key=lambda one: (not one.fits(self.limit), one.step or math.inf))
        self.compiled += made[:RECALLED] + failed

    def _likely_to_compile(self, left: list[Candidate]) -> Float[np.ndarray, "layouts"]:
        """By how many of a kind did: what took too long would again, with another option."""
        tried = Counter(_kind(one.candidate.layout) for one in self.compiled)
        came = Counter(_kind(one.candidate.layout) for one in self.compiled if one.result)
        if tried == came:
            return np.ones(len(left))
        kinds = (_kind(one.layout) for one in left)
        return np.array([(1 + came[kind]) / (1 + tried[kind]) for kind in kinds])

    def _first_of_kind(
        self, left: list[Candidate], seconds: np.ndarray, chance: np.ndarray
    ) -> Candidate | None:
        """The best predicted of a kind of mesh and loop of which nothing is compiled yet."""
        seen = [one.candidate for one in self.compiled] + self.running
        kinds = {_kind(one.layout) for one in seen}
        if len(kinds) >= KINDS_FIRST:
            return None
        likely = [int(at) for at in np.argsort(seconds) if chance[at] >= 0.5]
        small = [at for at in likely if left[at].predicted.bytes <= ROOM * self.limit]
        if not seen and small:
            return left[next((at for at in small if _is_plain(left[at].layout)), small[0])]
        for at in small or likely:
            if seconds[at] > seconds[likely[0]] + math.log(WITHIN):
                return None
            if _kind(left[at].layout) not in kinds:
                return left[at]
        return None

    def refitted(self, left: list[Candidate], figure: str) -> "_Refitted":
        """The logarithm of a figure by prediction and what is compiled, and its deviation."""
        predicted = np.log([_figure(one.predicted, figure) for one in left])
        known = [
            (one.candidate, math.log(value / _figure(one.candidate.predicted, figure)))
            for one in self.compiled
            if (value := _measured(one, figure))
        ]
        if not known:
            return _Refitted(predicted, np.full(len(left), UNSURE))
        rows = _rows([*left, *(one for one, _ in known)])
        # A layout that is like no other, of which the prediction is right: what a few compiles have
        # in common need not hold of those that are unlike them.
        unlike = np.full((1, rows.shape[1]), -1)
        apart = np.array([*(off for _, off in known), 0.0])
        least = UNSURE / math.sqrt(1 + len(known))  # what few have in common may be chance
        found = Surrogate(np.concatenate([rows[len(left) :], unlike]), apart).predict(
            rows[: len(left)]
        )
        return _Refitted(predicted + found.mean, np.maximum(found.deviation, least))


class _Refitted(NamedTuple):
    mean: Float[np.ndarray, "layouts"]
    deviation: Float[np.ndarray, "layouts"]


def of_limit(size: float, limit: int) -> str:
    """Such as `57.1 of 42.0 GB`."""
    unit, name = (1e9, "GB") if limit >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.1f} of {limit / unit:,.1f} {name}"


def account_of(one: Compiled) -> int:
    return one.result.needed_bytes if one.result else 0


def _figure(predicted: Predicted, figure: str) -> float:
    return predicted.seconds if figure == "step" else predicted.bytes


def _measured(one: Compiled, figure: str) -> float | None:
    if figure == "step":
        return one.step
    return float(one.result.needed_bytes) if one.result else None


def _kind(layout: Layout) -> tuple[str, ...]:
    found = features_of(layout)
    return found["loop"], found["tensor"], found["expert"], found["data"]


def _is_plain(layout: Layout) -> bool:
    """Whether weights are sharded over all devices, and nothing else is done: where most begin."""
    return layout.mesh.fsdp == layout.mesh.num_devices and not loop_of(layout)


def _rows(candidates: list[Candidate]) -> Int[np.ndarray, "layouts kinds"]:
    """Each layout as a row of numbers, one for each kind of choice."""
    columns = []
    layouts = [one.layout for one in candidates]
    texts = [
        *([getattr(one.mesh, axis) for one in layouts] for axis in ("data", "stage", "fsdp")),
        *([getattr(one.mesh, axis) for one in layouts] for axis in ("tensor", "expert")),
        *([getattr(one, name) for one in layouts] for name in Layout._fields[1:]),
    ]
    for values in texts:
        number: dict[object, int] = {}
        columns.append([number.setdefault(value, len(number)) for value in values])
    return np.array(columns).T


def _normal(distance: np.ndarray) -> np.ndarray:
    """The cumulative normal distribution."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in distance])


@dataclass(frozen=True)
class Budget:
    """When a search ends: at a time of `time.monotonic`; and how many compiles run at once."""

    until: float
    at_once: int = 2

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


def search(
    plan: Plan,
    compile: Callable[[Layout], Measurement],
    known: Callable[[Layout], Measurement | None],
    effort: Effort,
    budget: Budget,
    seen: Callable[[], None] = lambda: None,
) -> None:
    """Fills `plan.compiled` until nothing is worth a compile, or the budget is used up.

    - `compile`: compiles a layout; called from threads, several at a time.
    - `known`: what an earlier run compiled, which costs nothing.
    - `effort`: counts the compiles.
    - `seen`: called after each of them.
    """
    running: dict[Future[Measurement], Candidate] = {}
    is_spent = False
    with ThreadPoolExecutor(budget.at_once) as pool:
        while True:
            while len(running) < budget.at_once and budget.left > 0:
                if (one := plan.next()) is None:
                    is_spent = False
                    break
                if (found := known(one.layout)) is not None:
                    plan.compiled.append(Compiled(one, found, is_earlier=True))
                    seen()
                    continue
                if effort.left < 1:
                    is_spent = True
                    break
                plan.running.append(one)
                running[pool.submit(_made, one, compile, effort)] = one
            if (is_over := budget.left <= 0) or not running:
                plan.ended = "time" if is_over else "compiles" if is_spent else "done"
                if is_over:
                    end_all()
                return
            _take(plan, running, budget, effort.say)
            seen()


def _made(one: Candidate, compile: Callable[[Layout], Measurement], effort: Effort) -> Measurement:
    return effort.measure(str(one.layout), lambda: compile(one.layout))


def _take(
    plan: Plan, running: "dict[Future[Measurement], Candidate]", budget: Budget, say: Progress
) -> None:
    """Waits for a compile, and keeps what came of it."""
    done, _ = wait(running, max(0.1, min(LINE_EVERY, budget.left)), FIRST_COMPLETED)
    for future in done:
        one = running.pop(future)
        plan.running.remove(one)
        try:
            plan.compiled.append(Compiled(one, future.result()))
        except Spent:
            continue
        except Exception as error:  # a program may break any compiler in any way
            plan.compiled.append(Compiled(one, error=described(error, most=200)))
    if not done and running:
        best = plan.best
        so_far = f"; best so far {best.step:.3g} s" if best and best.step else ""
        say(f"{len(running)} compiling, {max(0, budget.left):.0f} s left{so_far}")
