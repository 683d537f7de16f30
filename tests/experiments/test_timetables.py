"""The executor of timetables: plans by simulation, and results beside a plain loop."""

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, float_rows, mesh_of
from hypothesis import given
from hypothesis import strategies as st

from nnx_pipeline import InputError, Max, Mean, Sum
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.experiments.timetables import make_timetable, run_timetable
from nnx_pipeline.experiments.timetables.executor._plan import (
    EndsOn,
    TimetablePlan,
    forward_only,
    make_timetable_plan,
)
from nnx_pipeline.experiments.timetables.executor._slots import share_slots
from nnx_pipeline.experiments.timetables.make import TIMETABLES
from nnx_pipeline.pipeline import (
    Accumulation,
    FsdpGather,
    Inputs,
    LoopOptions,
    ModelFunctions,
    OneForwardOneBackward,
    Weights,
    WithState,
)
from nnx_pipeline.pipeline._timetable.actions import LETTERS, Actions, actions_of, read_csv

pytestmark = pytest.mark.jax_alone

WIDTH, ROWS = 4, 4
names = st.sampled_from(TIMETABLES)


def timetable(name: str, ranks: int, microbatches: int) -> Actions:
    repeats = 2 if name == "interleaved" else 1
    return make_timetable(name, ranks=ranks, microbatches=microbatches, repeats=repeats)


# ---- timetables and plans ----------------------------------------------------------------------


