"""The search for what to keep, against all choices; and the frontier of Mixtral 8x7B.

    python benchmarks/remat_search.py all [PROGRAM …]   compiles every choice of small programs
    python benchmarks/remat_search.py frontier          searches Mixtral 8x7B on 64 TPU v5p
    python benchmarks/remat_search.py                   writes benchmarks/results/remat_search.md

The first two add to benchmarks/results/remat_search.json, and go on where they were.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kept_rows import write_rows

from nnx_pipeline.config._remat import KEPT, LAYER_INPUT, POLICIES, QUERY_KEY_VALUE
from nnx_pipeline.lab._cli.changing.keeping import Choosable, of_function, of_preset
from nnx_pipeline.lab._cli.subject import GivenArguments, subject_of
from nnx_pipeline.lab._cli.values import Chosen
from nnx_pipeline.lab._files import write_text
from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.compile.measure import kept_in
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import described
from nnx_pipeline.lab.search.cheapest import Point, Search, frontier_of
from nnx_pipeline.lab.search.choices import Choice, Fate, Kind, Space
from nnx_pipeline.lab.search.effort import Spent

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "remat_search.md"
KNOWN = RESULTS.with_suffix(".json")
SHARES = (0.1, 0.3, 0.6)  # of the way from the smallest account to the largest: the limits
MOST_FRONTIER = 16  # compiles of the large model


class Program(NamedTuple):
    """A preset with overrides on a mesh, or a function of `remat_steps`.

    - `platforms`: TPU and GPU, of as many devices as the mesh has.
    - `on_device`: the kinds that are not offloaded, so that there are not too many choices.
    """

    name: str
    platforms: tuple[str, ...]
    mesh: str = ""
    settings: tuple[str, ...] = ()
    on_device: tuple[str, ...] = ()


ONE = ("tpu:v5p:2x2x1", "cuda:h100:1")
TWO_STAGES = ("tpu:v5p:2x2x1", "cuda:h100:4")
SMALL = {"mesh": "stage=2,fsdp=2", "settings": ("model.num_layers=2",)}
PROGRAMS = {
    "unet": Program("remat_steps/unet.py", ONE),
    "transformer": Program("remat_steps/transformer.py", ONE),
    "plain_nnx": Program("remat_steps/plain_nnx.py", ONE),
    "tiny": Program("tiny", TWO_STAGES, **SMALL, on_device=QUERY_KEY_VALUE),
    "mixtral-small": Program("mixtral-small", TWO_STAGES, **SMALL, on_device=KEPT),
}
LARGE = Program(
    "mixtral-8x7b",
    ("tpu:v5p:4x4x4",),
    mesh="stage=4,fsdp=16",
    settings=("pipeline.num_microbatches=4", "pipeline.num_repeats=8"),
)


def opened(program: Program, platform: Platform) -> Choosable:
    """What can be kept of a program, and how a choice is compiled and written."""
    if program.name.endswith(".py"):
        file = str(FOLDER / program.name)
        inputs = GivenArguments(f"{file}:inputs", ())
        subject = subject_of(f"{file}:step", Chosen(None, ()), inputs, program.mesh)
        return of_function(subject, platform)
    given = Chosen(None, program.settings)
    subject = subject_of(program.name, given, GivenArguments(None, ()), program.mesh)
    found = of_preset(subject, platform)
    return found._replace(space=narrowed(found.space, program)) if program.on_device else found


def narrowed(space: Space, program: Program) -> Space:
    """The inputs of layers are kept, and some names are not offloaded."""
    kinds = [
        dataclasses.replace(kind, fates=("keep",))
        if kind.name == LAYER_INPUT
        else dataclasses.replace(kind, fates=("recompute", "keep"))
        if kind.name in program.on_device
        else kind
        for kind in space.kinds
    ]
    return Space(tuple(kinds))


class Table:
    """The points of one program on one platform that are in the file, and those added to it."""

    def __init__(self, key: str) -> None:
        self.key = key
        document = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
        entry = document.get(key, {})
        self.kinds = entry.get("kinds", {})
        self.seconds = entry.get("seconds", [])
        self.points = {
            tuple(row["choice"].split()): Point(
                tuple(row["choice"].split()), row["account"], row["step"], row["error"]
            )
            for row in entry.get("points", [])
        }

    def add(self, space: Space, point: Point, seconds: float) -> None:
        root = f"{FOLDER.parent}/"  # of loops, whose names are places in files
        self.kinds = {kind.name.removeprefix(root): list(kind.fates) for kind in space.kinds}
        self.points[point.choice] = point
        self.seconds.append(round(seconds, 1))
        document = json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}
        rows = [
            {**dataclasses.asdict(one), "choice": " ".join(one.choice)}
            for one in self.points.values()
        ]
        document[self.key] = {"kinds": self.kinds, "seconds": self.seconds, "points": rows}
        write_rows(KNOWN, document)


def point_of(found: Choosable, choice: Choice) -> Point:
    try:
        with kept_in(Cache.of_user()):
            result = found.make(choice)
    except Exception as error:  # the compiler may refuse a choice
        return Point(choice, error=described(error, most=200))
    step = result.time.step_seconds if result.time and not result.is_refused else None
    return Point(choice, result.needed_bytes, step)


def compile_all(names: Sequence[str]) -> None:
    """Compiles every choice of these programs that is not in the file yet."""
    for name in names or PROGRAMS:
        for target in PROGRAMS[name].platforms:
            table, found = Table(f"{name} {target}"), opened(PROGRAMS[name], Platform.parse(target))
            choices = found.space.listed()
            for number, choice in enumerate(choices, 1):
                if choice not in table.points:
                    began = time.monotonic()
                    table.add(found.space, point_of(found, choice), time.monotonic() - began)
                    said = f"{table.key}: {number} of {len(choices)}, {table.points[choice]}"
                    print(said, file=sys.stderr, flush=True)


def compile_frontier() -> None:
    """The named policies first, which begin no search; then the search, with a limit at each."""
    (target,) = LARGE.platforms
    platform = Platform.parse(target)
    named, table = Table(f"{LARGE.name} named"), Table(f"{LARGE.name} {target}")
    found = opened(LARGE, platform)
    for policy in POLICIES:
        choice = choice_of(found.space, policy)
        if choice not in named.points:
            began = time.monotonic()
            named.add(found.space, point_of(found, choice), time.monotonic() - began)
            print(policy, named.points[choice], file=sys.stderr, flush=True)
    left = [MOST_FRONTIER]

    def compiled(choice: Choice) -> Point:
        if choice in named.points:
            return named.points[choice]
        if choice not in table.points:
            if not left[0]:
                raise Spent("no compile is left")
            left[0] -= 1
            began = time.monotonic()
            table.add(found.space, point_of(found, choice), time.monotonic() - began)
            print(choice, table.points[choice], file=sys.stderr, flush=True)
        return table.points[choice]

    accounts = sorted(point.account for point in named.points.values() if point.account)
    Search(found.space, compiled, [*named.points.values()]).run(accounts)


def choice_of(space: Space, policy: str) -> Choice:
    """A named policy as a choice; the inputs of layers are kept unless they are offloaded."""
    remat = POLICIES[policy]
    if remat.saved is None:
        return space.everything

    def fate(kind: Kind) -> Fate:
        if kind.name in remat.offloaded:
            return "offload"
        return "keep" if kind.name in (*(remat.saved or ()), LAYER_INPUT) else "recompute"

    return tuple(map(fate, space.kinds))


def space_in(table: Table, *, has_checkpoint: bool) -> Space:
    kinds = (
        Kind(name, tuple(fates), is_loop=".py:" in name) for name, fates in table.kinds.items()
    )
    return Space(tuple(kinds), has_checkpoint=has_checkpoint)


ABOUT = """# The search for what to keep

`nnx-pipeline fit … --over remat` against all choices of small programs, and the frontier of Mixtral
8x7B. A choice says of each value with a name whether the backward pass keeps it, computes it again
or, where the column has a `+`, fetches it from the host; and of each loop without a checkpoint
whether it gets one. Made by `python benchmarks/remat_search.py`, whose first lines say how.

## Against all choices

All choices of each program were compiled; *choices* are those that differ. The limits are 10, 30
and 60 % of the way from the smallest account to the largest. Each search begins anew, and its
compiles are counted. The steps are estimates in ms, *above* is by how much the search's is above
the fastest that fits, and *within 3%* is how many compiles it takes until that is 3 % at most; the
others look for the last 0.03 %. The presets have two layers on `stage=2,fsdp=2`; of `tiny` only
`out_proj` and the experts' hidden units are offloaded, and of `mixtral-small` nothing.

| program | platform | kinds | choices | limit MB | compiles | step | fastest | above | within 3% |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


SUMS = ("rows", "choices", "compiles", "exact", "worst", "enough", "by a tenth")


def against_all() -> tuple[list[str], dict[str, float]]:
    """The rows of the table, and its sums."""
    rows, sums = list[str](), dict.fromkeys(SUMS, 0.0)
    for name, program in PROGRAMS.items():
        for target in program.platforms:
            table = Table(f"{name} {target}")
            space = space_in(table, has_checkpoint=name != "plain_nnx")
            if not table.points or set(table.points) != set(space.listed()):
                rows.append(f"| `{name}` | {target} | not all choices are compiled |" + " |" * 7)
                continue
            known = [one.account for one in table.points.values() if one.fits(float("inf"))]
            low, high = min(known), max(known)
            for share in SHARES:
                limit = low + share * (high - low)
                search = Search(space, table.points.__getitem__)
                search.run([limit])
                found = search.fastest(limit)
                best = Search(space, table.points.__getitem__, [*table.points.values()])
                true = best.fastest(limit)
                above = found.step / true.step - 1
                enough = _enough(search, limit, 1.03 * true.step)
                sums["enough"] += enough
                sums["by a tenth"] += enough <= len(table.points) / 10
                sums["compiles"] += len(search.points)
                sums["choices"] += len(table.points)
                sums["worst"] = max(sums["worst"], above)
                sums["exact"] += above == 0
                sums["rows"] += 1
                free = sum(len(kind.fates) > 1 for kind in space.kinds)
                cells = [f"`{name}`", target, free, len(table.points), f"{limit / 1e6:,.1f}"]
                cells += [len(search.points), f"{found.step * 1e3:,.3f}"]
                cells += [f"{true.step * 1e3:,.3f}", f"{above:.1%}", enough]
                rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows, sums