def in_fixed_order(ranks: int, microbatches: int, repeats: int) -> str:
    """The interleaved timetable as CSV: the next action of each rank's order, where it may be."""
    stages = ranks * repeats
    left: list[list[tuple[str, int, int]]] = []
    for rank in range(ranks):
        visits = [(s, m) for m in range(microbatches) for s in range(rank, stages, ranks)]
        back = sorted(visits, key=lambda one: (one[1] // ranks, -one[0], one[1]))
        on = sorted(visits, key=lambda one: (one[1] // ranks, *one))
        # In each turn a forward and a backward visit, if there are such.
        first = 2 * (ranks - 1 - rank) + (repeats - 1) * ranks
        turns = [(turn - first, ("F", *visit)) for turn, visit in enumerate(on)]
        turns += [(turn, ("B", *visit)) for turn, visit in enumerate(back)]
        left.append([action for _, action in sorted(turns, key=lambda one: one[0])])
    done: set[tuple[str, int, int]] = set()
    lines: list[list[str]] = [[] for _ in range(ranks)]

    def may(kind: str, stage: int, microbatch: int) -> bool:
        if kind == "F":
            return not stage or ("F", stage - 1, microbatch) in done
        last = stage == stages - 1
        return (("F", stage, microbatch) if last else ("B", stage + 1, microbatch)) in done

    while any(left):
        taken = [mine[0] if mine and may(*mine[0]) else None for mine in left]
        for rank, action in enumerate(taken):
            lines[rank].append("" if action is None else f"{action[1]}{action[0]}{action[2]}")
            if action is not None:
                done.add(left[rank].pop(0))
    return "".join(",".join(line) + "\n" for line in lines)


@given(ranks=st.integers(1, 5), groups=st.integers(1, 3), repeats=st.integers(1, 3))
def test_interleaved_has_a_fixed_order(ranks: int, groups: int, repeats: int) -> None:
    made = make_timetable("interleaved", ranks=ranks, microbatches=ranks * groups, repeats=repeats)
    assert made.to_csv() == in_fixed_order(ranks, ranks * groups, repeats)


def fewest_steps(place: list[int], microbatches: int, split: bool, limits: list[int]) -> int:
    """The steps of the shortest timetable, by trying every action in every step, and idling.

    - `place`: the rank of each stage.
    - `limits`: how many visits each rank may keep.

    A state is how many microbatches each kind of action of each stage has done.
    """
    stages, kinds = len(place), 3 if split else 2
    ranks, size = len(limits), stages * kinds

    def actions(state: tuple[int, ...], rank: int) -> Iterator[int | None]:
        forward, back, last = state[:stages], state[stages : 2 * stages], state[-stages:]
        own = [stage for stage in range(stages) if place[stage] == rank]
        room = sum(forward[s] - last[s] for s in own) < limits[rank]
        yield None
        for s in own:
            if room and forward[s] < (forward[s - 1] if s else microbatches):
                yield s
            if back[s] < (back[s + 1] if s + 1 < stages else forward[s]):
                yield stages + s
            if split and last[s] < back[s]:
                yield 2 * stages + s

    seen = front = {(0,) * size}
    for steps in itertools.count():
        if (microbatches,) * size in front:
            return steps
        after = set()
        for state in front:
            for taken in itertools.product(*(actions(state, rank) for rank in range(ranks))):
                after.add(tuple(n + (at in taken) for at, n in enumerate(state)))
        front = after - seen
        seen |= front
    raise AssertionError("unreachable")


SMALL = [
    *(("1f1b", ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in range(1, 7)),
    *(("zb-h1", ranks, microbatches) for ranks in (1, 2, 3) for microbatches in range(1, 7)),
    *(("zb-h1", 4, microbatches) for microbatches in (1, 2, 3)),
    *(("interleaved", *numbers) for numbers in ((1, 3), (2, 2), (2, 4), (3, 3))),
    *(("zb-v", *numbers) for numbers in ((1, 3), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2))),
]


def test_no_order_is_shorter() -> None:
    """Every order of every small case, with as many visits kept as the schedule is known for."""
    for name, ranks, microbatches in SMALL:
        place = [*range(ranks)]
        if name == "interleaved":
            place *= 2
        elif name == "zb-v":
            place += reversed(place)
        fewest = fewest_steps(place, microbatches, name.startswith("zb"), most_kept(name, ranks))
        assert timetable(name, ranks, microbatches).steps == fewest, (name, ranks, microbatches)


@given(ranks=st.integers(1, 9), more=st.integers(0, 25))
def test_timetables_are_as_short_as_published(ranks: int, more: int) -> None:
    """In zero bubble the last rank begins after ranks - 1 steps, and then never idles."""
    microbatches = ranks + more
    assert timetable("1f1b", ranks, microbatches).steps == 2 * (microbatches + ranks - 1)
    assert timetable("zb-h1", ranks, microbatches).steps == 3 * microbatches + ranks - 1
    assert timetable("zb-v", ranks, microbatches).steps == 6 * microbatches + ranks - 1


def most_kept(name: str, ranks: int) -> list[int]:
    """The visits that each rank keeps at most, with two chunks of interleaved."""
    return {
        "1f1b": [ranks - rank for rank in range(ranks)],
        "zb-h1": [ranks] * ranks,
        "interleaved": [2 * (ranks - 1 - rank) + ranks + 1 for rank in range(ranks)],
        "zb-v": [2 * ranks] * ranks,
    }[name]


def calls_of(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many functions Python calls until it does."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        made = make()
    finally:
        sys.setprofile(None)
    return made, calls


def test_large_timetables_are_made_by_arrays() -> None:
    """262,144 actions and twice as many, with less than one call for each: none is an object."""
    actions, calls = calls_of(lambda: make_timetable("1f1b", ranks=64, microbatches=2048))
    assert actions.count == 2 * 64 * 2048 > calls
    plan, calls = calls_of(lambda: make_timetable_plan(actions, [0] * 64))
    assert plan.rings == (64,)
    assert calls < actions.steps
    actions, calls = calls_of(lambda: timetable("interleaved", 64, 2048))
    assert actions.count == 2 * 2 * 64 * 2048 > 2 * calls


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 6)), max_size=25))
def test_arrays_share_slots(arrays: list[tuple[int, int, int]]) -> None:
    """No two arrays are in a slot at a time, and each owner has only as many as it needs."""
    owner, start, length = np.array([*arrays, (0, 0, 1)]).T
    slots, counts = share_slots(owner, start, start + length, owners=4)
    needed = np.zeros(4, int)
    for tick in range(20):
        there = (start <= tick) & (tick < start + length)
        used = [*zip(owner[there].tolist(), slots[there].tolist(), strict=True)]
        assert len({*used}) == len(used)
        needed = np.maximum(needed, np.bincount(owner[there], minlength=4))
    assert counts.tolist() == needed.tolist()
    assert (slots < counts[owner]).all()


@given(name=names, ranks=st.integers(1, 6), groups=st.integers(1, 4))
def test_what_ranks_keep(name: str, ranks: int, groups: int) -> None:
    """`Actions` checks order and completeness; here the memory that each schedule is known for."""
    actions = timetable(name, ranks, ranks * groups)
    assert all(map(operator.le, actions.kept, most_kept(name, ranks)))


@given(ranks=st.integers(1, 8), repeats=st.integers(1, 4), groups=st.integers(1, 9))
def test_interleaved_is_that_of_its_paper(ranks: int, repeats: int, groups: int) -> None:
    """It idles like 1F1B, however many microbatches there are.

    And it keeps what its first forward visits and the next one leave, or all if there are fewer.
    """
    visits = ranks * groups * repeats
    actions = make_timetable(
        "interleaved", ranks=ranks, microbatches=ranks * groups, repeats=repeats
    )
    assert actions.steps == 2 * visits + 2 * (ranks - 1)
    first = [2 * (ranks - 1 - rank) + (repeats - 1) * ranks for rank in range(ranks)]
    assert actions.kept == tuple(min(before + 1, visits) for before in first)
    if repeats == 1:
        assert actions.steps == timetable("1f1b", ranks, ranks * groups).steps


def simulated(actions: Actions, plan: TimetablePlan) -> None:
    """Carries out a plan with names in the place of arrays; each action must find what it reads."""
    ranks, rows = actions.ranks, plan.rows
    messages: list[dict[int, Any]] = [{} for _ in range(ranks)]
    rings: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    last = actions.stages - 1
    for step in range(actions.steps):
        gave: list[Any] = [None] * ranks
        for rank in range(ranks):
            at, letter = (step, rank), LETTERS[actions.kind[rank, step]]
            assert (rows.branch[at] == 0) == (letter == " ")
            if letter == " ":
                continue
            branch, kind = plan.branches[rows.branch[at] - 1], letter
            stage, microbatch = (
                int(one[rank, step]) for one in (actions.stage, actions.microbatch)
            )
            assert (branch.kind, rows.microbatch[at]) == (kind, microbatch)
            assert plan.stages[rank][rows.chunk[at]] == stage
            ring = (branch.function, int(rows.keep[at]))
            taken = messages[rank].get(int(rows.take[at]))
            if kind == "F":
                assert rows.enters[at] or taken == ("x", stage, microbatch)
                rings[rank][ring] = (stage, microbatch)
                gave[rank] = ("x", stage + 1, microbatch)
                gave[rank] = ("d", stage, microbatch) if stage == last else gave[rank]
            else:
                assert taken == ("d", stage, microbatch)
                assert rings[rank][ring] == (stage, microbatch)
                gave[rank] = ("d", stage - 1, microbatch) if kind != "W" else None
        for rank in range(ranks):
            for column, sender in (("same", 0), ("before", -1), ("after", 1)):
                slot = int(getattr(rows, column)[step, rank])
                if slot < plan.messages:
                    messages[rank][slot] = gave[(rank + sender) % ranks]


@pytest.mark.parametrize(("ends_on", "count"), [("all", 2), ("own", 5)])
def test_ranks_share_branches(ends_on: EndsOn, count: int) -> None:
    """Compilers compile each branch, so that ranks have one of their own only at their own ends."""
    actions = timetable("1f1b", 4, 8)
    branches = make_timetable_plan(actions, [0] * 4, ends_on).branches
    assert len(branches) == count
    assert {type(each) for branch in branches for each in branch} == {str, int, bool}


@given(name=names, ranks=st.integers(1, 6), groups=st.integers(1, 4), data=st.data())
def test_every_action_finds_what_it_reads(
    name: str, ranks: int, groups: int, data: st.DataObject
) -> None:
    actions = timetable(name, ranks, ranks * groups)
    functions = [data.draw(st.integers(0, 2)) for _ in range(actions.stages)]
    plan = make_timetable_plan(actions, functions)
    simulated(actions, plan)
    outer_ticks = plan.outer_ticks
    assert all(
        sorted(each.microbatch[each.due]) == [*range(ranks * groups)] for each in outer_ticks
    )
    assert sum(plan.rings) >= max(actions.kept)
    simulated(forward_only(actions), make_timetable_plan(forward_only(actions), functions))


# ---- values and gradients ----------------------------------------------------------------------


def mixing(params: Any, x: Any, side: Any) -> Any:
    kernel, _ = params
    y = (x["a"] + jnp.tanh(x["a"] @ kernel)) * side[:, None]
    metrics = {"sum": Sum(jnp.sum(y)), "mean": Mean(jnp.mean(y**2)), "max": Max(jnp.max(y))}
    return {"a": y, "b": x["b"] + y}, metrics


def doubled(params: Any, x: Any, side: Any) -> Any:
    """Another kind of stage: two layers, with a bias."""
    kernel, bias = params
    y, metrics = mixing((kernel.T, None), x, side)
    return {"a": jnp.sin(y["a"] + bias), "b": y["b"]}, metrics


def per_row(params: Any, x: Any, side: Any) -> Any:
    """A stage with a metric of another shape."""
    y, metrics = mixing(params, x, side)
    return y, {**metrics, "sum": Sum(jnp.sum(y["a"], axis=0))}


METRIC_WEIGHTS = {"sum": 0.01, "mean": 0.3, "max": None}


class Model:
    """Arrays and functions of a small model, whose ends close over a factor."""

    def __init__(self, actions: Actions, stages: Any = mixing) -> None:
        self.actions, self.stages = actions, stages
        self.placed = make_timetable_plan(actions, [0] * actions.stages).stages
        ranks, chunks = actions.ranks, len(self.placed[0])
        self.weights = Weights(
            float_rows(WIDTH, WIDTH, seed=1),
            (
                float_rows(chunks, ranks, WIDTH, WIDTH, seed=2),
                float_rows(chunks, ranks, WIDTH, seed=3),
            ),
            float_rows(WIDTH, seed=4),
        )
        self.x = float_rows(actions.microbatches, ROWS, WIDTH, seed=5)
        self.side = 0.5 + 0.1 * jnp.abs(float_rows(actions.microbatches, ROWS, seed=6))

    def ends(self, factor: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def enter(weights: Any, x: Any) -> Any:
            return {"a": x @ weights * factor, "b": x}

        def leave(weights: Any, y: Any, target: Any) -> Any:
            return jnp.sum(jnp.sin((y["a"] + y["b"]) @ weights) * target) * factor

        return enter, leave

    def loss(self, weights: Any, factor: Any, options: LoopOptions, ends_on: EndsOn = "all") -> Any:
        enter, leave = self.ends(factor)
        return run_timetable(
            ModelFunctions(enter, self.stages, leave, METRIC_WEIGHTS),
            weights,
            Inputs(self.x, self.side, self.side),
            actions=self.actions,
            ends_on=ends_on,
            options=options,
        )

    def plain(self, weights: Any, factor: Any) -> Any:
        (enter, leave), loss, found = self.ends(factor), jnp.zeros(()), []
        for microbatch in range(self.actions.microbatches):
            x = enter(weights.enter, self.x[microbatch])
            for stage in range(self.actions.stages):
                at = next(
                    (own.index(stage), rank) for rank, own in enumerate(self.placed) if stage in own
                )
                one = jax.tree.map(lambda leaf, at=at: leaf[at], weights.stages)
                function = self.stages if callable(self.stages) else self.stages[stage]
                x, metrics = function(one, x, self.side[microbatch])
                found.append(metrics)
            loss += leave(weights.leave, x, self.side[microbatch])
        metrics = {
            "max": jnp.max(jnp.stack([one["max"].value for one in found])),
            "mean": jnp.mean(jnp.stack([one["mean"].value for one in found])),
            "sum": sum(one["sum"].value for one in found),
        }
        return loss + 0.01 * metrics["sum"] + 0.3 * metrics["mean"], (loss, metrics)


def check(
    model: Model, mesh: str, options: LoopOptions = LoopOptions(), ends_on: EndsOn = "all"
) -> None:
    factor = jnp.float32(0.7)
    with jax.set_mesh(mesh_of(mesh, "auto")):
        run = functools.partial(model.loss, options=options, ends_on=ends_on)
        got = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(model.weights, factor)
        alone = jax.jit(run)(model.weights, factor)
    want = jax.jit(jax.value_and_grad(model.plain, (0, 1), has_aux=True))(model.weights, factor)
    assert_close(got, want, 2e-5)
    assert_close(alone, want[0], 2e-5)


NAN = LoopOptions(bubble_fill=float("nan"))
CASES = {
    "1f1b": ("1f1b", "stage=4,fsdp=2", 8, NAN),
    "zb-h1, two ranks": ("zb-h1", "stage=2,data=2", 4, NAN),
    "interleaved": ("interleaved", "stage=4", 8, LoopOptions(remat=POLICIES["none"])),
    "zb-v": ("zb-v", "stage=4,fsdp=2", 6, NAN),
    "few microbatches": ("zb-v", "stage=4", 2, LoopOptions()),
    "one rank": ("zb-h1", "", 3, LoopOptions()),
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("ends_on", ["all", "own"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_plain_loop(case: Any, ends_on: EndsOn) -> None:
    name, mesh, microbatches, options = case
    ranks = int(mesh[6]) if mesh else 1
    check(Model(timetable(name, ranks, microbatches)), mesh, options, ends_on)


def test_stages_that_differ() -> None:
    """Each stage has a function of its own, some with two layers and a bias."""
    actions = timetable("1f1b", 4, 6)
    check(Model(actions, [mixing, doubled, doubled, mixing]), "stage=4", NAN)


def test_a_timetable_from_a_file() -> None:
    """The lockstep ticks of the library's 1F1B, read as CSV."""
    actions = read_csv(actions_of(OneForwardOneBackward(2, 4)).to_csv())
    check(Model(actions), "stage=2,tensor=2")


def test_gradients_add_up_in_another_dtype() -> None:
    model = Model(timetable("1f1b", 2, 4))
    options = LoopOptions(accumulate=Accumulation(grad_dtype="bfloat16"))
    with jax.set_mesh(mesh_of("stage=2", "auto")):
        text = jax.jit(jax.grad(lambda weights: model.loss(weights, 0.7, options)[0])).lower(
            model.weights
        )
    assert f"tensor<1x{WIDTH}x{WIDTH}xbf16>" in text.as_text()


# ---- errors ------------------------------------------------------------------------------------


def _run(actions: Actions, mesh: str = "stage=2", mode: str = "auto", **changes: Any) -> None:
    model = Model(timetable("1f1b", 2, 4))
    model.actions = actions
    model.stages = changes.pop("stages", model.stages)
    weights = changes.pop("weights", model.weights)
    model.x = changes.pop("x", model.x)
    with jax.set_mesh(mesh_of(mesh, mode)):
        model.loss(weights, 1.0, LoopOptions(**changes))


TWO = timetable("1f1b", 2, 4)
APART = read_csv("0F0\n,,,3F0\n,1F0\n,,2F0")
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "explicit axes": (lambda: _run(TWO, mode="explicit"), "needs a mesh of auto axes"),
    "another mesh": (lambda: _run(TWO, "stage=4"), "has 2 ranks and the mesh stage=4"),
    "more stages": (
        lambda: _run(timetable("zb-v", 2, 4)),
        "its first axes must be (chunks, ranks) = (2, 2)",
    ),
    "other microbatches": (lambda: _run(timetable("1f1b", 2, 6)), "the 6 microbatches"),
    "too few functions": (
        lambda: _run(TWO, stages=[mixing]),
        "has 2 stages, and was given 1 stage function",
    ),
    "no function": (lambda: _run(TWO, stages=[mixing, 3]), "neither a function nor a list"),
    "unlike metrics": (
        lambda: _run(TWO, stages=[mixing, per_row]),
        "all must report the same",
    ),
    "shift": (lambda: _run(TWO, shift_by="slice"), "leave shift_by, cast_at_use and"),
    "cast at use": (lambda: _run(TWO, cast_at_use=True), "leave shift_by, cast_at_use and"),
    "weights gathered before": (
        lambda: _run(TWO, accumulate=Accumulation(fsdp_gather=FsdpGather(prefetch=True))),
        "leave shift_by, cast_at_use and accumulate.fsdp_gather",
    ),
    "offloaded": (
        lambda: _run(TWO, remat=POLICIES["minimal_offloaded"]),
        "keeps values in device memory only",
    ),
    "distant ranks": (
        lambda: make_timetable_plan(APART, [0] * 4),
        "ranks send to their neighbours only",
    ),
    "uneven ranks": (
        lambda: make_timetable_plan(read_csv("0F0,1F0\n,,2F0"), [0] * 3),
        "each must have as many",
    ),
    "unknown": (lambda: timetable("1f1c", 2, 4), "did you mean '1f1b'?"),
    "repeats": (
        lambda: make_timetable("1f1b", ranks=2, microbatches=4, repeats=2),
        "repeats=2 is for the timetable interleaved",
    ),
    "state": (
        lambda: _run(TWO, weights=Weights(None, WithState(np.ones((1, 2)), np.ones((1, 2))), None)),
        "was given layers WithState, and has no state",
    ),
    "no timetable": (lambda: run_timetable(None, None, None, actions="0F0"), "give Actions"),
    "a fraction": (lambda: timetable("zb-v", 2.0, 4), "ranks=2.0 is not a whole number"),
    "no ranks": (lambda: timetable("zb-v", 0, 4), "ranks=0 is not a whole number"),
    "microbatches of interleaved": (lambda: timetable("interleaved", 4, 6), "a multiple of 4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()


def test_a_timetable_without_backward_visits_has_no_gradient() -> None:
    actions = forward_only(TWO)
    _run(actions)
    model = Model(actions)
    with jax.set_mesh(mesh_of("stage=2", "auto")), pytest.raises(InputError, match="no backward"):
        jax.grad(lambda weights: model.loss(weights, 1.0, LoopOptions())[0])(model.weights)