def _enough(search: Search, limit: float, step: float) -> int:
    """After how many compiles a search has a choice that fits and takes this step at most."""
    reached = (point.fits(limit) and (point.step or 0.0) <= step for point in search.points)
    return next(number for number, is_reached in enumerate(reached, 1) if is_reached)


def frontier_rows() -> list[str]:
    (target,) = LARGE.platforms
    named, table = Table(f"{LARGE.name} named"), Table(f"{LARGE.name} {target}")
    if not named.points:
        return ["not measured yet"]
    space = space_in(named, has_checkpoint=True)
    names = {choice_of(space, policy): f"`{policy}`" for policy in POLICIES}
    every = {**table.points, **named.points}
    best = {point.choice for point in frontier_of([*every.values()])}
    rows = ["| | choice | account GB | step ms | |", "|---|---|--:|--:|---|"]
    shown = [point for point in every.values() if point.choice in names or point.choice in best]
    for point in sorted(shown, key=lambda one: one.account or 0):
        step = "–" if point.step is None else f"{point.step * 1e3:,.1f}"
        account = "–" if point.account is None else f"{point.account / 1e9:,.2f}"
        rows.append(
            f"| {names.get(point.choice, '')} | {in_words(space, point.choice)} | {account} | "
            f"{step} | {'frontier' if point.choice in best else point.error} |"
        )
    took = [*named.seconds, *table.seconds]
    rows += ["", f"{len(took)} compiles, {sum(took) / len(took):,.0f} s each."]
    return rows


def in_words(space: Space, choice: Choice) -> str:
    if choice == space.everything:
        return "everything"
    parts = {"": space.names(choice, "keep"), "host: ": space.names(choice, "offload")}
    return "; ".join(f"{word}{', '.join(names)}" for word, names in parts.items() if names)


def write_report() -> None:
    rows, sums = against_all()
    text = ABOUT + "\n".join(rows) + "\n"
    if sums["rows"]:
        text += (
            f"\nIn sum {sums['compiles']:,.0f} compiles for {sums['choices']:,.0f} choices, "
            f"{sums['compiles'] / sums['choices']:.1%}. The answer is the true best in "
            f"{sums['exact']:.0f} of {sums['rows']:.0f} searches, and at worst "
            f"{sums['worst']:.1%} slower. It is within 3 % after {sums['enough']:,.0f} compiles in "
            f"sum, {sums['enough'] / sums['choices']:.1%}, and after a tenth of the choices in "
            f"{sums['by a tenth']:.0f} of the searches.\n"
        )
    text += (
        f"\n## The frontier of Mixtral 8x7B\n\n`{LARGE.name}` on {LARGE.platforms[0]}, "
        f"`{LARGE.mesh}`, 4 microbatches × 8 repeats; per device. What is not named in a row is "
        "computed again.\n\n" + "\n".join(frontier_rows()) + "\n"
    )
    write_text(str(RESULTS), text)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["all", *names]:
            compile_all(names)
        case ["frontier"]:
            compile_frontier()
        case _:
            write_report()
